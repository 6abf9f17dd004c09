"""A journal as it lies on the disk, for whoever only reads it: never locked, never changed.

A server may write to the folder meanwhile. Its files are opened before anything is read, and are a state
that the folder was in: where a snapshot took the place of older ones in between, they are opened again.
What is open stays readable when it is removed. A file that is being written to is read up to where it
ends at that moment, with `pread`: a server that starts cuts its last file off, which a mapping would not
survive.

The end of a file is judged as a server does it (`journal_segment`). One thing is added: a frame that is not
right may be one that is being written. A later frame that says it was durable then was written after it;
so it is looked at once more, and is corrupt only if it still is not right.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.server.journal import JournalRecord, Record, Stored
from penstock.server.journal_files import Files, find_files
from penstock.server.journal_segment import (
    ALIGNMENT,
    FRAME,
    HEADER,
    MAGIC,
    MARK,
    MAX_PAYLOAD,
    Frame,
    SegmentCorrupt,
    read_frame,
)

SCAN_BYTES = 1 << 20
MAX_REOPENINGS = 100


class NoJournal(Exception):
    """The folder cannot be read as a journal; the message is for a person."""


@dataclass(eq=False)
class Segment:
    """One open file of a journal."""

    number: int
    path: Path
    descriptor: int
    last: bool
    """Whether its tail may be torn: no other segment follows it."""
    end: int = HEADER.size
    """Where what was written ends; as of the last frame read."""
    torn_bytes: int = 0
    """Bytes after it that are being written, or were when the machine stopped."""

    @property
    def snapshot(self) -> bool:
        """Whether it is the one file that says what came of all before it."""
        return self.path.suffix == ".snapshot"

    @property
    def byte_count(self) -> int:
        """Size of the file."""
        return os.fstat(self.descriptor).st_size

    def frames(self) -> Iterator[Frame]:
        """Every frame in order. Raises SegmentCorrupt."""
        if os.pread(self.descriptor, len(MAGIC), 0) != MAGIC or self.byte_count < HEADER.size:
            raise SegmentCorrupt(self.path, 0, "is no segment of a journal")
        self.end = HEADER.size
        while True:
            try:
                frame, _ = self._read(self.end)
            except ValueError as error:
                if not self._goes_on(str(error)):
                    return
                continue
            self.end += frame.length
            yield frame

    def record(self, frame: Frame) -> Record:
        """What a frame says. Raises SegmentCorrupt."""
        record = JournalRecord()
        try:
            record.ParseFromString(bytes(frame.payload))
        except Exception as error:  # protobuf's own, of several kinds.
            raise SegmentCorrupt(self.path, frame.offset, f"is no record: {error}") from error
        return record

    def read(self, offset: int) -> Record:
        """The record at a place that `frames` gave. Raises SegmentCorrupt."""
        try:
            return self.record(self._read(offset)[0])
        except ValueError as error:
            raise SegmentCorrupt(self.path, offset, str(error)) from error

    def _read(self, offset: int) -> tuple[Frame, int]:
        head = os.pread(self.descriptor, FRAME.size, offset)
        length = 0
        if len(head) == FRAME.size:
            mark, length, _, _ = FRAME.unpack(head)
            # Otherwise `read_frame` says what is wrong, of the head alone.
            if mark != MARK or length > min(MAX_PAYLOAD, self.byte_count):
                length = 0
        data = os.pread(self.descriptor, FRAME.size + length, offset) if length else head
        frame, durable = read_frame(memoryview(data), 0)
        return Frame(offset, frame.length, frame.payload), durable

    def _goes_on(self, problem: str) -> bool:
        """Whether the frame at the end is right by now; where not, what is after it. Raises
        SegmentCorrupt."""
        written = 0
        for offset, marks, last in self._words(self.end):
            written = last or written
            if not self.last:
                raise SegmentCorrupt(self.path, self.end, problem)
            for mark in marks:
                try:
                    _, durable = self._read(offset + mark * ALIGNMENT)
                except ValueError:
                    continue
                if durable <= self.end:
                    continue
                try:
                    self._read(self.end)
                except ValueError:
                    raise SegmentCorrupt(self.path, self.end, problem) from None
                return True
        self.torn_bytes = max(0, written - self.end)
        return False

    def _words(self, begin: int) -> Iterator[tuple[int, list[int], int]]:
        """What is not zero from `begin` on: offset, words in which a frame may begin, and the end of the
        last byte that is not zero."""
        while chunk := os.pread(self.descriptor, SCAN_BYTES, begin):
            content = chunk.rstrip(b"\0")
            if content:
                padded = content + bytes(-len(content) % ALIGNMENT)
                words = np.frombuffer(padded, "<u8") & 0xFFFF_FFFF
                marks = [int(place) for place in np.flatnonzero(words == MARK)]
                yield begin, marks, begin + len(content)
            begin += len(chunk)


@dataclass(frozen=True, eq=False)
class StoredJournal:
    """A journal whose files are open."""

    folder: Path
    segments: tuple[Segment, ...]
    """In the order of what they say; a snapshot is the first."""
    obsolete: tuple[Path, ...]
    """What a server removes when it starts."""
    writer: int | None
    """Process that writes to it, where it can be seen from here."""

    def records(self) -> Iterator[tuple[Record, Stored]]:
        """Every record, oldest first. Raises SegmentCorrupt."""
        for segment in self.segments:
            for frame in segment.frames():
                stored = Stored(segment.number, frame.offset, frame.length)
                yield segment.record(frame), stored

    def read(self, stored: Stored) -> Record:
        """One record again. Raises SegmentCorrupt."""
        segment = next(s for s in self.segments if s.number == stored.segment)
        return segment.read(stored.offset)


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


def _open_files(folder: Path, stack: contextlib.ExitStack) -> tuple[Files, list[Segment]]:
    for _ in range(MAX_REOPENINGS):
        files = find_files(folder)
        with contextlib.ExitStack() as opened:
            segments: list[Segment] = []
            try:
                for number, path in files.all:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, descriptor)
                    last = bool(files.segments) and number == files.segments[-1][0]
                    segments.append(Segment(number, path, descriptor, last))
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
