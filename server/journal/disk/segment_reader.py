"""Reads files of the journal, for a starting server and for the read-only commands.

A file is read with `pread`, in pieces, and never mapped. So an unreadable sector is an error with a
location, and a file that a server truncates meanwhile simply ends.

While a server writes to the file, an invalid frame may be one that is just being written. If a later frame
states that this place was durable, the frame was complete by then: it is read once more, and reported as
corrupt only if it is still invalid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.server.journal.disk.segment import (
    COUNT,
    HEADER,
    NOWHERE,
    Frame,
    Place,
    SegmentCorrupt,
    read_frame,
    read_header,
)
from penstock.server.journal.protocol import Record
from penstock.wire.frames import ALIGNMENT, CLOSING_MARK, FRAME, MARK, MAX_PAYLOAD
from penstock.wire.messages import JournalRecord

READ_BYTES = 64 << 10
SCAN_BYTES = 1 << 20


class FileMissing(SegmentCorrupt):
    """A file that another file refers to is missing."""


@dataclass(eq=False)
class SegmentReader:
    number: int
    path: Path
    descriptor: int
    last: bool = field(kw_only=True)
    """No other segment follows, so that the tail may be torn."""
    before: Place | None = None
    """Where the previous file ended; None before `begin`, and in files of earlier versions."""
    end: int = 0
    """End of the last frame read; zero before `begin`."""
    torn_bytes: int = 0
    """Bytes after `end` that are being written, or were when the machine stopped."""
    _count: int = 0
    _closed: bool = False
    _buffer: memoryview = field(default_factory=lambda: memoryview(b""))
    _buffer_begin: int = 0

    @property
    def snapshot(self) -> bool:
        """Whether the file is a snapshot, which replaces all earlier files."""
        return self.path.suffix == ".snapshot"

    @property
    def byte_count(self) -> int:
        """Current size of the file, including its unused end."""
        return os.fstat(self.descriptor).st_size

    def begin(self) -> None:
        """Read the header. Idempotent. Raises SegmentCorrupt."""
        if self.end:
            return
        try:
            end, number, before = read_header(self._pread(0, HEADER.size))
        except ValueError as error:
            raise SegmentCorrupt(self.path, 0, str(error)) from error
        if number != self.number:
            raise SegmentCorrupt(self.path, 0, f"was written as number {number}")
        self.end, self.before = end, before

    def frames(self) -> Iterator[Frame]:
        """Yield the frame of every record, in order. Raises SegmentCorrupt."""
        self.begin()
        while True:
            try:
                frame = self._frame(self.end)
            except ValueError as error:
                if not self._goes_on(str(error)):
                    break
                continue
            if frame.closing:
                (count,) = COUNT.unpack(frame.payload)
                if count != self._count:
                    problem = f"the file holds {self._count} records, but its closing frame counts {count}"
                    raise SegmentCorrupt(self.path, self.end, problem)
            self._closed = frame.closing
            self._count += not frame.closing
            self.end += frame.length
            if not frame.closing:
                yield frame
        if self.snapshot and self.before is not None and not self._closed:
            raise SegmentCorrupt(self.path, self.end, "the snapshot is cut off here")

    def record(self, frame: Frame) -> Record:
        try:
            return JournalRecord.FromString(bytes(frame.payload))
        except Exception as error:  # protobuf raises several types.
            problem = f"is not a valid record: {error}"
            raise SegmentCorrupt(self.path, frame.offset, problem) from error

    def read(self, offset: int) -> Record:
        """Read the record at an offset that `frames` yielded. Raises SegmentCorrupt."""
        try:
            return self.record(self._frame(offset))
        except ValueError as error:
            raise SegmentCorrupt(self.path, offset, str(error)) from error

    def _frame(self, offset: int) -> Frame:
        """Raises ValueError and SegmentCorrupt."""
        data = self._bytes(offset, FRAME.size)
        if len(data) >= FRAME.size:
            mark, length, _, _ = FRAME.unpack_from(data)
            size = FRAME.size + length
            # For an invalid head or a length that does not fit, `read_frame` needs only the head.
            fits = length <= READ_BYTES or length <= min(MAX_PAYLOAD, self.byte_count)
            if size > len(data) and mark in (MARK, CLOSING_MARK) and fits:
                data = self._bytes(offset, size)
        return read_frame(data, offset)

    def _bytes(self, offset: int, length: int) -> memoryview:
        """Return at least `length` bytes from `offset`, or fewer at the end of the file."""
        skipped = offset - self._buffer_begin
        if skipped < 0 or skipped + length > len(self._buffer):
            data = self._pread(offset, max(length, READ_BYTES))
            self._buffer_begin, self._buffer, skipped = offset, memoryview(data), 0
        return self._buffer[skipped:]

    def _pread(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self.descriptor, length, offset)
        except OSError as error:
            raise SegmentCorrupt(self.path, offset, f"cannot be read: {error.strerror}") from error

    def _read_again(self, offset: int) -> Frame:
        """Like `_frame`, without the buffer."""
        self._buffer = memoryview(b"")
        return self._frame(offset)

    def _goes_on(self, problem: str) -> bool:
        """Return whether the frame at `end` has become valid meanwhile, so that reading continues.

        If not, the tail is torn, and `torn_bytes` is set. Raises SegmentCorrupt if bytes after `end` rule
        out a torn tail.
        """
        written = 0
        for offset, marks, last in self._words(self.end):
            written = last or written
            if not self.last:
                raise SegmentCorrupt(self.path, self.end, problem)
            for mark in marks:
                try:
                    frame = self._read_again(offset + mark * ALIGNMENT)
                except ValueError:
                    continue
                if frame.durable <= self.end:
                    continue
                try:
                    self._read_again(self.end)
                except ValueError:
                    raise SegmentCorrupt(self.path, self.end, problem) from None
                return True
        self.torn_bytes = max(0, written - self.end)
        return False

    def _words(self, begin: int) -> Iterator[tuple[int, list[int], int]]:
        """Scan from `begin` for chunks that are not zero. Yields the chunk's offset, the indices of its
        words that hold a mark, and the end of its last non-zero byte."""
        while chunk := self._pread(begin, SCAN_BYTES):
            content = chunk.rstrip(b"\0")
            if content:
                padded = content + bytes(-len(content) % ALIGNMENT)
                words = np.frombuffer(padded, "<u8") & 0xFFFF_FFFF
                marks = np.flatnonzero((words == MARK) | (words == CLOSING_MARK))
                yield begin, marks.tolist(), begin + len(content)
            begin += len(chunk)


def check_order(before: SegmentReader | None, reader: SegmentReader) -> None:
    """Check that a file follows `before`, which was read to its end; None for the first file.

    Raises FileMissing, and SegmentCorrupt if the end of `before` itself is missing.
    """
    reader.begin()
    if reader.snapshot:
        return  # A snapshot replaces everything before it.
    if reader.before is None:
        # Only the number is known. One may be skipped, that of an unfinished snapshot.
        last = 0 if before is None else before.number
        most = 1 if before is None or before.snapshot else 2
        if reader.number > last + most:
            raise FileMissing(reader.path, 0, "the file before it is missing")
        return
    expected = NOWHERE if before is None else Place(before.number, before.end)
    if before is not None and before.snapshot and before.before is not None:
        # The snapshot and this segment both began at the end of the same file.
        expected = before.before
    elif before is not None and reader.before.number == before.number:
        if reader.before.end != before.end:
            problem = f"it ended at {reader.before.end} when {reader.path.name} was begun"
            raise SegmentCorrupt(before.path, before.end, problem)
        return
    if reader.before != expected:
        raise FileMissing(reader.path, 0, "the file before it is missing")


def check_last(last: SegmentReader | None) -> None:
    """Check that a snapshot is followed by a segment, which always exists. Raises FileMissing."""
    if last is not None and last.snapshot and last.before is not None:
        raise FileMissing(last.path, last.end, "the file after it is missing")
