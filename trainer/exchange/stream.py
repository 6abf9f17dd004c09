"""The trainer's end of the `Exchange` stream: demand, deliveries, receipts, switches, reconnection.

    Hello -> Welcome
    Demand(n) -> n GroupDelivery      SwitchWeights(v) -> WeightReceipt(v)
    GroupReceipt, CheckpointNotice -> nothing

A lost stream loses no groups. The server redelivers every group it has no receipt for. A group that
arrives twice is recognized (`known_groups`) and takes no place in a batch. Unmet demand is granted
again on the new stream.

A run that is asked to stop (`stopping` is set) still uses its server to finish the current step. It
does not wait for a server that is away:

    server connected                       the stream stays; the loop finishes its step, then `close`
    server away: not connected yet, lost,  the trainer leaves the server: connecting or restoring is
      or back and not yet up to date         cancelled, `left` is set, and nothing more is sent
    server lost after the stop request     the same, as soon as the trainer notices the loss

Groups without a receipt at that point stay with the server, which delivers them again. If a server
falls silent without closing the stream, keepalive detects the loss.

On the server's host the trainer may read groups from the server's journal (`stored_groups`). If one
cannot be read, the trainer ends the stream, and the next stream asks for messages instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import grpc

from penstock.common.failpoints import hit
from penstock.trainer.core.aio import unless
from penstock.trainer.core.errors import ServerGone, ServerLost, SessionRefused, SwitchRejected
from penstock.trainer.exchange.evaluation_stream import EvaluationStream
from penstock.trainer.exchange.known_groups import KnownGroups
from penstock.trainer.exchange.stored_groups import Delivered, GroupUnreadable, StoredGroups
from penstock.v1 import rejection_pb2, trainer_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason

log = logging.getLogger(__name__)

EXCHANGE = "/penstock.v1.TrainerService/Exchange"
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 5.0
# Statuses that neither a restarted server nor a later attempt turns into success.
GREATEST_EPOCH = 2**63 - 1
FINAL_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)

Request = codec.twin(trainer_service_pb2.ExchangeRequest)
Hello = codec.twin(trainer_service_pb2.Hello)
Demand = codec.twin(trainer_service_pb2.Demand)
GroupReceipt = codec.twin(trainer_service_pb2.GroupReceipt)
SwitchWeights = codec.twin(trainer_service_pb2.SwitchWeights)
CheckpointNotice = codec.twin(trainer_service_pb2.CheckpointNotice)
Rejection = codec.twin(rejection_pb2.Rejection)
Contract = codec.twin(trainer_service_pb2.StalenessContract)


@dataclass(frozen=True, slots=True)
class SwitchReceipt:
    """The server now samples the requested version."""

    weight_version: int
    pause_seconds: float
    """How long generation was paused; zero if the figure was lost with the stream."""
    probe_difference: float | None = None
    """Mean difference of the engine's score of the probe, in nats. None without a probe, or if the
    figure was lost with the stream."""
    received_at: float = field(default_factory=time.time)
    """Unix seconds."""


class Exchange:
    """One run's stream to one server, across reconnections."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        run_id: str,
        contract: trainer_service_pb2.StalenessContract,
        in_flight: weights_pb2.InFlightPolicy.ValueType,
        weight_version: int,
        step: int,
        give_up_after_seconds: float,
        stopping: asyncio.Event,
        trained: Mapping[str, int] | None = None,
        where: str = "",
        start_id: str = "",
    ) -> None:
        """`weight_version` is what the trainer holds, `step` is the last step its state contains,
        and `trained` maps the groups it was trained on to their steps. Once `stopping` is set, the
        trainer leaves a server that is away. `where` identifies the server in messages when there
        are several. The server drops whatever it holds for a start of this run other than
        `start_id`."""
        self._channel = channel
        self._run_id = run_id
        self._contract = contract
        self._in_flight = in_flight
        self._held = weight_version
        self._step = step
        self._give_up_after = give_up_after_seconds
        self.stopping = stopping
        """Set when the run is asked to stop."""
        self._where = f" at {where}" if where else ""
        self._start_id = start_id
        self.left = asyncio.Event()
        """Set when the run stops without its server, for good. Nothing more is sent, and no answer
        arrives."""
        self.on_left: Callable[[], None] | None = None
        """Called once, when `left` is set."""
        self._epoch = 0
        self._may_pass = True
        """Whether the epoch may still be raised past a newer one on the server: see `_explain`."""
        self._final_step = step
        self._call: grpc.aio.StreamStreamCall[
            trainer_service_pb2.ExchangeRequest, trainer_service_pb2.ExchangeResponse
        ]
        self._outgoing: asyncio.Queue[trainer_service_pb2.ExchangeRequest | None] | None = None
        self._stored: StoredGroups | None = None
        """Reads groups that the server announces by their place in its journal; None if it sends
        messages."""
        self._reads_stored = True
        """Whether the next stream may read stored groups."""
        self._ready = asyncio.Event()
        self.restored = asyncio.Event()
        """Cleared while a server that came back with less state is given the version the trainer
        holds, because it reads the payload meanwhile. Set once the server reports that it samples
        that version."""
        self.restored.set()
        self._closing = False
        self._owed = 0
        """Groups demanded and not yet delivered."""
        self._arrived: asyncio.Queue[trajectory_pb2.TrajectoryGroup] = asyncio.Queue()
        # Bounded by demand: the server never sends more than it was granted.
        self._groups = KnownGroups(trained)
        self.delivery_count = 0
        """Deliveries received, including those of known groups."""
        self._deliveries_to_see = 0
        self._switches: dict[int, asyncio.Future[SwitchReceipt]] = {}
        self.on_notice: Callable[[trainer_service_pb2.Notice], None] | None = None
        self.on_arrival: Callable[[], None] | None = None
        """Called for each group that `next_group` will return."""
        self.on_all_seen: Callable[[], None] | None = None
        """Called when every group buffered at the server has been seen and the last one was already
        known, so that `next_group` returns nothing for it."""
        self.evaluations = EvaluationStream(self._ready, self._send)
        """Handles evaluation groups; the rest of this class concerns training groups only."""

    @property
    def trainer_epoch(self) -> int:
        """Epoch of the live session, which uploads carry."""
        return self._epoch

    @property
    def held_version(self) -> int:
        """Version the trainer holds: the one in Hello, then the one of the last `switch`."""
        return self._held

    async def open(self) -> trainer_service_pb2.Welcome | None:
        """Connects for the first time. Returns None if the run is asked to stop first.

        Raises ServerGone and SessionRefused.
        """
        welcome = await unless(self.stopping, self._connect(""))
        if welcome is None:
            self.leave()
        else:
            self._ready.set()
        return welcome

    async def run(self, restore: Callable[[trainer_service_pb2.Welcome], Awaitable[None]]) -> None:
        """Consumes what the server sends; waits for the stream; produces arrivals and receipts.

        Returns after `close`. When the stream is lost, it reconnects and calls `restore` before any
        new demand, to bring a server that lost its memory up to date. If the run is asked to stop
        meanwhile, it leaves the server and returns instead. Raises ServerGone and SessionRefused.
        """
        while True:
            reason = await self._read()
            if self._closing:
                return
            self._ready.clear()
            welcome = await unless(self.stopping, self._connect_again(reason, restore))
            if welcome is None:
                self.leave()
                return
            self._resume(welcome)

    async def ready(self) -> None:
        """Waits until the stream is up and the server is up to date."""
        await self._ready.wait()

    @property
    def on_their_way(self) -> int:
        """Groups demanded and not yet taken with `next_group`."""
        return self._owed + self._arrived.qsize()

    @property
    def arrived_count(self) -> int:
        """Groups delivered and not yet taken with `next_group`."""
        return self._arrived.qsize()

    @property
    def all_seen(self) -> bool:
        """Whether all groups buffered at the server when it said Welcome have arrived and been
        taken."""
        return self.delivery_count >= self._deliveries_to_see and self._arrived.empty()

    def take_arrived(self) -> list[trajectory_pb2.TrajectoryGroup]:
        """Takes every group counted by `arrived_count`."""
        return [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]

    def demand(self, group_count: int) -> None:
        """Grants the server credit for more groups."""
        self._owed += group_count
        if self._ready.is_set():
            self._send(Request(demand=Demand(group_count=group_count)))

    async def next_group(self) -> trajectory_pb2.TrajectoryGroup:
        """Waits for the next delivered group. Each group is returned once."""
        return await self._arrived.get()

    def receipt(self, groups: list[trajectory_pb2.TrajectoryGroup], step: int) -> None:
        """Acknowledges that a step trained these groups."""
        ids = [self._groups.settle(group.group_id, step) for group in groups]
        self._step = step
        if ids:
            self._send(Request(receipt=GroupReceipt(delivery_ids=ids, step=step)))

    def refuse(self, group: trajectory_pb2.TrajectoryGroup, reason: str, message: str) -> None:
        """Tells the server that a group is unusable and must not be delivered again."""
        delivery_id = self._groups.settle(group.group_id, 0)
        rejection = Rejection(reason=reason, message=message)
        self._send(Request(receipt=GroupReceipt(delivery_ids=[delivery_id], rejection=rejection)))

    def checkpoint(self, step: int) -> None:
        """Reports that receipts up to `step` are final."""
        self._final_step = step
        self._send(Request(checkpoint=CheckpointNotice(step=step)))

    def switch(self, weight_version: int) -> asyncio.Future[SwitchReceipt]:
        """Requests a staged version. The trainer holds it as of this call.

        The future fails with SwitchRejected. It survives a lost stream, and succeeds once the
        server is back and up to date.
        """
        future: asyncio.Future[SwitchReceipt] = asyncio.get_running_loop().create_future()
        self._switches[weight_version] = future
        self._held = weight_version
        self.repeat_switch()
        return future

    def hold(self, weight_version: int) -> None:
        """Records that the trainer holds a version the server has already passed, without
        requesting it."""
        self._held = weight_version

    def repeat_switch(self) -> None:
        """Requests the held version again; for `restore`."""
        switch = SwitchWeights(weight_version=self._held, in_flight=self._in_flight)
        self._send(Request(switch_weights=switch))

    async def close(self, *, timeout_seconds: float = 10.0) -> None:
        """Half-closes the stream. Returns when the server has ended it, or after the timeout."""
        self._closing = True
        if self._outgoing is None:
            return
        self._outgoing.put_nowait(None)
        lost = True
        try:
            async with asyncio.timeout(timeout_seconds):
                lost = await self._call.code() != grpc.StatusCode.OK
        except (TimeoutError, grpc.aio.AioRpcError):
            self._call.cancel()
        if lost and self.stopping.is_set():
            self.leave()

    def leave(self) -> None:
        """Stops using this server, because the run is asked to stop. Idempotent."""
        # A stream may be open to a server that is not up to date. The loop must not write to it.
        self._end_requests()
        if not self.left.is_set():
            self.left.set()
            if self.on_left is not None:
                self.on_left()

    # Internals of the stream.

    async def _connect_again(
        self, reason: str, restore: Callable[[trainer_service_pb2.Welcome], Awaitable[None]]
    ) -> trainer_service_pb2.Welcome:
        pause = FIRST_BACKOFF_SECONDS
        while True:
            log.warning("lost the server%s: %s", self._where, reason)
            welcome = await self._connect(reason)
            try:
                # The stream is not read meanwhile, so `restore` must not wait for an answer on it.
                await restore(welcome)
                return welcome
            except ServerLost as error:
                reason = str(error)
                # The server is up, but for example full, and asked the trainer to back off.
                await asyncio.sleep(max(pause, error.retry_after_seconds))
                pause = min(2 * pause, LONGEST_BACKOFF_SECONDS)

    def _end_requests(self) -> None:
        """Ends the request iterator, even of a lost stream: grpc's own task waits for that."""
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
            self._outgoing = None

    async def _connect(self, reason: str) -> trainer_service_pb2.Welcome:
        deadline = time.monotonic() + self._give_up_after
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._channel.channel_ready()
                    return await self._greet()
            except TimeoutError as error:
                raise ServerGone(
                    f"no server{self._where} for {self._give_up_after:g} s"
                    f"{f': {reason}' if reason else ''}"
                ) from error
            except grpc.aio.AioRpcError as error:
                reason = self._explain(error)
            # `channel_ready` waits for an absent server. This one answered and refuses for now.
            await asyncio.sleep(min(backoff, max(0.0, deadline - time.monotonic())))
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)

    async def _greet(self) -> trainer_service_pb2.Welcome:
        # Exceeds the epoch of any earlier start if the clocks agree; if not, see `_explain`.
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._end_requests()
        self._outgoing = asyncio.Queue()
        hello = Hello(
            run_id=self._run_id,
            trainer_epoch=self._epoch,
            weight_version=self._held,
            resume_step=self._step,
            staleness=self._contract,
            start_id=self._start_id,
        )
        self._outgoing.put_nowait(Request(hello=hello))
        method: grpc.aio.StreamStreamMultiCallable[
            trainer_service_pb2.ExchangeRequest, trainer_service_pb2.ExchangeResponse
        ] = self._channel.stream_stream(
            EXCHANGE,
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(trainer_service_pb2.ExchangeResponse),
        )
        self._call = method(_drain(self._outgoing))
        first = await self._receive()
        if first is None or first.WhichOneof("message") != "welcome":
            self._end_requests()
            raise SessionRefused(f"the server{self._where} did not answer Hello with Welcome")
        self._may_pass = False
        folder = first.welcome.group_folder
        self._stored = StoredGroups.find(folder) if self._reads_stored else None
        self._reads_stored = True
        self._deliveries_to_see = self.delivery_count + first.welcome.buffered_group_count
        return first.welcome

    async def _receive(self) -> trainer_service_pb2.ExchangeResponse | None:
        """Returns the next message, or None once the server has ended the stream."""
        message = await self._call.read()
        if message is grpc.aio.EOF:
            return None
        return cast("trainer_service_pb2.ExchangeResponse", message)

    async def _read(self) -> str:
        """Handles messages until the stream ends. Returns the reason."""
        try:
            while (response := await self._receive()) is not None:
                self._handle(response)
        except GroupUnreadable as error:
            self._reads_stored = False
            self._call.cancel()
            self._end_requests()
            return f"a group cannot be read from its journal, {error}"
        except grpc.aio.AioRpcError as error:
            if self._closing:
                return ""
            self._end_requests()
            return self._explain(error)
        self._end_requests()
        return "it ended the stream"

    def _explain(self, error: grpc.aio.AioRpcError) -> str:
        """Returns why the stream is lost. Raises SessionRefused if reconnecting would not help.

        A process may get STALE_EPOCH for its first Hello although it started after the previous
        trainer. In that case the previous trainer's clock was ahead. The trainer then exceeds the
        epoch the server reports, once. A process that was welcomed before never does so, because it
        was replaced. Of two live trainers, the one started last wins.
        """
        failure = read_failure(error)
        text = f"{failure.reason or failure.code.name}: {failure.message}"
        if failure.reason == Reason.STALE_EPOCH and self._may_pass:
            current = int(failure.metadata.get("current", GREATEST_EPOCH))
            if current < GREATEST_EPOCH:
                self._may_pass, self._epoch = False, current
                return text
        if failure.reason == Reason.SESSION_REPLACED or failure.code in FINAL_CODES:
            raise SessionRefused(f"the server{self._where} refuses this trainer: {text}") from error
        return text

    def _handle(self, response: trainer_service_pb2.ExchangeResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "delivery":
            self._take(self._delivered(response.delivery))
        elif kind == "deliveries":
            for delivery in response.deliveries.deliveries:
                self._take(self._delivered(delivery))
        elif kind == "weight_receipt":
            self._switched(response.weight_receipt)
        elif kind == "notice":
            log.warning("%s: %s", response.notice.reason, response.notice.message)
            if self.on_notice is not None:
                self.on_notice(response.notice)

    def _delivered(self, delivery: trainer_service_pb2.GroupDelivery) -> Delivered:
        """Reads a stored group from the journal. Raises GroupUnreadable."""
        if not delivery.HasField("stored"):
            return Delivered(delivery.delivery_id, delivery.group)
        if self._stored is None:
            raise GroupUnreadable("which was not asked for")
        return Delivered(delivery.delivery_id, self._stored.read(delivery.stored))

    def _take(self, delivery: Delivered) -> None:
        if delivery.group.purpose == trajectory_pb2.PURPOSE_EVAL:
            self.evaluations.take(delivery)
            return
        self.delivery_count += 1
        if self._groups.take(delivery):
            self._owed = max(0, self._owed - 1)
            self._arrived.put_nowait(delivery.group)
            if self.on_arrival is not None:
                self.on_arrival()
            return
        # A redelivery after a lost stream used up credit that was meant for another group.
        self._send(Request(demand=Demand(group_count=1)))
        receipt = self._groups.answer(delivery, self._final_step)
        if receipt is not None:
            self._send(Request(receipt=receipt))
        self._look_whether_all_seen()

    def _look_whether_all_seen(self) -> None:
        if self.all_seen and self.on_all_seen is not None:
            self.on_all_seen()

    def _switched(self, receipt: weights_pb2.WeightReceipt) -> None:
        version = receipt.weight_version
        future = self._switches.pop(version, None)
        if not receipt.HasField("rejection"):
            self.restored.set()
            if future is not None and not future.done():
                pause = receipt.pause.ToNanoseconds() / 1e9
                probed = receipt.HasField("probe")
                difference = receipt.probe.mean_difference if probed else None
                future.set_result(SwitchReceipt(version, pause, difference))
            return
        rejection = receipt.rejection
        error = SwitchRejected(
            version, receipt.active_weight_version, rejection.reason, rejection.message
        )
        if future is None or future.done():
            raise error
        future.set_exception(error)

    def _resume(self, welcome: trainer_service_pb2.Welcome) -> None:
        """Repeats the requests that were open when the stream was lost. The server is up to date
        again."""
        if welcome.active_weight_version >= self._held:
            self.restored.set()
        if welcome.active_weight_version == self._held:
            future = self._switches.pop(self._held, None)
            if future is not None and not future.done():
                future.set_result(SwitchReceipt(self._held, 0.0))
        self._ready.set()
        self._send(Request(checkpoint=CheckpointNotice(step=self._final_step)))
        if self._owed:
            self._send(Request(demand=Demand(group_count=self._owed)))
        self.evaluations.resume()
        self._look_whether_all_seen()
        if self._closing and self._outgoing is not None:
            self._outgoing.put_nowait(None)
        log.warning(
            "connected again; the server%s samples version %d",
            self._where,
            welcome.active_weight_version,
        )

    def _send(self, request: trainer_service_pb2.ExchangeRequest) -> None:
        if request.HasField("demand"):
            request.demand.by_place = self._stored is not None
        # Without a stream, requests are dropped: each kind is made up for after reconnecting.
        if self._outgoing is not None:
            self._outgoing.put_nowait(request)


async def _drain(
    queue: asyncio.Queue[trainer_service_pb2.ExchangeRequest | None],
) -> AsyncIterator[trainer_service_pb2.ExchangeRequest]:
    """Yields the stream's requests; None half-closes it."""
    while (request := await queue.get()) is not None:
        hit(f"exchange.before_{request.WhichOneof('message')}")
        yield request
        # grpc asks for the next request once this one has been written.
        hit(f"exchange.after_{request.WhichOneof('message')}")
