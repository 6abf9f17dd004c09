"""Upload messages mean what protobuf says they mean, and a header's checksum covers its bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.v1 import weights_pb2
from penstock.wire import codec
from penstock.wire.codec import MalformedMessage
from penstock.wire.upload_messages import Chunk, Header, read_upload_message

UpdateWeightsRequest = weights_pb2.UpdateWeightsRequest
WeightChunk = weights_pb2.WeightChunk


def varint(value: int, padding: int = 0) -> bytes:
    """A number as a varint, with `padding` more bytes than it needs."""
    out = bytearray()
    while value > 0x7F or padding:
        if value <= 0x7F:
            padding -= 1
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def delimited(tag: int, data: bytes, padding: int = 0) -> bytes:
    return bytes([tag]) + varint(len(data), padding) + data


FIELDS = st.one_of(
    st.builds(
        lambda value, padding: b"\x08" + varint(value, padding),
        st.integers(0, (1 << 64) - 1),
        st.integers(0, 2),
    ),
    st.builds(
        lambda data, padding: delimited(0x12, data, padding),
        st.binary(max_size=40),
        st.integers(0, 2),
    ),
    st.builds(lambda data: b"\x19" + data, st.binary(min_size=8, max_size=8)),
    # Unknown fields of a later contract: a number, eight bytes, text.
    st.builds(lambda value: b"\x20" + varint(value), st.integers(0, 1 << 40)),
    st.builds(lambda data: b"\x2a" + varint(len(data)) + data, st.binary(max_size=8)),
    st.just(b"\xb9\x06" + bytes(8)),
)
CHUNKS = st.lists(FIELDS, max_size=5).map(b"".join)
MESSAGES = st.one_of(
    st.builds(delimited, st.just(0x12), CHUNKS, st.integers(0, 2)),
    st.builds(lambda one, two: delimited(0x12, one) + delimited(0x12, two), CHUNKS, CHUNKS),
    st.builds(lambda one, two: delimited(0x12, one) + two, CHUNKS, FIELDS),
    st.binary(max_size=60),
    st.builds(lambda data: b"\x12" + data, st.binary(max_size=60)),
    # Truncated, or with one byte changed.
    st.builds(lambda chunk, end: delimited(0x12, chunk)[:end], CHUNKS, st.integers(0, 30)),
)


def meaning(request: Any) -> object:
    """The meaning of a request, read as a typed message."""
    kind = request.WhichOneof("message")
    if kind == "chunk":
        chunk = request.chunk
        return chunk.offset_bytes, bytes(chunk.data), chunk.xxh3
    return kind


@given(MESSAGES)
@example(b"")
@example(b"\x12\x00")
@example(b"\x12\x03\x12\x05ab")
@example(delimited(0x12, b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
def test_a_message_means_what_protobuf_says(data: bytes) -> None:
    try:
        expected = UpdateWeightsRequest.FromString(data)
    except DecodeError:
        with pytest.raises(MalformedMessage):
            read_upload_message(data)
        return
    found = read_upload_message(data)
    if isinstance(found, Chunk):
        assert (found.offset_bytes, bytes(found.data), found.xxh3) == meaning(expected)
    elif isinstance(found, Header):
        assert weights_pb2.WeightHeader.FromString(codec.encode(found.message)) == expected.header
    else:
        assert meaning(found) == meaning(expected)


@given(st.integers(0, (1 << 63) - 1), st.binary(max_size=300), st.integers(0, (1 << 64) - 1))
def test_a_chunk_is_a_view_of_its_message(offset: int, payload: bytes, xxh3: int) -> None:
    chunk = WeightChunk(offset_bytes=offset, data=payload, xxh3=xxh3)
    data = UpdateWeightsRequest(chunk=chunk).SerializeToString()
    found = read_upload_message(data)
    assert isinstance(found, Chunk)
    assert (found.offset_bytes, bytes(found.data), found.xxh3) == (offset, payload, xxh3)
    assert found.data.obj is data


HEADER = weights_pb2.WeightHeader(
    weight_version=7,
    tensors=[weights_pb2.TensorSpec(name="w", shape=[2, 3], xxh3=5)],
    inline=weights_pb2.InlineSource(length_bytes=24),
    probe=weights_pb2.WeightProbe(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0], tolerance=0.5),
)


@given(st.randoms(use_true_random=False))
def test_a_header_has_the_checksum_of_its_bytes_in_any_order(order: Any) -> None:
    fields = [
        weights_pb2.WeightHeader(**{field.name: value}).SerializeToString()
        for field, value in HEADER.ListFields()
    ]
    order.shuffle(fields)
    raw = b"".join(fields)
    found = read_upload_message(delimited(0x0A, raw))
    assert isinstance(found, Header)
    assert weights_pb2.WeightHeader.FromString(codec.encode(found.message)) == HEADER
    assert found.sha256 == hashlib.sha256(raw).digest()


def test_a_header_in_pieces_has_the_checksum_of_all() -> None:
    raw = HEADER.SerializeToString()
    cut = len(weights_pb2.WeightHeader(weight_version=7).SerializeToString())
    unknown = delimited(0x7A, b"later")
    found = read_upload_message(
        delimited(0x0A, raw[:cut]) + unknown + delimited(0x0A, raw[cut:], padding=1)
    )
    assert isinstance(found, Header)
    assert weights_pb2.WeightHeader.FromString(codec.encode(found.message)) == HEADER
    assert found.sha256 == hashlib.sha256(raw).digest()
