"""The journal on disk: torn writes are detected and corruption is refused. `test_journal_promises`
tests the guarantees shared by every journal."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.server.core.errors import DomainError
from penstock.server.journal.disk import journal as log_journal
from penstock.server.journal.disk import segment as journal_segment
from penstock.server.journal.disk.files import find_files
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.disk.segment import NOWHERE, SegmentCorrupt, SegmentWriter
from penstock.server.journal.disk.segment_reader import SegmentReader
from penstock.server.journal.disk.writing import Durability
from penstock.server.journal.protocol import JournalUnreadable, Record, Stored
from penstock.server.journal.records import tasks_known
from penstock.trainer.state.ledger import Ledger
from penstock.wire.messages import JournalRecord
from penstock.wire.reasons import Reason

MEBIBYTE = 1 << 20


def record(name: str, size: int = 0) -> Record:
    return tasks_known([name, "x" * size])


def name_of(found: Record) -> str:
    return found.tasks_known.task_ids[0]


def read_name(payload: bytes) -> str:
    return name_of(JournalRecord.FromString(payload))


def make(
    folder: Path, *, max_bytes: int = 64 * MEBIBYTE, durability: Durability = "fsync"
) -> LogJournal:
    return LogJournal(folder, durability=durability, max_bytes=max_bytes, segment_bytes=MEBIBYTE)


@asynccontextmanager
async def opened(
    folder: Path, snapshot: Callable[[], Iterable[Record | Stored]] = list, **options: int
) -> AsyncGenerator[tuple[LogJournal, list[str]]]:
    """A journal that accepts records, and the names of the records it held before."""
    journal = make(folder, **options)
    try:
        names = [name_of(found) async for found, _ in journal.replay()]
        await journal.start(snapshot)
        yield journal, names
    finally:
        await journal.close()


async def names_in(folder: Path) -> list[str]:
    async with opened(folder) as (_, names):
        return names


# Segments


def write_segment(folder: Path, payloads: list[bytes], *, sync: bool = True) -> Path:
    writer = SegmentWriter(folder / "spare", 64 * 1024)
    path = folder / "0000000001.log"
    writer.begin(path, 1, NOWHERE)
    for payload in payloads:
        writer.write([(payload,)])
        if sync:
            writer.sync()
    writer.close()
    return path


def read_segment(path: Path, *, last: bool = True) -> tuple[list[bytes], int]:
    with path.open("rb") as file:
        reader = SegmentReader(1, path, file.fileno(), last=last)
        return [bytes(frame.payload) for frame in reader.frames()], reader.torn_bytes


@given(st.lists(st.binary(max_size=200), max_size=8))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
def test_a_segment_gives_back_what_was_written(tmp_path: Path, payloads: list[bytes]) -> None:
    path = write_segment(tmp_path, payloads)
    assert read_segment(path) == (payloads, 0)
    assert read_segment(path, last=False) == (payloads, 0)
    path.unlink()


@given(data=st.data())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150
)
def test_a_cut_anywhere_leaves_the_frames_before_it(tmp_path: Path, data: st.DataObject) -> None:
    payloads = data.draw(st.lists(st.binary(min_size=1, max_size=90), min_size=1, max_size=6))
    path = write_segment(tmp_path, payloads, sync=False)
    whole = path.read_bytes()
    ends = [journal_segment.HEADER.size]
    for payload in payloads:
        ends.append(ends[-1] + journal_segment.frame_length(len(payload)))
    cut = data.draw(st.integers(ends[0], ends[-1]))
    # Unwritten parts of a segment read as zeros.
    path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
    kept = sum(end <= cut for end in ends[1:])
    found, torn = read_segment(path)
    # Zeros at the end of a payload look like unwritten bytes. This does no harm.
    assert found[:kept] == payloads[:kept] and found == payloads[: len(found)]
    assert (torn == 0) == (not any(whole[ends[len(found)] : cut]))
    path.unlink()


@given(data=st.data())
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150
)
def test_a_flipped_bit_in_what_was_durable_is_corruption(
    tmp_path: Path, data: st.DataObject
) -> None:
    payloads = [b"first" * 20, b"second" * 20, b"third" * 20]
    path = write_segment(tmp_path, payloads)
    content = bytearray(path.read_bytes())
    # A bit in the first two frames, which the third frame marks as durable.
    begin = journal_segment.HEADER.size
    end = begin + sum(journal_segment.frame_length(len(p)) for p in payloads[:2])
    place = data.draw(st.integers(begin, end - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        found, _ = read_segment(path)
    except SegmentCorrupt as error:
        assert error.offset <= place
    else:
        assert found == payloads  # The flipped bit was in the padding between two frames.
    path.unlink()


def test_a_tail_that_another_segment_follows_is_corruption(tmp_path: Path) -> None:
    path = write_segment(tmp_path, [b"one", b"two"], sync=False)
    content = bytearray(path.read_bytes())
    content[journal_segment.HEADER.size + journal_segment.frame_length(3) + 8] ^= 1
    path.write_bytes(content)
    assert read_segment(path)[0] == [b"one"]
    with pytest.raises(SegmentCorrupt, match="checksum"):
        read_segment(path, last=False)


def test_what_is_no_segment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "0000000001.log"
    for content in (b"", b"PENSTOCK", b"something else altogether"):
        path.write_bytes(content)
        with pytest.raises(SegmentCorrupt):
            read_segment(path)


# Appending


async def test_appends_that_come_together_are_made_durable_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = 0
    sync = SegmentWriter.sync

    def counted(writer: SegmentWriter) -> None:
        nonlocal syncs
        syncs += 1
        sync(writer)

    monkeypatch.setattr(SegmentWriter, "sync", counted)
    async with opened(tmp_path) as (journal, _):
        await asyncio.gather(*(journal.append([record(str(i))]) for i in range(100)))
        assert syncs == 1


async def test_a_record_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    async with opened(tmp_path) as (journal, _):
        journal.check_room(3 * MEBIBYTE)
        await journal.append([record("small")])
        await journal.append([record("large", 3 * MEBIBYTE)], hold_last=True)
        await journal.append([record("after")])
    assert await names_in(tmp_path) == ["small", "large", "after"]


async def test_a_torn_tail_is_seen_and_nothing_is_written_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as (journal, _):
        await journal.append([record("whole")])
    _, path = find_files(tmp_path).segments[-1]
    with path.open("r+b") as file:
        file.seek(journal_segment.HEADER.size)
        content = file.read()
        end = journal_segment.HEADER.size + len(content.rstrip(b"\0")) + 16
        file.seek(end - end % 8)
        file.write(b"JRNL torn in the middle of")
    async with opened(tmp_path) as (journal, names):
        assert names == ["whole"]
        assert "never acknowledged" in caplog.text
        await journal.append([record("later")])
    caplog.clear()
    assert await names_in(tmp_path) == ["whole", "later"]
    assert caplog.text == ""


async def test_a_corrupt_record_is_named_and_nothing_is_served(tmp_path: Path) -> None:
    async with opened(tmp_path) as (journal, _):
        for name in "abc":
            (stored,) = await journal.append([record(name, 100)])
        content = bytearray(journal._segments.paths[stored.segment].read_bytes())
        content[journal_segment.HEADER.size + 40] ^= 0x10
        path = journal._segments.paths[stored.segment]
    path.write_bytes(content)
    with pytest.raises(JournalUnreadable, match=r"corrupt: 0000000001\.log at 40"):
        await names_in(tmp_path)


async def test_what_passes_is_no_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running out of file descriptors says nothing about a file's content."""

    def refuse(path: Path, mode: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    async with opened(tmp_path) as (journal, _):
        (stored,) = await journal.append([record("a")], hold_last=True)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", refuse)
            with pytest.raises(OSError, match="Too many"):
                await journal.read(stored)
        assert read_name(await journal.read(stored)) == "a"


@pytest.mark.parametrize("of_journal", [True, False])
async def test_a_folder_that_is_made_is_durable_in_the_one_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_journal: bool
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)

    folder = tmp_path / "runs" / "first"
    if of_journal:
        await make(folder).close()
    else:
        Ledger(folder).close()
    assert set(synced) >= {tmp_path, tmp_path / "runs"}


