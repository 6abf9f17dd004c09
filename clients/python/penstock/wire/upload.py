"""One `UpdateWeights` call, from the side that has the weights.

    header -> READY -> chunks, where the source is inline -> commit -> STAGED, and ACTIVE if immediate

Requests are written as bytes here. A chunk then costs one copy of its data instead of four, and
the header's checksum is that of the very bytes that are sent. Needs xxhash, which the client does not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import grpc
import xxhash

from penstock.v1 import weights_pb2
from penstock.wire import codec

CHUNK_BYTES = 1024 * 1024
UPDATE_WEIGHTS = "/penstock.v1.RolloutService/UpdateWeights"

Piece = bytes | memoryview

# Tags of the fields that are written here: field number and wire type.
_HEADER, _CHUNK = b"\x0a", b"\x12"
_OFFSET, _DATA, _XXH3 = b"\x08", b"\x12", b"\x19"


class NotStaged(Exception):
    """The server ended the upload without an error and without staging the version."""


async def upload(
    channel: grpc.aio.Channel,
    header: weights_pb2.WeightHeader,
    payload: Iterable[Piece] = (),
    *,
    on_sent: Callable[[int], None] | None = None,
) -> weights_pb2.UpdateWeightsResponse:
    """Uploads one version; returns the server's last answer, STAGED or ACTIVE.

    `payload` is what goes into chunks, in order; it is read once the server is ready, and
    `on_sent` is told the length of each chunk. Raises AioRpcError and NotStaged.
    """
    ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    method: grpc.aio.StreamStreamMultiCallable[bytes, weights_pb2.UpdateWeightsResponse] = (
        channel.stream_stream(
            UPDATE_WEIGHTS,
            request_serializer=_as_it_is,
            response_deserializer=codec.decoder(weights_pb2.UpdateWeightsResponse),
        )
    )
    last: weights_pb2.UpdateWeightsResponse | None = None
    try:
        async for response in method(_requests(header, payload, ready, on_sent)):
            if response.state != weights_pb2.WEIGHT_STATE_READY:
                last = response
            elif not ready.done():
                ready.set_result(True)
    finally:
        # grpc's own task waits for the requests to end, also of a call that is over.
        if not ready.done():
            ready.set_result(False)
    if last is None:
        raise NotStaged(
            f"version {header.weight_version}: the server ended the upload without staging it"
        )
    return last


async def _requests(
    header: weights_pb2.WeightHeader,
    payload: Iterable[Piece],
    ready: asyncio.Future[bool],
    on_sent: Callable[[int], None] | None,
) -> AsyncIterator[bytes]:
    data = header.SerializeToString(deterministic=True)
    yield b"".join((_HEADER, _varint(len(data)), data))
    if not await ready:
        return
    offset = 0
    for pieces in _chunks(payload):
        length = sum(map(len, pieces))
        yield _chunk(offset, length, pieces)
        offset += length
        if on_sent is not None:
            on_sent(length)
    commit = weights_pb2.WeightCommit(header_sha256=hashlib.sha256(data).digest())
    yield weights_pb2.UpdateWeightsRequest(commit=commit).SerializeToString()


def _chunks(payload: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The payload in chunks of CHUNK_BYTES, each as the pieces it is made of."""
    pieces: list[Piece] = []
    room = CHUNK_BYTES
    for whole in payload:
        rest = memoryview(whole)
        while rest:
            pieces.append(rest[:room])
            rest = rest[room:]
            room -= len(pieces[-1])
            if not room:
                yield pieces
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield pieces


def _chunk(offset: int, length: int, pieces: Iterable[Piece]) -> bytes:
    """A serialized UpdateWeightsRequest with one chunk."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    # A field of value zero is left out, as every writer of proto3 does.
    start = _OFFSET + _varint(offset) if offset else b""
    before = start + _DATA + _varint(length)
    after = _XXH3 + digest.intdigest().to_bytes(8, "little")
    size = len(before) + length + len(after)
    return b"".join((_CHUNK, _varint(size), before, *pieces, after))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _as_it_is(request: bytes) -> bytes:
    return request
