"""Decides who may call what, in one place that every rpc passes, including health and reflection.

Order of the checks: the server has room -> the caller's metadata is within bounds -> authentication -> the
caller's role may use the rpc -> its account has room -> the message is read, and within bounds -> the
handler. Refusing a call costs little, because its message is read last. That is why every rpc is
registered as a stream of requests and a stream of answers, which it is on the wire. A call only ends when
its last answer has been read. Until then gRPC holds the answer, and the caller's account is charged for it.

    TOKEN_MISSING, TOKEN_INVALID     the caller is not authenticated
    ROLE_NOT_ALLOWED                 the caller's role may not use the rpc
    CALLER_LIMIT, MESSAGE_TOO_LARGE  the caller asks for too much
    QUEUE_FULL                       too many calls are open, either in total or to one of the rpcs that
                                     need no authentication
    CREDENTIAL_ENDED                 the token of an open stream expired or was revoked

CREDENTIAL_ENDED is UNAVAILABLE: a client that reconnects presents its current token. A method that is in
neither `ANYBODY` nor `ALLOWED` is refused to all callers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError

from penstock.common.token_file import Role
from penstock.server.config.limits import LimitsSection
from penstock.server.config.settings import ServeConfig
from penstock.server.core.errors import DomainError
from penstock.server.rpc.boundary import ServicerContext, linger, refuse
from penstock.server.security.callers import VISIT, Callers
from penstock.server.security.credentials import AuthContext, Caller, Credentials, Metadata, host_of
from penstock.wire.channel import MAX_METADATA_BYTES, is_loopback
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

ANYBODY = frozenset({"grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"})
"""For probes; they need no token."""
_EVERY = frozenset(Role)
_AGENT = frozenset({Role.AGENT, Role.ADMIN})
_TRAINER = frozenset({Role.TRAINER, Role.ADMIN})

EXCHANGE = "penstock.v1.TrainerService/Exchange"
ALLOWED: Mapping[str, frozenset[Role]] = {
    "penstock.v1.RolloutService/Generate": _AGENT,
    "penstock.v1.RolloutService/Continue": _AGENT,
    "penstock.v1.RolloutService/Abort": _EVERY,
    "penstock.v1.RolloutService/UpdateWeights": _TRAINER,
    "penstock.v1.RolloutService/FetchWeights": _TRAINER,
    "penstock.v1.RolloutService/GetServerInfo": _EVERY,
    "penstock.v1.RolloutService/GetTrajectory": _EVERY,
    "penstock.v1.TaskService/SubmitTasks": _TRAINER,
    "penstock.v1.TaskService/LeaseTasks": _AGENT,
    "penstock.v1.TaskService/RenewLease": _AGENT,
    "penstock.v1.TaskService/CompleteTrajectory": _AGENT,
    EXCHANGE: _TRAINER,
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _EVERY,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _EVERY,
}
"""Roles that may use each other rpc. `ownership` further restricts an agent to what it owns."""

# Size that HTTP/2 adds to the name and value of each header (RFC 9113, section 6.5.2).
HEADER_BYTES = 32
# Fraction of the server's concurrent calls that each rpc without authentication may take.
ANYBODYS_PART = 16
ANYBODYS_SECONDS = 10.0
"""How long a caller of such an rpc may take to send its message."""
REFUSAL_SECONDS = 1.0
"""How long a refused caller may continue to send before it gets its answer."""
# Fraction of the memory budget that a caller may leave unread, unless configured.
UNREAD_PART = 16

if TYPE_CHECKING:
    RpcHandler = grpc.RpcMethodHandler[Any, Any]
Serve = Callable[[Any, ServicerContext], Any]
Decode = Callable[[bytes], object]
Encode = Callable[[Any], bytes]
Unread = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Presented:
    metadata: Metadata
    peer: str
    """In gRPC's form: "ipv4:127.0.0.1:4711"."""
    auth_context: Callable[[], AuthContext]
    """Of its connection, such as a client certificate."""


