"""What `pool_simulation` is given, and what it comes to."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from simulated_engine import EngineTimes

from penstock.server.groups.staleness_gate import StalenessContract
from penstock.server.pool.rules import PoolRules


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """One turn of an attempt."""

    observation_tokens: int
    """Added to the context before it: the prompt, or what a tool answered."""
    token_count: int
    """That the policy writes."""
    tool_seconds: float
    """From its end to the next one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What attempts are like: a function of seed, task and place in the group, so that a real run and a
    simulated one have the same."""

    siblings: int = 4
    """Attempts of a group."""
    turns: int = 1
    prompt_tokens: int = 16
    observation_tokens: int = 8
    median_tokens: float = 64.0
    """Of a turn's log-normal length."""
    sigma: float = 0.0
    """Of the same; 0 makes all of them the median."""
    alike: float = 0.5
    """Part of the variance of the lengths' logarithm that siblings have in common."""
    most_tokens: int = 1 << 20
    """Where a turn is cut."""
    tool_seconds: float = 0.0
    """Median of the log-normal time between two turns."""
    tool_sigma: float = 0.0

    def plan(self, seed: int, task: int, index: int) -> tuple[TurnPlan, ...]:
        """One attempt's turns."""
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
    """How long the trainer takes, as measured."""

    step_seconds: float
    """Of a step, from a whole batch to its new weights, whatever is in it."""
    token_seconds: float = 0.0
    """Further, of each token that is delivered."""
    publish_seconds: float = 0.0
    """From the new weights to the switch: every engine has them staged."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated."""

    contract: StalenessContract
    workload: Workload
    times: EngineTimes
    trainer: TrainerTimes
    engines: int = 1
    agents: int | None = None
    """Attempts worked on at a time; None for as many as are admitted."""
    hub_seconds: float = 0.0
    """That the hub, one process, is busy with each turn: those that come together go one after another."""
    attempt_seconds: float = 0.0
    """Of an attempt outside its turns and its tools."""
    switch_seconds: float = 0.0
    """That an engine is out of rotation for a switch; at least until it samples again."""
    rules: PoolRules = field(default_factory=PoolRules)
    freshness: bool = True
    stuck_seconds: float = 1e6
    """Without a turn's end or a step of the trainer, that a run which will never end is given up after."""


@dataclass(slots=True)
class Tally:
    """What a run came to, after its warm-up."""

    max_lag: int
    engines: int = 1
    steps: int = 0
    seconds: float = 0.0
    idle_seconds: float = 0.0
    trajectories: int = 0
    tokens_by_lag: dict[int, int] = field(default_factory=dict[int, int])
    """Delivered tokens, those too old to train among them."""
    discarded: int = 0
    """Groups thrown away for their age."""
    busy_seconds: float = 0.0
    turn_seconds: float = 0.0
    prefilled: int = 0
    """Context tokens computed."""
    reused: int = 0
    """Context tokens that were in a cache."""
    turns: int = 0
    waited_seconds: float = 0.0
    """That agents waited for turns."""

    def add(self, tokens_by_lag: dict[int, int]) -> None:
        """Delivered tokens."""
        for behind, count in tokens_by_lag.items():
            self.tokens_by_lag[behind] = self.tokens_by_lag.get(behind, 0) + count

    @property
    def per_hour(self) -> float:
        """Trained trajectories an hour."""
        return 3600.0 * self.trajectories / self.seconds

    @property
    def idle(self) -> float:
        """Part of the time that the trainer waited for groups."""
        return self.idle_seconds / self.seconds

    @property
    def trained_tokens(self) -> int:
        """Those not too old."""
        return sum(n for behind, n in self.tokens_by_lag.items() if behind <= self.max_lag)

    @property
    def masked(self) -> float:
        """Part of the delivered tokens that were too old to train."""
        return 1.0 - self.trained_tokens / max(1, sum(self.tokens_by_lag.values()))

    @property
    def mean_lag(self) -> float:
        """Of trained tokens."""
        lags = sum(b * n for b, n in self.tokens_by_lag.items() if b <= self.max_lag)
        return lags / max(1, self.trained_tokens)

    @property
    def oldest(self) -> int:
        """Largest lag of a trained token."""
        return max((b for b in self.tokens_by_lag if b <= self.max_lag), default=0)

    @property
    def busy(self) -> float:
        """Part of the time that an engine had a turn."""
        return self.busy_seconds / (self.seconds * self.engines)

    @property
    def turn(self) -> float:
        """Seconds of a turn, as its agent sees it."""
        return self.waited_seconds / max(1, self.turns)

    @property
    def batch(self) -> float:
        """Turns that an engine decoded at a time, while it had any."""
        return self.turn_seconds / self.busy_seconds if self.busy_seconds else 0.0
