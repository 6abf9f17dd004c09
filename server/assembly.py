"""The assembled server: what each part is made of.

`routes` says which part serves what, and `lifecycle` starts and stops it all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.server.config.settings import ServeConfig
from penstock.server.core.aio import Broadcast
from penstock.server.core.memory_budget import KEPT_PART, MemoryBudget
from penstock.server.core.telemetry import ServerMetrics
from penstock.server.engine.protocol import LocalEngine
from penstock.server.groups.admission import Admission
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.memory import MemoryJournal
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import weights_activated
from penstock.server.pool.engine import PoolEngine
from penstock.server.rollouts.buffering import CompletedGroups
from penstock.server.rollouts.complete import Closing
from penstock.server.rollouts.start import Opening
from penstock.server.rollouts.unleased import OwnTrajectories
from penstock.server.rpc.lease_lines import LeaseLines
from penstock.server.rpc.leases import CallLeases
from penstock.server.rpc.progress import Progress
from penstock.server.rpc.rollout_servicer import RolloutServicer
from penstock.server.rpc.server_info import ServerInfo
from penstock.server.rpc.standard import Health
from penstock.server.rpc.task_servicer import TaskServicer
from penstock.server.rpc.trainer.delivery import Deliverer, Receipts
from penstock.server.rpc.trainer.drops import Drops
from penstock.server.rpc.trainer.servicer import Switches, TrainerServicer
from penstock.server.rpc.trainer.session import CurrentSession
from penstock.server.rpc.turn_events import TurnEvents
from penstock.server.security.callers import COPIES, Callers
from penstock.server.security.gate import Gate
from penstock.server.security.ownership import Ownership
from penstock.server.text.renderer import Renderer
from penstock.server.turns.policy_messages import PolicyMessages
from penstock.server.turns.prompts import Prompts
from penstock.server.turns.records import TurnRecorder
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.server.turns.trajectory import Turn
from penstock.server.turns.turn import TurnAttempt
from penstock.server.weights.adapter_folder import AdapterFolders
from penstock.server.weights.adapter_versions import AdapterVersions
from penstock.server.weights.engine_switch import EngineSwitch
from penstock.server.weights.held import HeldWeights
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.staging.stage_memory import SHARED_MEMORY
from penstock.server.weights.switch import InFlight, Switched, Switcher, WeightSwitch
from penstock.server.weights.upload.collective import Collective
from penstock.server.weights.upload.peers import PeerFetcher
from penstock.server.weights.upload.service import UploadService
from penstock.server.weights.versions import WeightVersions
from penstock.wire import staleness

if TYPE_CHECKING:
    from penstock.server.http.server import HttpServer


@dataclass(frozen=True, eq=False)
class Serving:
    """Each property makes its part once, from the parts above it. Later calls may use any part."""

    engine: LocalEngine | PoolEngine
    renderer: Renderer
    config: ServeConfig
    journal: Journal = field(default_factory=MemoryJournal)
    gate: Gate | None = None
    http: HttpServer | None = None
    changed: Broadcast = field(default_factory=Broadcast, init=False)
    metrics: ServerMetrics = field(default_factory=ServerMetrics, init=False)

    @cached_property
    def pool(self) -> PoolEngine | None:
        return self.engine if isinstance(self.engine, PoolEngine) else None

    @cached_property
    def callers(self) -> Callers:
        return Callers(self.config.limits.caller) if self.gate is None else self.gate.callers

    # Turns

    @cached_property
    def store(self) -> TrajectoryStore:
        most = self.config.limits.open_trajectories
        if self.pool is None:
            return TrajectoryStore(most)
        return TrajectoryStore(most, on_closed=self.pool.placing.closed)

    @cached_property
    def switch(self) -> WeightSwitch:
        return WeightSwitch(on_health=lambda: self.health.publish())

    @cached_property
    def turns(self) -> TurnRunner:
        return TurnRunner(
            self.engine,
            self.switch,
            self.renderer.decode,
            TurnRecorder(self.journal, self.store),
            on_tokens=self._tokens_sampled,
            on_started=lambda turn: self.ownership.turn_started(turn),
            on_ended=self._turn_ended,
            on_left=self._turn_left,
        )

    @cached_property
    def messages(self) -> PolicyMessages:
        return PolicyMessages(self.renderer)

    # Groups

    @cached_property
    def admission(self) -> Admission:
        return Admission(
            self.changed,
            time.monotonic,
            self.config.limits.groups_without_trainer,
            freshness=self.config.freshness,
        )

    @cached_property
    def queue(self) -> TaskQueue:
        limits = self.config.limits
        return TaskQueue(
            self.changed,
            self.admission,
            self.config.leases,
            time.monotonic,
            max_pending=limits.pending_tasks,
            max_evaluation_groups=limits.evaluation_groups,
            has_memory=lambda: self.budget.may_begin(),
            buffered_evaluations=lambda: self.buffer.buffered_evaluation_count,
        )

    @cached_property
    def buffer(self) -> GroupBuffer:
        return GroupBuffer(
            self.changed,
            self.journal,
            lambda group: self.queue.pending.known.leave(group.task_id),
            self.config.limits.memory_bytes // KEPT_PART,
        )

    @cached_property
    def budget(self) -> MemoryBudget:
        parts = (
            lambda: self.store.byte_count,
            lambda: self.queue.byte_count,
            lambda: self.buffer.byte_count,
            lambda: COPIES * self.callers.unread_bytes,
        )
        return MemoryBudget(self.config.limits.memory_bytes, parts, self.buffer.kept, self.own)

    # Weights

    @cached_property
    def stage(self) -> WeightStage:
        description = self.engine.description
        folder = self.config.weights.stage_folder
        return WeightStage(folder, description.tensors, description.weight_dtype)

    @cached_property
    def held(self) -> HeldWeights:
        checkpoint = self.engine.description.checkpoint
        return HeldWeights(self.stage, checkpoint, enabled=self.config.weights.hold_active)

    @cached_property
    def adapters(self) -> AdapterVersions | None:
        """None on a hub, whose engines have their own."""
        if isinstance(self.engine, PoolEngine):
            return None
        description = self.engine.description
        folder = self.config.weights.stage_folder or SHARED_MEMORY
        return AdapterVersions(
            self.engine,
            self.switch,
            self.turns,
            self.stage,
            AdapterFolders(folder, str(description.model)),
            description.adapters,
        )

    @cached_property
    def engine_switch(self) -> EngineSwitch | None:
        """None on a hub."""
        if isinstance(self.engine, PoolEngine) or self.adapters is None:
            return None
        return EngineSwitch(
            self.engine,
            self.switch,
            self.turns,
            self.adapters,
            prepare_ahead=self.config.weights.prepare_ahead,
        )

    @cached_property
    def switcher(self) -> Switcher:
        if isinstance(self.engine, PoolEngine):
            return self.engine.make_weights(self.switch, self.turns, self.held.open)
        assert self.engine_switch is not None
        return self.engine_switch

    @cached_property
    def weights(self) -> WeightVersions:
        section = self.config.weights
        return WeightVersions(
            self.stage,
            self.held,
            self.switch,
            self.switcher,
            self.metrics.weights_staged,
            self._switched,
            in_flight=InFlight(section.in_flight),
            max_staged=section.max_staged,
        )

    @cached_property
    def uploads(self) -> UploadService:
        peers = self.config.peers
        return UploadService(
            self.weights,
            self.stage,
            Collective(self.engine_switch, self.config.weights.collective_seconds),
            self.engine.description,
            PeerFetcher(peers.shown(), peers.silent_seconds),
            self.admission.advance,
            lambda epoch: self.session.check_upload(epoch),
        )

    # Rollouts

    @cached_property
    def own(self) -> OwnTrajectories:
        return OwnTrajectories(
            self.store,
            self.journal,
            self.queue.leases,
            self.changed,
            time.monotonic,
            self.config.leases.own_seconds,
        )

    @cached_property
    def completed(self) -> CompletedGroups:
        return CompletedGroups(
            self.store, self.queue, self.buffer, self.admission, self.journal, self.budget
        )

    @cached_property
    def closing(self) -> Closing:
        return Closing(
            self.store,
            self.queue,
            self.completed,
            self.turns,
            self.journal,
            self.budget,
            self.own,
            time.monotonic,
        )

    @cached_property
    def opening(self) -> Opening:
        description = self.engine.description
        return Opening(
            description,
            self.config.streaming,
            Prompts(self.renderer, description.vocab_size),
            self.store,
            self.queue,
            self.turns,
            self.switch,
            self.journal,
            self.own,
            self._check_room,
        )

    # Services

    @cached_property
    def lease_lines(self) -> LeaseLines:
        return LeaseLines(self.queue, self.changed, lambda: self.switch.active_version)

    @cached_property
    def leases(self) -> CallLeases:
        return CallLeases(self.queue, self.store, self.own)

    @cached_property
    def ownership(self) -> Ownership:
        return Ownership(self.callers, self.leases, self.store, self.turns)

    @cached_property
    def events(self) -> TurnEvents:
        return TurnEvents(
            self.renderer,
            self.messages,
            self.store,
            self.turns,
            self.journal,
            self.own,
            self.leases,
        )

    @cached_property
    def rollouts(self) -> RolloutServicer:
        return RolloutServicer(
            self.opening,
            self.events,
            self.store,
            self.queue,
            self.turns,
            self.completed.find_trajectory,
        )

    @cached_property
    def session(self) -> CurrentSession:
        return CurrentSession(self.uploads.fence)

    @cached_property
    def tasks(self) -> TaskServicer:
        return TaskServicer(
            self.queue,
            self.lease_lines,
            self.closing,
            self.journal,
            self.budget,
            self.engine.description.vocab_size,
            self.session.check,
        )

    @cached_property
    def drops(self) -> Drops:
        return Drops(
            self.admission,
            self.queue,
            self.buffer,
            self.store,
            self.turns,
            self.completed.drop_unbuffered,
        )

    @cached_property
    def trainer(self) -> TrainerServicer:
        drops = self.drops
        return TrainerServicer(
            self.changed,
            self.journal,
            self.session,
            Deliverer(
                self.changed, self.admission, self.buffer, self.journal, drops, self._group_taken
            ),
            Receipts(self.admission, self.buffer, self.journal),
            drops,
            Switches(self.changed, self.admission, self.weights),
            self._release_turns,
        )

    @cached_property
    def health(self) -> Health:
        return Health(lambda: self.switch.trusted and not self.switch.awaiting_trainer)

    @cached_property
    def progress(self) -> Progress:
        return Progress(
            self.engine,
            self.switch,
            self.weights,
            self.queue,
            self.admission,
            self.buffer,
            self.turns,
            self.session,
            self.journal,
            self.budget,
            self.config.leases.attempt_seconds,
        )

    @cached_property
    def info(self) -> ServerInfo:
        return ServerInfo(
            self.engine,
            self.switch,
            self.weights,
            self.switcher,
            self.store,
            self.buffer,
            self.health,
            self.progress,
            0 if self.http is None else self.http.port,
        )

    # What parts do to others

    def _check_room(self, byte_count: int) -> None:
        self.callers.check_tokens()
        self.budget.check(byte_count)
        self.journal.check_room(byte_count)

    async def _turn_ended(self, turn: Turn, attempt: TurnAttempt) -> None:
        # The call may have taken long. Give the caller its full time to follow up, even if it is
        # not streaming.
        self.own.touch(turn.record)
        await self.messages.hold(turn, attempt)

    def _turn_left(self) -> None:
        if self.adapters is not None:
            self.adapters.free_idle()

    async def _switched(self, switched: Switched) -> None:
        self.metrics.weights_switched(switched.pause_seconds)
        recorded = self.journal.append([weights_activated(switched.weight_version)])
        self._release_turns()
        # Before the switch is answered. Without the record, a restarted server would sample with the
        # weights it loads and take them for the beginning of the run.
        await recorded

    def _release_turns(self) -> None:
        """Without a session any uploaded version counts as the trainer's, such as one from a hub."""
        active = self.switch.active_version
        if not self.session.connected or self.admission.trainer_version == active:
            self.switch.await_trainer(False)

    def _tokens_sampled(self, count: int, weight_version: int) -> None:
        self.metrics.tokens_sampled(count, weight_version)
        self.progress.sampled()

    def _group_taken(self, group: BufferedGroup) -> None:
        self.progress.delivered()
        if group.training and group.oldest_version is not None:
            self.metrics.group_taken(
                staleness.lag(self.admission.trainer_version, group.oldest_version)
            )
