"""Parses what `UpdateWeights` receives, with as few copies as possible.

    read_upload_message(data) -> Header | Chunk | UpdateWeightsRequest (commit, join, round, or nothing)

Almost all messages of an upload are chunks, which protobuf would copy twice. So a chunk is parsed by hand
if its bytes are plain: each field at most once, no unknown field, every length exact. Protobuf parses
everything else, including malformed bytes, and decides what it means. A header keeps the checksum of its
bytes as received, because another language may legally encode it in another order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from penstock.v1 import weights_pb2
from penstock.wire import codec

RAW_PACKAGE = "penstock.v1raw"

# Tags of the fields that are parsed here: field number and wire type.
_CHUNK, _OFFSET, _DATA, _XXH3 = 0x12, 0x08, 0x12, 0x19
_XXH3_BYTES = 8
# Offsets and lengths have at most 63 bits, which fit into nine bytes.
_LONGEST_VARINT = 9


@dataclass(frozen=True, slots=True)
class Header:
    message: weights_pb2.WeightHeader
    """A twin message."""
    sha256: bytes
    """Hash of the header's bytes as they were sent."""


@dataclass(frozen=True, slots=True)
class Chunk:
    offset_bytes: int
    data: memoryview
    """A view of the received message."""
    xxh3: int


UploadMessage = Header | Chunk | weights_pb2.UpdateWeightsRequest


def read_upload_message(data: bytes) -> UploadMessage:
    """Parses a serialized UpdateWeightsRequest. Raises MalformedMessage."""
    if (chunk := _plain_chunk(data)) is not None:
        return chunk
    request = codec.decode(weights_pb2.UpdateWeightsRequest, data)
    kind = request.WhichOneof("message")
    if kind == "chunk":
        chunk = request.chunk
        return Chunk(chunk.offset_bytes, memoryview(chunk.data), chunk.xxh3)
    if kind == "header":
        # A header split into several fields is legal; protobuf merges them in order.
        pieces = _Raw.FromString(data).header
        return Header(request.header, hashlib.sha256(b"".join(pieces)).digest())
    return request


def _raw_class() -> type[Message]:
    """An UpdateWeightsRequest that exposes only its header: a repeated field of bytes."""
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock/v1raw/weights.proto", package=RAW_PACKAGE, syntax="proto3"
    )
    header = weights_pb2.UpdateWeightsRequest.DESCRIPTOR.fields_by_name["header"]
    file.message_type.add(name="UpdateWeightsRequest").field.add(
        name=header.name,
        number=header.number,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
    )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindMessageTypeByName(f"{RAW_PACKAGE}.UpdateWeightsRequest")
    return message_factory.GetMessageClass(found)


_Raw: Any = _raw_class()


def _plain_chunk(data: bytes) -> Chunk | None:
    """The chunk, if its bytes are plain; None leaves the message to protobuf."""
    try:
        if data[0] != _CHUNK:
            return None
        length, at = _varint(data, 1)
        if at + length != len(data):
            return None
        return _fields(data, at)
    except (IndexError, ValueError):
        return None


def _fields(data: bytes, at: int) -> Chunk | None:
    end = len(data)
    found: dict[int, tuple[int, int]] = {}
    offset = xxh3 = 0
    while at < end:
        tag = data[at]
        if tag in found:
            return None
        if tag == _OFFSET:
            offset, after = _varint(data, at + 1)
            found[tag] = at, after
        elif tag == _XXH3:
            after = at + 1 + _XXH3_BYTES
            xxh3 = int.from_bytes(data[at + 1 : after], "little")
            found[tag] = at, after
        elif tag == _DATA:
            length, begin = _varint(data, at + 1)
            after = begin + length
            found[tag] = begin, after
        else:
            return None
        at = after
    if at != end:
        return None
    begin, after = found.get(_DATA, (end, end))
    return Chunk(offset, memoryview(data)[begin:after], xxh3)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("not a plain non-negative number")
