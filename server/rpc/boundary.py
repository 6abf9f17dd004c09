"""The boundary between gRPC and the domain: handlers from the descriptors, statuses from one table.

Every rpc of a service is registered by walking its descriptor, so that none can be forgotten. Here,
and only here, messages are decoded under guard and errors become statuses: bad bytes are
MALFORMED_MESSAGE, a `DomainError` is its status, and anything else is INTERNAL without its text, which
goes to the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.context import Context

from penstock.common import telemetry
from penstock.server.core.errors import DomainError, to_status
from penstock.v1 import rollout_service_pb2, task_service_pb2, trainer_service_pb2
from penstock.wire.codec import MalformedMessage, decoder, encode
from penstock.wire.reasons import Reason
from penstock.wire.upload_messages import read_upload_message

logger = logging.getLogger(__name__)

SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    cast("ServiceDescriptor", module.DESCRIPTOR.services_by_name[name])
    for module, name in (
        (rollout_service_pb2, "RolloutService"),
        (task_service_pb2, "TaskService"),
        (trainer_service_pb2, "TrainerService"),
    )
)

# What reads the requests of a method, where it is not the codec.
READERS: Mapping[str, Callable[[bytes], object]] = {
    "penstock.v1.RolloutService/UpdateWeights": read_upload_message,
}

# What writes the answers of a method, likewise: those of this one are bytes when they come.
WRITERS: Mapping[str, Callable[[Any], bytes]] = {
    "penstock.v1.RolloutService/FetchWeights": bytes,
}

LINGER_SECONDS = 10.0
# At a load of 15 on two cores one in 3,000 callers took longer than 0.05 s to its next message.
LINGER_PAUSE_SECONDS = 0.15

ServicerContext = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a message that could not be decoded; gRPC would answer UNKNOWN if decoding raised."""

    error: DomainError


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler may know of the call besides its messages."""

    trace: Context
    write: Callable[[object], Awaitable[None]]
    """Sends one message of a streamed answer."""


# One of four shapes, by the descriptor: (request | requests, call) -> answer | answers | None.
Handler = Callable[[Any, Call], Any]


def _deserializer(name: str, typed: type[Message]) -> Callable[[bytes], object]:
    read = READERS.get(name) or decoder(typed)

    def deserialize(data: bytes) -> object:
        try:
            return read(data)
        except MalformedMessage as error:
            return _Malformed(DomainError(Reason.MALFORMED_MESSAGE, str(error)))

    return deserialize


def _checked(message: object) -> object:
    if isinstance(message, _Malformed):
        raise message.error
    return message


@contextlib.contextmanager
def _boundary(method: str) -> Generator[None]:
    """Turns what no handler foresaw into INTERNAL; lets refusals and cancellation pass."""
    try:
        yield
    except DomainError:
        raise
    except MalformedMessage as error:
        raise DomainError(Reason.MALFORMED_MESSAGE, str(error)) from error
    except Exception as error:
        logger.exception("%s failed", method)
        raise DomainError(Reason.INTERNAL_ERROR, "internal error") from error


def _call(context: ServicerContext, write: Callable[[object], Awaitable[None]]) -> Call:
    metadata = cast("tuple[tuple[str, str | bytes], ...] | None", context.invocation_metadata())
    return Call(telemetry.incoming(metadata), write)


# What gRPC was given for a caller it holds until the caller reads it or is gone, and it takes no status
# meanwhile. So a call whose caller reads nothing frees what it had in the domain, and then it waits: until
# its end it is counted as one that is open.


class _Outgoing:
    """The answers of a call whose handler writes them itself."""

    def __init__(self, context: ServicerContext, stalled_seconds: float) -> None:
        self._context = context
        self._stalled_seconds = stalled_seconds
        self._sending: asyncio.Future[None] | None = None

    async def write(self, answer: object) -> None:
        """Returns when gRPC has passed it on. Raises SLOW_READER."""
        self._sending = asyncio.ensure_future(_write(self._context, answer))
        # Whoever waits may end before it does.
        self._sending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        done, _ = await asyncio.wait({self._sending}, timeout=self._stalled_seconds)
        if not done:
            raise _slow_reader(self._stalled_seconds)
        self._sending.result()

    async def gone(self) -> None:
        """Waits until gRPC holds nothing any more."""
        if self._sending is not None:
            await asyncio.wait({self._sending})


async def _send_all(
    context: ServicerContext, answers: AsyncGenerator[object], stalled_seconds: float
) -> None:
    """Sends what a generator yields, and closes it. Raises SLOW_READER, once the last answer is read, where
    that took so long: then it was closed as soon as the time was over."""
    loop = asyncio.get_running_loop()
    closing: asyncio.Task[None] | None = None

    def cut_off() -> None:
        nonlocal closing
        closing = loop.create_task(answers.aclose())

    try:
        async for answer in answers:
            timer = loop.call_later(stalled_seconds, cut_off)
            try:
                await _write(context, answer)
            finally:
                timer.cancel()
            if closing is not None:
                raise _slow_reader(stalled_seconds)
    finally:
        await (answers.aclose() if closing is None else closing)


async def _write(context: ServicerContext, answer: object) -> None:
    try:
        await context.write(answer)
    except grpc.aio.InternalError as error:
        # What gRPC raises where the caller went away while the answer waited for it.
        raise asyncio.CancelledError from error


async def refuse(context: ServicerContext, error: DomainError) -> None:
    """Ends a call with an error's status, by raising what gRPC ends it with."""
    try:
        await context.abort_with_status(to_status(error))
    except grpc.aio.InternalError as gone:
        # What gRPC raises where the caller went away while it was told.
        raise asyncio.CancelledError from gone


