"""One episode: the environment and the policy take turns until it is done or reaches a limit.

    started ──reset──► shown ──turn──► acted ──step──► shown ... ──► ended
                         │                                             ▲
                         └── a limit is reached ───────────────────────┘

`Outcome.metadata["ended"]` records how it ended. DONE: the environment ended it. TURNS, INVALID_ACTIONS,
SECONDS: a limit was reached. CONTEXT: the policy had no room left to write. Each is an outcome with the
rewards so far, not a failure: the policy's actions count, and so does not getting further.

Failures: if the environment raises, or a step exceeds its time limit, the attempt fails. The server makes
it again, up to its bound. If the server aborts a turn, for example for a weight switch, the turn is
resumed and the environment does not notice. A lost lease cancels the episode and closes the environment.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from penstock.client.blocking import is_async
from penstock.client.conversation import Message, MessageLike, Observation
from penstock.client.environments.environment import (
    Environment,
    EnvironmentInvalid,
    Step,
    TaskUnusable,
    read_episode,
)
from penstock.client.environments.threads import CallThreads, within
from penstock.client.outcome import Outcome
from penstock.client.turns import FinishReason

if TYPE_CHECKING:
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits that end an episode before its environment does; for example `--set episode.turns=8`."""

    turns: int = 32
    """Maximum number of the policy's turns."""
    invalid_actions: int = 3
    """Invalid actions allowed over the whole episode; the next one ends it. Games have additional
    rules for this, which may be stricter."""
    invalid_penalty: float = 0.0
    """Subtracted from the reward of a turn whose action was invalid."""
    seconds: float | None = None
    """Time limit from the reset. Checked between turns, so no turn is cut off. None: no limit."""
    step_seconds: float = 60.0
    """Time limit for one call of the environment. Exceeding it fails the attempt."""

    def __post_init__(self) -> None:
        if self.turns < 1 or self.invalid_actions < 0 or self.step_seconds <= 0:
            raise ValueError(
                "episode: turns must be at least 1, invalid_actions at least 0 and step_seconds above 0, "
                f"got turns {self.turns}, invalid_actions {self.invalid_actions} and step_seconds "
                f"{self.step_seconds}"
            )
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"episode: seconds must be above 0, got {self.seconds}")
        if not (math.isfinite(self.invalid_penalty) and self.invalid_penalty >= 0):
            raise ValueError(
                f"episode: invalid_penalty must be finite and at least 0, got {self.invalid_penalty}"
            )


@dataclass
class _Course:
    rewards: list[float] = field(default_factory=list[float])
    invalid_count: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, step: Step, penalty: float) -> None:
        reward = float(step.reward) - (penalty if step.invalid else 0.0)
        if not math.isfinite(reward):
            raise EnvironmentInvalid(f"a reward must be a finite number, got {reward}")
        self.rewards.append(reward)
        self.invalid_count += step.invalid
        self.metrics.update({name: float(value) for name, value in step.metrics.items()})

    def outcome(self, ended: str, seed: int, name: str) -> Outcome:
        own = {
            "turns": float(len(self.rewards)),
            "invalid_actions": float(self.invalid_count),
            "at_a_limit": float(ended != "DONE"),
        }
        return Outcome(
            sum(self.rewards),
            metrics={**self.metrics, **own},
            metadata={"ended": ended, "environment": name, "seed": seed},
            turn_rewards=tuple(self.rewards),
        )