class Gate(grpc.aio.ServerInterceptor):
    def __init__(self, credentials: Credentials, callers: Callers, limits: LimitsSection) -> None:
        self.credentials = credentials
        self.callers = callers
        self._limits = limits
        self._calls: Counter[str] = Counter()
        """Open calls. Those without authentication are counted by method, all others together."""
        self._guarded: dict[str, RpcHandler] = {}
        self._open: dict[asyncio.Timeout, Caller] = {}
        """Open streams, which can outlive the token they were admitted with."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[RpcHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> RpcHandler | None:
        """Returns None for an unknown method, which gRPC answers with UNIMPLEMENTED."""
        method = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            guarded = self._guarded[method] = self._guard(method.removeprefix("/"), handler)
        return guarded

    def _guard(self, method: str, handler: RpcHandler) -> RpcHandler:
        """The wrapped handler reads its messages only after the call is admitted."""
        rpc: Any = handler
        decode: Decode = rpc.request_deserializer
        encode: Encode = rpc.response_serializer
        serve: Serve = rpc.unary_unary or rpc.unary_stream or rpc.stream_unary or rpc.stream_stream
        # Exchange is never refused, because training groups is what frees memory. It sends one group at a
        # time.
        bounded = method != EXCHANGE
        patience = self._limits.stalled_seconds
        if method in ANYBODY:
            patience = min(patience, ANYBODYS_SECONDS)

        async def visited(stream: AsyncIterator[bytes], grpc_context: ServicerContext) -> None:
            unread = self.callers.unread if bounded else self.callers.unread_group
            context: Any = _Counted(grpc_context, unread, encode)
            metadata: Any = grpc_context.invocation_metadata() or ()
            presented = Presented(metadata, grpc_context.peer(), grpc_context.auth_context)
            try:
                with self.visit(method, presented) as caller:
                    messages = _Messages(stream, decode, self.callers.message_bytes)
                    request = messages
                    if not rpc.request_streaming:
                        request = await messages.only(patience)
                    if not rpc.response_streaming:
                        await context.write(await serve(request, context))
                        return
                    async with self.while_in_force(caller):
                        await _answer(serve(request, context), context)
            except DomainError as error:
                self.callers.refused(error)
                if rpc.request_streaming:
                    await linger(stream, REFUSAL_SECONDS)
                await refuse(grpc_context, error)

        async def handle(stream: AsyncIterator[bytes], context: ServicerContext) -> None:
            try:
                await visited(stream, context)
            except grpc.aio.AbortError as error:
                # The call holds the error, and its traceback holds the call with its messages. That
                # cycle would keep them, uncounted, until the next garbage collection.
                error.__context__ = None
                raise error.with_traceback(None)  # noqa: B904

        answering: Any = handle
        return grpc.stream_stream_rpc_method_handler(answering, None, None)

    @contextmanager
    def visit(self, method: str, presented: Presented) -> Generator[Caller]:
        """Covers a call from its admission to its end. Raises DomainError."""
        kind = method if method in ANYBODY else ""
        self._check_room(kind)
        caller = self._admit(method, presented)
        visit = self.callers.enter(caller)
        token = VISIT.set(visit)
        self._calls[kind] += 1
        try:
            yield caller
        finally:
            self._calls[kind] -= 1
            VISIT.reset(token)
            visit.leave()

    def _check_room(self, kind: str) -> None:
        """`kind` is the method if the call needs no authentication, otherwise empty."""
        count, most = self._calls.total(), self._limits.concurrent_calls
        if kind and count < most:
            count, most = self._calls[kind], max(1, most // ANYBODYS_PART)
        if count >= most:
            what = f"{kind} calls" if kind else "calls"
            raise DomainError(
                Reason.QUEUE_FULL,
                f"{count} {what} are open, the most this server allows",
                {"call_count": count, "limit": most},
            )

    def _admit(self, method: str, presented: Presented) -> Caller:
        metadata = presented.metadata
        size = sum(len(key) + len(value) + HEADER_BYTES for key, value in metadata)
        if size > MAX_METADATA_BYTES:
            raise DomainError(
                Reason.MESSAGE_TOO_LARGE,
                f"the call's metadata has {size} bytes; at most {MAX_METADATA_BYTES} are allowed",
                {"metadata_bytes": size, "limit": MAX_METADATA_BYTES},
            )
        if method in ANYBODY:
            return Caller("host", host_of(presented.peer))
        if self.credentials.refresh():
            self._end_revoked()
        caller = self.credentials.identify(metadata, presented.peer, presented.auth_context)
        allowed = ALLOWED.get(method, frozenset())
        if caller.role in allowed or (caller.role is None and allowed):
            return caller
        names, role = ", ".join(sorted(allowed)) or "nobody", caller.role or "none"
        raise DomainError(
            Reason.ROLE_NOT_ALLOWED,
            f"{caller} has the role {role}; {method} is for: {names}",
            {"caller": caller.name, "role": role, "method": method, "allowed": names},
        )

    @asynccontextmanager
    async def while_in_force(self, caller: Caller) -> AsyncGenerator[None]:
        """Ends the enclosed work with CREDENTIAL_ENDED when the caller's token or certificate expires."""
        limit = asyncio.timeout(self.credentials.seconds_left(caller))
        self._open[limit] = caller
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DomainError(
                Reason.CREDENTIAL_ENDED,
                f"the credential of {caller} is no longer valid; call again with a current one",
                {"caller": caller.name},
            ) from error
        finally:
            del self._open[limit]

    def _end_revoked(self) -> None:
        now = asyncio.get_running_loop().time()
        for limit, caller in self._open.items():
            if not limit.expired() and not self.credentials.holds(caller):
                limit.reschedule(now)


