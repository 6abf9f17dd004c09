"""One `UpdateWeights` call, from the side that has the weights.

    header -> READY -> chunks, where the source is inline -> commit -> STAGED, and ACTIVE if immediate
    header -> READY -> commit, likewise: `Filling`, of shared memory that is filled in between
    ... -> STAGED -> activate -> ACTIVE: `Staging`, of a version that is switched to later

The server says its last answer again every ten seconds. An upload that hears none for SILENT_SECONDS has
gone astray: a bit that flips in the number of its HTTP/2 stream leaves it open for ever, on a connection
whose pings are answered. It ends as one whose server is away does.

Requests are written as bytes here. A chunk then costs one copy of its data instead of four, and
the header's checksum is that of the very bytes that are sent. Needs xxhash, which the client does not.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial

import grpc
import xxhash

from penstock.v1 import weights_pb2
from penstock.wire import codec

CHUNK_BYTES = 2 * 1024 * 1024
SILENT_SECONDS = 60.0
"""Longest time without an answer."""
ROOM_BYTES_PER_SECOND = 1e9
"""By which the first may come later: room for the payload is made before it."""
SILENT_PARTS = 6
UPDATE_WEIGHTS = "/penstock.v1.RolloutService/UpdateWeights"

Piece = bytes | memoryview
Request = bytes | weights_pb2.WeightCommit
"""A serialized UpdateWeightsRequest, or the commit, which lacks the header's checksum yet."""

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
    checksums: Sequence[int] = (),
    silent_seconds: float = SILENT_SECONDS,
) -> weights_pb2.UpdateWeightsResponse:
    """Uploads one version; returns the server's last answer, STAGED or ACTIVE.

    `payload` is what goes into chunks, in order; it is read once the server is ready, and
    `on_sent` is told the length of each chunk. `checksums` has the XXH3-64 of each, where they are known
    already. Raises AioRpcError, which is UNAVAILABLE also after `silent_seconds` without an answer, and
    NotStaged.
    """
    body = partial(_chunk_requests, payload, on_sent, checksums)
    return await _call(channel, header, body, silent_seconds=silent_seconds)


class Filling:
    """An upload whose shared memory is filled while the server verifies it; on the event loop.

    `commit` ends it; without, `cancel` has to. Whatever becomes of the call before the commit is heard
    there.
    """

    def __init__(self, channel: grpc.aio.Channel, header: weights_pb2.WeightHeader) -> None:
        """Sends the header, whose source is shared memory with `filling` set."""
        self._checksums: asyncio.Future[Sequence[int] | None] = (
            asyncio.get_running_loop().create_future()
        )
        self._last = asyncio.ensure_future(_call(channel, header, self._requests))
        self._last.add_done_callback(self._end)

    async def commit(self, tensor_xxh3: Sequence[int]) -> weights_pb2.UpdateWeightsResponse:
        """All is there; returns the server's last answer, STAGED or ACTIVE.

        Raises AioRpcError and NotStaged.
        """
        if not self._checksums.done():
            self._checksums.set_result(tensor_xxh3)
        return await self._last

    def cancel(self) -> None:
        """Ends the call, of which nothing is left at the server; safe to repeat."""
        self._last.cancel()
        if self._last.done() and not self._last.cancelled():
            self._last.exception()  # Nobody waits for it.

    def _end(self, _: object) -> None:
        # grpc's own task waits for the requests to end, also of a call that is over.
        if not self._checksums.done():
            self._checksums.set_result(None)

    async def _requests(self) -> AsyncIterator[Request]:
        checksums = await self._checksums
        if checksums is not None:
            yield weights_pb2.WeightCommit(tensor_xxh3=checksums)


class Staging:
    """An upload that is staged, and switched to when its uploader says so; on the event loop.

    `activate` ends it; without, `cancel` has to.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        header: weights_pb2.WeightHeader,
        payload: Iterable[Piece] = (),
    ) -> None:
        """Sends the header, whose activation is staged, and what `upload` sends."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[bool] = loop.create_future()
        self._staged: asyncio.Future[weights_pb2.UpdateWeightsResponse] = loop.create_future()
        self._activation: asyncio.Future[weights_pb2.WeightActivation | None] = loop.create_future()
        self._payload = payload
        self._last = asyncio.ensure_future(
            _call(channel, header, self._requests, self._hear, self._activation, self._ready)
        )
        self._last.add_done_callback(self._end)

    async def ready(self) -> bool:
        """Whether the server takes it; false where it had it before, or refuses it."""
        await asyncio.wait([self._ready, self._last], return_when=asyncio.FIRST_COMPLETED)
        return self._ready.done() and self._ready.result()

    async def staged(self) -> weights_pb2.UpdateWeightsResponse:
        """The server's answer once the version is verified there. Raises AioRpcError and NotStaged."""
        await asyncio.wait([self._staged, self._last], return_when=asyncio.FIRST_COMPLETED)
        return self._staged.result() if self._staged.done() else await self._last

    async def activate(
        self, in_flight: weights_pb2.InFlightPolicy.ValueType
    ) -> weights_pb2.UpdateWeightsResponse:
        """Has it switched to; returns the server's answer, ACTIVE. Raises AioRpcError and NotStaged."""
        if not self._activation.done():
            self._activation.set_result(weights_pb2.WeightActivation(in_flight=in_flight))
        return await self._last

    def cancel(self) -> None:
        """Ends the call; what was staged by it may stay so. Safe to repeat."""
        self._last.cancel()
        if self._last.done() and not self._last.cancelled():
            self._last.exception()  # Nobody waits for it.

    def _hear(self, answer: weights_pb2.UpdateWeightsResponse) -> None:
        if not self._staged.done():
            self._staged.set_result(answer)

    def _end(self, _: object) -> None:
        # grpc's own task waits for the requests to end, also of a call that is over.
        if not self._activation.done():
            self._activation.set_result(None)

    def _requests(self) -> AsyncIterator[Request]:
        return _chunk_requests(self._payload, None)


