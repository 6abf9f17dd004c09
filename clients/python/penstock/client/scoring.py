"""Calls the user's functions that run and score attempts, and converts their results to outcomes."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, TypeVar, cast

from penstock.client.blocking import BlockingTrajectory, is_async, run_in_thread
from penstock.client.errors import PenstockError
from penstock.client.outcome import Failed, Outcome, as_utf8
from penstock.common.functions import FunctionInvalid, find_function

if TYPE_CHECKING:
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory

Score: TypeAlias = SupportsFloat | Outcome | Failed
"""A number (including numpy's and torch's), an Outcome with metrics, or a Failed."""

Agent: TypeAlias = Callable[..., Any]
"""`async def generate(task, trajectory)`, or `async def reward(task, trajectory)`.

A plain `def` runs in its own thread and receives a BlockingTrajectory. A group reward receives a
list of trajectories and returns a list of scores.
"""

F = TypeVar("F", bound=Callable[..., Any])

_GROUP_MARK = "penstock_group_reward"
_MESSAGE_LENGTH = 1000
_WORD_BOUNDARY = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"


class BadFunction(Exception):
    """A name on the command line does not lead to a function of (task, trajectory)."""


class AttemptFailed(Exception):
    """An attempt failed through no fault of a function. The message alone explains why."""


class RewardInvalid(Exception):
    """A function returned a value that is not a finite number, or not one score per trajectory."""


def load_function(name: str, option: str) -> Agent:
    """Loads a function of (task, trajectory). Raises BadFunction with the option and the name."""
    return find(name, option, ("task", "trajectory"))


def find(
    name: str,
    option: str,
    positional: tuple[str, ...] | None,
    named: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Modules in the working directory are importable. Raises BadFunction."""
    try:
        return cast("Callable[..., Any]", find_function(name, positional, named))
    except FunctionInvalid as error:
        raise BadFunction(f"{option} {name}: {error}") from error


def group_reward(reward: F) -> F:
    """Declares that a reward compares siblings: `reward(task, trajectories) -> list of numbers`.

    The trajectories are those of one group that did not fail, ordered by sample_index.
    """
    setattr(reward, _GROUP_MARK, True)
    return reward


def is_group_reward(reward: Agent | None) -> bool:
    return bool(getattr(reward, _GROUP_MARK, False))


async def single_turn(task: Task, trajectory: Trajectory) -> None:
    await trajectory.turn()


async def call(
    function: Agent, task: Task, trajectory: Trajectory | Sequence[Trajectory]
) -> object:
    """Calls a user's function, on the event loop or in a thread."""
    if is_async(function):
        return await cast("Awaitable[object]", function(task, trajectory))
    loop = asyncio.get_running_loop()
    if isinstance(trajectory, Sequence):
        blocking = [BlockingTrajectory(sibling, loop) for sibling in trajectory]
        result = await run_in_thread(function, task, blocking)
    else:
        result = await run_in_thread(function, task, BlockingTrajectory(trajectory, loop))
    if inspect.iscoroutine(result):
        # The coroutine expects a blocking trajectory, whose calls would block the event loop.
        result.close()
        raise TypeError("the plain function returned a coroutine: declare it with async def")
    return result


def as_outcome(score: object) -> Outcome | Failed:
    """Converts a score to an outcome. Raises RewardInvalid if it is not a finite number."""
    if isinstance(score, Failed):
        return score
    if not isinstance(score, Outcome):
        if isinstance(score, str) or not isinstance(score, SupportsFloat):
            raise RewardInvalid(f"a reward must be a number, not {type(score).__name__}")
        score = Outcome(float(score))
    if not all(math.isfinite(number) for number in (score.reward, *score.turn_rewards)):
        raise RewardInvalid(f"a reward must be finite, not {score.reward}")
    return score


def as_outcomes(scores: object, count: int) -> list[Outcome | Failed]:
    """Converts the scores of a group. Raises RewardInvalid unless there is one per trajectory."""
    # Accepts any iterable with a length, including numpy arrays.
    if isinstance(scores, str) or not hasattr(scores, "__len__"):
        raise RewardInvalid(f"a group reward must return a list, not {type(scores).__name__}")
    given = list(cast("Sequence[object]", scores))
    if len(given) != count:
        raise RewardInvalid(f"a group reward returned {len(given)} numbers for {count} siblings")
    return [as_outcome(score) for score in given]


def as_failed(error: BaseException) -> Failed:
    """Converts an exception to a failure: a reason in UPPER_SNAKE_CASE, and its message."""
    named = error.reason if isinstance(error, PenstockError) else ""
    reason = named or re.sub(_WORD_BOUNDARY, "_", type(error).__name__).upper()
    return Failed(reason, as_utf8(str(error)[:_MESSAGE_LENGTH]))
