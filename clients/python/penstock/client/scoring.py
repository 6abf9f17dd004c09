"""Calls the user's functions that run and score attempts, and converts their results to outcomes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
import re
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, TypeVar, cast

from penstock.client.blocking import BlockingTrajectory, is_async, run_in_thread
from penstock.client.errors import PenstockError
from penstock.client.outcome import Failed, Outcome, as_utf8
from penstock.common.functions import FunctionInvalid, find_function
from penstock.common.suggestions import did_you_mean, listed

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

_Logged: TypeAlias = tuple[type[BaseException], BaseException, types.TracebackType | None]
F = TypeVar("F", bound=Callable[..., Any])

_GROUP_MARK = "penstock_group_reward"
_MESSAGE_LENGTH = 1000
_STYLES = (
    ("completions", "trl"),
    ("solution_str", "verl"),
    ("(args, sample", "slime"),
)
"""Parameters of functions that were written for another system, and its style."""
_CLIENT = str(Path(__file__).parent)
_STANDARD_LIBRARY = tuple(
    str(Path(file).parent) for file in (asyncio.__file__, concurrent.futures.__file__)
)
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
        styles = [style for mark, style in _STYLES if mark in str(error)]
        hint = f"; for functions of {styles[0]} give --style {styles[0]}" if styles else ""
        raise BadFunction(f"{option} {name}: {error}{hint}") from error


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


def as_failed(error: BaseException, task: Task | None = None) -> Failed:
    """Converts an exception to a failure: a reason in UPPER_SNAKE_CASE, and its message.

    A KeyError of a function that was called with `task` lists what the task's metadata has.
    """
    named = error.reason if isinstance(error, PenstockError) else ""
    reason = named or re.sub(_WORD_BOUNDARY, "_", type(error).__name__).upper()
    message = str(error)
    key: object = error.args[0] if isinstance(error, KeyError) and error.args else None
    if task is not None and isinstance(key, str) and key not in task.metadata:
        names = listed(sorted(task.metadata)) or "nothing"
        message += f"; the task's metadata has {names}{did_you_mean(key, task.metadata)}"
    return Failed(reason, as_utf8(message[:_MESSAGE_LENGTH]))


def to_log(error: BaseException) -> _Logged | None:
    """The exception as `exc_info`, with a traceback that begins in the user's function. None if its
    message says all."""
    if isinstance(error, PenstockError | AttemptFailed | RewardInvalid):
        return None
    frames = error.__traceback__
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not file.startswith((_CLIENT, *_STANDARD_LIBRARY)):
            break
        frames = frames.tb_next
    # Without a frame of the user's, the error is one of Penstock's own.
    return type(error), error, frames or error.__traceback__