async def _call(
    channel: grpc.aio.Channel,
    header: weights_pb2.WeightHeader,
    body: Callable[[], AsyncIterator[Request]],
    on_staged: Callable[[weights_pb2.UpdateWeightsResponse], None] | None = None,
    activation: asyncio.Future[weights_pb2.WeightActivation | None] | None = None,
    ready: asyncio.Future[bool] | None = None,
    silent_seconds: float = SILENT_SECONDS,
) -> weights_pb2.UpdateWeightsResponse:
    """One call; `body` has what comes once the server is ready, at last the commit. `on_staged` is told
    of each answer but READY, `activation` has what to send after it, and `ready` is told what the first
    answer said."""
    ready = ready or asyncio.get_running_loop().create_future()
    method: grpc.aio.StreamStreamMultiCallable[bytes, weights_pb2.UpdateWeightsResponse] = (
        channel.stream_stream(
            UPDATE_WEIGHTS,
            request_serializer=_as_it_is,
            response_deserializer=codec.decoder(weights_pb2.UpdateWeightsResponse),
        )
    )
    last: weights_pb2.UpdateWeightsResponse | None = None
    try:
        call = method(_requests(header, body, ready, activation))
        async for response in _answers(call, header, silent_seconds):
            if response.state != weights_pb2.WEIGHT_STATE_READY:
                last = response
                if on_staged is not None:
                    on_staged(response)
                if not ready.done():
                    # It had the version already.
                    ready.set_result(False)
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


async def _answers(
    call: grpc.aio.StreamStreamCall[bytes, weights_pb2.UpdateWeightsResponse],
    header: weights_pb2.WeightHeader,
    silent_seconds: float,
) -> AsyncIterator[weights_pb2.UpdateWeightsResponse]:
    """What the server says. Raises AioRpcError, also where it says nothing for too long."""
    bound = silent_seconds + header.inline.length_bytes / ROOM_BYTES_PER_SECOND
    answers = aiter(call)
    while True:
        answer = asyncio.ensure_future(anext(answers, None))
        try:
            # In parts: a loop that stood still for as long has had no time to hear.
            for _ in range(SILENT_PARTS):
                await asyncio.wait([answer], timeout=bound / SILENT_PARTS)
                if answer.done():
                    break
            else:
                call.cancel()
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                    f"the server said nothing of version {header.weight_version} for {bound:.0f} s",
                )
        finally:
            answer.cancel()
        if (response := await answer) is None:
            return
        yield response
        bound = silent_seconds


async def _requests(
    header: weights_pb2.WeightHeader,
    body: Callable[[], AsyncIterator[Request]],
    ready: asyncio.Future[bool],
    activation: asyncio.Future[weights_pb2.WeightActivation | None] | None,
) -> AsyncIterator[bytes]:
    data = header.SerializeToString(deterministic=True)
    yield b"".join((_HEADER, _varint(len(data)), data))
    if await ready:
        async for request in body():
            if isinstance(request, weights_pb2.WeightCommit):
                request.header_sha256 = hashlib.sha256(data).digest()
                yield weights_pb2.UpdateWeightsRequest(commit=request).SerializeToString()
            else:
                yield request
    if activation is not None and (told := await activation) is not None:
        yield weights_pb2.UpdateWeightsRequest(activate=told).SerializeToString()


async def _chunk_requests(
    payload: Iterable[Piece], on_sent: Callable[[int], None] | None, checksums: Sequence[int] = ()
) -> AsyncIterator[Request]:
    offset = 0
    for number, pieces in enumerate(chunk_pieces(payload)):
        length = sum(map(len, pieces))
        known = checksums[number] if checksums else None
        yield chunk_message(offset, length, pieces, known)
        offset += length
        if on_sent is not None:
            on_sent(length)
    yield weights_pb2.WeightCommit()


def chunk_pieces(payload: Iterable[Piece]) -> Iterator[list[Piece]]:
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


def chunk_message(
    offset: int, length: int, pieces: Iterable[Piece], xxh3: int | None = None
) -> bytes:
    """A serialized UpdateWeightsRequest with one chunk; its checksum is computed where it is not given."""
    if xxh3 is None:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        xxh3 = digest.intdigest()
    # A field of value zero is left out, as every writer of proto3 does.
    start = _OFFSET + _varint(offset) if offset else b""
    before = start + _DATA + _varint(length)
    after = _XXH3 + xxh3.to_bytes(8, "little")
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
