"""Several rewards as one: their weighted sum, with each part as a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.client.blocking import is_async
from penstock.client.outcome import Failed, Outcome
from penstock.client.scoring import as_outcome, call
from penstock.common.suggestions import did_you_mean
from penstock.rewards.mathematics import boxed
from penstock.rewards.programs import unit_tests
from penstock.rewards.texts import exact, format, numeric  # noqa: A004

if TYPE_CHECKING:
    from penstock.client.tasks import Task
    from penstock.rewards.attempt import Reward

READY = {
    "boxed": boxed,
    "exact": exact,
    "format": format,
    "numeric": numeric,
    "unit_tests": unit_tests,
}


def weighted(**parts: float | tuple[float, Reward]) -> Reward:
    """A sum of rewards: `weighted(boxed=1.0, short=(0.1, my_function))`.

    A number is the weight of the reward of that name in `penstock.rewards`; a pair is a weight and a
    reward of (task, trajectory). Each part is reported as a metric under its name, unweighted. A part
    that returns Failed fails the attempt. Raises ValueError for a name that is unknown.
    """
    if not parts:
        raise ValueError("weighted needs at least one part, such as weighted(exact=1.0)")
    weights = {n: float(p[0] if isinstance(p, tuple) else p) for n, p in parts.items()}
    functions = {n: p[1] if isinstance(p, tuple) else _ready(n) for n, p in parts.items()}

    def add(scores: Mapping[str, object]) -> Outcome | Failed:
        total, metrics = 0.0, dict[str, float]()
        for name, score in scores.items():
            outcome = as_outcome(score)
            if isinstance(outcome, Failed):
                return outcome
            total += weights[name] * outcome.reward
            metrics[name] = outcome.reward
            metrics |= {f"{name}.{key}": value for key, value in outcome.metrics.items()}
        return Outcome(total, metrics)

    async def score_async(task: Task, trajectory: Any) -> Outcome | Failed:
        return add({n: await call(function, task, trajectory) for n, function in functions.items()})

    def score(task: Task, trajectory: Any) -> Outcome | Failed:
        return add({name: function(task, trajectory) for name, function in functions.items()})

    return score_async if any(map(is_async, functions.values())) else score


def _ready(name: str) -> Reward:
    if name not in READY:
        hint = did_you_mean(name, READY) or "; give (weight, function) for one of your own"
        raise ValueError(f"there is no ready-made reward {name}{hint}")
    return READY[name]()
