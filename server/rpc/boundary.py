"""The boundary between gRPC and the domain: handlers from the descriptors, statuses from one table.

Every rpc of a service is registered by walking its descriptor, so that none can be forgotten. This is
the only place where messages are decoded and errors become statuses. Bad bytes become MALFORMED_MESSAGE
and a `DomainError` its own status. Anything else becomes INTERNAL without its text, which goes to the log.
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

# Decoders and encoders of the methods that do not use the codec. FetchWeights yields bytes already.
READERS = {"penstock.v1.RolloutService/UpdateWeights": read_upload_message}
WRITERS = {"penstock.v1.RolloutService/FetchWeights": bytes}

LINGER_SECONDS = 10.0
# At a load of 15 on two cores, one caller in 3,000 took longer than 0.05 s until its next message.
LINGER_PAUSE_SECONDS = 0.15

ServicerContext = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a message that could not be decoded. If decoding raised, gRPC would answer UNKNOWN."""

    error: DomainError


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler gets of a call in addition to its messages."""

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
    """Turn unexpected exceptions into INTERNAL; let refusals and cancellation pass."""
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


# gRPC holds an answer until the caller reads it or is gone, and sends no status meanwhile. A call whose
# caller reads nothing therefore frees what it holds in the domain, waits, and counts as open until it ends.


@dataclass(slots=True)
class _Outgoing:
    """The answers of a call whose handler writes them itself."""

    context: ServicerContext
    stalled_seconds: float
    _sending: asyncio.Future[None] | None = None

    async def write(self, answer: object) -> None:
        """Return when gRPC has passed the answer on. Raises SLOW_READER."""
        self._sending = asyncio.ensure_future(_write(self.context, answer))
        # This call may end before the write does; retrieve its exception in any case.
        self._sending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        done, _ = await asyncio.wait({self._sending}, timeout=self.stalled_seconds)
        if not done:
            raise _slow_reader(self.stalled_seconds)
        self._sending.result()

    async def gone(self) -> None:
        """Wait until gRPC no longer holds an answer."""
        if self._sending is not None:
            await asyncio.wait({self._sending})


async def _send_all(
    context: ServicerContext, answers: AsyncGenerator[object], stalled_seconds: float
) -> None:
    """Send what a generator yields, then close it. If the caller does not read an answer in time, the
    generator is closed at once. SLOW_READER is raised later, when that answer has been read."""
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
        # gRPC raises this if the caller left while the answer waited for it.
        raise asyncio.CancelledError from error


async def refuse(context: ServicerContext, error: DomainError) -> None:
    """Raises gRPC's abort."""
    try:
        await context.abort_with_status(to_status(error))
    except grpc.aio.InternalError as gone:
        # gRPC raises this if the caller left before the status reached it.
        raise asyncio.CancelledError from gone


def _slow_reader(seconds: float) -> DomainError:
    return DomainError(
        Reason.SLOW_READER, f"nothing was read for {seconds:g} s", {"seconds": seconds}
    )


@dataclass(frozen=True, slots=True)
class _Requests:
    """The checked messages of a stream. Closing an unfinished generator would take an extra task."""

    stream: AsyncIterator[object]

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        return _checked(await anext(self.stream))


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
    """Read what a caller still sends after its answer is known.

    If the status arrives while a client (grpcio does this) is in the middle of a write, the client reports
    the failed write, INTERNAL, instead of the status. So the status waits until the caller pauses
    or is done.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                async with asyncio.timeout(LINGER_PAUSE_SECONDS):
                    if await anext(stream, None) is None:
                        return


def _method_handler(
    service: ServiceDescriptor, method: MethodDescriptor, handler: Handler, stalled_seconds: float
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
    handlers: Mapping[str, Handler], stalled_seconds: float
) -> tuple[grpc.GenericRpcHandler, ...]:
    """`handlers` maps "Service/Method" to its handler. A call whose caller reads nothing for
    `stalled_seconds` is cut off.

    Raises KeyError for an rpc without a handler, so that an incomplete server does not start.
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
