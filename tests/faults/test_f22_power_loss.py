"""F22: the machine of a NATS server loses power. With every write synced, what was acknowledged
survives.

NATS syncs each message before it acknowledges it and before it writes the next. So its disk has
kept all messages but the last one written. Of the last one it may have any sectors, unless it was
acknowledged. The index of a stream is not synced with each message. It may be any earlier one,
truncated, or missing. File names are assumed to survive, as a journaling file system ensures when
it syncs a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import struct
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed (the extra jetstream)")

from penstock.server.journal.jetstream import log as jetstream_log
from penstock.server.journal.jetstream.frames import StoredOutside
from penstock.server.journal.protocol import Stored
from tests.faults.report import COUNT, Report
from tests.support.journal_stores import MEBIBYTE, JetStreamStore, names_in, record
from tests.support.nats_server import NatsServer, find_program, nats_server

WHERE = "JetStream"
NAME = "power of NATS lost"
SECTOR = 512
CALLERS = 8
SIZES = (0, 1_000, 90_000, 600_000)
"""Record sizes in bytes: several records in a message, and one record in several messages."""
MAX_BYTES = 512 * MEBIBYTE
"""More than any disk accepts in the second of writing."""
MESSAGE = struct.Struct("<IQ")
"""The beginning of a stored message: its total bytes, and its sequence in the stream."""
HAS_HEADERS = 1 << 31
NO_MESSAGE = 3 << 62
"""Sequence bits of an entry that is no longer a message, or that marks one as deleted."""


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Generator[NatsServer]:
    """One NATS server for all tests of this file, which syncs each write."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        if server.durability != "fsync":
            pytest.skip(f"{find_program()} cannot be told to sync each write")
        yield server


# The disk


@dataclass
class Disk:
    """The files of one stream."""

    nats: NatsServer
    stream: str
    indexes: list[bytes] = field(default_factory=list[bytes])
    """Every index that was seen."""

    @property
    def folder(self) -> Path:
        return self.nats.folder / "store" / "jetstream" / "$G" / "streams" / self.stream / "msgs"

    @property
    def index(self) -> Path:
        return self.folder / "index.db"

    def look(self) -> None:
        """Keep a copy of the current index."""
        with contextlib.suppress(FileNotFoundError):
            self.indexes.append(self.index.read_bytes())

    def lose(self, acknowledged: int, rng: random.Random) -> int:
        """Leave what may survive a power loss; return the number of lost or changed bytes of messages."""
        self.look()
        found = rng.choice([*self.indexes, None, None])
        if found is None:
            self.index.unlink(missing_ok=True)
        else:
            whole = rng.random() < 0.7
            self.index.write_bytes(found if whole else found[: rng.randint(0, len(found))])
        files = sorted(self.folder.glob("*.blk"), key=lambda path: int(path.stem))
        last = next((path for path in reversed(files) if path.stat().st_size), None)
        return lose_tail(last, end_of_synced(last.read_bytes(), acknowledged), rng) if last else 0


def end_of_synced(data: bytes, acknowledged: int) -> int:
    """The offset up to which a message file is certain: its last message, or its end if that was
    acknowledged.
    """
    begin = place = 0
    sequence = NO_MESSAGE
    while place + MESSAGE.size <= len(data):
        begin = place
        length, sequence = MESSAGE.unpack_from(data, place)
        place += length & ~HAS_HEADERS
    whole = place <= len(data) and not sequence & NO_MESSAGE
    return place if whole and sequence <= acknowledged else begin


def lose_tail(path: Path, kept: int, rng: random.Random) -> int:
    """Lose some sectors after the first `kept` bytes of a file, and possibly shorten it."""
    data = bytearray(path.read_bytes())
    length = rng.randint(kept, len(data))
    changed = len(data) - length
    del data[length:]
    for sector in range(kept // SECTOR, -(-length // SECTOR)):
        if rng.random() < 0.3:
            first, last = max(kept, sector * SECTOR), min(length, (sector + 1) * SECTOR)
            data[first:last] = bytes(last - first)
            changed += last - first
    path.write_bytes(data)
    return changed


# The writers


@dataclass
class Writing:
    """Callers that each append one record after another, waiting for the acknowledgement."""

    journal: Any
    rng: random.Random
    last: int
    """The sequence of the last acknowledged message."""
    told: list[str] = field(default_factory=list[str])

    async def go(self, callers: int) -> None:
        numbers = itertools.count()
        await asyncio.gather(*(self._call(numbers) for _ in range(callers)))

    async def _call(self, numbers: itertools.count[int]) -> None:
        while True:
            name, size = f"{next(numbers)}", self.rng.choice(SIZES)
            (stored,) = await self.journal.append([record(name, size)], hold_last=True)
            self.told.append(name)
            self.last = max(self.last, last_message(stored))


def last_message(stored: Stored) -> int:
    """The last message that contains a part of this record."""
    if isinstance(stored, StoredOutside):
        return max(stored.segment, stored.reference.first + stored.reference.count - 1)
    return stored.segment


async def lose_power(nats: NatsServer, rng: random.Random) -> tuple[int, int]:
    """Lose power once. Returns the number of acknowledged records, and of lost bytes."""
    store = JetStreamStore(nats)
    disk = Disk(nats, store.stream)
    journal = await store.make(max_bytes=MAX_BYTES)
    assert not await names_in(journal)
    await journal.start(list)
    # NATS acknowledged the message with which the journal took the stream, before any record.
    writing = Writing(journal, rng, last=journal._log._next - 1)
    # Sometimes power is lost before the first record.
    working = asyncio.create_task(writing.go(0 if rng.random() < 0.1 else CALLERS))
    if rng.random() < 0.7:
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        # NATS writes its index when it is stopped.
        await asyncio.to_thread(nats.stop)
        disk.look()
        await asyncio.to_thread(nats.start)
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    nats.kill()
    working.cancel()
    await asyncio.wait([working])
    if not working.cancelled():
        working.result()
    await store.crash(journal)
    lost = disk.lose(writing.last, rng)
    await asyncio.to_thread(nats.start)
    async with store.opened(max_bytes=MAX_BYTES) as (journal, names):
        assert len(names) == len(set(names))
        assert set(writing.told) <= set(names), set(writing.told) - set(names)
        await journal.append([record("later")])
    assert await store.names(max_bytes=MAX_BYTES) == [*names, "later"]
    return len(writing.told), lost


async def test_what_was_acknowledged_survives_where_nats_syncs(
    nats: NatsServer,
    report: Report,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 0.0)
    told = lost = 0

    async def happen(rng: random.Random) -> None:
        nonlocal told, lost
        more, bytes_lost = await lose_power(nats, rng)
        told, lost = told + more, lost + bytes_lost

    count = report.count or COUNT
    await report.repeat(WHERE, NAME, request.node.nodeid, count, happen)
    report.survived(WHERE, NAME, count, "times", f"{told} records acknowledged, {lost} bytes lost")
