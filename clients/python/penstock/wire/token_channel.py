"""A channel that adds a token to the metadata of every call.

gRPC itself offers two ways, and neither fits. Call credentials do not work in plaintext, which loopback
uses, and start a thread for each call. Interceptors replace each stream call with a wrapper that
behaves differently when read or cancelled. This channel returns the original call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

import grpc

Q = TypeVar("Q")
R = TypeVar("R")
C = TypeVar("C")

Pairs = Sequence[tuple[str, str | bytes]]
Metadata = grpc.aio.Metadata | Pairs
Serialize = Callable[[Q], bytes]
Deserialize = Callable[[bytes], R]


class TokenChannel(grpc.aio.Channel):
    """Wraps a channel and adds what `source` returns to the metadata of each call."""

    def __init__(self, channel: grpc.aio.Channel, source: Callable[[], Pairs]) -> None:
        self._channel = channel
        self._source = source

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._channel.__aexit__(exc_type, exc_val, exc_tb)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    # Generated stubs pass `_registered_method`.

    def unary_unary(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.UnaryUnaryMultiCallable[Q, R]:
        inner = self._channel.unary_unary(method, request_serializer, response_deserializer)
        return cast("grpc.aio.UnaryUnaryMultiCallable[Q, R]", _Carrying(inner, self._source))

    def unary_stream(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.UnaryStreamMultiCallable[Q, R]:
        inner = self._channel.unary_stream(method, request_serializer, response_deserializer)
        return cast("grpc.aio.UnaryStreamMultiCallable[Q, R]", _Carrying(inner, self._source))

    def stream_unary(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.StreamUnaryMultiCallable[Q, R]:
        inner = self._channel.stream_unary(method, request_serializer, response_deserializer)
        return cast("grpc.aio.StreamUnaryMultiCallable[Q, R]", _Carrying(inner, self._source))

    def stream_stream(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.StreamStreamMultiCallable[Q, R]:
        inner = self._channel.stream_stream(method, request_serializer, response_deserializer)
        return cast("grpc.aio.StreamStreamMultiCallable[Q, R]", _Carrying(inner, self._source))


class _Carrying(Generic[C]):
    """Starts calls of the wrapped method."""

    def __init__(self, begin: Callable[..., C], source: Callable[[], Pairs]) -> None:
        self._begin, self._source = begin, source

    def __call__(
        self,
        request: object = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **rest: object,
    ) -> C:
        more = (*(metadata or ()), *self._source())
        return self._begin(request, timeout=timeout, metadata=more, **rest)
