"""Files of the journal: frames of checked bytes, one after the other.

A segment is a file of a fixed size, allocated whole before anything is written to it: a full disk shows
itself there and then, and not in the middle of a record. It holds

    magic, number, place, XXH3-64 of the three  40 bytes
    frame, frame, ...                           each a multiple of 8 bytes
    zeros

and a frame: its mark, the length of its payload, how much of this segment was durable when it was written,
XXH3-64 of those two and the payload, the payload, and zeros up to a multiple of 8.

The place is where the file before it ended, so that a file that is lost, or its last records, are missed.
A file that nothing is added to any more has a closing frame at its end, which says how many records there
are: a snapshot, and the last segment of a server that was stopped. Files of earlier versions hold only
magic and number before their frames, and no closing frame.

The end of what was written is where no frame begins. Where it is a frame that cannot be right, the tail is
torn: it was being written when the machine stopped, and nobody was told that it was there. That cannot
be so where a later frame says that this place was durable already, or another segment follows: then bytes
were lost that somebody relies on, and the segment is corrupt. `journal_segment_reader` judges it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.common.folders import sync_folder
from penstock.server.journal.records import JournalRecord
from penstock.wire.frames import (
    ALIGNMENT,
    CLOSING_MARK,
    FRAME,
    MARK,
    digest,
    frame_length,
    read_head,
    read_payload_at,
)
from penstock.wire.referred import put_together

MAGIC = b"PENSTOK2"
HEADER = struct.Struct("<8sQQQQ")
FIRST_MAGIC = b"PENSTOCK"
FIRST_HEADER = struct.Struct("<8sQ")
COUNT = struct.Struct("<Q")
CLOSING_BYTES = FRAME.size + COUNT.size
# A piece of this size is written as it lies; smaller ones are copied together first.
LARGE_PIECE = 64 << 10

Payload = tuple[bytes | bytearray, ...]
"""In pieces that follow each other."""


class SegmentCorrupt(Exception):
    """Bytes that were durable are not what was written."""

    def __init__(self, path: Path, offset: int, problem: str) -> None:
        super().__init__(f"{path.name} at {offset}: {problem}")
        self.path = path
        self.offset = offset
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file ends."""

    number: int
    """Of the file; zero where there is none."""
    end: int


NOWHERE = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Header:
    """How a file begins."""

    size: int
    number: int
    before: Place | None
    """Where the file before it ended, or all that a snapshot says anew; None of an earlier version."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a payload lies, and what it is."""

    offset: int
    length: int
    """Bytes of the whole frame."""
    durable: int
    """Bytes of its file that were durable when it was written."""
    payload: memoryview
    closing: bool = False
    """Whether it ends the file: its payload is how many records there are."""


def header_of(number: int, before: Place) -> bytes:
    """How a file begins that follows another."""
    fields = HEADER.pack(MAGIC, number, before.number, before.end, 0)[:-8]
    return fields + xxhash.xxh3_64(fields).intdigest().to_bytes(8, "little")


def read_header(data: bytes) -> Header:
    """How a file begins whose first bytes these are. Raises ValueError."""
    magic = data[: len(MAGIC)]
    if magic == FIRST_MAGIC and len(data) >= FIRST_HEADER.size:
        _, number = FIRST_HEADER.unpack_from(data)
        return Header(FIRST_HEADER.size, number, None)
    if magic != MAGIC or len(data) < HEADER.size:
        raise ValueError("is no segment of a journal")
    _, number, before, end, checksum = HEADER.unpack_from(data)
    if xxhash.xxh3_64(data[: HEADER.size - 8]).intdigest() != checksum:
        raise ValueError("the checksum of its beginning does not match")
    return Header(HEADER.size, number, Place(before, end))


def payload_length(payload: Payload) -> int:
    """Bytes of its pieces."""
    return sum(map(len, payload))


