"""A hub, its engines, agents and a trainer on a virtual clock, around the server's own policy code.

All decisions are made by the server's code: `StalenessGate` with its `FreshnessController`, the placing and
the limits of `pool`, and `lag`. This module adds the times at which the server calls them. It mirrors:

    lease      task_servicer.lease_tasks, task_queue.lease: waiting attempts first, otherwise a new group,
               which the gate admits under the pool's active version; checked after every change
    turn       turns, client.trajectory: the context grows by the tool's answer
    complete   rollouts.complete: the last sibling finishes the group, with the version of its oldest token
    deliver    rpc.trainer.delivery: the gate selects after every change, even without credit
    switch     rpc.trainer.servicer: the gate advances when the trainer requests the switch,
               before the engines switch
    step       trainer.loop: gather, train, wait for the previous switch, publish, switch, demand

Each token carries the version of the engine that sampled it. Its lag is computed when its group's step is
made, from the version that the trainer holds while it gathers.

The hub is busy with each turn for a while, one after another. Failures, expiring leases, evaluation and the
journal are not simulated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulation.engine import SimulatedEngine, Turn
from benchmarks.simulation.pool import Clock, SimulatedPool
from benchmarks.simulation.setup import Setup, Tally, TurnPlan

from penstock.server.groups.staleness_gate import LatePolicy, StalenessGate
from penstock.wire.staleness import lag


@dataclass(slots=True, eq=False)
class Group:
    """A group and its progress."""

    group_id: str
    task: int
    open_count: int
    """Number of siblings that are not complete."""
    homes: set[tuple[SimulatedEngine, int]] = field(
        default_factory=set["tuple[SimulatedEngine, int]"]
    )
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    """Policy tokens by weight version."""


@dataclass(slots=True, eq=False)
class Attempt:
    """The attempt at one sample_index of a group."""

    group: Group
    trajectory_id: str
    plan: tuple[TurnPlan, ...]
    turn: int = 0
    """Index of the next turn."""
    context: int = 0
    asked_at: float = 0.0
    """When its last turn started."""
    home: tuple[SimulatedEngine, int] | None = None
    """Engine and version that computed its last turn."""


class Stuck(AssertionError):
    """No events are left, but the trainer has not made all of its steps."""


class Simulation:
    """One run. `play` simulates it and needs a running event loop."""

    def __init__(
        self,
        setup: Setup,
        seed: int,
        on_trained: Callable[[Group, dict[int, int]], None] = lambda group, lags: None,
    ) -> None:
        """`on_trained` is called with each group of a step and its tokens by lag."""
        self.setup = setup
        self.clock = Clock()
        self.gate = StalenessGate(setup.contract, freshness=setup.freshness)
        self.pool = SimulatedPool(setup, self.clock, seed, self._sampled)
        self.version = 0
        """Version that the trainer holds."""
        self.credit = 0
        self.batch: list[Group] = []
        """Delivered and not trained."""
        self.finished: dict[str, Group] = {}
        self.admitted_count = self.trained_count = self.discarded_count = 0
        """Total numbers of groups."""
        self.tally = Tally(setup.contract.max_lag, setup.engines)
        self._on_trained = on_trained
        self._seed = seed
        self._requeued: deque[int] = deque()
        self._task_count = 0
        self._unleased: deque[Attempt] = deque()
        self._working = 0
        self._hub_free = 0.0
        self._gathering_since: float | None = None
        self._waited = 0.0
        self._switching = self._publish_waits = False
        self._steps_made = 0
        self._counted_from = 0.0

    def play(self, steps: int, warmup: int = 0) -> Tally:
        """Simulates `warmup` steps, which are not counted, and then `steps` counted ones."""
        self.gate.advance(0, 0.0)
        self.pool.look()
        self._demand()
        try:
            self._play_until(warmup)
            self._begin_counting()
            self._play_until(warmup + steps)
            self._end_counting()
        finally:
            self.pool.close()
        return self.tally

    def _play_until(self, steps: int) -> None:
        # Polls of the engines never end, so a stuck run would still have events forever.
        idle_since = self.clock.now
        while self._steps_made < steps:
            made, turns = self._steps_made, self.tally.turns
            self.clock.tick()
            if (made, turns) != (self._steps_made, self.tally.turns):
                idle_since = self.clock.now
            elif self.clock.now > idle_since + self.setup.stuck_seconds:
                raise Stuck(f"version {self.version}, {self.gate.outstanding} outstanding")

    # Agents and the task queue

    def _lease(self) -> None:
        """Leases waiting attempts, or those of a newly admitted group, while an agent is free."""
        agents = self.setup.agents
        while agents is None or self._working < agents:
            if not self._unleased:
                if not self.gate.may_admit(self.pool.active_version):
                    return
                self._begin_group()
            self._working += 1
            self.clock.after(self.setup.attempt_seconds, self._ask, self._unleased.popleft())

    def _begin_group(self) -> None:
        if self._requeued:
            task = self._requeued.popleft()
        else:
            task, self._task_count = self._task_count, self._task_count + 1
        workload = self.setup.workload
        group = Group(f"g{self.admitted_count}", task, workload.siblings)
        self.admitted_count += 1
        self.gate.admit(group.group_id, self.pool.active_version)
        for index in range(workload.siblings):
            plan = workload.plan(self._seed, task, index)
            self._unleased.append(Attempt(group, f"{group.group_id}-{index}", plan))

    def _ask(self, attempt: Attempt) -> None:
        """The agent starts the attempt's next turn."""
        planned = attempt.plan[attempt.turn]
        attempt.asked_at = self.clock.now
        turn = Turn(
            attempt,
            f"{attempt.trajectory_id}/{attempt.turn}",
            planned.token_count,
            context=attempt.context + planned.observation_tokens,
            prompt=attempt.plan[0].observation_tokens,
            cached=attempt.context,
            last_home=attempt.home,
            group_homes=attempt.group.homes,
        )
        self._hub_free = max(self.clock.now, self._hub_free) + self.setup.hub_seconds
        self.clock.at(self._hub_free, self._place, turn)

    def _place(self, turn: Turn) -> None:
        attempt: Attempt = turn.owner
        self.pool.place(turn, attempt.trajectory_id, attempt.group.group_id)

    def _sampled(self, turn: Turn) -> None:
        """An engine has ended a turn; the agent receives it a little later."""
        assert turn.home is not None
        attempt: Attempt = turn.owner
        tokens = attempt.group.tokens
        for version, count in turn.home[0].versions_of(turn):
            tokens[version] = tokens.get(version, 0) + count
        attempt.context = turn.context + turn.token_count
        attempt.home = turn.home
        self.tally.turns += 1
        self.tally.waited_seconds += (
            self.clock.now + self.setup.times.turn_seconds - attempt.asked_at
        )
        self.clock.after(self.setup.times.turn_seconds, self._heard, attempt)

    def _heard(self, attempt: Attempt) -> None:
        tool_seconds = attempt.plan[attempt.turn].tool_seconds
        attempt.turn += 1
        if attempt.turn < len(attempt.plan):
            self.clock.after(tool_seconds, self._ask, attempt)
            return
        self.pool.closed(attempt.trajectory_id)
        group = attempt.group
        self._working -= 1
        group.open_count -= 1
        if not group.open_count:
            self.finished[group.group_id] = group
            self.gate.complete(group.group_id, min(group.tokens, default=None), self.clock.now)
            self._deliver()
        self._lease()

    # The gate and the trainer

    def _deliver(self) -> None:
        selection = self.gate.select(self.credit, self.clock.now)
        self.credit -= len(selection.delivered)
        for group_id in selection.late:
            late = self.finished.pop(group_id)
            self.discarded_count += 1
            self.tally.discarded += 1
            if self.setup.contract.late_policy is LatePolicy.REQUEUE:
                self._requeued.append(late.task)
        self.batch += [self.finished.pop(group_id) for group_id in selection.delivered]
        whole = len(self.batch) == self.setup.contract.groups_per_step
        if whole and self._gathering_since is not None:
            self._waited = self.clock.now - self._gathering_since
            self._gathering_since = None
            times = self.setup.trainer
            tokens = sum(sum(group.tokens.values()) for group in self.batch)
            self.clock.after(times.step_seconds + times.token_seconds * tokens, self._computed)

    def _demand(self) -> None:
        self._gathering_since = self.clock.now
        self.credit += self.setup.contract.groups_per_step
        self._deliver()
        self._lease()

    def _computed(self, _: object) -> None:
        if self._switching:
            self._publish_waits = True
        else:
            self.clock.after(self.setup.trainer.publish_seconds, self._step)

    def _concluded(self) -> None:
        """Called when every engine has the trainer's version."""
        self._switching = False
        self._lease()
        if self._publish_waits:
            self._publish_waits = False
            self._computed(None)

    def _step(self, _: object) -> None:
        self._count()
        self.trained_count += len(self.batch)
        self.batch = []
        self.version += 1
        self._steps_made += 1
        self.gate.advance(self.version, self.clock.now)
        self._switching = True
        self.pool.switch(self.version, self._concluded)
        self._demand()

    def _count(self) -> None:
        tally = self.tally
        tally.steps += 1
        tally.idle_seconds += self._waited
        tally.trajectories += len(self.batch) * self.setup.workload.siblings
        for group in self.batch:
            lags: dict[int, int] = {}
            for version, count in group.tokens.items():
                behind = lag(self.version, version)
                lags[behind] = lags.get(behind, 0) + count
            tally.add(lags)
            self._on_trained(group, lags)

    def _begin_counting(self) -> None:
        self._counted_from = self.clock.now
        self.tally = Tally(self.setup.contract.max_lag, self.setup.engines)
        for engine in self.pool.engines:
            engine.count_anew(self.clock.now)

    def _end_counting(self) -> None:
        tally = self.tally
        tally.seconds = self.clock.now - self._counted_from
        for engine in self.pool.engines:
            engine.count_until(self.clock.now)
            tally.busy_seconds += engine.busy_seconds
            tally.turn_seconds += engine.turn_seconds
            tally.prefilled += engine.prefilled
            tally.reused += engine.reused


def simulate(setup: Setup, seed: int, steps: int, warmup: int = 0) -> Tally:
    """Simulates one run to its end."""

    async def play() -> Tally:
        return Simulation(setup, seed).play(steps, warmup)

    return asyncio.run(play())
