"""Every rpc of a server, found by walking the descriptors, and a raw call to any of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.server.rpc.boundary import SERVICES
from penstock.server.rpc.standard import V1_SERVICE
from penstock.wire.failure import Failure, read_failure


@dataclass(frozen=True)
class Rpc:
    name: str
    """For example "penstock.v1.TaskService/SubmitTasks"."""
    request_streaming: bool
    response_streaming: bool


def every_rpc() -> list[Rpc]:
    """The rpcs of Penstock's services, the health service and the reflection service."""
    others = [
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
        descriptor_pool.Default().FindServiceByName(V1_SERVICE),
    ]
    return [
        Rpc(f"{service.full_name}/{method.name}", method.client_streaming, method.server_streaming)
        for service in (*SERVICES, *others)
        for method in service.methods
    ]


async def call(
    channel: grpc.aio.Channel,
    rpc: Rpc,
    body: bytes = b"",
    *,
    metadata: tuple[tuple[str, str], ...] = (),
    seconds: float = 20.0,
    open_ended: bool = False,
) -> Failure | None:
    """Call a method with raw bytes. Returns the failure, or None if the call was answered.

    The call leaves a stream after its first answer. `open_ended` keeps the request stream open.
    """

    async def requests() -> AsyncIterator[bytes]:
        yield body
        if open_ended:
            await asyncio.Event().wait()

    path = f"/{rpc.name}"
    try:
        if rpc.request_streaming:
            stream = channel.stream_stream(path)(requests(), timeout=seconds, metadata=metadata)
        elif rpc.response_streaming:
            stream = channel.unary_stream(path)(body, timeout=seconds, metadata=metadata)
        else:
            await channel.unary_unary(path)(body, timeout=seconds, metadata=metadata)
            return None
        with contextlib.closing(_Cancelled(stream)):
            async for _ in stream:
                return None
    except grpc.aio.AioRpcError as error:
        return read_failure(error)
    return None


class _Cancelled:
    def __init__(self, call: grpc.aio.Call) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()
