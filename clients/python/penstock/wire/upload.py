"""One `UpdateWeights` call, on the side of the sender.

    header -> READY -> chunks, if the source is inline -> commit -> STAGED, then ACTIVE if immediate
    header -> READY -> commit -> the same: `Filling`, shared memory that is filled in between
    ... -> STAGED -> activate -> ACTIVE: `Staging`, a version that is switched to later

The server repeats its last answer every ten seconds. An upload without any answer for SILENT_SECONDS has
gone astray. A flipped bit in the number of its HTTP/2 stream, for example, leaves it open forever on a
connection whose pings are answered. Such an upload fails as if the server were unreachable.

Requests are serialized here by hand. A chunk then costs one copy of its data instead of four, and the
header's checksum covers exactly the bytes that are sent. Needs xxhash, on which the client does not depend.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
import xxhash

from penstock.v1 import weights_pb2
from penstock.wire import codec

CHUNK_BYTES = 2 * 1024 * 1024
SILENT_SECONDS = 60.0
"""Maximum time between two answers."""
ROOM_BYTES_PER_SECOND = 1e9
"""The first answer may take longer: the server first allocates memory for the payload, at this rate."""
SILENT_PARTS = 6
UPDATE_WEIGHTS = "/penstock.v1.RolloutService/UpdateWeights"

T = TypeVar("T")
Piece = bytes | memoryview
Request = bytes | weights_pb2.WeightCommit
"""A serialized UpdateWeightsRequest, or the commit, which still lacks the header's checksum."""

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

    `payload` is sent as chunks, in order; it is read once the server is ready. `on_sent` gets the length of
    each chunk. `checksums` has the XXH3-64 of each chunk, if they are known already. Raises NotStaged, and
    AioRpcError; after `silent_seconds` without an answer its code is UNAVAILABLE.
    """
    body = partial(_chunk_requests, payload, on_sent, checksums)
    return await _call(channel, header, body, silent_seconds=silent_seconds)


class _Begun(Generic[T]):
    """An upload that waits for the caller to tell it how to end. Use it on the event loop."""

    _last: asyncio.Future[weights_pb2.UpdateWeightsResponse]

    def __init__(self) -> None:
        self._told: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Ends the call; the server then drops the version unless it is staged. Safe to repeat."""
        self._last.cancel()
        if self._last.done() and not self._last.cancelled():
            self._last.exception()  # Marks it as retrieved, so that asyncio does not log it.

    def _send(self, call: Coroutine[Any, Any, weights_pb2.UpdateWeightsResponse]) -> None:
        self._last = asyncio.ensure_future(call)
        self._last.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        # grpc's own task waits for the request iterator to end, even after the call is over.
        if not self._told.done():
            self._told.set_result(None)

    async def _tell(self, how: T) -> weights_pb2.UpdateWeightsResponse:
        if not self._told.done():
            self._told.set_result(how)
        return await self._last


class Filling(_Begun["Sequence[int]"]):
    """An upload whose shared memory is filled while the server verifies it.

    The caller must end it with `commit` or `cancel`. An error of the call before that is raised by
    `commit`.
    """

    def __init__(self, channel: grpc.aio.Channel, header: weights_pb2.WeightHeader) -> None:
        """Sends the header, whose source is shared memory with `filling` set."""
        super().__init__()
        self._send(_call(channel, header, self._requests))

    async def commit(self, tensor_xxh3: Sequence[int]) -> weights_pb2.UpdateWeightsResponse:
        """Tells the server that all tensors are filled; returns its last answer, STAGED or ACTIVE.

        Raises AioRpcError and NotStaged.
        """
        return await self._tell(tensor_xxh3)

    async def _requests(self) -> AsyncIterator[Request]:
        checksums = await self._told
        if checksums is not None:
            yield weights_pb2.WeightCommit(tensor_xxh3=checksums)


class Staging(_Begun[weights_pb2.WeightActivation]):
    """An upload that is staged first, and switched to on request.

    The caller must end it with `activate` or `cancel`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        header: weights_pb2.WeightHeader,
        payload: Iterable[Piece] = (),
    ) -> None:
        """Sends the header, which must ask for staged activation, and then the payload, as `upload`."""
        super().__init__()
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[bool] = loop.create_future()
        self._staged: asyncio.Future[weights_pb2.UpdateWeightsResponse] = loop.create_future()
        body = partial(_chunk_requests, payload, None)
        self._send(_call(channel, header, body, self._hear, self._told, self._ready))

    async def ready(self) -> bool:
        """Whether the server is ready for the payload; false if it has the version or refuses it."""
        await asyncio.wait([self._ready, self._last], return_when=asyncio.FIRST_COMPLETED)
        return self._ready.done() and self._ready.result()

    async def staged(self) -> weights_pb2.UpdateWeightsResponse:
        """Waits for the server's answer that the version is verified. Raises AioRpcError and NotStaged."""
        await asyncio.wait([self._staged, self._last], return_when=asyncio.FIRST_COMPLETED)
        return self._staged.result() if self._staged.done() else await self._last

    async def activate(
        self, in_flight: weights_pb2.InFlightPolicy.ValueType
    ) -> weights_pb2.UpdateWeightsResponse:
        """Has the version switched to; returns the answer ACTIVE. Raises AioRpcError and NotStaged."""
        return await self._tell(weights_pb2.WeightActivation(in_flight=in_flight))

    def _hear(self, answer: weights_pb2.UpdateWeightsResponse) -> None:
        if not self._staged.done():
            self._staged.set_result(answer)


async def _call(
    channel: grpc.aio.Channel,
    header: weights_pb2.WeightHeader,
    body: Callable[[], AsyncIterator[Request]],
    on_staged: Callable[[weights_pb2.UpdateWeightsResponse], None] | None = None,
    activation: asyncio.Future[weights_pb2.WeightActivation | None] | None = None,
    ready: asyncio.Future[bool] | None = None,
    silent_seconds: float = SILENT_SECONDS,
) -> weights_pb2.UpdateWeightsResponse:
    """Makes one call and returns the last answer.

    `body` yields the requests to send once the server is ready, the commit last. `on_staged` gets each
    answer other than READY. The result of `activation` is sent after the body. `ready` is set to whether
    the first answer was READY.
    """
    ready = ready or asyncio.get_running_loop().create_future()
    method: grpc.aio.StreamStreamMultiCallable[bytes, weights_pb2.UpdateWeightsResponse] = (
        channel.stream_stream(
            UPDATE_WEIGHTS,
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
                    # The server had the version already.
                    ready.set_result(False)
            elif not ready.done():
                ready.set_result(True)
    finally:
        # grpc's own task waits for the request iterator to end, even after the call is over.
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
    """Yields the server's answers. Raises AioRpcError, also after too long a silence."""
    bound = silent_seconds + header.inline.length_bytes / ROOM_BYTES_PER_SECOND
    answers = aiter(call)
    while True:
        answer = asyncio.ensure_future(anext(answers, None))
        try:
            # Waits in parts: an event loop that was blocked for the whole time could not have heard.
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
                    f"the server sent no answer for version {header.weight_version} within {bound:.0f} s",
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
    """The payload in chunks of CHUNK_BYTES, each as a list of pieces."""
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
    """A serialized UpdateWeightsRequest with one chunk; computes the checksum unless it is given."""
    if xxh3 is None:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        xxh3 = digest.intdigest()
    # proto3 writers leave out fields of value zero.
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
