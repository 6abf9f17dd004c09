"""F14: power is lost. The log of writes and syncs is cut anywhere; what was acknowledged survives.

What a disk may have kept when power went: of each file everything before its last sync, and of what was
written since any part, sector by sector; of each folder every name up to its last sync, and of later ones
any.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.server import journal_segment
from penstock.server.journal import tasks_known
from penstock.server.journal_files import Reading, find_files, read_records
from penstock.server.journal_segment import SegmentCorrupt
from penstock.server.log_journal import LogJournal
from tests.faults.report import Report

SECTOR = 512
SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Event:
    """One thing that happened to the disk, or that a caller was told."""

    kind: str
    file: int = 0
    name: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Tape:
    """Everything that a journal did to its disk, in order."""

    events: list[Event] = field(default_factory=list[Event])

    def record(self, patch: pytest.MonkeyPatch) -> None:
        """From here on."""
        files = itertools.count(1)
        numbers: dict[int, int] = {}
        names: dict[str, int] = {}
        write, sync, fallocate = os.pwrite, os.fdatasync, os.posix_fallocate
        rename, sync_folder = Path.rename, journal_segment.sync_folder

        def recorded_fallocate(descriptor: int, offset: int, length: int) -> None:
            fallocate(descriptor, offset, length)
            numbers[descriptor] = names["spare"] = next(files)
            self.events.append(Event("create", numbers[descriptor], "spare", length))

        def recorded_write(descriptor: int, data: Any, offset: int) -> int:
            count = write(descriptor, data, offset)
            content = bytes(data[:count])
            self.events.append(Event("write", numbers[descriptor], offset=offset, data=content))
            return count

        def recorded_sync(descriptor: int) -> None:
            sync(descriptor)
            self.events.append(Event("sync", numbers[descriptor]))

        def recorded_rename(path: Path, target: Path) -> Path:
            self.events.append(Event("rename", names[path.name], target.name))
            return rename(path, target)

        def recorded_sync_folder(folder: Path) -> None:
            sync_folder(folder)
            self.events.append(Event("sync_folder"))

        patch.setattr(os, "posix_fallocate", recorded_fallocate)
        patch.setattr(os, "pwrite", recorded_write)
        patch.setattr(os, "fdatasync", recorded_sync)
        patch.setattr(Path, "rename", recorded_rename)
        patch.setattr(journal_segment, "sync_folder", recorded_sync_folder)

    def told(self, name: str) -> None:
        """A caller was told that this is durable."""
        self.events.append(Event("told", name=name))

    def disk(self, cut: int, rng: random.Random, folder: Path) -> set[str]:
        """What a disk may hold where power went after so many events; returns what callers were told."""
        happened = self.events[:cut]
        synced = {event.file: index for index, event in enumerate(happened) if event.kind == "sync"}
        names_synced = max(
            (index for index, event in enumerate(happened) if event.kind == "sync_folder"),
            default=-1,
        )
        contents: dict[int, bytearray] = {}
        names: dict[int, str] = {}
        for index, event in enumerate(happened):
            if event.kind == "create":
                contents[event.file] = bytearray(event.offset)
                names[event.file] = event.name
            elif event.kind == "write":
                whole = index <= synced.get(event.file, -1)
                self._write(contents[event.file], event, rng, whole=whole)
            elif event.kind == "rename" and (index <= names_synced or rng.random() < 0.5):
                names[event.file] = event.name
        for file, name in names.items():
            (folder / name).write_bytes(contents[file])
        return {event.name for event in happened if event.kind == "told"}

    @staticmethod
    def _write(content: bytearray, event: Event, rng: random.Random, *, whole: bool) -> None:
        end = event.offset + len(event.data)
        for begin in range(event.offset // SECTOR * SECTOR, end, SECTOR):
            if whole or rng.random() < 0.5:
                first, last = max(begin, event.offset), min(begin + SECTOR, end)
                content[first:last] = event.data[first - event.offset : last - event.offset]


async def write_some(folder: Path, tape: Tape, rng: random.Random) -> None:
    """A journal's life: appends of all sizes, one by one and many at a time, over several segments."""
    journal = LogJournal(folder, durability="fsync", max_bytes=1 << 30, segment_bytes=SEGMENT_BYTES)
    async for _ in journal.replay():
        pass
    await journal.start(list)

    async def append(name: str) -> None:
        size = rng.choice([0, 100, 3_000, 200_000])
        await journal.append([tasks_known([name, "x" * size])], hold_last=True)
        tape.told(name)

    names = (f"record{i}" for i in itertools.count())
    for _ in range(12):
        burst = rng.choice([1, 1, 4])
        await asyncio.gather(*(append(next(names)) for _ in range(burst)))
    await journal.close()


async def test_what_was_acknowledged_survives_the_loss_of_power(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    async def happen(rng: random.Random) -> None:
        tape = Tape()
        folder = tmp_path / f"written-{rng.random()}"
        with pytest.MonkeyPatch.context() as patch:
            tape.record(patch)
            await write_some(folder, tape, rng)
        # Several cuts of one tape: to make it costs more than to cut it.
        for _ in range(CUTS):
            lost = tmp_path / f"lost-{rng.random()}"
            lost.mkdir()
            told = tape.disk(rng.randint(0, len(tape.events)), rng, lost)
            try:
                found = [
                    record.tasks_known.task_ids[0]
                    for record, _ in read_records(find_files(lost), Reading())
                ]
            except SegmentCorrupt as error:
                raise AssertionError(f"told {sorted(told)}, and then {error}") from error
            assert told <= set(found), sorted(told - set(found))
            assert len(found) == len(set(found))
            await go_on(lost, found)

    count = -(-report.count // CUTS) if report.count else 2
    await report.repeat("journal", "power lost", request.node.nodeid, count, happen)
    report.survived("journal", "power lost", count * CUTS)


CUTS = 10


async def go_on(folder: Path, found: list[str]) -> None:
    """Another server takes it up, and what it adds is there as well."""
    journal = LogJournal(folder, durability="fsync", max_bytes=1 << 30, segment_bytes=SEGMENT_BYTES)
    replayed = [stored async for _, stored in journal.replay()]
    assert len(replayed) == len(found)
    for stored in replayed:
        journal.hold(stored)
    await journal.start(list)
    await journal.append([tasks_known(["later"])], hold_last=True)
    await journal.close()
    again = [r.tasks_known.task_ids[0] for r, _ in read_records(find_files(folder), Reading())]
    assert again == [*found, "later"]
