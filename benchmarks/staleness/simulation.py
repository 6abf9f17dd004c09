"""A discrete-event simulation of rollouts, a trainer and failures around the real staleness gate.

The virtual clock jumps from event to event on a heap; time does not advance in fixed steps. `Simulation`
does the server's work: it admits groups while the gate allows it, reports finished groups, and delivers the
groups that the gate selects. A token stands for a second of a sibling's sampling. Each is stamped with the
weight version that was active then, so lag and masking are measured per token, as in the server.

`staleness.gate` prints figures from it; `tests/server/groups/test_staleness_gate.py` adds failures,
restarts and an observer that checks each decision.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from penstock.server.groups.staleness_gate import Selection, StalenessContract, StalenessGate
from penstock.wire.staleness import lag


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a group, with the times at which siblings sample, in seconds after admission."""

    spans: tuple[tuple[float, float], ...]
    """Start and end of each sibling; empty for a group without tokens."""
    seconds: float
    """Time at which all siblings are complete."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load and timing of the simulated system."""

    attempt: Callable[[random.Random], Attempt]
    """Draws one attempt at a group."""
    step_seconds: float = 60.0
    """Time from a complete batch to the trainer's next version."""
    switch_seconds: float = 1.0
    """Time from the trainer's next version to sampling with it."""
    agents: int | None = None
    """Maximum number of groups that agents work on at a time; None for no limit."""
    failure_rate: float = 0.0
    """Share of the attempts that fail at some point and are repeated as a new group."""
    restart_rate: float = 0.0
    """Probability per step that the trainer dies during it."""
    checkpoint_steps: int = 1
    """Steps from one checkpoint to the next."""
    restart_seconds: float = 120.0
    """Time from the trainer's death to its next Hello."""
    weights_fall_back: bool = False
    """Whether a restarted trainer's older weights become active again."""


@dataclass(slots=True)
class Group:
    """A group and its progress."""

    group_id: str
    admitted_at: float
    admission_version: int
    attempt: Attempt
    tokens: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds of sampling by weight version; known once finished."""

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest token; None without tokens."""
        return min(self.tokens, default=None)


@dataclass(slots=True)
class Tally:
    """Results of a run."""

    steps: int = 0
    seconds: float = 0.0
    idle_seconds: float = 0.0
    trained_tokens: float = 0.0
    masked_tokens: float = 0.0
    lag_sum: float = 0.0
    """Sum of the lag of trained tokens."""
    ripe_lag_sum: float = 0.0
    """Sum of the lag that trained tokens had when their group finished, which no controller can avoid."""
    oldest_trained: int = 0
    """Largest lag of a trained token."""
    discarded: int = 0
    failed: int = 0
    restarts: int = 0
    outstanding_sum: int = 0

    @property
    def idle(self) -> float:
        """Share of the time that the trainer waited for groups."""
        return self.idle_seconds / self.seconds

    @property
    def masked(self) -> float:
        """Share of the delivered tokens that were too old to train."""
        return self.masked_tokens / (self.masked_tokens + self.trained_tokens)

    @property
    def mean_lag(self) -> float:
        """Mean lag of trained tokens."""
        return self.lag_sum / self.trained_tokens

    @property
    def ripe_lag(self) -> float:
        """Mean lag of trained tokens, had each group been delivered when it finished."""
        return self.ripe_lag_sum / self.trained_tokens

    @property
    def outstanding(self) -> float:
        """Mean number of outstanding groups at the trainer's steps."""
        return self.outstanding_sum / self.steps


class Observer(Protocol):
    """Observes each decision of the gate, together with the state of the simulation."""

    def admitted(self, simulation: Simulation, group: Group) -> None:
        """A group was admitted."""
        ...

    def selected(self, simulation: Simulation, selection: Selection) -> None:
        """The gate selected groups, possibly none. The simulation's credit is the remaining demand."""
        ...

    def restarted(self, simulation: Simulation, restored: list[Group]) -> None:
        """The trainer restarted with an older version; `restored` will be delivered again."""
        ...


