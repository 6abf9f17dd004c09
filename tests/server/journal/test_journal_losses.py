"""Data lost from a journal's disk is detected, both by `verify` and by a server that starts."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.server.journal.disk import journal as log_journal
from penstock.server.journal.disk.files import Reading, find_files, forget_cached, read_records
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.disk.writing import Durability
from penstock.server.journal.protocol import JournalUnreadable, Record, Stored
from tests.support.journal_stores import MEBIBYTE, names_in, record


def make(folder: Path, durability: Durability = "fsync") -> LogJournal:
    return LogJournal(
        folder, durability=durability, max_bytes=64 * MEBIBYTE, segment_bytes=MEBIBYTE
    )


async def written(folder: Path, durability: Durability = "fsync", *, stop: bool = True) -> Path:
    """A journal of six records in one segment, left by a stopped or killed server."""
    journal = make(folder / "journal", durability)
    assert await names_in(journal) == []
    await journal.start(list)
    for n in range(6):
        await journal.append([record(f"{n}", 100)])
    if not stop:
        shutil.copytree(folder / "journal", folder / "killed")
    await journal.close()
    return folder / ("journal" if stop else "killed")


async def in_segments(folder: Path) -> Path:
    """A journal of forty records in four segments."""
    journal = make(folder / "journal")
    assert await names_in(journal) == []
    await journal.start(lambda: [record("state")])
    for n in range(40):
        await journal.append([record(f"{n}", 100_000)], hold_last=True)
    await journal.close()
    assert len(find_files(folder / "journal").segments) == 4
    return folder / "journal"


async def compacted(folder: Path) -> Path:
    """A journal with a snapshot of ten records, and the records appended after it."""

    def snapshot() -> Iterable[Record]:
        return [record(f"{n}", 50_000) for n in range(10)]

    journal = make(folder / "journal")
    assert await names_in(journal) == []
    await journal.start(snapshot)
    async with asyncio.timeout(20):
        while not journal.compactions:
            await journal.append([record("filler", 200_000)])
            await asyncio.sleep(0.01)
    await journal.append([record("after")])
    await journal.close()
    return folder / "journal"


def places(folder: Path) -> list[Stored]:
    return [stored for _, stored in read_records(find_files(folder), Reading())]


def path_of(folder: Path, stored: Stored) -> Path:
    return dict(find_files(folder).all)[stored.segment]


async def found_in(folder: Path) -> list[str]:
    """The records that a server would read. Raises JournalUnreadable."""
    journal = make(folder)
    try:
        return await names_in(journal)
    finally:
        await journal.close()


async def assert_missed(folder: Path, where: str) -> None:
    shown = CliRunner().invoke(main, ("journal", "verify", str(folder)))
    assert shown.exit_code == 1, shown.output
    assert shown.output.splitlines()[-1] == "corrupt"
    assert where in shown.output
    with pytest.raises(JournalUnreadable, match=where):
        await found_in(folder)


@pytest.mark.parametrize("durability", ["fsync", "process"])
@pytest.mark.parametrize("stop", [True, False])
async def test_a_wrong_byte_is_missed_in_whatever_was_acknowledged(
    tmp_path: Path, durability: Durability, stop: bool
) -> None:
    folder = await written(tmp_path, durability, stop=stop)
    assert await found_in(shutil.copytree(folder, tmp_path / "whole")) == [*"012345"]
    stored = places(folder)
    # A killed server wrote nothing after its last batch, so damage there looks like a torn write.
    for n, place in enumerate(stored if stop else stored[:-1]):
        copy = shutil.copytree(folder, tmp_path / f"copy{n}")
        with path_of(copy, place).open("r+b") as file:
            file.seek(place.offset + place.length // 2)
            file.write(b"?")
        await assert_missed(copy, f"{place.offset}")


@pytest.mark.parametrize("victim", range(3))
async def test_a_segment_that_is_not_there_is_missed(tmp_path: Path, victim: int) -> None:
    folder = await in_segments(tmp_path)
    segments = find_files(folder).segments
    segments[victim][1].unlink()
    await assert_missed(folder, segments[victim + 1][1].name)


async def test_segments_that_stand_in_for_each_other_are_missed(tmp_path: Path) -> None:
    folder = await in_segments(tmp_path)
    (_, second), (_, third) = find_files(folder).segments[1:3]
    second.rename(folder / "other")
    third.rename(second)
    (folder / "other").rename(third)
    await assert_missed(folder, second.name)


@pytest.mark.parametrize("count", [1, 2])
async def test_the_end_of_a_segment_is_missed(tmp_path: Path, count: int) -> None:
    folder = await in_segments(tmp_path)
    second, path = find_files(folder).segments[1]
    lost = [stored for stored in places(folder) if stored.segment == second][-count:]
    with path.open("r+b") as file:
        file.seek(lost[0].offset)
        file.write(bytes(sum(stored.length for stored in lost)))
    await assert_missed(folder, f"{lost[0].offset}")


async def test_the_end_of_a_segment_is_missed_after_a_start(tmp_path: Path) -> None:
    folder = await written(tmp_path, stop=False)
    last = places(folder)[-1]
    journal = make(folder)
    assert await names_in(journal) == [*"012345"]
    await journal.start(list)
    await journal.close()
    with path_of(folder, last).open("r+b") as file:
        file.truncate(last.offset)
    await assert_missed(folder, f"{last.offset}")


@pytest.mark.parametrize("left", range(11))
async def test_the_end_of_a_snapshot_is_missed(tmp_path: Path, left: int) -> None:
    folder = await compacted(tmp_path)
    assert await found_in(shutil.copytree(folder, tmp_path / "whole"))
    files = find_files(folder)
    assert files.snapshot is not None
    number, path = files.snapshot
    of_it = [stored for stored in places(folder) if stored.segment == number]
    with path.open("r+b") as file:
        file.truncate([*(p.offset for p in of_it), of_it[-1].offset + of_it[-1].length][left])
    await assert_missed(folder, path.name)


async def test_what_came_after_a_snapshot_is_missed(tmp_path: Path) -> None:
    folder = await compacted(tmp_path)
    for _, path in find_files(folder).segments:
        path.unlink()
    await assert_missed(folder, "the file after")


async def test_a_sector_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await in_segments(tmp_path)
    bad = places(folder)[20]
    real = os.pread

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        opened = Path(f"/proc/self/fd/{descriptor}").readlink()
        if opened == path_of(folder, bad) and offset <= bad.offset < offset + length:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    await assert_missed(folder, "Input/output error")


async def test_a_server_reads_what_the_disk_holds_and_not_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await written(tmp_path, stop=False)
    path, last = find_files(folder).segments[-1][1], places(folder)[-1]

    def lose(file: Path) -> None:
        """As after a failed fsync: the pages are lost together with the cache."""
        assert file == path
        with file.open("r+b") as opened:
            opened.seek(last.offset)
            opened.write(bytes(last.length))

    with monkeypatch.context() as patched:
        patched.setattr(log_journal, "forget_cached", lose)
        journal = make(folder)
        assert await names_in(journal) == [*"01234"]
        await journal.start(list)
        await journal.append([record("after", 100)])
        await journal.close()
    assert await found_in(folder) == [*"01234", "after"]


async def test_what_was_read_is_made_durable_and_comes_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await written(tmp_path, "process", stop=False)
    path = find_files(folder).segments[-1][1]
    before = path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        forget_cached(path)
        try:
            os.preadv(descriptor, [bytearray(100)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            pytest.skip(f"this file system does not say what is cached: {error}")
        else:
            pytest.skip("this file system lets go of nothing: it has no disk")
        assert path.read_bytes() == before
    finally:
        os.close(descriptor)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=path.name):
            await found_in(folder)
    assert path.read_bytes() == before
    assert await found_in(folder) == [*"012345"]
