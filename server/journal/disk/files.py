"""Finds the files in a journal's folder, and reads their records."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.server.journal.disk.segment_reader import SegmentReader, check_last, check_order
from penstock.server.journal.protocol import Record, Stored


@dataclass(frozen=True, slots=True)
class Files:
    snapshot: tuple[int, Path] | None
    segments: tuple[tuple[int, Path], ...]
    """Segments written since the snapshot, oldest first."""
    obsolete: tuple[Path, ...]

    @property
    def all(self) -> tuple[tuple[int, Path], ...]:
        """The files to read, in order."""
        return (*((self.snapshot,) if self.snapshot else ()), *self.segments)

    @contextmanager
    def opened(self, number: int, path: Path) -> Generator[SegmentReader]:
        """Open one of the files to read. Raises OSError."""
        with path.open("rb", buffering=0) as file:
            last = self.segments[-1:] == ((number, path),)
            yield SegmentReader(number, path, file.fileno(), last=last)


def find_files(folder: Path) -> Files:
    """Sort the folder's files into those to read and those to remove."""
    snapshots = sorted((int(p.stem), p) for p in folder.glob("*.snapshot"))
    snapshot = snapshots[-1] if snapshots else None
    newest = snapshot[0] if snapshot else 0
    logs = sorted((int(p.stem), p) for p in folder.glob("*.log"))
    return Files(
        snapshot,
        tuple(entry for entry in logs if entry[0] > newest),
        (
            *(path for _, path in snapshots[:-1]),
            *(path for number, path in logs if number <= newest),
            *folder.glob("*.unfinished"),
        ),
    )


@dataclass(eq=False)
class Reading:
    """Totals, filled in while a journal is read."""

    torn_bytes: int = 0
    bytes_by_segment: dict[int, int] = field(default_factory=dict[int, int])


def read_records(files: Files, reading: Reading) -> Iterator[tuple[Record, Stored]]:
    """Like `records_in`, with one file open at a time. Also raises OSError."""

    def readers() -> Iterator[SegmentReader]:
        for number, path in files.all:
            with files.opened(number, path) as reader:
                yield reader
            reading.torn_bytes += reader.torn_bytes
            reading.bytes_by_segment[number] = reader.end

    return records_in(readers())


def records_in(readers: Iterable[SegmentReader]) -> Iterator[tuple[Record, Stored]]:
    """Yield every record, oldest first. Raises SegmentCorrupt, also if a file is missing."""
    before: SegmentReader | None = None
    for reader in readers:
        check_order(before, reader)
        for frame in reader.frames():
            yield reader.record(frame), Stored(reader.number, frame.offset, frame.length)
        before = reader
    check_last(before)


def forget_cached(path: Path) -> None:
    """Sync a file and drop it from the page cache, so that the next read comes from the disk.

    Raises OSError if it cannot be synced. After a failed fsync, Linux marks the pages as written
    anyway: they stay in memory, and a later fsync succeeds (Rebello et al., "Can Applications
    Recover from fsync Failures?", 2020).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