def frame_of(payload: Payload, durable: int, mark: int = MARK) -> Payload:
    """The pieces of a frame, in a segment of which `durable` bytes were durable."""
    length = payload_length(payload)
    head = FRAME.pack(mark, length, durable, digest(length, durable, payload))
    return (head, *payload, bytes(-(FRAME.size + length) % ALIGNMENT))


def read_frame(data: memoryview, place: int) -> Frame:
    """The frame that begins `data`, which lies at `place` of its file. Raises ValueError."""
    mark, length, durable, checksum = read_head(data, len(data))
    payload = data[FRAME.size : FRAME.size + length]
    closing = mark == CLOSING_MARK
    if digest(length, durable, (payload,)) != checksum or (closing and length != COUNT.size):
        raise ValueError("its checksum does not match")
    return Frame(place, frame_length(length), durable, payload, closing)


class SegmentWriter:
    """Appends to a segment; made and used in one thread."""

    def __init__(self, path: Path, size: int) -> None:
        """A file of `size` bytes, not yet a segment. Raises OSError, and leaves nothing, where they are
        not there."""
        self.path = path
        self.number = 0
        self._size = size
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError:
            os.close(self._descriptor)
            path.unlink()
            raise
        self.end = HEADER.size
        self._count = 0
        self._durable = 0

    def begin(self, path: Path, number: int, before: Place) -> None:
        """Becomes a segment, with all that was written to it so far. Raises OSError."""
        self._write_at(0, header_of(number, before))
        os.fdatasync(self._descriptor)
        self.path.rename(path)
        sync_folder(path.parent)
        self.path, self.number = path, number

    @property
    def room(self) -> int:
        """Bytes that still fit, beside the closing frame."""
        return self._size - self.end - CLOSING_BYTES

    def write(self, payloads: Sequence[Payload]) -> list[tuple[int, int]]:
        """Appends payloads, which fit; returns the offset and length of each frame. Raises OSError."""
        places: list[tuple[int, int]] = []
        small: list[bytes | bytearray] = []
        begin = end = self.end
        for payload in payloads:
            places.append((end, frame_length(payload_length(payload))))
            for part in frame_of(payload, self._durable):
                if len(part) >= LARGE_PIECE:
                    self._write_at(begin, b"".join(small))
                    self._write_at(end, part)
                    small, begin = [], end + len(part)
                else:
                    small.append(part)
                end += len(part)
        self._write_at(begin, b"".join(small))
        self.end = end
        self._count += len(payloads)
        return places

    def write_closing(self) -> None:
        """Ends the file: nothing is appended any more. Raises OSError."""
        frame = frame_of((COUNT.pack(self._count),), self._durable, CLOSING_MARK)
        self._write_at(self.end, b"".join(frame))
        self.end += CLOSING_BYTES

    def trim(self) -> None:
        """Gives back what was allocated and is not used. Raises OSError."""
        os.ftruncate(self._descriptor, self.end)

    def _write_at(self, offset: int, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def sync(self) -> None:
        """Makes durable what was written. Raises OSError, after which nothing can be said of it."""
        os.fdatasync(self._descriptor)
        self.rely()

    def rely(self) -> None:
        """What was written so far is relied on: frames after it say so."""
        self._durable = self.end

    def close(self) -> None:
        """Without making anything durable."""
        os.close(self._descriptor)


def read_payload(path: Path, offset: int, length: int) -> bytes:
    """The payload of one frame. Raises OSError and SegmentCorrupt."""
    with path.open("rb") as file:
        try:
            return read_payload_at(file.fileno(), offset, length)
        except ValueError as error:
            raise SegmentCorrupt(path, offset, str(error)) from error


def whole_record(payload: bytes, turns: Iterable[bytes]) -> bytes:
    """Expands a record that may be short. `turns` has the records it refers to, in order.

    Raises ValueError if they are not the right records, and DecodeError.
    """
    record = JournalRecord.FromString(payload)
    if not record.HasField("group_referred"):
        return payload
    found = (JournalRecord.FromString(turn).turn_changed for turn in turns)
    finished = put_together(record.group_referred, found)
    return JournalRecord(group_finished=finished).SerializeToString()
