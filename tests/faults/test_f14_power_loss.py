"""F14: power loss. The log of writes and syncs is cut at any point; everything acknowledged must survive.

The model of a disk after power loss: of each file, everything before its last sync is kept. Of later writes
any part may be kept, sector by sector. Of each folder, every name up to its last sync is kept, and of later
additions and removals of names any may be.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.server.journal.disk import segment as journal_segment
from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.disk.segment import SegmentCorrupt
from penstock.server.journal.protocol import Record, Stored
from penstock.server.journal.records import tasks_known
from tests.faults.report import Report

SECTOR = 512
SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Event:
    """One event: a change of the disk, or an acknowledgement to a caller."""

    kind: str
    file: int = 0
    name: str = ""
    offset: int = 0
    data: bytes = b""


@dataclass
class Tape:
    """All operations of a journal on its disk, in order."""

    events: list[Event] = field(default_factory=list[Event])

    def record(self, patch: pytest.MonkeyPatch) -> None:
        files = itertools.count(1)
        numbers: dict[int, int] = {}
        names: dict[str, int] = {}
        write, sync, fallocate = os.pwrite, os.fdatasync, os.posix_fallocate
        rename, unlink, truncate = Path.rename, Path.unlink, os.ftruncate
        sync_folder = journal_segment.sync_folder

        def recorded_fallocate(descriptor: int, offset: int, length: int) -> None:
            fallocate(descriptor, offset, length)
            name = Path(f"/proc/self/fd/{descriptor}").readlink().name
            numbers[descriptor] = names[name] = next(files)
            self.events.append(Event("create", numbers[descriptor], name, length))

        def recorded_truncate(descriptor: int, length: int) -> None:
            truncate(descriptor, length)
            self.events.append(Event("truncate", numbers[descriptor], offset=length))

        def recorded_write(descriptor: int, data: Any, offset: int) -> int:
            count = write(descriptor, data, offset)
            content = bytes(data[:count])
            self.events.append(Event("write", numbers[descriptor], offset=offset, data=content))
            return count

        def recorded_sync(descriptor: int) -> None:
            sync(descriptor)
            self.events.append(Event("sync", numbers[descriptor]))

        def recorded_rename(path: Path, target: Path) -> Path:
            names[target.name] = names.pop(path.name)
            self.events.append(Event("rename", names[target.name], target.name))
            return rename(path, target)

        def recorded_unlink(path: Path, missing_ok: bool = False) -> None:
            unlink(path, missing_ok)
            if path.name in names:
                self.events.append(Event("unlink", names.pop(path.name), path.name))

        def recorded_sync_folder(folder: Path) -> None:
            sync_folder(folder)
            self.events.append(Event("sync_folder"))

        patch.setattr(os, "posix_fallocate", recorded_fallocate)
        patch.setattr(os, "pwrite", recorded_write)
        patch.setattr(os, "fdatasync", recorded_sync)
        patch.setattr(os, "ftruncate", recorded_truncate)
        patch.setattr(Path, "rename", recorded_rename)
        patch.setattr(Path, "unlink", recorded_unlink)
        patch.setattr(journal_segment, "sync_folder", recorded_sync_folder)

    def told(self, name: str) -> None:
        """Records that a caller got an acknowledgement that this is durable."""
        self.events.append(Event("told", name=name))

    def gone(self, name: str) -> None:
        """Records that this is of no use from now on."""
        self.events.append(Event("gone", name=name))

    def disk(self, cut: int, rng: random.Random, folder: Path) -> set[str]:
        """Writes a disk as it may be if power went after this many events.

        Returns what was acknowledged as durable by then, without what had become useless.
        """
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
            elif event.kind == "truncate":
                if index <= synced.get(event.file, -1) or rng.random() < 0.5:
                    del contents[event.file][event.offset :]
            elif event.kind == "rename" and (index <= names_synced or rng.random() < 0.5):
                names[event.file] = event.name
            elif event.kind == "unlink" and (index <= names_synced or rng.random() < 0.5):
                del names[event.file]
        for file, name in names.items():
            (folder / name).write_bytes(contents[file])
        told = {event.name for event in happened if event.kind == "told"}
        return told - {event.name for event in happened if event.kind == "gone"}

    @staticmethod
    def _write(content: bytearray, event: Event, rng: random.Random, *, whole: bool) -> None:
        end = event.offset + len(event.data)
        content.extend(bytes(max(0, end - len(content))))
        for begin in range(event.offset // SECTOR * SECTOR, end, SECTOR):
            if whole or rng.random() < 0.5:
                first, last = max(begin, event.offset), min(begin + SECTOR, end)
                content[first:last] = event.data[first - event.offset : last - event.offset]


async def write_some(folder: Path, tape: Tape, rng: random.Random) -> None:
    """A journal's life: appends of all sizes, singly and many at once, over several segments."""
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


