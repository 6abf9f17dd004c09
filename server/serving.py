"""The assembled server, and its life from the first bind to the last answer.

Order of start: port bound (a port in use fails before a model is loaded) -> journal locked -> engine ->
journal read -> handlers -> serving, logged in one line.

Order of a stop (SIGTERM, SIGINT): health NOT_SERVING -> no new turns, no new leases -> turns in flight
finish within `drain_seconds`, the rest end ABORTED -> the trainer's session ends with DRAINING -> open
calls end -> engine closed -> journal closed.

If the engine dies, so does the server: health NOT_SERVING, turns end with ENGINE_LOST. The process logs the
reason and exits with 1, so that its supervisor starts another. The same happens if the journal can no
longer be written.

A server started in the middle of a run, according to its journal or its configuration, holds turns back.
It is NOT_SERVING until the trainer's version is active.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.server.config.settings import Security, ServeConfig, check_exposure
from penstock.server.core.broadcast import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.core.memory_budget import KEPT_PART, MemoryBudget
from penstock.server.core.telemetry import ServerMetrics
from penstock.server.engine.protocol import Engine
from penstock.server.gauges import observe_load, observe_pool
from penstock.server.groups.admission import Admission
from penstock.server.groups.attempts import LeaseRules
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.recovery import recover_from
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.memory import MemoryJournal
from penstock.server.journal.protocol import Journal, SnapshotItem
from penstock.server.journal.records import server_started, weights_activated
from penstock.server.pool.engine import PoolEngine
from penstock.server.rollouts.complete import Closing
from penstock.server.rollouts.start import Opening, StreamRules
from penstock.server.rollouts.unleased import OwnTrajectories
from penstock.server.rpc.boundary import SERVICES, Call, Handler, service_handlers
from penstock.server.rpc.reflection import add_reflection
from penstock.server.rpc.rollout_servicer import RolloutServicer
from penstock.server.rpc.server_info import ServerInfo
from penstock.server.rpc.task_servicer import TaskServicer
from penstock.server.rpc.trainer_servicer import TrainerServicer
from penstock.server.security.callers import COPIES, Callers
from penstock.server.security.gate import Gate
from penstock.server.state import Parts
from penstock.server.text.renderer import Renderer
from penstock.server.turns.policy_messages import PolicyMessages
from penstock.server.turns.records import TurnRecorder
from penstock.server.turns.runner import Turn, TurnAttempt, TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.server.weights.adapter_folder import AdapterFolders
from penstock.server.weights.adapter_versions import AdapterVersions
from penstock.server.weights.held import HeldWeights
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.staging.stage_memory import SHARED_MEMORY
from penstock.server.weights.switch import InFlight, Switched, WeightSwitch
from penstock.server.weights.upload.collective import Collective
from penstock.server.weights.upload.handout import WeightHandout
from penstock.server.weights.upload.peers import Peers
from penstock.server.weights.upload.service import WeightUploads
from penstock.server.weights.versions import WeightVersions
from penstock.wire import staleness
from penstock.wire.channel import server_options
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from penstock.server.http.server import HttpServer


class AddressInUse(Exception):
    """The server cannot listen on the address."""


def bind(
    listen: str, concurrent_calls: int, gate: Gate | None = None
) -> tuple[grpc.aio.Server, int]:
    """Create a gRPC server bound to HOST:PORT, not yet serving. Returns it and the port it got.

    Without a gate it accepts calls from this host only and does not authenticate them.

    Raises AddressInUse if another process has the port or the host is not this machine's, and
    ConfigError if the server would be open to anyone.
    """
    credentials = None if gate is None else gate.credentials.server_credentials()
    if gate is None:
        check_exposure(listen, Security())
    server = grpc.aio.server(
        interceptors=() if gate is None else (gate,),
        # gRPC lets in twice as many calls. The gate refuses the second half and tells when to retry.
        options=server_options(2 * concurrent_calls),
        maximum_concurrent_rpcs=concurrent_calls if gate is None else 2 * concurrent_calls,
    )
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {listen}: {error}") from error
    return server, port


FOR_EVER_SECONDS = 1e9


class Serving:
    """One rollout server: an engine and the three services around it."""

    def __init__(
        self,
        server: grpc.aio.Server,
        engine: Engine,
        renderer: Renderer,
        config: ServeConfig,
        journal: Journal | None = None,
        gate: Gate | None = None,
        http: HttpServer | None = None,
    ) -> None:
        """`gate` is the one that the server was bound with; `http` uses it too."""
        clock = time.monotonic
        self._server = server
        self._http, self._gate = http, gate
        self.callers = Callers(config.limits.caller) if gate is None else gate.callers
        self._engine = engine
        self._renderer = renderer
        self._drain_seconds = config.drain_seconds
        self._journal = journal or MemoryJournal()
        self._await_trainer = config.weights.await_trainer
        self._stalled_seconds = config.limits.stalled_seconds
        self._starts = 0
        description = engine.description
        changed = Broadcast()
        limits = config.limits
        self.store = TrajectoryStore(limits.open_trajectories)
        self.admission = Admission(
            changed, clock, limits.groups_without_trainer, freshness=config.freshness
        )
        self.queue, self.buffer, self.budget = self._make_queues(changed, clock, config)
        self.pool = engine if isinstance(engine, PoolEngine) else None
        self.switch = WeightSwitch(
            engine, pool=self.pool, prepare_ahead=config.weights.prepare_ahead
        )
        self.turns = TurnRunner(
            engine, self.switch, renderer.decode, TurnRecorder(self._journal, self.store)
        )
        self.messages = PolicyMessages(renderer)
        self.metrics = ServerMetrics()
        self.adapters, self.weights, self.uploads = self._make_weights(config)
        self.own = OwnTrajectories(
            self.store,
            self._journal,
            self.queue.leases,
            changed,
            clock,
            config.leases.own_seconds,
        )
        self.budget.last = self.own
        self.closing = Closing(
            self.store,
            self.queue,
            self.buffer,
            self.admission,
            self.turns,
            self._journal,
            self.budget,
            self.own,
            clock,
        )
        self.opening, self.rollouts = self._make_rollouts(renderer, config)
        self.trainer = TrainerServicer(
            changed,
            self.admission,
            self.queue,
            self.buffer,
            self.store,
            self.weights,
            self.uploads.fence,
            self.turns,
            self._journal,
            self.closing.drop_in_hand,
        )
        self.tasks = TaskServicer(
            changed,
            self.queue,
            self.closing,
            self._journal,
            self.budget,
            lambda: self.switch.active_version,
            description.vocab_size,
            self.trainer.check_session,
        )
        self.info = ServerInfo(
            engine, self.switch, self.weights, self.adapters, self.store, self.buffer, self.pool
        )
        self.info.http_port = 0 if http is None else http.port
        self.parts = Parts(
            self.queue,
            self.store,
            self.buffer,
            self.admission,
            self.closing,
            self.own,
            self.trainer,
        )
        # grpcio-health-checking carries no types.
        self._health: Any = cast("Any", health).aio.HealthServicer()
        self._background: list[asyncio.Task[None]] = []
        self._wire_callbacks()

    def _make_queues(
        self, changed: Broadcast, clock: Callable[[], float], config: ServeConfig
    ) -> tuple[TaskQueue, GroupBuffer, MemoryBudget]:
        """Queue of tasks to sample and buffer of groups to train, within one memory budget."""
        limits, leases = config.limits, config.leases
        queue = TaskQueue(
            changed,
            self.admission,
            LeaseRules(leases.seconds, leases.grace_seconds, leases.max_attempts),
            clock,
            max_pending=limits.pending_tasks,
            max_evaluation_groups=limits.evaluation_groups,
        )
        buffer = GroupBuffer(changed, limits.memory_bytes // KEPT_PART)
        budget = MemoryBudget(limits.memory_bytes)
        budget.kept = buffer.kept
        store = self.store
        budget.parts = (
            lambda: store.byte_count,
            lambda: queue.byte_count,
            lambda: buffer.byte_count,
            lambda: COPIES * self.callers.unread_bytes,
        )
        self.callers.check_memory = budget.check
        queue.has_memory = budget.may_begin
        buffer.on_gone = lambda group: queue.known_tasks.leave(group.task_id)
        return queue, buffer, budget

    def _make_rollouts(
        self, renderer: Renderer, config: ServeConfig
    ) -> tuple[Opening, RolloutServicer]:
        opening = Opening(
            self._engine,
            renderer,
            self.store,
            self.queue,
            self.turns,
            self.switch,
            StreamRules(config.streaming.flush_seconds, config.streaming.interval),
            self._journal,
            self.budget,
            self.own,
        )
        rollouts = RolloutServicer(
            opening,
            renderer,
            self.messages,
            self.store,
            self.queue,
            self.turns,
            self._journal,
            self.own,
            self.closing.find_finished,
        )
        return opening, rollouts

    def _make_weights(
        self, config: ServeConfig
    ) -> tuple[AdapterVersions, WeightVersions, WeightUploads]:
        engine, description, wanted = self._engine, self._engine.description, config.weights
        stage = WeightStage(wanted.stage_folder, description.tensors, description.weight_dtype)
        adapters = AdapterVersions(
            engine,
            self.switch,
            self.turns,
            AdapterFolders(wanted.stage_folder or SHARED_MEMORY, str(description.model)),
            description.adapters,
        )
        versions = WeightVersions(
            stage,
            self.switch,
            self.turns,
            adapters,
            InFlight(wanted.in_flight),
            HeldWeights(stage, description.checkpoint, enabled=wanted.hold_active),
            max_staged=wanted.max_staged,
        )
        collective = Collective(engine, wanted.collective_seconds)
        peers = Peers(config.peers.shown(), config.peers.silent_seconds)
        uploads = WeightUploads(versions, stage, collective, description, peers)
        return adapters, versions, uploads

    def _wire_pool(self, pool: PoolEngine) -> None:
        pool.weights.open_version = self.weights.open_version
        pool.weights.may_bring_up = lambda: not self.switch.awaiting_trainer
        self.weights.on_accepted = pool.stage
        self.store.on_closed = pool.placing.closed
        observe_pool(self.metrics, pool)

    def _wire_callbacks(self) -> None:
        if self.pool is not None:
            self._wire_pool(self.pool)
        self.switch.on_health = self._publish_health
        self.turns.on_tokens = self.metrics.tokens_sampled
        self.turns.on_ended = self._turn_ended
        self.turns.on_left = self.adapters.free_idle
        self.turns.on_started = self.callers.turn_started
        self.callers.turns_in_flight = lambda: self.turns.in_flight
        self.callers.is_open = self._is_open
        self.opening.check_caller = self.callers.check_tokens
        self.callers.on_call = self.rollouts.called
        self.callers.on_group_call = self.rollouts.group_called
        self.weights.on_staged = self.metrics.weights_staged
        self.weights.on_switched = self._switched
        self.trainer.on_session = self._release_turns
        self.uploads.on_trainer_version = self.admission.advance

        def group_taken(group: BufferedGroup) -> None:
            if group.training and group.oldest_version is not None:
                self.metrics.group_taken(
                    staleness.lag(self.admission.trainer_version, group.oldest_version)
                )

        self.trainer.on_delivery = group_taken
        observe_load(
            self.metrics, self.parts, self.budget, self.callers, self.adapters, self._engine.stats
        )

    async def _turn_ended(self, turn: Turn, attempt: TurnAttempt) -> None:
        # The call may have taken long. Give the caller its full time to follow up, even if it is
        # not streaming.
        self.own.touch(turn.record)
        await self.messages.hold(turn, attempt)

    async def _switched(self, switched: Switched) -> None:
        self.metrics.weights_switched(switched.pause_seconds)
        recorded = self._journal.begin_append([weights_activated(switched.weight_version)])
        await self._release_turns()
        # Before the switch is answered. Without the record, a restarted server would sample with the
        # weights it loads and take them for the beginning of the run.
        await recorded

    async def _release_turns(self) -> None:
        """Stop holding turns if the active version is the trainer's.

        Without a session any uploaded version will do, for example one that a hub gave its engine server.
        """
        active = self.switch.active_version
        if not self.trainer.connected or self.admission.trainer_version == active:
            await self.switch.await_trainer(False)

    async def _recover(self) -> None:
        """Restore what the journal holds. Raises JournalUnreadable."""
        found = await recover_from(self._journal)
        self.parts.restore(found, self._journal)
        await self.messages.restore(self.store.records())
        self._starts = found.starts + 1
        awaiting = self._await_trainer or found.weight_version > 0
        self.admission.trainer_awaited = awaiting
        await self.switch.await_trainer(awaiting)

        # A separate variable, so that the closure does not keep the rest of `found`, which may be large.
        left_version = found.weight_version

        def state() -> Iterator[SnapshotItem]:
            # Until the trainer has published again, this is still the middle of its run.
            waits = self.switch.awaiting_trainer
            version = self.switch.active_version or (left_version if waits else 0)
            return self.parts.snapshot(self._starts, version)

        await self._journal.start(state, self.own.give_way)
        await self._journal.append([server_started(self._starts)])

    def _handlers(self) -> Mapping[str, Handler]:
        rollouts, tasks = self.rollouts, self.tasks

        def update_weights(requests: Any, call: Call) -> object:
            return self.uploads.update_weights(requests, call.write)

        handout = WeightHandout(self.weights.complete, lambda: self.uploads.arriving)

        def exchange(requests: Any, call: Call) -> object:
            return self.trainer.exchange(requests, call.write)

        return {
            "RolloutService/Generate": lambda request, call: rollouts.generate(request, call.trace),
            "RolloutService/Continue": lambda request, call: rollouts.continue_(
                request, call.trace
            ),
            "RolloutService/Abort": lambda request, _: rollouts.abort(request),
            "RolloutService/UpdateWeights": update_weights,
            "RolloutService/FetchWeights": lambda request, _: handout.fetch_weights(request),
            "RolloutService/GetServerInfo": lambda request, _: self.info.get_server_info(request),
            "RolloutService/GetTrajectory": lambda request, _: rollouts.get_trajectory(request),
            "TaskService/SubmitTasks": lambda request, _: tasks.submit_tasks(request),
            "TaskService/LeaseTasks": lambda request, _: tasks.lease_tasks(request),
            "TaskService/RenewLease": lambda request, _: tasks.renew_lease(request),
            "TaskService/CompleteTrajectory": lambda request, _: tasks.complete_trajectory(request),
            "TrainerService/Exchange": exchange,
        }

    async def start(self) -> None:
        """Recover from the journal and begin to serve. Raises JournalUnreadable and OSError."""
        await self._recover()
        handlers = service_handlers(self.callers.guard(self._handlers()), self._stalled_seconds)
        self._server.add_generic_rpc_handlers(handlers)
        cast("Any", health_pb2_grpc).add_HealthServicer_to_server(self._health, self._server)
        add_reflection(self._server)
        await self._publish_health()
        await self._server.start()
        if self._http is not None:
            await self._http.start(cast("Any", self._endpoints()))
        self._background += [
            asyncio.create_task(self.closing.give_back_expired(), name="lease clock"),
            asyncio.create_task(self.own.expire(), name="clock of callers' own trajectories"),
        ]

    def _endpoints(self) -> Starlette:
        """Build the HTTP endpoints served in addition to gRPC."""
        # These import vllm, which takes seconds, so import them only if they are served.
        from penstock.server.http.app import Endpoints
        from penstock.server.http.chat import ChatCompletions
        from penstock.server.http.messages import Messages
        from penstock.server.http.responses import Responses
        from penstock.server.http.turns import AgentTurns

        assert self._gate is not None, "HTTP requires a gate"
        turns = AgentTurns(
            self.opening,
            self.rollouts,
            self.store,
            self.queue,
            self.callers,
            self.turns,
            self.metrics,
        )
        messages = Messages()
        surfaces = {
            "chat/completions": ChatCompletions(),
            "responses": Responses(),
            "messages": messages,
        }
        return Endpoints(
            surfaces,
            turns,
            self._renderer,
            str(self._engine.description.model),
            self._gate,
            self._stalled_seconds,
            messages,
        ).application()

    def _is_open(self, trajectory_id: str) -> bool:
        record = self.store.find(trajectory_id)
        return record is not None and not record.closed

    async def failed(self) -> str:
        """Return, with the reason, when the server can no longer serve."""
        lost = asyncio.create_task(self._engine.lost())
        ended = asyncio.create_task(self._ended())
        unwritable = self._journal.failed
        try:
            await asyncio.wait(
                [lost, ended, unwritable, *self._background], return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ended.cancel()
        if ended.done():
            lost.cancel()
            return ended.result()
        if unwritable.done():
            lost.cancel()
            await self.switch.refuse(DomainError(Reason.JOURNAL_FAILED, unwritable.result()))
            return unwritable.result()
        for task in self._background:
            if task.done():
                lost.cancel()
                task.result()
        reason = await lost
        await self.switch.refuse(DomainError(Reason.ENGINE_LOST, f"the engine is lost: {reason}"))
        return f"the engine is lost: {reason}"

    async def _ended(self) -> str:
        """Return, with the reason, if gRPC itself has ended the server, which no call should cause."""
        try:
            # Without a timeout, cancelling this wait would cancel the server's termination itself.
            await self._server.wait_for_termination(FOR_EVER_SECONDS)
        except Exception as error:
            return f"the gRPC server ended: {error!r}"
        return "the gRPC server ended"

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain and stop; see the module's docstring for the order."""
        refusal = DomainError(
            Reason.DRAINING, "the server is shutting down", retry_after_seconds=5.0
        )
        self.info.draining = True
        await self._publish_health()
        self.opening.drain(refusal)
        self.tasks.drain(refusal)
        limit = self._drain_seconds if drain_seconds is None else drain_seconds
        try:
            async with asyncio.timeout(limit):
                await self.turns.wait_idle()
        except TimeoutError:
            await self.turns.abort(self.turns.in_flight)
        self.trainer.end(refusal)
        if self._http is not None:
            await self._http.stop()
        await self._server.stop(grace=2.0)
        await self.closing.settled()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._engine.close()
        await self.uploads.close()
        await self.weights.close()
        await self._journal.close()

    async def _publish_health(self) -> None:
        serving = self.switch.trusted and not (self.info.draining or self.switch.awaiting_trainer)
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in (health.OVERALL_HEALTH, *(service.full_name for service in SERVICES)):
            await self._health.set(name, status)
