"""Disk use of a journal: it never exceeds its limit, and refused records are
accepted again once there is room."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from penstock.server.config.journal import JournalSection
from penstock.server.core.errors import DomainError
from penstock.server.journal import appending
from penstock.server.journal.disk import journal as log_journal
from penstock.server.journal.disk import snapshot as journal_snapshot
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.protocol import Record, Stored
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from tests.support.harness import SubmitTasksRequest, Task, sampling, sequence, serve
from tests.support.journal_stores import MEBIBYTE, names_in, record

Snapshot = Callable[[], Iterable[Record | Stored]]


def disk_use(folder: Path) -> int:
    """The disk space that a folder's files take, in bytes."""
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # The file was removed during the scan.
    return total


class Peak:
    """The peak disk use of a folder, sampled continuously and between events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.byte_count = 0

    def look(self) -> None:
        self.byte_count = max(self.byte_count, disk_use(self.folder))

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(0.001)


@asynccontextmanager
async def watched(
    folder: Path, snapshot: Snapshot, max_bytes: int, segment_bytes: int = MEBIBYTE
) -> AsyncGenerator[tuple[LogJournal, Peak]]:
    """A journal that accepts records, and its peak disk use."""
    journal = LogJournal(
        folder, durability="process", max_bytes=max_bytes, segment_bytes=segment_bytes
    )
    peak = Peak(folder)
    watching = asyncio.create_task(peak.watch())
    try:
        await names_in(journal)
        await journal.start(snapshot)
        yield journal, peak
    finally:
        await journal.close()
        watching.cancel()


def fits(journal: LogJournal, byte_count: int) -> bool:
    try:
        journal.check_room(byte_count)
    except DomainError as error:
        assert error.reason is Reason.DISK_FULL
        return False
    return True


async def wait_for_room(journal: LogJournal, byte_count: int) -> None:
    async with asyncio.timeout(20):
        while not fits(journal, byte_count):
            await asyncio.sleep(0.01)


class SmallDisk:
    """Simulates a disk with `size` bytes for one folder."""

    def __init__(self, folder: Path, size: int, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.size = folder, size
        fallocate, write = os.posix_fallocate, os.pwrite

        def take(descriptor: int, end: int) -> None:
            found = os.fstat(descriptor)
            if end - found.st_blocks * 512 > self.free:
                raise OSError(errno.ENOSPC, "No space left on device")

        def small_fallocate(descriptor: int, offset: int, length: int) -> None:
            take(descriptor, offset + length)
            fallocate(descriptor, offset, length)

        def small_write(descriptor: int, data: memoryview, offset: int) -> int:
            take(descriptor, offset + len(data))
            return write(descriptor, data, offset)

        def small_statvfs(_: Path) -> os.statvfs_result:
            return os.statvfs_result((1, 1, self.size, self.free, self.free, 0, 0, 0, 0, 255))

        patch.setattr(os, "posix_fallocate", small_fallocate)
        patch.setattr(os, "pwrite", small_write)
        patch.setattr(os, "statvfs", small_statvfs)

    @property
    def free(self) -> int:
        """The bytes that still fit."""
        return max(0, self.size - disk_use(self.folder))


@pytest.mark.parametrize("kept", ["held", "counted", "both"])
async def test_the_disk_is_never_used_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """Records stay live; whenever one is refused, the oldest are released."""
    monkeypatch.setattr(appending, "SHORTEST_WAIT_SECONDS", 0.01)
    most = 32 * MEBIBYTE
    live: list[tuple[Record, Stored | None]] = []

    def snapshot() -> Iterable[Record | Stored]:
        return [new if stored is None else stored for new, stored in live]

    refused = 0
    async with watched(tmp_path, snapshot, most) as (journal, peak):
        n = 0
        while refused < 8 or n < 200:
            n += 1
            size = 700_000 if n % 10 == 0 else 70_000
            if not fits(journal, size):
                refused += 1
                while not fits(journal, size):
                    _, stored = live.pop(0) if live else (None, None)
                    if stored is not None:
                        journal.release(stored)
                    await journal.append([record("receipt")])
                    await asyncio.sleep(0.01)
            hold = kept == "held" or (kept == "both" and n % 2 == 0)
            new = record(f"{n}", size)
            (stored,) = await journal.append([new], hold_last=hold)
            live.append((new, stored if hold else None))
            peak.look()
        assert journal.compactions > 2
    assert peak.byte_count <= most


async def test_a_server_never_uses_the_disk_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks, turns and groups; whenever one is refused, waiting ones are given up."""
    monkeypatch.setattr(appending, "SHORTEST_WAIT_SECONDS", 0.01)
    most = 16 * MEBIBYTE
    folder = tmp_path / "journal"
    async with serve(
        tmp_path,
        f"journal.folder={folder}",
        f"journal.max_bytes={most}",
        "journal.durability=process",
        max_context=40_000,
    ) as harness:
        peak = Peak(folder)
        watching = asyncio.create_task(peak.watch())
        journal = harness.serving.journal
        assert isinstance(journal, LogJournal)
        refused = n = 0
        async with asyncio.timeout(120):
            while refused < 5 or journal.compactions < 3:
                n += 1
                try:
                    task = Task(task_id=f"task{n}", group_size=1, tokens=sequence([1] * 2_000))
                    await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
                    for sample in range(2):
                        await harness.generate(
                            f"t{n}-{sample}",
                            [1] * 10_000,
                            group_id=f"g{n}",
                            group_size=2,
                            sample_index=sample,
                            sampling_params=sampling(2),
                        )
                        await harness.complete(f"t{n}-{sample}")
                except grpc.aio.AioRpcError as error:
                    assert read_failure(error).reason == "DISK_FULL"
                    refused += 1
                    for group in list(harness.serving.buffer.groups):
                        harness.serving.buffer.drop(group.group_id)
                    await asyncio.sleep(0.1)
                peak.look()
        watching.cancel()
    assert peak.byte_count <= most


