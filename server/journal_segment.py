"""Files of the journal: frames of checked bytes, one after the other.

A segment is a file of a fixed size, allocated whole before anything is written to it: a full disk shows
itself there and then, and not in the middle of a record. It holds

    magic, number                               16 bytes
    frame, frame, ...                           each a multiple of 8 bytes
    zeros

and a frame: its mark, the length of its payload, how much of this segment was durable when it was written,
XXH3-64 of those two and the payload, the payload, and zeros up to a multiple of 8.

The end of what was written is where no frame begins. Where it is a frame that cannot be right, the tail is
torn: it was being written when the machine stopped, and nobody was told that it was there. That cannot
be so where a later frame says that this place was durable already, or another segment follows: then bytes
were lost that somebody relies on, and the segment is corrupt.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

MAGIC = b"PENSTOCK"
HEADER = struct.Struct("<8sQ")
FRAME = struct.Struct("<IIQQ")
MARK = 0x4C4E524A
ALIGNMENT = 8
MAX_PAYLOAD = 1 << 30
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
class Frame:
    """Where a payload lies, and what it is."""

    offset: int
    length: int
    """Bytes of the whole frame."""
    payload: memoryview


def frame_length(payload_length: int) -> int:
    """Bytes that a payload takes in a segment."""
    return -(-(FRAME.size + payload_length) // ALIGNMENT) * ALIGNMENT


def payload_length(payload: Payload) -> int:
    """Bytes of its pieces."""
    return sum(len(part) for part in payload)


def frame_of(payload: Payload, durable: int) -> Payload:
    """The pieces of a frame, in a segment of which `durable` bytes were durable."""
    length = payload_length(payload)
    head = FRAME.pack(MARK, length, durable, _digest(length, durable, payload))
    return (head, *payload, bytes(-(FRAME.size + length) % ALIGNMENT))


def read_frame(data: memoryview, offset: int) -> tuple[Frame, int]:
    """The frame at `offset` and how much of the segment was durable then. Raises ValueError."""
    if offset + FRAME.size > len(data):
        raise ValueError("no room for a frame")
    mark, length, durable, digest = FRAME.unpack_from(data, offset)
    if mark != MARK:
        raise ValueError("no frame begins here")
    begin = offset + FRAME.size
    if length > MAX_PAYLOAD or begin + length > len(data):
        raise ValueError(f"a frame of {length} bytes does not fit")
    payload = data[begin : begin + length]
    if _digest(length, durable, (payload,)) != digest:
        raise ValueError("its checksum does not match")
    return Frame(offset, frame_length(length), payload), durable


def _digest(length: int, durable: int, payload: Sequence[bytes | bytearray | memoryview]) -> int:
    digest = xxhash.xxh3_64(struct.pack("<IQ", length, durable))
    for part in payload:
        digest.update(part)
    return digest.intdigest()


class SegmentReader:
    """Reads a segment from its beginning."""

    def __init__(self, path: Path, *, last: bool) -> None:
        """`last` is whether its tail may be torn: no other segment follows it.

        Raises SegmentCorrupt where it is no segment.
        """
        self._path = path
        self._last = last
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER.size or file.read(len(MAGIC)) != MAGIC:
                raise SegmentCorrupt(path, 0, "is no segment of a journal")
            # One that compaction wrote may be larger than memory.
            self._data = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
        self.end = HEADER.size
        """Where what was written ends; as of the last frame read."""
        self.torn_bytes = 0
        """Bytes after it that were being written when the machine stopped."""

    def frames(self) -> Iterator[Frame]:
        """Every frame in order. Raises SegmentCorrupt."""
        while self.end < len(self._data):
            try:
                frame, _ = read_frame(self._data, self.end)
            except ValueError as error:
                self._check_end(str(error))
                return
            self.end += frame.length
            yield frame

    def _check_end(self, problem: str) -> None:
        written = len(bytes(self._data[self.end :]).rstrip(b"\0"))
        if not written:
            return
        if not self._last:
            raise SegmentCorrupt(self._path, self.end, problem)
        for offset in range(self.end, self.end + written, ALIGNMENT):
            if int.from_bytes(self._data[offset : offset + 4], "little") != MARK:
                continue
            try:
                _, durable = read_frame(self._data, offset)
            except ValueError:
                continue
            if durable > self.end:
                raise SegmentCorrupt(self._path, self.end, problem)
        self.torn_bytes = written


class SegmentWriter:
    """Appends to a segment; made and used in the journal's own thread."""

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
        self._durable = 0

    def begin(self, path: Path, number: int) -> None:
        """Becomes a segment. Raises OSError."""
        os.pwrite(self._descriptor, HEADER.pack(MAGIC, number), 0)
        os.fdatasync(self._descriptor)
        self.path.rename(path)
        sync_folder(path.parent)
        self.path, self.number = path, number

    @property
    def room(self) -> int:
        """Bytes that still fit."""
        return self._size - self.end

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
        return places

    def _write_at(self, offset: int, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def sync(self) -> None:
        """Makes durable what was written. Raises OSError, after which nothing can be said of it."""
        os.fdatasync(self._descriptor)
        self._durable = self.end

    def close(self) -> None:
        """Without making anything durable."""
        os.close(self._descriptor)


def read_payload(path: Path, offset: int, length: int) -> bytes:
    """The payload of one frame. Raises OSError and SegmentCorrupt."""
    with path.open("rb") as file:
        data = os.pread(file.fileno(), length, offset)
    try:
        frame, _ = read_frame(memoryview(data), 0)
    except ValueError as error:
        raise SegmentCorrupt(path, offset, str(error)) from error
    return bytes(frame.payload)


def sync_folder(folder: Path) -> None:
    """Makes durable which files a folder holds. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
