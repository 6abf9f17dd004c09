"""Appends per second of a journal in a folder, and of one in a stream of NATS JetStream.

    python -m benchmarks.journal.stores [--rounds 5] [--seconds 2]

Each round appends to every store for a while, in random order:

- records of 300 bytes, one after the other;
- the same records by 64 concurrent callers;
- groups of 500 KB, held and released, by 8 concurrent callers.

A NATS server runs on the same host and disk. Both stores are measured with `durability = "process"` and
with "fsync"; the stream uses a separate NATS server for each. Debian's NATS 2.9.10 has no equivalent of
"fsync", so that row is left out with it.

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
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import tasks_known
from penstock.server.journals import open_journal

KINDS = {"one by one": (300, 1), "64 callers": (300, 64), "groups": (500_000, 8)}


async def appends_per_second(
    section: JournalSection, size: int, callers: int, seconds: float
) -> float:
    """Measures one store for `seconds`."""
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
    """One caller, which waits for each of its appends; returns their number."""
    count = 0
    while time.perf_counter() < until:
        (stored,) = await journal.append([record], hold_last=True)  # type: ignore[list-item]
        journal.release(stored)
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="Appends per second, by store.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
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