# Room


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Make the disk full: no further file can be created."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    nothing_free = os.statvfs_result((1, 1, 0, 0, 0, 0, 0, 0, 0, 0))
    patch.setattr(os, "posix_fallocate", full)
    patch.setattr(os, "statvfs", lambda _: nothing_free)


async def test_a_disk_without_room_refuses_before_anything_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (journal, _):
        fill_disk(monkeypatch)
        written = 0
        while True:
            try:
                journal.check_room(100_000)
            except DomainError as error:
                assert error.reason is Reason.DISK_FULL
                break
            await journal.append([record("x", 100_000)])
            written += 1
        assert written
        # Hold the record, so that compaction keeps it.
        await journal.append([record("receipt")], hold_last=True)
        monkeypatch.undo()
    assert (await names_in(tmp_path))[-1] == "receipt"


async def test_what_is_appended_without_asking_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_journal, "ROOM_SECONDS", 0.02)
    async with opened(tmp_path) as (journal, _):
        with monkeypatch.context() as disk:
            fill_disk(disk)
            appends = [
                asyncio.ensure_future(
                    journal.append([record(f"{number}", 300_000)], hold_last=True)
                )
                for number in range(20)
            ]
            _, waiting = await asyncio.wait(appends, timeout=0.3)
            assert waiting
            with pytest.raises(DomainError) as refused:
                journal.check_room(1)
            assert refused.value.reason is Reason.DISK_FULL
        async with asyncio.timeout(20):
            await asyncio.gather(*appends)
        assert not journal.failed.done()
    assert set(map(str, range(20))) <= set(await names_in(tmp_path))


