"""A channel that adds a token to the metadata of every call.

gRPC itself offers two ways, and neither fits. Call credentials do not work in plaintext, which loopback
uses, and start a thread for each call. Interceptors replace each stream call with a wrapper that
behaves differently when read or cancelled. This channel returns the original call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import grpc

Pairs = Sequence[tuple[str, str | bytes]]


def _adding(kind: str) -> Any:
    # Generated stubs pass `_registered_method`.
    def make(
        self: TokenChannel,
        method: str,
        request_serializer: object = None,
        response_deserializer: object = None,
        _registered_method: bool | None = False,
    ) -> Callable[..., Any]:
        begin = getattr(self.inner, kind)(method, request_serializer, response_deserializer)

        def call(
            request: object = None,
            timeout: float | None = None,
            metadata: grpc.aio.Metadata | Pairs | None = None,
            **rest: object,
        ) -> Any:
            more = (*(metadata or ()), *self.source())
            return begin(request, timeout=timeout, metadata=more, **rest)

        return call

    return make


class TokenChannel(grpc.aio.Channel):
    """Wraps a channel and adds what `source` returns to the metadata of each call."""

    def __init__(self, channel: grpc.aio.Channel, source: Callable[[], Pairs]) -> None:
        self.inner = channel
        self.source = source

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self.inner.__aexit__(*raised)

    async def close(self, grace: float | None = None) -> None:
        await self.inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.inner.channel_ready()

    unary_unary = _adding("unary_unary")
    unary_stream = _adding("unary_stream")
    stream_unary = _adding("stream_unary")
    stream_stream = _adding("stream_stream")