async def write_and_compact(folder: Path, tape: Tape, rng: random.Random) -> None:
    """A second life, in which records become useless after a while and are compacted, twice."""
    live: dict[str, Stored | None] = {}
    """Positions of the live records; None for those that are only in the state."""

    def snapshot() -> list[Record | Stored]:
        return [
            tasks_known([name, "x" * 20_000]) if stored is None else stored
            for name, stored in live.items()
        ]

    journal = LogJournal(folder, durability="fsync", max_bytes=1 << 30, segment_bytes=SEGMENT_BYTES)
    async for _ in journal.replay():
        pass
    await journal.start(snapshot)
    for n in itertools.count():
        name, held = f"record{n}", rng.random() < 0.5
        size = rng.choice([20_000, 100_000, 300_000]) if held else 20_000
        if not held:
            live[name] = None  # The state is changed before its record is appended.
        (stored,) = await journal.append([tasks_known([name, "x" * size])], hold_last=held)
        tape.told(name)
        if held:
            live[name] = stored
        if len(live) > 5:
            oldest = next(iter(live))
            tape.gone(oldest)
            found = live.pop(oldest)
            if found is not None:
                journal.release(found)
        if journal.compactions >= 2:
            break
        # Compaction continues concurrently.
        await asyncio.sleep(rng.choice([0, 0, 0.002]))
    await journal.close()


def read_lost(folder: Path, told: set[str]) -> list[str]:
    """Reads the journal as a server does. It must contain everything that was acknowledged."""
    try:
        found = [
            record.tasks_known.task_ids[0]
            for record, _ in read_records(find_files(folder), Reading())
        ]
    except SegmentCorrupt as error:
        raise AssertionError(f"told {sorted(told)}, and then {error}") from error
    assert told <= set(found), sorted(told - set(found))
    return found


async def test_what_was_acknowledged_survives_the_loss_of_power(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    async def happen(rng: random.Random) -> None:
        tape = Tape()
        folder = tmp_path / f"written-{rng.random()}"
        with pytest.MonkeyPatch.context() as patch:
            tape.record(patch)
            await write_some(folder, tape, rng)
        # Several cuts of one recording, because recording costs more than cutting.
        for _ in range(CUTS):
            lost = tmp_path / f"lost-{rng.random()}"
            lost.mkdir()
            told = tape.disk(rng.randint(0, len(tape.events)), rng, lost)
            found = read_lost(lost, told)
            assert len(found) == len(set(found))
            await go_on(lost, found)

    count = -(-report.count // CUTS) if report.count else 2
    await report.repeat("journal", "power lost", request.node.nodeid, count, happen)
    report.survived("journal", "power lost", count * CUTS)


async def test_what_was_acknowledged_survives_the_loss_of_power_while_it_is_compacted(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    async def happen(rng: random.Random) -> None:
        tape = Tape()
        folder = tmp_path / f"written-{rng.random()}"
        with pytest.MonkeyPatch.context() as patch:
            tape.record(patch)
            await write_and_compact(folder, tape, rng)
        # Between the rotation that begins a compaction and the removal of the last old file.
        kinds = [event.kind for event in tape.events]
        first = next(i for i, e in enumerate(tape.events) if e.name.endswith(".unfinished"))
        last = len(kinds) - kinds[::-1].index("unlink")
        assert any(event.name.endswith(".snapshot") for event in tape.events)
        cuts = [rng.randint(first, last) for _ in range(CUTS)]
        cuts += [i + rng.randint(0, 1) for i, e in enumerate(tape.events) if e.kind == "unlink"]
        for cut in cuts:
            lost = tmp_path / f"lost-{rng.random()}"
            lost.mkdir()
            found = read_lost(lost, tape.disk(cut, rng, lost))
            await go_on(lost, found)
            shutil.rmtree(lost)

    count = -(-report.count // CUTS) if report.count else 2
    node = request.node.nodeid
    await report.repeat("journal", "power lost in compaction", node, count, happen)
    report.survived("journal", "power lost in compaction", count * CUTS)


CUTS = 10


async def go_on(folder: Path, found: list[str]) -> None:
    """Checks that another server can continue the journal, and that its appends are found too."""
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