async def test_a_disk_that_stays_full_ends_with_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = make(tmp_path)
    async for _ in journal.replay():
        pass
    await journal.start(list)

    with monkeypatch.context() as disk:
        fill_disk(disk)
        appends = [
            asyncio.ensure_future(journal.append([record(f"{number}", 300_000)]))
            for number in range(20)
        ]
        await asyncio.wait(appends, timeout=0.2)
        async with asyncio.timeout(20):
            await journal.close()
        ended = await asyncio.gather(*appends, return_exceptions=True)
    failed = [str(number) for number, end in enumerate(ended) if isinstance(end, DomainError)]
    assert failed and not set(failed) & set(await names_in(tmp_path))


async def test_after_a_failed_fsync_nothing_is_answered_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = make(tmp_path)
    async for _ in journal.replay():
        pass
    await journal.start(list)
    await journal.append([record("answered")])

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    for _ in range(2):
        with pytest.raises(DomainError) as error:
            await journal.append([record("never")])
        assert error.value.reason is Reason.JOURNAL_FAILED
    assert "Input/output error" in await journal.failed
    monkeypatch.undo()
    await journal.close()
    assert (await names_in(tmp_path))[0] == "answered"


# Compaction


async def test_a_snapshot_that_was_never_finished_is_removed(tmp_path: Path) -> None:
    async with opened(tmp_path) as (journal, _):
        await journal.append([record("a")])
    (tmp_path / "0000000009.unfinished").write_bytes(b"half")
    assert await names_in(tmp_path) == ["a"]
    assert not list(tmp_path.glob("*.unfinished"))


async def test_of_older_files_beside_a_snapshot_nothing_is_read(tmp_path: Path) -> None:
    async with opened(tmp_path, lambda: [record("snapshot")]) as (journal, _):
        await journal.append([record("old")])
        number, older = next(iter(journal._segments.paths.items()))
        content = older.read_bytes()
        while not journal.compactions:
            await journal.append([record("filler", 300_000)])
            await asyncio.sleep(0.01)
        await journal.append([record("new")])
    # As if the server had been killed before it removed the older files.
    older.write_bytes(content)
    names = await names_in(tmp_path)
    assert "old" not in names and "snapshot" in names and names[-1] == "new"
    assert not older.exists()
    assert number == 1


async def test_an_old_file_that_cannot_be_removed_costs_nothing_but_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error")

    state = [record("snapshot")]
    async with opened(tmp_path, lambda: state) as (journal, _):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refuse)
            async with asyncio.timeout(20):
                while journal.compactions < 2:
                    await journal.append([record("filler", 300_000)])
        # A third compaction may begin after this append, and replace what it wrote.
        state.append(record("new"))
        await journal.append([record("new")])
    names = await names_in(tmp_path)
    assert "snapshot" in names and names[-1] == "new"