class _Event(Enum):
    FINISH = auto()
    FAIL = auto()
    STEP = auto()
    SWITCH = auto()
    DEATH = auto()
    HELLO = auto()


class Stuck(AssertionError):
    """No events are left, but the trainer has not made all of its steps."""


class Simulation:
    """One run, which `run` simulates to its end."""

    def __init__(
        self,
        contract: StalenessContract,
        load: Load,
        seed: int,
        *,
        freshness: bool = True,
        warmup_steps: int = 0,
        demand: Callable[[random.Random, int], int] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.contract = contract
        self.gate = StalenessGate(contract, freshness=freshness)
        self.tally = Tally()
        self.now = 0.0
        self.version = 0
        self.active_version = 0
        self.credit = 0
        self.batch: list[Group] = []
        self.running: dict[str, Group] = {}
        self.finished: dict[str, Group] = {}
        self._load = load
        self._random = random.Random(seed)
        self._warmup_steps = warmup_steps
        self._demand = demand
        self._observer = observer
        self._events: list[tuple[float, int, _Event, int, str]] = []
        self._sequence = 0
        self._epoch = 0
        self._gathering_since: float | None = None
        self._waited = 0.0
        self._measured_from = 0.0
        self._switch_times = [0.0]
        self._switch_versions = [0]
        self._trained: dict[int, list[Group]] = {}
        self._checkpoint = 0
        self._steps_made = 0

    def run(self, steps: int) -> Tally:
        """Simulates until the trainer has made `steps` optimizer steps after the warm-up."""
        self.gate.advance(0, 0.0)
        self._gather()
        made = steps + self._warmup_steps
        while self._steps_made < made:
            if not self._events:
                raise Stuck(f"version {self.version}, {self.gate.outstanding} outstanding")
            self.now, _, event, epoch, group_id = heapq.heappop(self._events)
            self._happen(event, epoch, group_id)
        self.tally.seconds = self.now - self._measured_from
        return self.tally

    def _at(self, seconds: float, event: _Event, group_id: str = "") -> None:
        self._sequence += 1
        heapq.heappush(
            self._events, (self.now + seconds, self._sequence, event, self._epoch, group_id)
        )

    def _happen(self, event: _Event, epoch: int, group_id: str) -> None:
        if event is _Event.FINISH:
            self._finish(group_id)
        elif event is _Event.FAIL:
            del self.running[group_id]
            self.gate.release(group_id)
            self.tally.failed += 1
            self._serve()
        elif epoch != self._epoch:
            return  # An event of a trainer that has died since.
        elif event is _Event.STEP:
            self._step()
        elif event is _Event.SWITCH:
            self._switch()
        elif event is _Event.DEATH:
            self._die()
        else:
            self._come_back()

    # The server's part.

    def _serve(self) -> None:
        """Does the server's work after every change: deliver, then admit, until nothing changes."""
        self._deliver()
        while self._has_agent() and self.gate.may_admit(self.active_version):
            self._admit()

    def _has_agent(self) -> bool:
        return self._load.agents is None or len(self.running) < self._load.agents

    def _admit(self) -> None:
        self._sequence += 1
        attempt = self._load.attempt(self._random)
        group = Group(f"g{self._sequence}", self.now, self.active_version, attempt)
        self.gate.admit(group.group_id, self.active_version)
        self.running[group.group_id] = group
        if self._random.random() < self._load.failure_rate:
            self._at(self._random.random() * attempt.seconds, _Event.FAIL, group.group_id)
        else:
            self._at(attempt.seconds, _Event.FINISH, group.group_id)
        if self._observer:
            self._observer.admitted(self, group)

    def _finish(self, group_id: str) -> None:
        group = self.running.pop(group_id)
        group.tokens = self._stamp(group)
        self.finished[group_id] = group
        self.gate.complete(group_id, group.oldest_version, self.now)
        self._serve()

    def _stamp(self, group: Group) -> dict[int, float]:
        tokens: dict[int, float] = {}
        times, versions = self._switch_times, self._switch_versions
        first = bisect_right(times, group.admitted_at) - 1
        for begin, end in group.attempt.spans:
            begin, end = group.admitted_at + begin, group.admitted_at + end
            for i in range(first, len(times)):
                if times[i] >= end:
                    break
                until = times[i + 1] if i + 1 < len(times) else end
                seconds = min(end, until) - max(begin, times[i])
                if seconds > 0.0:
                    tokens[versions[i]] = tokens.get(versions[i], 0.0) + seconds
        return tokens

    def _deliver(self) -> None:
        selection = self.gate.select(self.credit, self.now)
        self.credit -= len(selection.delivered)
        for group_id in selection.late:
            del self.finished[group_id]
            self.tally.discarded += 1
        self.batch += [self.finished.pop(group_id) for group_id in selection.delivered]
        if self._observer:
            self._observer.selected(self, selection)
        if selection.delivered and self._gathering_since is not None:
            self._ask()

    # The trainer's part.

    def _gather(self) -> None:
        self._gathering_since = self.now
        if self._random.random() < self._load.restart_rate:
            self._at(self._random.random() * 2 * self._load.step_seconds, _Event.DEATH)
        self._ask()
        self._serve()

    def _ask(self) -> None:
        """Demands the groups missing in the batch, or fewer, or more; trains once it is complete."""
        missing = self.contract.groups_per_step - len(self.batch)
        if missing <= 0:
            assert self._gathering_since is not None
            self._waited = self.now - self._gathering_since
            self._gathering_since = None
            self._at(self._load.step_seconds, _Event.STEP)
        elif not self.credit:
            self.credit = self._demand(self._random, missing) if self._demand else missing
            self._deliver()

    def _step(self) -> None:
        delivered, self.batch = self.batch, []
        batch = delivered[: self.contract.groups_per_step]
        self.batch = delivered[self.contract.groups_per_step :]
        self._count(batch)
        self.version += 1
        self._steps_made += 1
        self._trained[self.version] = batch
        if self.version % self._load.checkpoint_steps == 0:
            self._checkpoint = self.version
            self._trained.clear()
        self.gate.advance(self.version, self.now)
        self._at(self._load.switch_seconds, _Event.SWITCH)
        self._gather()

    def _count(self, batch: list[Group]) -> None:
        if self._steps_made < self._warmup_steps:
            self._measured_from = self.now
            return
        tally = self.tally
        tally.steps += 1
        tally.idle_seconds += self._waited
        tally.outstanding_sum += self.gate.outstanding
        for group in batch:
            newest = max(group.tokens, default=0)
            for version, tokens in group.tokens.items():
                behind = lag(self.version, version)
                if behind > self.contract.max_lag:
                    tally.masked_tokens += tokens
                else:
                    tally.trained_tokens += tokens
                    tally.oldest_trained = max(tally.oldest_trained, behind)
                    tally.lag_sum += behind * tokens
                    tally.ripe_lag_sum += lag(newest, version) * tokens

    def _switch(self) -> None:
        # An older version becomes active only if the load makes weights fall back after a restart.
        if self.version > self.active_version or self._load.weights_fall_back:
            self.active_version = self.version
            self._switch_times.append(self.now)
            self._switch_versions.append(self.active_version)
        self._serve()

    def _die(self) -> None:
        self._epoch += 1
        self.credit = 0
        self._gathering_since = None
        self.tally.restarts += 1
        self._at(self._load.restart_seconds, _Event.HELLO)

    def _come_back(self) -> None:
        self.version = self._checkpoint
        restored = [group for groups in self._trained.values() for group in groups] + self.batch
        self._trained.clear()
        self.batch = []
        self.gate.advance(self.version, self.now)
        for group in restored:
            self.gate.restore(group.group_id, group.oldest_version)
            self.finished[group.group_id] = group
        if self._observer:
            self._observer.restarted(self, restored)
        self._at(self._load.switch_seconds, _Event.SWITCH)
        self._gather()
