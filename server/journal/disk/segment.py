"""The file format of the journal: a header, frames with checksums (`wire.frames`), then zeros.

A segment is allocated whole before anything is written to it, so that a full disk is noticed then and not
in the middle of a record. The header has the place where the previous file ended, which reveals the loss
of a file or of its last records. A finished file, such as a snapshot, ends in a closing frame. Files of
earlier versions have only magic and number before their frames, and no closing frame.

The written part ends where no frame begins. If it ends in an invalid frame, the tail is torn: the frame
was being written when the machine stopped, and its records were never acknowledged. That explanation is
ruled out if a later frame states that this place was durable, or if another segment follows. Then
acknowledged bytes were lost, and the segment is corrupt. `segment_reader` tells the two cases apart.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.common.folders import sync_folder
from penstock.server.journal.protocol import Part, Payload
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
from penstock.wire.messages import JournalRecord
from penstock.wire.referred import put_together

MAGIC = b"PENSTOK2"
HEADER = struct.Struct("<8sQQQQ")
FIRST_MAGIC = b"PENSTOCK"
FIRST_HEADER = struct.Struct("<8sQ")
COUNT = struct.Struct("<Q")
CLOSING_BYTES = FRAME.size + COUNT.size
LARGE_PIECE = 64 << 10
"""A part of this size is written directly; smaller ones are joined first."""


class SegmentCorrupt(Exception):
    """Durable bytes differ from what was written."""

    def __init__(self, path: Path, offset: int, problem: str) -> None:
        super().__init__(f"{path.name} at {offset}: {problem}")
        self.path = path
        self.offset = offset
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file ends."""

    number: int
    """Of the file; zero for `NOWHERE`."""
    end: int


NOWHERE = Place(0, 0)


@dataclass(frozen=True, slots=True)
class Frame:
    offset: int
    length: int
    """Bytes of the whole frame."""
    durable: int
    """Bytes of the file that were durable when the frame was written."""
    payload: memoryview
    closing: bool = False
    """Whether it ends the file; its payload is then the number of records."""


def header_of(number: int, before: Place) -> bytes:
    fields = HEADER.pack(MAGIC, number, before.number, before.end, 0)[:-8]
    return fields + xxhash.xxh3_64(fields).intdigest().to_bytes(8, "little")


def read_header(data: bytes) -> tuple[int, int, Place | None]:
    """Decode the header's size, the file's number and the place from the first bytes of a file.

    The place is None in files of earlier versions. Raises ValueError.
    """
    magic = data[: len(MAGIC)]
    if magic == FIRST_MAGIC and len(data) >= FIRST_HEADER.size:
        _, number = FIRST_HEADER.unpack_from(data)
        return FIRST_HEADER.size, number, None
    if magic != MAGIC or len(data) < HEADER.size:
        raise ValueError("is not a journal segment")
    _, number, before, end, checksum = HEADER.unpack_from(data)
    if xxhash.xxh3_64(data[: HEADER.size - 8]).intdigest() != checksum:
        raise ValueError("the checksum of its header does not match")
    return HEADER.size, number, Place(before, end)


def payload_length(payload: Payload) -> int:
    return sum(map(len, payload))


def frame_of(payload: Payload, durable: int, mark: int = MARK) -> Payload:
    """Encode a frame; `durable` bytes of its segment are durable so far."""
    length = payload_length(payload)
    head = FRAME.pack(mark, length, durable, digest(length, durable, payload))
    return (head, *payload, bytes(-(FRAME.size + length) % ALIGNMENT))


def read_frame(data: memoryview, place: int) -> Frame:
    """Decode the frame at the start of `data`; `place` is its offset in the file. Raises ValueError."""
    mark, length, durable, checksum = read_head(data, len(data))
    payload = data[FRAME.size : FRAME.size + length]
    closing = mark == CLOSING_MARK
    if digest(length, durable, (payload,)) != checksum or (closing and length != COUNT.size):
        raise ValueError("its checksum does not match")
    return Frame(place, frame_length(length), durable, payload, closing)


class SegmentWriter:
    """Appends to a segment. Created and used in a single thread."""

    def __init__(self, path: Path, size: int) -> None:
        """Allocate a file of `size` bytes, which is not a segment yet.

        If the disk lacks the room, raises OSError and leaves no file.
        """
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
        """Turn the file, with everything written so far, into a segment of this name. Raises OSError."""
        self._write_at(0, header_of(number, before))
        os.fdatasync(self._descriptor)
        self.path.rename(path)
        sync_folder(path.parent)
        self.path, self.number = path, number

    @property
    def room(self) -> int:
        """Bytes that still fit, not counting the closing frame."""
        return self._size - self.end - CLOSING_BYTES

    def write(self, payloads: Sequence[Payload]) -> list[tuple[int, int]]:
        """Append payloads that fit; returns the offset and length of each frame. Raises OSError."""
        places: list[tuple[int, int]] = []
        small: list[Part] = []
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
        """Write the closing frame, after which nothing is appended. Raises OSError."""
        frame = frame_of((COUNT.pack(self._count),), self._durable, CLOSING_MARK)
        self._write_at(self.end, b"".join(frame))
        self.end += CLOSING_BYTES

    def trim(self) -> None:
        """Free the unused end of the file. Raises OSError."""
        os.ftruncate(self._descriptor, self.end)

    def _write_at(self, offset: int, data: Part) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def sync(self) -> None:
        """Make everything written durable. After an OSError the state of the file is unknown."""
        os.fdatasync(self._descriptor)
        self.rely()

    def rely(self) -> None:
        """Have later frames state that everything written so far is durable."""
        self._durable = self.end

    def close(self) -> None:
        os.close(self._descriptor)


def read_payload(path: Path, offset: int, length: int) -> bytes:
    """Read and check the payload of one frame. Raises OSError and SegmentCorrupt."""
    with path.open("rb") as file:
        try:
            return read_payload_at(file.fileno(), offset, length)
        except ValueError as error:
            raise SegmentCorrupt(path, offset, str(error)) from error


def whole_record(payload: bytes, turns: Iterable[bytes]) -> bytes:
    """Expand a record that may be short. `turns` has the records it refers to, in order.

    Raises ValueError if they are not the right records, and DecodeError.
    """
    record = JournalRecord.FromString(payload)
    if not record.HasField("group_referred"):
        return payload
    found = (JournalRecord.FromString(turn).turn_changed for turn in turns)
    finished = put_together(record.group_referred, found)
    return JournalRecord(group_finished=finished).SerializeToString()
