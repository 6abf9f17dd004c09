"""What is under way on the server, and what it and its peers wait for: the facts that `waits` judges.

A watch looks every WATCH_SECONDS, to know how long a cause has lasted, and logs one that lasts. The
server's log, `GetServerInfo` and with it the trainer, the workers and `penstock doctor` say the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from penstock.server.core.errors import DomainError
from penstock.server.core.memory_budget import MemoryBudget
from penstock.server.engine.protocol import Engine
from penstock.server.groups.admission import Admission
from penstock.server.groups.attempts import Attempt, Group
from penstock.server.groups.buffer import GroupBuffer
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal
from penstock.server.pool.engine import PoolEngine
from penstock.server.pool.member import State
from penstock.server.rpc.trainer.session import CurrentSession
from penstock.server.rpc.waits import REPORT_SECONDS, Cause, Facts, Silent, causes
from penstock.server.turns.requests import as_duration
from penstock.server.turns.runner import TurnRunner
from penstock.server.weights.switch import WeightSwitch
from penstock.server.weights.versions import WeightVersions
from penstock.v1 import rollout_service_pb2, task_service_pb2, trajectory_pb2
from penstock.wire.messages import LeasedAttempt, LeasingAgent, Place, Wait
from penstock.wire.messages import Progress as ProgressMessage
from penstock.wire.words import ORDINARY

logger = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
LOG_SECONDS = 30.0
"""A cause that lasts for this long and is not ordinary is logged, once, and again when it is over."""
MOST_LISTED = 100
ROOM_BYTES = 16 << 10
"""The disk is full if it has no room for this much."""


@dataclass(eq=False)
class Progress:
    engine: Engine
    switch: WeightSwitch
    weights: WeightVersions
    queue: TaskQueue
    admission: Admission
    buffer: GroupBuffer
    turns: TurnRunner
    session: CurrentSession
    journal: Journal
    budget: MemoryBudget
    attempt_seconds: float
    _token_at: float | None = None
    _delivered_at: float | None = None
    _idle_at: float = field(default_factory=time.monotonic)
    """When the engine was last seen without a turn."""
    _since: dict[str, float] = field(default_factory=dict[str, float])
    """When each present cause was first seen, by name."""
    _logged: set[str] = field(default_factory=set[str])

    def sampled(self) -> None:
        """The policy wrote tokens."""
        self._token_at = time.monotonic()

    def delivered(self) -> None:
        """A group was sent to the trainer."""
        self._delivered_at = time.monotonic()

    async def watch(self) -> None:
        """Runs as long as the server."""
        while True:
            for cause in self._look():
                self._log(cause)
            await asyncio.sleep(WATCH_SECONDS)

    def waits(self) -> list[rollout_service_pb2.Wait]:
        """The causes that have lasted for a while, the most likely one first."""
        return [
            Wait(
                cause=cause.name,
                message=cause.message,
                advice=cause.advice,
                duration=as_duration(seconds),
            )
            for cause in self._look()
            if (seconds := self._seconds(cause)) >= REPORT_SECONDS
        ]

    def _look(self) -> list[Cause]:
        now = time.monotonic()
        found = causes(self.facts())
        present = {cause.name for cause in found}
        for name in self._since.keys() - present:
            if name in self._logged:
                self._logged.discard(name)
                logger.info("over after %.0f s: %s", now - self._since[name], name)
            del self._since[name]
        for name in present:
            self._since.setdefault(name, now)
        return found

    def _seconds(self, cause: Cause) -> float:
        return max(cause.seconds, time.monotonic() - self._since[cause.name])

    def _log(self, cause: Cause) -> None:
        seconds = self._seconds(cause)
        if seconds >= LOG_SECONDS and cause.name not in self._logged | ORDINARY:
            self._logged.add(cause.name)
            logger.warning(
                "%s for %.0f s: %s; %s", cause.name, seconds, cause.message, cause.advice
            )

    def facts(self) -> Facts:
        now, queue, session = time.monotonic(), self.queue, self.session.current
        version = self.switch.active_version
        in_engine = len(self.turns.sampling)
        if not in_engine:
            self._idle_at = now
        leased = self._leased()
        quietest = _quietest(leased)
        demand, evaluation_demand = self._demand()
        heard_at = self.session.left_at if session is None else session.heard_at
        contract = self.admission.contract
        return Facts(
            run=self.session.run[0],
            trainer_connected=session is not None,
            trainer_seconds=now - heard_at,
            demand=demand,
            evaluation_demand=evaluation_demand,
            buffered=self.buffer.buffered_count,
            places=self.admission.outstanding,
            place_limit=self.admission.target,
            under_way=len(queue.groups),
            may_begin=queue.may_begin(trajectory_pb2.PURPOSE_TRAIN, version),
            pending=queue.pending.count,
            waiting=sum(len(group.waiting) for group in queue.groups),
            untaken=tuple(_described(*one) for one in islice(queue.untaken(), 3)),
            agents=len(queue.holders),
            idle_agents=sum(not holder.full for holder in queue.holders),
            leased=len(leased),
            silent=None
            if quietest is None
            else Silent(quietest.trajectory_id, _agent(quietest), now - quietest.called_at),
            attempt_seconds=self.attempt_seconds,
            turns=in_engine,
            token_seconds=now - max(self._token_at or 0.0, self._idle_at),
            trainer_version=self.admission.trainer_version,
            active_version=version,
            staged=tuple(self.weights.staged_versions),
            switch=self.switch.phase.value,
            switch_seconds=now - self.switch.phase_since,
            awaits_trainer=self.switch.awaiting_trainer,
            evaluations=sum(g.purpose == trajectory_pb2.PURPOSE_EVAL for g in queue.groups),
            engines=self._engines(),
            engines_serving=self._serving(),
            disk_problem=self._disk_problem(),
            memory_full=not self.budget.may_begin(),
            drops=self.buffer.drops_since_trained,
            groups_per_step=1 if contract is None else contract.groups_per_step,
        )

    def _engines(self) -> dict[str, str]:
        if isinstance(self.engine, PoolEngine):
            members = self.engine.roster.members
            out = [m for m in members if m.state not in (State.SERVING, State.SWITCHING)]
            return {m.address: m.setback or m.problem for m in out}
        return {} if self.switch.trusted else {"": f"cannot be used: {self.switch.problem}"}

    def _serving(self) -> int:
        if isinstance(self.engine, PoolEngine):
            return len(self.engine.roster.members) - len(self._engines())
        return int(self.switch.trusted)

    def _disk_problem(self) -> str:
        try:
            self.journal.check_room(ROOM_BYTES)
        except DomainError as error:
            return error.message
        return ""

    def message(self) -> rollout_service_pb2.Progress:
        now, queue = time.monotonic(), self.queue
        demand, evaluation_demand = self._demand()
        progress = ProgressMessage(
            trainer_connected=self.session.connected,
            trainer_weight_version=self.admission.trainer_version,
            demanded_group_count=demand,
            demanded_evaluation_group_count=evaluation_demand,
            place_limit=self.admission.target,
            places=islice(chain(self._running(now), self._completed()), MOST_LISTED),
            place_count=len(queue.groups) + self.buffer.buffered_count,
            pending_task_count=queue.pending.count,
            agents=[
                LeasingAgent(
                    agent_id=holder.agent_id,
                    concurrency=holder.concurrency,
                    leased_count=len(holder.held),
                    whole_groups=holder.whole_groups,
                )
                for holder in islice(queue.holders, MOST_LISTED)
            ],
            agent_count=len(queue.holders),
            switch_state=self.switch.phase.value,
            since_switch_state=as_duration(now - self.switch.phase_since),
            drops=self.buffer.drops_since_trained,
        )
        leased = self._leased()
        if leased:
            oldest = min(leased, key=lambda attempt: attempt.leased_at)
            progress.oldest_lease.CopyFrom(_leased_attempt(oldest, now))
        if (quietest := _quietest(leased)) is not None:
            progress.most_silent_lease.CopyFrom(_leased_attempt(quietest, now))
        if self._token_at is not None:
            progress.since_token.CopyFrom(as_duration(now - self._token_at))
        if self._delivered_at is not None:
            progress.since_delivery.CopyFrom(as_duration(now - self._delivered_at))
        return progress

    def _leased(self) -> list[Attempt]:
        return [a for group in self.queue.groups for a in group.attempts if a.state.leased]

    def _demand(self) -> tuple[int, int]:
        """Groups for training and for evaluation that the trainer has asked for."""
        session = self.session.current
        return (0, 0) if session is None else (session.credit, session.evaluation_credit)

    def _running(self, now: float) -> Iterator[rollout_service_pb2.Place]:
        for group in self.queue.groups:
            leased = sum(attempt.state.leased for attempt in group.attempts)
            ended = sum(attempt.state.final for attempt in group.attempts)
            yield Place(
                group_id=group.group_id,
                task_id=_task_id(group),
                purpose=group.purpose,
                age=as_duration(now - group.begun_at),
                waiting_count=len(group.attempts) - leased - ended,
                leased_count=leased,
                ended_count=ended,
            )

    def _completed(self) -> Iterator[rollout_service_pb2.Place]:
        for group in self.buffer.buffered:
            yield Place(
                group_id=group.group_id,
                task_id=group.task_id,
                purpose=group.purpose,
                ended_count=len(group.trajectory_ids),
            )


def _quietest(leased: Sequence[Attempt]) -> Attempt | None:
    """The attempt whose agent has been silent for the longest."""
    quiet = [attempt for attempt in leased if not attempt.open_calls]
    return min(quiet, key=lambda attempt: attempt.called_at, default=None)


def _leased_attempt(attempt: Attempt, now: float) -> rollout_service_pb2.LeasedAttempt:
    return LeasedAttempt(
        trajectory_id=attempt.trajectory_id,
        group_id=attempt.group.group_id,
        agent_id=_agent(attempt),
        age=as_duration(now - attempt.leased_at),
        silence=as_duration(0.0 if attempt.open_calls else now - attempt.called_at),
    )


def _agent(attempt: Attempt) -> str:
    return "" if attempt.holder is None else attempt.holder.agent_id


def _task_id(group: Group) -> str:
    return "" if group.task is None else group.task.task_id


def _described(task: task_service_pb2.Task, count: int) -> str:
    race = ""
    if 0 < task.finish_count < task.group_size:
        race = f", of which the first {task.finish_count} complete it"
    return f"{count} tasks like {task.task_id}, a group of {max(1, task.group_size)}{race}"
