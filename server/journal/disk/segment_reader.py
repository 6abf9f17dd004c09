"""Reads files of the journal, for a server that starts and for whoever only looks.

A file is read with `pread`, in pieces, and never mapped: a sector that cannot be read is then an error with
a place, and a file that a server cuts off meanwhile ends. The end of what was written is judged as
`journal_segment` says. Where somebody else writes, a frame that is not right may be one that is being
written: a later frame that says it was durable then was written after it, so it is looked at once more, and
is corrupt only if it still is not right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from penstock.server.journal.records import JournalRecord, Record
from penstock.wire.frames import ALIGNMENT, CLOSING_MARK, FRAME, MARK, MAX_PAYLOAD

READ_BYTES = 64 << 10
SCAN_BYTES = 1 << 20


class FileMissing(SegmentCorrupt):
    """A file is not there that another one refers to."""


class SegmentReader:
    """One open file of a journal."""

    def __init__(self, number: int, path: Path, descriptor: int, *, last: bool) -> None:
        """`last` is whether its tail may be torn: no other segment follows it."""
        self.number = number
        self.path = path
        self.last = last
        self.before: Place | None = None
        """Where the file before it ended; None of an earlier version, and until it is begun."""
        self.end = 0
        """Where what was written ends; as of the last frame read."""
        self.torn_bytes = 0
        """Bytes after it that are being written, or were when the machine stopped."""
        self._descriptor = descriptor
        self._count = 0
        self._closed = False
        self._buffer = memoryview(b"")
        self._buffer_begin = 0

    @property
    def snapshot(self) -> bool:
        """Whether it is the one file that says what came of all before it."""
        return self.path.suffix == ".snapshot"

    @property
    def byte_count(self) -> int:
        """Size of the file."""
        return os.fstat(self._descriptor).st_size

    def begin(self) -> None:
        """Reads how the file begins; once is enough. Raises SegmentCorrupt."""
        if self.end:
            return
        try:
            header = read_header(self._pread(0, HEADER.size))
        except ValueError as error:
            raise SegmentCorrupt(self.path, 0, str(error)) from error
        if header.number != self.number:
            raise SegmentCorrupt(self.path, 0, f"was written as number {header.number}")
        self.before, self.end = header.before, header.size

    def frames(self) -> Iterator[Frame]:
        """The frame of every record, in order. Raises SegmentCorrupt."""
        self.begin()
        while True:
            try:
                frame = self._frame(self.end)
            except ValueError as error:
                if not self._goes_on(str(error)):
                    break
                continue
            if frame.closing:
                self._check_count(*COUNT.unpack(frame.payload))
            self._closed = frame.closing
            self._count += not frame.closing
            self.end += frame.length
            if not frame.closing:
                yield frame
        if self.snapshot and self.before is not None and not self._closed:
            raise SegmentCorrupt(self.path, self.end, "the snapshot went on here")

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
            return self.record(self._frame(offset))
        except ValueError as error:
            raise SegmentCorrupt(self.path, offset, str(error)) from error

    def _check_count(self, count: int) -> None:
        if count != self._count:
            problem = f"{self._count} records come before its end, and {count} were written"
            raise SegmentCorrupt(self.path, self.end, problem)

    def _frame(self, offset: int) -> Frame:
        """The frame at a place. Raises ValueError and SegmentCorrupt."""
        data = self._bytes(offset, FRAME.size)
        if len(data) >= FRAME.size:
            mark, length, _, _ = FRAME.unpack_from(data)
            size = FRAME.size + length
            # Of a frame that does not fit, and of what is none, the head alone says what is wrong.
            if size > len(data) and mark in (MARK, CLOSING_MARK) and self._fits(length):
                data = self._bytes(offset, size)
        return read_frame(data, offset)

    def _fits(self, length: int) -> bool:
        return length <= READ_BYTES or length <= min(MAX_PAYLOAD, self.byte_count)

    def _bytes(self, offset: int, length: int) -> memoryview:
        """At least so many bytes of the file, or what there is."""
        skipped = offset - self._buffer_begin
        if skipped < 0 or skipped + length > len(self._buffer):
            data = self._pread(offset, max(length, READ_BYTES))
            self._buffer_begin, self._buffer, skipped = offset, memoryview(data), 0
        return self._buffer[skipped:]

    def _pread(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise SegmentCorrupt(self.path, offset, f"cannot be read: {error.strerror}") from error

    def _read_again(self, offset: int) -> Frame:
        """The frame at a place as it is by now. Raises ValueError and SegmentCorrupt."""
        self._buffer = memoryview(b"")
        return self._frame(offset)

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
        """What is not zero from `begin` on: offset, words in which a frame may begin, and the end of the
        last byte that is not zero."""
        while chunk := self._pread(begin, SCAN_BYTES):
            content = chunk.rstrip(b"\0")
            if content:
                padded = content + bytes(-len(content) % ALIGNMENT)
                words = np.frombuffer(padded, "<u8") & 0xFFFF_FFFF
                marks = np.flatnonzero((words == MARK) | (words == CLOSING_MARK))
                yield begin, [int(place) for place in marks], begin + len(content)
            begin += len(chunk)


def check_order(before: SegmentReader | None, reader: SegmentReader) -> None:
    """That a file is the one that follows `before`, which was read to its end; None for the first.

    Raises FileMissing, and SegmentCorrupt where it is the end of `before` that is not there.
    """
    reader.begin()
    if reader.snapshot:
        return  # It says anew what was before it.
    if reader.before is None:
        # By its number only. One may be skipped: that of a snapshot that was never finished.
        last = 0 if before is None else before.number
        most = 1 if before is None or before.snapshot else 2
        if reader.number > last + most:
            raise FileMissing(reader.path, 0, "what came before it is missing")
        return
    expected = NOWHERE if before is None else Place(before.number, before.end)
    if before is not None and before.snapshot and before.before is not None:
        # Begun together with it, where the same file ended.
        expected = before.before
    elif before is not None and reader.before.number == before.number:
        if reader.before.end != before.end:
            problem = f"it went on to {reader.before.end}, where {reader.path.name} goes on"
            raise SegmentCorrupt(before.path, before.end, problem)
        return
    if reader.before != expected:
        raise FileMissing(reader.path, 0, "what came before it is missing")


def check_last(last: SegmentReader | None) -> None:
    """That what was appended after a snapshot is not missing altogether. Raises FileMissing."""
    if last is not None and last.snapshot and last.before is not None:
        raise FileMissing(last.path, last.end, "what came after it is missing")
