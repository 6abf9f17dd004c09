"""A channel whose every call carries a token.

gRPC has two ways of its own. Call credentials are not to be had in plaintext, which loopback is, and start
a thread for each call; asyncio's interceptors put a call of their own in the place of each stream's, which
reads and is cancelled differently. This hands over the real call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar, cast

import grpc

Q = TypeVar("Q")
R = TypeVar("R")
C = TypeVar("C")

Pairs = Sequence[tuple[str, str | bytes]]
Metadata = grpc.aio.Metadata | Pairs
Serialize = Callable[[Q], bytes]
Deserialize = Callable[[bytes], R]


class MetadataSource(Protocol):
    """What is asked for each call's metadata."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the call carries beside its own."""
        ...


class TokenChannel(grpc.aio.Channel):
    """The channel within, and metadata with each call."""

    def __init__(self, channel: grpc.aio.Channel, source: MetadataSource) -> None:
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
        """Closes the channel within."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """That of the channel within."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for the channel within."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits for the channel within."""
        await self._channel.channel_ready()

    # `_registered_method` is what generated stubs say.

    def unary_unary(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.UnaryUnaryMultiCallable[Q, R]:
        """A method of one request and one answer."""
        inner = self._channel.unary_unary(method, request_serializer, response_deserializer)
        return cast("grpc.aio.UnaryUnaryMultiCallable[Q, R]", _Carrying(inner, self._source))

    def unary_stream(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.UnaryStreamMultiCallable[Q, R]:
        """A method of one request and many answers."""
        inner = self._channel.unary_stream(method, request_serializer, response_deserializer)
        return cast("grpc.aio.UnaryStreamMultiCallable[Q, R]", _Carrying(inner, self._source))

    def stream_unary(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.StreamUnaryMultiCallable[Q, R]:
        """A method of many requests and one answer."""
        inner = self._channel.stream_unary(method, request_serializer, response_deserializer)
        return cast("grpc.aio.StreamUnaryMultiCallable[Q, R]", _Carrying(inner, self._source))

    def stream_stream(
        self,
        method: str,
        request_serializer: Serialize[Q] | None = None,
        response_deserializer: Deserialize[R] | None = None,
        _registered_method: bool | None = False,
    ) -> grpc.aio.StreamStreamMultiCallable[Q, R]:
        """A method of many requests and many answers."""
        inner = self._channel.stream_stream(method, request_serializer, response_deserializer)
        return cast("grpc.aio.StreamStreamMultiCallable[Q, R]", _Carrying(inner, self._source))


class _Carrying(Generic[C]):
    """Begins calls as the method within does, which carry metadata beside their own."""

    def __init__(self, begin: Callable[..., C], source: MetadataSource) -> None:
        self._begin, self._source = begin, source

    def __call__(
        self,
        request: object = None,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **rest: object,
    ) -> C:
        more = (*(metadata or ()), *self._source.metadata())
        return self._begin(request, timeout=timeout, metadata=more, **rest)
