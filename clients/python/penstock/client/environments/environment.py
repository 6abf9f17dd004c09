"""What an environment is, and what a task says of the episode it asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from penstock.client.conversation import Observation

if TYPE_CHECKING:
    from penstock.client.tasks import Task


_ENTRY_FIELDS = ("dataset", "entry_json")


class EnvironmentInvalid(Exception):
    """What was named is no environment, or it answered what none may; the message says which."""


class TaskUnusable(Exception):
    """The task asks for what this environment does not have; the message says what."""


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one action: `Step("higher", reward=0.0)`, `Step(reward=1.0, done=True)`."""

    observation: Observation = ""
    """What the policy is shown next: a text, as a user's message, or messages; unused where `done`."""
    reward: float = 0.0
    """Of this turn; finite. The episode's reward is their sum."""
    done: bool = False
    """Whether the episode has ended."""
    invalid: bool = False
    """Whether the action was none that could be taken; so many of them end the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers worth logging: of each name the last of the episode becomes one of `Outcome.metrics`."""


@runtime_checkable
class Environment(Protocol):
    """One episode after another, one at a time.

    What blocks may block: each call of a plain method has a thread for as long as it takes, and none
    while the policy thinks. Methods that are coroutines run on the event loop. A `close` is called at the
    end, where there is one.
    """

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> Observation | Awaitable[Observation | None] | None:
        """Begins an episode: the same seed and options, the same episode.

        Returns what the policy is shown first; None where the task's own prompt is all of it. Raises
        TaskUnusable for options that it does not have.
        """
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Takes what the policy wrote in its turn, as it wrote it."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """What a task's metadata says of its episode."""

    name: str
    """`environment`: which one, as on the command line; empty for whichever the worker has."""
    seed: int
    """`seed`; else the task's place in the data."""
    options: Mapping[str, Any]
    """`options`; of a problem that `[data.reasoning_gym]` wrote its `dataset` and `entry_json`."""


def read_episode(task: Task) -> EpisodeTask:
    """Reads a task. Raises TaskUnusable, naming the field."""
    metadata = task.metadata
    name, seed = metadata.get("environment", ""), metadata.get("seed", task.index)
    options = metadata.get("options")
    if options is None:
        options = {key: metadata[key] for key in _ENTRY_FIELDS if key in metadata}
    if not isinstance(name, str):
        raise TaskUnusable(f"metadata.environment is a name, got {name!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TaskUnusable(f"metadata.seed is a whole number, got {seed!r}")
    if not isinstance(options, Mapping):
        raise TaskUnusable(f"metadata.options is an object, got {options!r}")
    return EpisodeTask(name, seed, cast("Mapping[str, Any]", options))
