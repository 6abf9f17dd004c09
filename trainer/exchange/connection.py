"""One stream after another of a server's `Exchange` rpc: greets it, reads messages, sends requests.

If a server falls silent without closing the stream, keepalive detects the loss. On the server's host the
trainer may read groups from the server's journal (`stored_groups`). If one cannot be read, the trainer ends
the stream, and the next stream asks for messages instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import cast

import grpc

from penstock.common.failpoints import hit
from penstock.trainer.core.errors import ServerGone, SessionRefused
from penstock.trainer.exchange.stored_groups import Delivered, GroupUnreadable, StoredGroups
from penstock.v1 import trainer_service_pb2
from penstock.wire import codec
from penstock.wire.failure import connection_problem, read_failure, why_unreachable
from penstock.wire.messages import ExchangeRequest as Request
from penstock.wire.reasons import Reason

log = logging.getLogger(__name__)

EXCHANGE = "/penstock.v1.TrainerService/Exchange"
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 5.0
# A server that cannot be reached for longer than this is reported.
SILENCE_SECONDS = 2.0
GREATEST_EPOCH = 2**63 - 1
# Statuses that neither a restarted server nor a later attempt turns into success.
FINAL_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)


@dataclass(eq=False)
class Connection:
    """The streams to one server. There is at most one at a time."""

    channel: grpc.aio.Channel
    greeting: Callable[[int], trainer_service_pb2.Hello]
    """Returns the Hello for a trainer epoch."""
    give_up_after_seconds: float
    where: str
    """Part of error messages."""
    epoch: int = 0
    """Epoch of the last session that the trainer asked for."""
    closing: bool = False
    """Whether the trainer half-closed the stream, or will as soon as there is one."""
    _may_pass: bool = True
    """Whether the epoch may still be raised past a newer one on the server: see `_explain`."""
    _call: grpc.aio.StreamStreamCall[
        trainer_service_pb2.ExchangeRequest, trainer_service_pb2.ExchangeResponse
    ] = field(init=False)
    _outgoing: asyncio.Queue[trainer_service_pb2.ExchangeRequest | None] | None = None
    _stored: StoredGroups | None = None
    """Reads groups that the server announces by their place in its journal; None if it sends messages."""
    _reads_stored: bool = True
    """Whether the next stream may read stored groups."""

    async def connect(self, reason: str) -> trainer_service_pb2.Welcome:
        """Opens a stream. `reason` says in an error why the last one ended.

        Raises ServerGone and SessionRefused.
        """
        deadline = time.monotonic() + self.give_up_after_seconds
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._ready()
                    return await self._greet()
            except TimeoutError as error:
                reason = reason or await why_unreachable(self.channel)
                raise ServerGone(
                    f"no server{self.where} for {self.give_up_after_seconds:g} s"
                    f"{f': {reason}' if reason else ''}"
                ) from error
            except grpc.aio.AioRpcError as error:
                reason = self._explain(error)
            # `channel_ready` waits for an absent server. This one answered and refuses for now.
            await asyncio.sleep(min(backoff, max(0.0, deadline - time.monotonic())))
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    async def _ready(self) -> None:
        """Waits until the server can be reached, and logs why it cannot be."""
        ready = asyncio.ensure_future(self.channel.channel_ready())
        try:
            done, _ = await asyncio.wait({ready}, timeout=SILENCE_SECONDS)
            if not done:
                log.warning(
                    "no answer from the server%s yet: %s; waiting for up to %g s",
                    *(self.where, await why_unreachable(self.channel) or "it is silent"),
                    self.give_up_after_seconds,
                )
            await ready
        finally:
            ready.cancel()

    async def read(self, handle: Callable[[trainer_service_pb2.ExchangeResponse], None]) -> str:
        """Handles messages until the stream ends. Returns the reason. Raises SessionRefused."""
        try:
            while (response := await self._receive()) is not None:
                handle(response)
        except GroupUnreadable as error:
            self._reads_stored = False
            self._call.cancel()
            self.end()
            return f"a group cannot be read from its journal, {error}"
        except grpc.aio.AioRpcError as error:
            if self.closing:
                return ""
            self.end()
            return self._explain(error)
        self.end()
        return "it ended the stream"

    def group_of(self, delivery: trainer_service_pb2.GroupDelivery) -> Delivered:
        """Returns a delivered group; reads a stored one from the journal. Raises GroupUnreadable, which
        `read` handles."""
        if not delivery.HasField("stored"):
            return Delivered(delivery.delivery_id, delivery.group)
        if self._stored is None:
            raise GroupUnreadable("which was not asked for")
        return Delivered(delivery.delivery_id, self._stored.read(delivery.stored))

    def send(self, request: trainer_service_pb2.ExchangeRequest) -> None:
        """Sends a request. Without a stream it is dropped: each kind is made up for after reconnecting."""
        if request.HasField("demand"):
            request.demand.by_place = self._stored is not None
        if self._outgoing is not None:
            self._outgoing.put_nowait(request)

    def half_close(self) -> bool:
        """Sends nothing more. Returns False if there is no stream."""
        self.closing = True
        if self._outgoing is None:
            return False
        self._outgoing.put_nowait(None)
        return True

    async def closed(self, timeout_seconds: float) -> bool:
        """Waits for the server to end the stream. Returns whether it did in time and without an error."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._call.code() == grpc.StatusCode.OK
        except (TimeoutError, grpc.aio.AioRpcError):
            self._call.cancel()
            return False

    def end(self) -> None:
        """Ends the request iterator, even of a lost stream: grpc's own task waits for that."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
            self._outgoing = None

    async def _greet(self) -> trainer_service_pb2.Welcome:
        # Exceeds the epoch of any earlier start if the clocks agree; if not, see `_explain`.
        self.epoch = max(self.epoch + 1, time.time_ns())
        self.end()
        self._outgoing = asyncio.Queue()
        self._outgoing.put_nowait(Request(hello=self.greeting(self.epoch)))
        method: grpc.aio.StreamStreamMultiCallable[
            trainer_service_pb2.ExchangeRequest, trainer_service_pb2.ExchangeResponse
        ] = self.channel.stream_stream(
            EXCHANGE,
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(trainer_service_pb2.ExchangeResponse),
        )
        self._call = method(_drain(self._outgoing))
        first = await self._receive()
        if first is None or first.WhichOneof("message") != "welcome":
            self.end()
            raise SessionRefused(f"the server{self.where} did not answer Hello with Welcome")
        self._may_pass = False
        folder = first.welcome.group_folder
        self._stored = StoredGroups.find(folder) if self._reads_stored else None
        self._reads_stored = True
        return first.welcome

    async def _receive(self) -> trainer_service_pb2.ExchangeResponse | None:
        """Returns the next message, or None once the server has ended the stream."""
        message = await self._call.read()
        if message is grpc.aio.EOF:
            return None
        return cast("trainer_service_pb2.ExchangeResponse", message)

    def _explain(self, error: grpc.aio.AioRpcError) -> str:
        """Returns why the stream is lost. Raises SessionRefused if reconnecting would not help.

        A process may get STALE_EPOCH for its first Hello although it started after the previous trainer,
        if that trainer's clock was ahead. It then exceeds the epoch the server reports, once. A process
        that was welcomed before never does so, because it was replaced. Of two live trainers, the one
        started last wins.
        """
        failure = read_failure(error)
        cause = "" if failure.reason else connection_problem(failure.message)
        text = cause or f"{failure.reason or failure.code.name}: {failure.message}"
        if failure.reason == Reason.STALE_EPOCH and self._may_pass:
            current = int(failure.metadata.get("current", GREATEST_EPOCH))
            if current < GREATEST_EPOCH:
                self._may_pass, self.epoch = False, current
                return text
        if failure.reason == Reason.SESSION_REPLACED or failure.code in FINAL_CODES:
            raise SessionRefused(f"the server{self.where} refuses this trainer: {text}") from error
        return text


async def _drain(
    queue: asyncio.Queue[trainer_service_pb2.ExchangeRequest | None],
) -> AsyncIterator[trainer_service_pb2.ExchangeRequest]:
    """Yields the stream's requests; None half-closes it."""
    while (request := await queue.get()) is not None:
        hit(f"exchange.before_{request.WhichOneof('message')}")
        yield request
        # grpc asks for the next request once this one has been written.
        hit(f"exchange.after_{request.WhichOneof('message')}")
