"""Frames: checksummed pieces of a file, one after the other. The server writes them; a trainer may read
them.

A frame's length is a multiple of 8 bytes. It consists of a mark, the payload's length, a number chosen by
the writer, a checksum, the payload, and zeros. The writer uses the number for how much of the file was
durable. The checksum is XXH3-64 over the length, the number and the payload.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import xxhash

FRAME = struct.Struct("<IIQQ")
MARK = 0x4C4E524A
CLOSING_MARK = 0x444E454A
ALIGNMENT = 8
MAX_PAYLOAD = 1 << 30


def frame_length(payload_length: int) -> int:
    """Length in the file of a frame with such a payload."""
    return -(-(FRAME.size + payload_length) // ALIGNMENT) * ALIGNMENT


def digest(length: int, durable: int, payload: Sequence[bytes | bytearray | memoryview]) -> int:
    """The checksum of a frame; `payload` is in consecutive pieces."""
    found = xxhash.xxh3_64(struct.pack("<IQ", length, durable))
    for part in payload:
        found.update(part)
    return found.intdigest()


def read_head(data: bytes | memoryview, available: int) -> tuple[int, int, int, int]:
    """Mark, payload length, number and checksum of the frame at the start of `data`.

    `available` is the number of bytes up to the end of the file or block. Raises ValueError.
    """
    if len(data) < FRAME.size:
        raise ValueError("no room for a frame")
    mark, length, durable, checksum = FRAME.unpack_from(data)
    if mark not in (MARK, CLOSING_MARK):
        raise ValueError("no frame begins here")
    if length > MAX_PAYLOAD or FRAME.size + length > available:
        raise ValueError(f"a frame of {length} bytes does not fit")
    return mark, length, durable, checksum


def read_payload_at(descriptor: int, offset: int, length: int) -> bytes:
    """The payload of the frame of `length` bytes at `offset` in a file, copied once.

    Raises ValueError if the bytes differ from what was written, and OSError.
    """
    head = os.pread(descriptor, FRAME.size, offset)
    _, size, durable, checksum = read_head(head, length)
    payload = os.pread(descriptor, size, offset + FRAME.size)
    if len(payload) != size or digest(size, durable, (payload,)) != checksum:
        raise ValueError("its checksum does not match")
    return payload
