"""The Environment protocol, and the episode that a task's metadata asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from penstock.client.conversation import Observation

if TYPE_CHECKING:
    from penstock.client.tasks import Task


_ENTRY_FIELDS = ("dataset", "entry_json")


class EnvironmentInvalid(Exception):
    """The named object is not an environment, or it returned an invalid value; the message says which."""


class TaskUnusable(Exception):
    """The task asks for something this environment does not have; the message says what."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one action: `Step("higher", reward=0.0)`, `Step(reward=1.0, done=True)`."""

    observation: Observation = ""
    """What the policy sees next: text, sent as a user's message, or messages. Ignored if `done`."""
    reward: float = 0.0
    """Reward of this turn; finite. The episode's reward is the sum over turns."""
    done: bool = False
    invalid: bool = False
    """Whether the action was invalid. `EpisodeLimits.invalid_actions` bounds how many an episode
    allows."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to log. The episode's last value of each name becomes one of `Outcome.metrics`."""


@runtime_checkable
class Environment(Protocol):
    """An environment plays one episode after another, one at a time.

    Plain methods can block: each call has its own thread while it runs, and none while the policy
    generates. Coroutine methods run on the event loop. If the environment has a `close`, it is
    called at the end of the episode.
    """

    def reset(
        self, *, seed: int, options: Mapping[str, Any]
    ) -> Observation | Awaitable[Observation | None] | None:
        """Starts an episode. The same seed and options must give the same episode.

        Returns the first observation, or None if the task's prompt is complete. Raises TaskUnusable
        for unsupported options.
        """
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Applies the action: the text of the policy's turn, unmodified."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    name: str
    """From `environment`: its name, as on the command line. Empty means the worker's only one."""
    seed: int
    """From `seed`; defaults to the task's index in the data."""
    options: Mapping[str, Any]
    """From `options`. For a problem written by `[data.reasoning_gym]`, its `dataset` and `entry_json`."""


def read_episode(task: Task) -> EpisodeTask:
    """Reads the episode from a task. Raises TaskUnusable with the field's name."""
    metadata = task.metadata
    name, seed = metadata.get("environment", ""), metadata.get("seed", task.index)
    options = metadata.get("options")
    if options is None:
        options = {key: metadata[key] for key in _ENTRY_FIELDS if key in metadata}
    if not isinstance(name, str):
        raise TaskUnusable(f"metadata.environment must be a name, got {name!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TaskUnusable(f"metadata.seed must be an integer, got {seed!r}")
    if not isinstance(options, Mapping):
        raise TaskUnusable(f"metadata.options must be an object, got {options!r}")
    return EpisodeTask(name, seed, cast("Mapping[str, Any]", options))
