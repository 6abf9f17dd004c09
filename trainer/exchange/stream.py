"""The trainer's end of the `Exchange` stream: demand, deliveries, receipts, switches, reconnection.

    Hello -> Welcome
    Demand(n) -> n GroupDelivery      SwitchWeights(v) -> WeightReceipt(v)
    GroupReceipt, CheckpointNotice -> nothing

A lost stream loses no groups. The server redelivers every group it has no receipt for. A group that
arrives twice is recognized (`known_groups`) and takes no place in a batch. Unmet demand is granted again
on the new stream.

A run that is asked to stop (`stopping` is set) still uses a connected server to finish the current step.
It leaves a server that is away, or not yet up to date: connecting or restoring is cancelled, `left` is
set, and nothing more is sent. It does the same if it loses the server later. Groups without a receipt stay
with the server, which delivers them again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from penstock.trainer.core.aio import unless
from penstock.trainer.core.errors import ServerFull, ServerLost, SwitchRejected
from penstock.trainer.exchange.connection import (
    FIRST_BACKOFF_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    Connection,
)
from penstock.trainer.exchange.evaluation_stream import EvaluationStream
from penstock.trainer.exchange.known_groups import KnownGroups
from penstock.trainer.exchange.retrying import keep_trying
from penstock.trainer.exchange.stored_groups import Delivered
from penstock.v1 import trainer_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire.messages import (
    CheckpointNotice,
    Demand,
    GroupReceipt,
    Hello,
    Rejection,
    SwitchWeights,
)
from penstock.wire.messages import ExchangeRequest as Request

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SwitchReceipt:
    """The server now samples the requested version."""

    pause_seconds: float
    """How long generation was paused; zero if the figure was lost with the stream."""
    probe_difference: float | None = None
    """Mean difference of the engine's score of the probe, in nats. None without a probe, or if the
    figure was lost with the stream."""
    received_at: float = field(default_factory=time.time)
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run tells its servers about itself."""

    run_id: str
    contract: trainer_service_pb2.StalenessContract
    in_flight: weights_pb2.InFlightPolicy.ValueType
    weight_version: int
    """The version that the trainer holds."""
    step: int
    """The last step that the trainer's state contains."""
    trained: Mapping[str, int] = field(default_factory=dict[str, int])
    """The step of each group that the trainer's state contains, zero if refused."""
    start_id: str = ""
    """The server drops whatever it holds for another start of this run."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """What a stream calls when something happens."""

    arrived: Callable[[], None] = lambda: None
    """For each group that `next_group` will return."""
    all_seen: Callable[[], None] = lambda: None
    """When every group buffered at the server has been seen and the last one was already known, so that
    `next_group` returns nothing for it."""
    left: Callable[[], None] = lambda: None
    """Once, when `Exchange.left` is set."""
    noticed: Callable[[trainer_service_pb2.Notice], None] = lambda notice: None
    """For each notice."""


class Exchange:
    """One run's stream to one server, across reconnections."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run: RunFacts,
        *,
        give_up_after_seconds: float,
        stopping: asyncio.Event,
        where: str = "",
        listeners: Listeners | None = None,
    ) -> None:
        """`stopping` is set when the run is asked to stop. `where` is the server's address."""
        self._run = run
        self.in_flight = run.in_flight
        """What a switch does with turns in flight."""
        self._where = f" at {where}" if where else ""
        self._listeners = listeners or Listeners()
        self._connection = Connection(
            channel,
            self._greeting,
            give_up_after_seconds=give_up_after_seconds,
            where=self._where,
        )
        self.held_version = run.weight_version
        """Version the trainer holds: the one in Hello, then the last one requested or passed by the
        server."""
        self._step = self._final_step = run.step
        self.stopping = stopping
        self.left = asyncio.Event()
        """Set when the run stops without its server, for good. Nothing more is sent, and no answer
        arrives."""
        self.ready = asyncio.Event()
        """Set while the stream is up and the server is up to date."""
        self.restored = asyncio.Event()
        """Cleared while a server that came back with less state is given the version the trainer holds,
        because it reads the payload meanwhile. Set once the server reports that it samples that
        version."""
        self.restored.set()
        self._owed = 0
        """Groups demanded and not yet delivered."""
        self._arrived: asyncio.Queue[trajectory_pb2.TrajectoryGroup] = asyncio.Queue()
        # Bounded by demand: the server never sends more than it was granted.
        self._groups = KnownGroups(run.trained)
        self.delivery_count = 0
        """Deliveries received, including those of known groups."""
        self._deliveries_to_see = 0
        self._switches: dict[int, asyncio.Future[SwitchReceipt]] = {}
        self.evaluations = EvaluationStream(self.ready, self._connection.send)
        """Handles evaluation groups; the rest of this class concerns training groups only."""

    @property
    def trainer_epoch(self) -> int:
        """Epoch of the live session, which uploads carry."""
        return self._connection.epoch

    async def open(self) -> trainer_service_pb2.Welcome | None:
        """Connects for the first time. Returns None if the run is asked to stop first.

        Raises ServerGone and SessionRefused.
        """
        welcome = await unless(self.stopping, self._connect(""))
        if welcome is None:
            self.leave()
        else:
            self.ready.set()
        return welcome

    async def run(self, restore: Callable[[trainer_service_pb2.Welcome], Awaitable[None]]) -> None:
        """Consumes what the server sends; waits for the stream; produces arrivals and receipts.

        Returns after `close`. When the stream is lost, it reconnects and calls `restore` before any new
        demand, to bring a server that lost its memory up to date. If the run is asked to stop meanwhile,
        it leaves the server and returns instead. Raises ServerGone and SessionRefused.
        """
        while True:
            reason = await self._connection.read(self._handle)
            if self._connection.closing:
                return
            self.ready.clear()
            welcome = await unless(self.stopping, self._connect_again(reason, restore))
            if welcome is None:
                self.leave()
                return
            self._resume(welcome)

    async def ask(self, attempt: Callable[[], Awaitable[T]]) -> T | None:
        """Retries until it succeeds, waiting for the server to be ready before each attempt.

        Returns None once the run stops without the server. If the run is to stop, a server without room is
        left too.
        """
        try:
            return await self.answer(keep_trying(self.ready, attempt, stopping=self.stopping))
        except ServerFull as error:
            log.warning("%s; stopping without it", error)
            self.leave()
            return None

    async def answer(self, wait: Awaitable[T]) -> T | None:
        """Returns None once the run stops without the server."""
        return await unless(self.left, wait)

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
        """Whether all groups buffered at the server when it said Welcome have arrived and been taken."""
        return self.delivery_count >= self._deliveries_to_see and self._arrived.empty()

    def take_arrived(self) -> list[trajectory_pb2.TrajectoryGroup]:
        """Takes every group counted by `arrived_count`."""
        return [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]

    def demand(self, group_count: int) -> None:
        """Grants the server credit for more groups."""
        self._owed += group_count
        if self.ready.is_set():
            self._connection.send(Request(demand=Demand(group_count=group_count)))

    async def next_group(self) -> trajectory_pb2.TrajectoryGroup:
        """Waits for the next delivered group. Each group is returned once."""
        return await self._arrived.get()

    def receipt(self, groups: list[trajectory_pb2.TrajectoryGroup], step: int) -> None:
        """Acknowledges that a step trained these groups."""
        ids = [self._groups.settle(group.group_id, step) for group in groups]
        self._step = step
        if ids:
            self._connection.send(Request(receipt=GroupReceipt(delivery_ids=ids, step=step)))

    def refuse(self, group: trajectory_pb2.TrajectoryGroup, reason: str, message: str) -> None:
        """Tells the server that a group is unusable and must not be delivered again."""
        delivery_id = self._groups.settle(group.group_id, 0)
        rejection = Rejection(reason=reason, message=message)
        receipt = GroupReceipt(delivery_ids=[delivery_id], rejection=rejection)
        self._connection.send(Request(receipt=receipt))

    def checkpoint(self, step: int) -> None:
        """Reports that receipts up to `step` are final."""
        self._final_step = step
        self._connection.send(Request(checkpoint=CheckpointNotice(step=step)))

    def switch(self, weight_version: int) -> asyncio.Future[SwitchReceipt]:
        """Requests a staged version. The trainer holds it as of this call.

        The future fails with SwitchRejected. It survives a lost stream, and succeeds once the
        server is back and up to date.
        """
        future: asyncio.Future[SwitchReceipt] = asyncio.get_running_loop().create_future()
        self._switches[weight_version] = future
        self.held_version = weight_version
        self.repeat_switch()
        return future

    def repeat_switch(self) -> None:
        """Requests the held version again; for `restore`."""
        switch = SwitchWeights(weight_version=self.held_version, in_flight=self.in_flight)
        self._connection.send(Request(switch_weights=switch))

    async def close(self, *, timeout_seconds: float = 10.0) -> None:
        """Half-closes the stream. Returns when the server has ended it, or after the timeout."""
        if (
            self._connection.half_close()
            and not await self._connection.closed(timeout_seconds)
            and self.stopping.is_set()
        ):
            self.leave()

    def leave(self) -> None:
        """Stops using this server, because the run is asked to stop. Idempotent."""
        # A stream may be open to a server that is not up to date. The loop must not write to it.
        self._connection.end()
        if not self.left.is_set():
            self.left.set()
            self._listeners.left()

    def _greeting(self, trainer_epoch: int) -> trainer_service_pb2.Hello:
        return Hello(
            run_id=self._run.run_id,
            trainer_epoch=trainer_epoch,
            weight_version=self.held_version,
            resume_step=self._step,
            staleness=self._run.contract,
            start_id=self._run.start_id,
        )

    async def _connect(self, reason: str) -> trainer_service_pb2.Welcome:
        welcome = await self._connection.connect(reason)
        self._deliveries_to_see = self.delivery_count + welcome.buffered_group_count
        return welcome

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

    def _handle(self, response: trainer_service_pb2.ExchangeResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "delivery":
            self._take(self._connection.group_of(response.delivery))
        elif kind == "deliveries":
            for delivery in response.deliveries.deliveries:
                self._take(self._connection.group_of(delivery))
        elif kind == "weight_receipt":
            self._switched(response.weight_receipt)
        elif kind == "notice":
            log.warning("%s: %s", response.notice.reason, response.notice.message)
            self._listeners.noticed(response.notice)

    def _take(self, delivery: Delivered) -> None:
        if delivery.group.purpose == trajectory_pb2.PURPOSE_EVAL:
            self.evaluations.take(delivery)
            return
        self.delivery_count += 1
        if self._groups.take(delivery):
            self._owed = max(0, self._owed - 1)
            self._arrived.put_nowait(delivery.group)
            self._listeners.arrived()
            return
        # A redelivery after a lost stream used up credit that was meant for another group.
        self._connection.send(Request(demand=Demand(group_count=1)))
        receipt = self._groups.answer(delivery, self._final_step)
        if receipt is not None:
            self._connection.send(Request(receipt=receipt))
        self._look_whether_all_seen()

    def _look_whether_all_seen(self) -> None:
        if self.all_seen:
            self._listeners.all_seen()

    def _switched(self, receipt: weights_pb2.WeightReceipt) -> None:
        version = receipt.weight_version
        future = self._switches.pop(version, None)
        if not receipt.HasField("rejection"):
            self.restored.set()
            if future is not None and not future.done():
                pause = receipt.pause.ToNanoseconds() / 1e9
                probed = receipt.HasField("probe")
                difference = receipt.probe.mean_difference if probed else None
                future.set_result(SwitchReceipt(pause, difference))
            return
        rejection = receipt.rejection
        error = SwitchRejected(
            version, receipt.active_weight_version, rejection.reason, rejection.message
        )
        if self.left.is_set():
            # The run stops without its server, and the switch is not awaited any more.
            log.info("%s", error)
            return
        if future is None or future.done():
            raise error
        future.set_exception(error)

    def _resume(self, welcome: trainer_service_pb2.Welcome) -> None:
        """Repeats the requests that were open when the stream was lost. The server is up to date again."""
        if welcome.active_weight_version >= self.held_version:
            self.restored.set()
        if welcome.active_weight_version == self.held_version:
            future = self._switches.pop(self.held_version, None)
            if future is not None and not future.done():
                future.set_result(SwitchReceipt(0.0))
        self.ready.set()
        self._connection.send(Request(checkpoint=CheckpointNotice(step=self._final_step)))
        if self._owed:
            self._connection.send(Request(demand=Demand(group_count=self._owed)))
        self.evaluations.resume()
        self._look_whether_all_seen()
        if self._connection.closing:
            self._connection.half_close()
        log.warning(
            "connected again; the server%s samples version %d",
            self._where,
            welcome.active_weight_version,
        )