class _Calls:
    """Calls the environment's methods, plain or async, within the time limit of one call."""

    def __init__(self, environment: Environment, threads: CallThreads, seconds: float) -> None:
        self._environment, self._threads, self._seconds = environment, threads, seconds

    async def call(self, name: str, *arguments: object, **named: object) -> Any:
        method = cast("Callable[..., Any]", getattr(self._environment, name))
        if is_async(method):
            return await within(method(*arguments, **named), name, self._seconds)
        return await self._threads.run(lambda: method(*arguments, **named), name, self._seconds)

    async def step(self, action: str) -> Step:
        step = await self.call("step", action)
        if not isinstance(step, Step):
            raise EnvironmentInvalid(f"step must return a Step, not a {type(step).__name__}")
        return step

    async def close(self, *, at_once: bool = False) -> None:
        """With `at_once` it waits for no slot, because a call that hangs may hold one forever."""
        if at_once:
            self._threads = CallThreads(1)
        if callable(getattr(self._environment, "close", None)):
            await self.call("close")


async def play(
    environment: Environment,
    task: Task,
    trajectory: Trajectory,
    *,
    limits: EpisodeLimits | None = None,
    threads: CallThreads | None = None,
    name: str = "",
) -> Outcome:
    """Plays one episode and returns its outcome without sending it.

    `return await play(Maze(), task, trajectory)` is a complete agent. Episodes can share `threads`;
    without it, the call makes its own. Raises EnvironmentInvalid, TaskUnusable, StepTimeout,
    PenstockError, and what the environment raises.
    """
    limits, threads = limits or EpisodeLimits(), threads or CallThreads(1)
    if not isinstance(environment, Environment):
        raise EnvironmentInvalid(f"a {type(environment).__name__} has no reset and step")
    episode = read_episode(task)
    calls = _Calls(environment, threads, limits.step_seconds)
    course = _Course()
    try:
        begun = time.monotonic()
        shown = await calls.call("reset", seed=episode.seed, options=episode.options)
        ended = await _take_turns(calls, _opening(task, shown), trajectory, limits, course, begun)
    except BaseException:
        # The attempt has already failed with this error, so an error of the close does not matter.
        with suppress(Exception):
            await calls.close(at_once=True)
        raise
    await calls.close()
    return course.outcome(ended, episode.seed, name or episode.name or type(environment).__name__)


async def _take_turns(
    calls: _Calls,
    shown: Observation | None,
    trajectory: Trajectory,
    limits: EpisodeLimits,
    course: _Course,
    begun: float,
) -> str:
    """Takes turns and steps until the end. Returns how the episode ended."""
    while True:
        turn = await trajectory.turn(shown)
        while turn.aborted:
            turn = await trajectory.resume()
        if turn.finish_reason is FinishReason.LENGTH and not len(turn.token_ids):
            return "CONTEXT"
        step = await calls.step(turn.text)
        course.add(step, limits.invalid_penalty)
        if step.done:
            return "DONE"
        if course.invalid_count > limits.invalid_actions:
            return "INVALID_ACTIONS"
        if len(course.rewards) >= limits.turns:
            return "TURNS"
        if limits.seconds is not None and time.monotonic() - begun >= limits.seconds:
            return "SECONDS"
        shown = step.observation


def _opening(task: Task, shown: Observation | None) -> Observation | None:
    """Joins the task's prompt, if any, and what reset returned. Raises TaskUnusable if both are
    missing or they do not fit together."""
    if shown is None:
        if task.prompt is None:
            raise TaskUnusable("reset returned no observation, and the task has no prompt")
        return None
    if task.prompt is None:
        return [Message("user", shown)] if isinstance(shown, str) else shown
    prompt = None if isinstance(task.prompt, str) else _messages(task.prompt)
    first = _messages(shown)
    if prompt is None or first is None:
        raise TaskUnusable(
            "a prompt of text or tokens has no room for the observation that reset returned"
        )
    return [*prompt, *first]


def _messages(shown: Observation) -> list[MessageLike] | None:
    """Converts to messages; text becomes a user's message. Returns None for tokens."""
    if isinstance(shown, str):
        return [Message("user", shown)]
    if isinstance(shown, Message | Mapping):
        return [shown]
    if isinstance(shown, Sequence) and shown and not isinstance(shown[0], int):
        return [cast("MessageLike", message) for message in shown]
    return None