def _slow_reader(seconds: float) -> DomainError:
    return DomainError(
        Reason.SLOW_READER, f"nothing was read for {seconds:g} s", {"seconds": seconds}
    )


class _Requests:
    """The messages of a stream, each checked. Not a generator: one that is left before its end takes a task
    that closes it later on."""

    def __init__(self, stream: AsyncIterator[object]) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        return _checked(await anext(self._stream))


def _unary_unary(name: str, handler: Handler) -> Callable[..., Awaitable[Message]]:
    async def handle(request: object, context: ServicerContext) -> Message:
        try:
            with _boundary(name):
                return await handler(_checked(request), _call(context, context.write))
        except DomainError as error:
            await refuse(context, error)
            raise

    return handle


def _unary_stream(
    name: str, handler: Handler, stalled_seconds: float
) -> Callable[..., Awaitable[None]]:
    async def handle(request: object, context: ServicerContext) -> None:
        try:
            with _boundary(name):
                answers = handler(_checked(request), _call(context, context.write))
                await _send_all(context, answers, stalled_seconds)
        except DomainError as error:
            await refuse(context, error)

    return handle


def _stream_stream(
    name: str, handler: Handler, stalled_seconds: float
) -> Callable[..., Awaitable[None]]:
    async def handle(stream: AsyncIterator[object], context: ServicerContext) -> None:
        outgoing = _Outgoing(context, stalled_seconds)
        try:
            with _boundary(name):
                await handler(_Requests(stream), _call(context, outgoing.write))
                await linger(stream)
        except DomainError as error:
            await linger(stream)
            await outgoing.gone()
            await refuse(context, error)

    return handle


async def linger(stream: AsyncIterator[object], seconds: float = LINGER_SECONDS) -> None:
    """Reads what a caller is still sending after its answer is known.

    A client that is in the middle of a write when the status arrives reports the failed write, INTERNAL,
    instead of the status (grpcio does). So the status waits until the caller pauses or is done.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                async with asyncio.timeout(LINGER_PAUSE_SECONDS):
                    if await anext(stream, None) is None:
                        return


def _method_handler(
    service: ServiceDescriptor,
    method: MethodDescriptor,
    handler: Handler,
    stalled_seconds: float,
) -> grpc.RpcMethodHandler[Any, Any]:
    name = f"{service.full_name}/{method.name}"
    deserialize = cast("Any", _deserializer(name, GetMessageClass(method.input_type)))
    write = WRITERS.get(name, encode)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(
            cast("Any", _stream_stream(name, handler, stalled_seconds)), deserialize, encode
        )
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(
            cast("Any", _unary_stream(name, handler, stalled_seconds)), deserialize, write
        )
    return grpc.unary_unary_rpc_method_handler(
        cast("Any", _unary_unary(name, handler)), deserialize, encode
    )


def service_handlers(
    handlers: Mapping[str, Handler],
    stalled_seconds: float,
) -> tuple[grpc.GenericRpcHandler, ...]:
    """Handlers of every rpc; `handlers` maps "Service/Method" to what serves it. A caller that reads
    nothing for `stalled_seconds` is cut off.

    Raises KeyError for an rpc without a handler: a server that lacks one must not start.
    """
    return tuple(
        grpc.method_handlers_generic_handler(
            service.full_name,
            {
                method.name: _method_handler(
                    service, method, handlers[f"{service.name}/{method.name}"], stalled_seconds
                )
                for method in service.methods
            },
        )
        for service in SERVICES
    )