def open_gate(config: ServeConfig) -> Gate:
    """Raises ConfigError."""
    security = config.security
    limits = config.limits
    callers = Callers(limits.caller, limits.memory_bytes // UNREAD_PART)
    gate = Gate(Credentials(security), callers, limits)
    open_to_others = [address for address in config.addresses.values() if not is_loopback(address)]
    if security.insecure and open_to_others:
        asked = "reaches it" if gate.credentials.tokens is None else "presents a token"
        how = "in plaintext" if security.certificate is None else "by TLS"
        logger.warning(
            "security.insecure is set: %s accepts calls %s from anyone who %s",
            ", ".join(open_to_others),
            how,
            asked,
        )
    return gate


class _Counted:
    """Charges answers to the caller's account until they are read."""

    def __init__(self, context: ServicerContext, unread: Unread, encode: Encode) -> None:
        self._context, self._unread, self._encode = context, unread, encode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, answer: object) -> None:
        data = self._encode(answer)
        with self._unread(len(data)):
            await self._context.write(data)


class _Messages:
    """Decodes the requests of a stream. Not a generator, because a cancelled read must not prevent
    further reads."""

    def __init__(self, stream: AsyncIterator[bytes], decode: Decode, most_bytes: int) -> None:
        self._stream, self._decode, self._most_bytes = stream, decode, most_bytes

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        data = await anext(self._stream)
        if len(data) > self._most_bytes:
            raise DomainError(
                Reason.MESSAGE_TOO_LARGE,
                f"the message has {len(data)} bytes; at most {self._most_bytes} are allowed",
                {"message_bytes": len(data), "limit": self._most_bytes},
            )
        try:
            return self._decode(data)
        except DecodeError as error:
            # Only health and reflection; the decoder of our own messages never raises.
            raise DomainError(Reason.MALFORMED_MESSAGE, "the message cannot be decoded") from error

    async def only(self, patience: float) -> object:
        """Returns the single request of an rpc, which must arrive within `patience` seconds. gRPC holds an
        incomplete message without reporting it."""
        try:
            async with asyncio.timeout(patience):
                return await anext(self)
        except (StopAsyncIteration, TimeoutError):
            raise DomainError(Reason.MALFORMED_MESSAGE, "the call sent no message") from None


async def _answer(served: object, context: ServicerContext) -> object:
    """Sends what an async generator yields. A coroutine sends its answers itself."""
    if not inspect.isasyncgen(served):
        return await cast("Awaitable[object]", served)
    async with aclosing(served) as answers:
        async for answer in answers:
            await context.write(answer)
    return None
