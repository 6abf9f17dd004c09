"""Frames: checked bytes in a file, one after the other. The server writes them; a trainer may read one.

A frame is a multiple of 8 bytes: its mark, the length of its payload, a number that its writer has a use
for (how much of the file was durable), XXH3-64 of those two and the payload, the payload, zeros.
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
    """Bytes that a payload takes in a file."""
    return -(-(FRAME.size + payload_length) // ALIGNMENT) * ALIGNMENT


def digest(length: int, durable: int, payload: Sequence[bytes | bytearray | memoryview]) -> int:
    """The checksum of a frame with this payload, in pieces that follow each other."""
    found = xxhash.xxh3_64(struct.pack("<IQ", length, durable))
    for part in payload:
        found.update(part)
    return found.intdigest()


def read_head(data: bytes | memoryview, available: int) -> tuple[int, int, int, int]:
    """Mark, length of the payload, number and checksum of the frame that begins `data`, of which
    `available` bytes are there. Raises ValueError."""
    if len(data) < FRAME.size:
        raise ValueError("no room for a frame")
    mark, length, durable, checksum = FRAME.unpack_from(data)
    if mark not in (MARK, CLOSING_MARK):
        raise ValueError("no frame begins here")
    if length > MAX_PAYLOAD or FRAME.size + length > available:
        raise ValueError(f"a frame of {length} bytes does not fit")
    return mark, length, durable, checksum


def read_payload_at(descriptor: int, offset: int, length: int) -> bytes:
    """The payload of the frame of `length` bytes that lies at `offset` of a file, copied once. Raises
    ValueError where it is not what was written, and OSError."""
    head = os.pread(descriptor, FRAME.size, offset)
    _, size, durable, checksum = read_head(head, length)
    payload = os.pread(descriptor, size, offset + FRAME.size)
    if len(payload) != size or digest(size, durable, (payload,)) != checksum:
        raise ValueError("its checksum does not match")
    return payload
