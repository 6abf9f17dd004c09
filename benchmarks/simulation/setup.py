"""The inputs and results of `virtual_run`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from benchmarks.simulation.engine import EngineTimes

from penstock.server.config.pool import PoolSection
from penstock.server.groups.staleness_gate import StalenessContract


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn of an attempt."""

    observation_tokens: int
    """Tokens added to the context before the turn: the prompt, or a tool's answer."""
    token_count: int
    """Tokens that the policy writes."""
    tool_seconds: float
    """Time from the end of the turn to the start of the next one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of attempts.

    It is a function of seed, task and position in the group, so that a real run and a simulated run have
    the same attempts.
    """

    siblings: int = 4
    """Attempts in a group."""
    turns: int = 1
    prompt_tokens: int = 16
    observation_tokens: int = 8
    median_tokens: float = 64.0
    """Median of a turn's length, which is log-normal."""
    sigma: float = 0.0
    """Sigma of the same distribution; with 0, all turns have the median length."""
    alike: float = 0.5
    """Share of the variance of the logarithm of lengths that siblings have in common."""
    most_tokens: int = 1 << 20
    """Maximum length of a turn; longer ones are cut."""
    tool_seconds: float = 0.0
    """Median time between two turns, which is log-normal."""
    tool_sigma: float = 0.0

    def plan(self, seed: int, task: int, index: int) -> tuple[TurnPlan, ...]:
        """Returns the turns of one attempt."""
        common = random.Random(f"{seed} {task}").gauss(0.0, 1.0) if self.alike else 0.0
        rng = random.Random(f"{seed} {task} {index}")
        shared, own = math.sqrt(self.alike), math.sqrt(1.0 - self.alike)
        turns: list[TurnPlan] = []
        for number in range(self.turns):
            spread = self.sigma * (shared * common + own * rng.gauss(0.0, 1.0))
            count = min(self.most_tokens, max(1, round(self.median_tokens * math.exp(spread))))
            tool = 0.0
            if number + 1 < self.turns:
                tool = self.tool_seconds * math.exp(self.tool_sigma * rng.gauss(0.0, 1.0))
            seen = self.observation_tokens if number else self.prompt_tokens
            turns.append(TurnPlan(seen, count, tool))
        return tuple(turns)


@dataclass(frozen=True, slots=True)
class TrainerTimes:
    """Measured times of the trainer."""

    step_seconds: float
    """Fixed time of a step, from a complete batch to the new weights."""
    token_seconds: float = 0.0
    """Additional time for each delivered token."""
    publish_seconds: float = 0.0
    """Time from the new weights to the switch, when every engine has them staged."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The system to simulate."""

    contract: StalenessContract
    workload: Workload
    times: EngineTimes
    trainer: TrainerTimes
    engines: int = 1
    agents: int | None = None
    """Concurrent attempts; None for as many as the gate admits."""
    hub_seconds: float = 0.0
    """Time the hub is busy with each turn. It is one process, so simultaneous turns queue up."""
    attempt_seconds: float = 0.0
    """Time of an attempt outside its turns and its tools."""
    switch_seconds: float = 0.0
    """Time an engine is out of rotation for a switch; at least until it samples again."""
    rules: PoolSection = field(default_factory=PoolSection)
    freshness: bool = True
    stuck_seconds: float = 1e6
    """Time without the end of a turn or a step after which a run counts as stuck."""


@dataclass(slots=True)
class Tally:
    """Results of a run after its warm-up."""

    max_lag: int
    engines: int = 1
    steps: int = 0
    seconds: float = 0.0
    idle_seconds: float = 0.0
    trajectories: int = 0
    tokens_by_lag: dict[int, int] = field(default_factory=dict[int, int])
    """Delivered tokens, including those too old to train."""
    discarded: int = 0
    """Groups dropped because of their age."""
    busy_seconds: float = 0.0
    turn_seconds: float = 0.0
    prefilled: int = 0
    """Context tokens that were computed."""
    reused: int = 0
    """Context tokens that were in a prefix cache."""
    turns: int = 0
    waited_seconds: float = 0.0
    """Total time that agents waited for turns."""

    def add(self, tokens_by_lag: dict[int, int]) -> None:
        for behind, count in tokens_by_lag.items():
            self.tokens_by_lag[behind] = self.tokens_by_lag.get(behind, 0) + count

    @property
    def per_hour(self) -> float:
        """Trained trajectories per hour."""
        return 3600.0 * self.trajectories / self.seconds

    @property
    def idle(self) -> float:
        """Share of the time that the trainer waited for groups."""
        return self.idle_seconds / self.seconds

    @property
    def trained_tokens(self) -> int:
        """Delivered tokens that were not too old to train."""
        return sum(n for behind, n in self.tokens_by_lag.items() if behind <= self.max_lag)

    @property
    def masked(self) -> float:
        """Share of the delivered tokens that were too old to train."""
        return 1.0 - self.trained_tokens / max(1, sum(self.tokens_by_lag.values()))

    @property
    def mean_lag(self) -> float:
        """Mean lag of trained tokens."""
        lags = sum(b * n for b, n in self.tokens_by_lag.items() if b <= self.max_lag)
        return lags / max(1, self.trained_tokens)

    @property
    def oldest(self) -> int:
        """Largest lag of a trained token."""
        return max((b for b in self.tokens_by_lag if b <= self.max_lag), default=0)

    @property
    def busy(self) -> float:
        """Share of the time that an engine had a turn."""
        return self.busy_seconds / (self.seconds * self.engines)

    @property
    def turn(self) -> float:
        """Mean time of a turn in seconds, measured by its agent."""
        return self.waited_seconds / max(1, self.turns)

    @property
    def batch(self) -> float:
        """Mean number of turns that an engine decoded at a time, while it had any."""
        return self.turn_seconds / self.busy_seconds if self.busy_seconds else 0.0