async def test_an_empty_journal_takes_an_eighth_of_its_bound_at_most(tmp_path: Path) -> None:
    section = JournalSection(max_bytes=4 * MEBIBYTE)
    async with watched(tmp_path, list, section.max_bytes, section.segment_bytes) as (journal, peak):
        await journal.append([record("first")])
        peak.look()
    assert 0 < peak.byte_count <= section.max_bytes // 8 + 64 * 1024


@pytest.mark.parametrize("point", ["journal.before_snapshot_fsync", "start"])
async def test_a_compaction_that_failed_is_tried_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    point: str,
) -> None:
    monkeypatch.setattr(appending, "SHORTEST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(appending, "TIMES_AS_LONG", 1)
    failures = 0

    def fail(name: str) -> None:
        nonlocal failures
        if name == point and failures < 3:
            failures += 1
            raise OSError(errno.ENOSPC, "No space left on device")

    def read_bad(*arguments: object) -> object:
        fail("start")
        return write(*arguments)  # type: ignore[arg-type]

    write = log_journal.write_snapshot
    monkeypatch.setattr(journal_snapshot, "hit", fail)
    monkeypatch.setattr(log_journal, "write_snapshot", read_bad)
    most = 16 * MEBIBYTE
    async with watched(tmp_path, lambda: [record("state")], most) as (journal, peak):
        async with asyncio.timeout(20):
            while not journal.compactions:
                await wait_for_room(journal, 100_000)
                await journal.append([record("nobody's", 100_000)])
                if failures and journal._compacting is None:
                    assert not list(tmp_path.glob("*.unfinished"))
                peak.look()
        assert failures == 3
        await wait_for_room(journal, 1_000_000)
    assert peak.byte_count <= most
    assert caplog.text.count("cannot be compacted") == 1
    journal = LogJournal(tmp_path, durability="process", max_bytes=most, segment_bytes=MEBIBYTE)
    assert "state" in await names_in(journal)
    await journal.close()


@pytest.mark.parametrize("needed_of", [1, 2, 4])
async def test_a_disk_that_was_full_is_written_again_once_something_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed_of: int
) -> None:
    """The disk is smaller than the configured limit."""
    monkeypatch.setattr(appending, "SHORTEST_WAIT_SECONDS", 0.01)
    SmallDisk(tmp_path, 8 * MEBIBYTE, monkeypatch)
    held: list[Stored] = []
    async with watched(tmp_path, lambda: held, 64 << 30) as (journal, _):
        for round_number in range(3):
            n = 0
            while fits(journal, 100_000):
                n += 1
                (stored,) = await journal.append(
                    [record(f"{n}", 100_000)], hold_last=n % needed_of == 0
                )
                if n % needed_of == 0:
                    held.append(stored)
                await asyncio.sleep(0)
            # Less fits in later rounds, while older files are still being removed.
            assert n > (0 if round_number else 10)
            # Records that free room are always accepted.
            for _ in range(20):
                await journal.append([record("receipt", 10_000)])
            while held:
                journal.release(held.pop())
            await wait_for_room(journal, 100_000)


async def test_what_is_of_no_use_any_more_makes_room_though_nothing_is_released(
    tmp_path: Path,
) -> None:
    """Trajectories that were open at the last compaction have since been closed. The journal must
    compact again to free their records."""
    state = [record(f"open{n}", 100_000) for n in range(30)]
    async with watched(tmp_path, lambda: state, 16 * MEBIBYTE) as (journal, _):
        async with asyncio.timeout(20):
            while not journal.compactions:
                await wait_for_room(journal, 100_000)
                await journal.append([record("nobody's", 100_000)])
        while fits(journal, 100_000):
            await journal.append([record("kept", 100_000)], hold_last=True)
        state.clear()
        await journal.append([record("closed")])
        await wait_for_room(journal, 1_000_000)
