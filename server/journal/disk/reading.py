"""A journal as it lies on the disk, for whoever only reads it: never locked, never changed.

A server may write to the folder meanwhile. Its files are opened before anything is read, and are a state
that the folder was in: where a snapshot took the place of older ones in between, they are opened again.
What is open stays readable when it is removed. A file that is being written to is read up to where it
ends at that moment, with `pread` (`journal_segment_reader`).
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.server.journal.disk.files import Files, find_files
from penstock.server.journal.disk.segment import SegmentCorrupt
from penstock.server.journal.disk.segment_reader import SegmentReader, check_last, check_order
from penstock.server.journal.records import JournalRecord, Record, Stored
from penstock.wire.referred import put_together

MAX_REOPENINGS = 100


class NoJournal(Exception):
    """The folder cannot be read as a journal; the message is for a person."""


@dataclass(frozen=True, eq=False)
class StoredJournal:
    """A journal whose files are open."""

    folder: Path
    segments: tuple[SegmentReader, ...]
    """In the order of what they say; a snapshot is the first."""
    obsolete: tuple[Path, ...]
    """What a server removes when it starts."""
    writer: int | None
    """Process that writes to it, where it can be seen from here."""

    def records(self) -> Iterator[tuple[Record, Stored]]:
        """Every record, oldest first. Raises SegmentCorrupt."""
        before: SegmentReader | None = None
        for segment in self.segments:
            check_order(before, segment)
            for frame in segment.frames():
                stored = Stored(segment.number, frame.offset, frame.length)
                yield segment.record(frame), stored
            before = segment
        check_last(before)

    def read(self, stored: Stored) -> Record:
        """One record again, and whole. Raises SegmentCorrupt."""
        segment = next(s for s in self.segments if s.number == stored.segment)
        record = segment.read(stored.offset)
        if not stored.turns:
            return record
        turns = (self.read(turn).turn_changed for turn in stored.turns)
        try:
            return JournalRecord(group_finished=put_together(record.group_referred, turns))
        except ValueError as error:
            raise SegmentCorrupt(segment.path, stored.offset, str(error)) from error


@contextlib.contextmanager
def open_stored(folder: Path) -> Generator[StoredJournal]:
    """Opens what a folder holds. Raises NoJournal."""
    with contextlib.ExitStack() as stack:
        try:
            _allow_descriptors()
            files, segments = _open_files(folder, stack)
            if not segments and not (folder / "LOCK").exists():
                raise NoJournal(f"{folder} is no journal: it holds neither LOCK nor segments")
            writer = find_writer(folder / "LOCK")
        except ValueError as error:
            raise NoJournal(f"{folder} holds files that are not a journal's: {error}") from error
        except OSError as error:
            raise NoJournal(f"{error.filename or folder}: {error.strerror}") from error
        yield StoredJournal(folder, tuple(segments), files.obsolete, writer)


def _open_files(folder: Path, stack: contextlib.ExitStack) -> tuple[Files, list[SegmentReader]]:
    for _ in range(MAX_REOPENINGS):
        files = find_files(folder)
        with contextlib.ExitStack() as opened:
            segments: list[SegmentReader] = []
            try:
                for number, path in files.all:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, descriptor)
                    last = bool(files.segments) and number == files.segments[-1][0]
                    segments.append(SegmentReader(number, path, descriptor, last=last))
            except FileNotFoundError:
                continue
            # Older files are removed only once a snapshot has its name.
            if find_files(folder).snapshot == files.snapshot:
                stack.push(opened.pop_all())
                return files, segments
    raise NoJournal(f"{folder} is replaced faster than it can be opened")


def _allow_descriptors() -> None:
    """One per segment: the usual limit is for programs that wait with `select`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def find_writer(lock: Path) -> int | None:
    """Process that holds a lock file, from the kernel's own list: to try the lock would be to hold it.

    None where nobody does, and where it is in a container of its own.
    """
    try:
        found = lock.stat()
        table = Path("/proc/locks").read_text()
    except OSError:
        return None
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in table.splitlines():
        # 1: FLOCK  ADVISORY  WRITE 4711 08:02:131 0 EOF
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == device:
            return int(fields[4])
    return None
