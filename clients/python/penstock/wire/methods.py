"""Calls of `penstock.v1`, each made from the message that it answers with.

    info = await methods.unary(channel, GetServerInfoResponse)(GetServerInfoRequest(), timeout=5)

Requests may be typed messages or twins; responses are twins.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from penstock.wire import codec

M = TypeVar("M", bound=Message)


def unary(
    channel: grpc.aio.Channel, response: type[M]
) -> grpc.aio.UnaryUnaryMultiCallable[Message, M]:
    """One request, one response."""
    return channel.unary_unary(path(response), codec.encode, codec.decoder(response))


def streaming(
    channel: grpc.aio.Channel, response: type[M]
) -> grpc.aio.UnaryStreamMultiCallable[Message, M]:
    """One request, a stream of responses."""
    return channel.unary_stream(path(response), codec.encode, codec.decoder(response))


@cache
def path(response: type[Message]) -> str:
    """The path of a method, such as "/penstock.v1.TaskService/SubmitTasks" for SubmitTasksResponse."""
    (service,) = response.DESCRIPTOR.file.services_by_name.values()
    return f"/{service.full_name}/{response.DESCRIPTOR.name.removesuffix('Response')}"
