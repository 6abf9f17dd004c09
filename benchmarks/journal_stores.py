"""Appends per second of the journal in a folder and of the one in a stream of NATS JetStream, side by side.

    python benchmarks/journal_stores.py [--rounds 5] [--seconds 2]

Each round appends to every store for a while, in any order: records of 300 bytes one after the other and by
64 callers at a time, and groups of 500 KB, held and released, by 8 callers at a time. A NATS server runs
beside it, on the same disk. Both are measured with `durability = "process"` and with "fsync", the stream on
one NATS server for each; Debian's 2.9.10 has no equal of "fsync", and that column is left out with it.

The last line is one JSON object: appends per second by store and kind, medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from tests.support.nats_server import nats_server

from penstock.server.config.journal import JournalSection
from penstock.server.journal.records import Journal, tasks_known
from penstock.server.journals import open_journal

KINDS = {"one by one": (300, 1), "64 callers": (300, 64), "groups": (500_000, 8)}


async def appends_per_second(
    section: JournalSection, size: int, callers: int, seconds: float
) -> float:
    """Of one store, for so long."""
    journal = await open_journal(section)
    async for _ in journal.replay():
        pass
    await journal.start(list)
    record = tasks_known(["x" * size])
    until = time.perf_counter() + seconds
    counts = await asyncio.gather(*(call(journal, record, until) for _ in range(callers)))
    took = seconds + time.perf_counter() - until
    await journal.close()
    return sum(counts) / took


async def call(journal: Journal, record: object, until: float) -> int:
    """One caller, which waits for each of its appends."""
    count = 0
    while time.perf_counter() < until:
        (stored,) = await journal.append([record], hold_last=True)  # type: ignore[list-item]
        journal.release(stored)
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="Appends per second, by store.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    arguments = parser.parse_args()
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as name,
        nats_server(Path(name) / "nats") as synced,
        nats_server(Path(name) / "unsynced", sync=False) as nats,
    ):
        for number in range(arguments.rounds):
            sections = {
                "folder, fsync": JournalSection(folder=Path(name) / f"fsync-{number}"),
                "folder, process": JournalSection(
                    folder=Path(name) / f"process-{number}", durability="process"
                ),
                "stream, process": nats.section(f"ROUND_{number}", max_bytes=4 << 30),
            }
            if synced.durability == "fsync":
                sections["stream, fsync"] = synced.section(f"ROUND_{number}", max_bytes=4 << 30)
            pairs = [(store, kind) for store in sections for kind in KINDS]
            for store, kind in random.sample(pairs, len(pairs)):
                size, callers = KINDS[kind]
                rate = asyncio.run(
                    appends_per_second(sections[store], size, callers, arguments.seconds)
                )
                found[store, kind].append(rate)
    table = Table("appends per second", *KINDS)
    figures = {
        store: {kind: round(median(found[store, kind])) for kind in KINDS}
        for store in dict.fromkeys(store for store, _ in found)
    }
    for store, rates in sorted(figures.items()):
        table.add_row(store, *(f"{rates[kind]:,}" for kind in KINDS))
    Console(file=sys.stderr).print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
