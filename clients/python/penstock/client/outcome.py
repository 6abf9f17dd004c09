"""The outcome of an episode, as judged by its agent."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.client.values import from_struct, to_struct
from penstock.v1.trajectory_pb2 import Failure
from penstock.v1.trajectory_pb2 import Outcome as OutcomeMessage

# Maximum length of a failure reason that a server accepts.
_REASON_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scored episode: `Outcome(1.0, metrics={"format": 0.5})`."""

    reward: float
    """The scalar return; finite."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named parts of the reward, and other numbers to log."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values for later readers."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards per turn, by index; empty if only the whole episode is scored."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An episode that could not be scored: `Failed("TOOL_TIMEOUT", "the sandbox was silent")`."""

    reason: str
    """Machine-readable, UPPER_SNAKE_CASE. The server receives at most 256 characters."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    group_completed: bool
    retried: bool = False
    """Whether the attempt failed and will be made again, under another trajectory id."""


@dataclass(frozen=True)
class ProcessRecord:
    """A process that has ended. Reward functions read it as `trajectory.process`."""

    folder: Path
    """Folder of the attempt as the process left it. Exists until the attempt is scored."""
    status: int | None
    """Exit status; None if a signal or a limit ended it."""
    signal: int | None
    seconds: float
    """Time from its start to the end of its last descendant."""
    peak_bytes: int
    """Peak resident memory of its largest process."""
    output: str
    """The end of what it wrote to stdout and stderr, combined."""
    result: Mapping[str, Any] | None = None
    """Content of the result file; None if the file does not exist."""

    def described(self) -> str:
        if self.signal is None:
            return f"exit status {self.status}"
        try:
            return f"ended by {signal.Signals(self.signal).name}"
        except ValueError:
            return f"ended by signal {self.signal}"


def write_outcome(outcome: Outcome | Failed) -> OutcomeMessage:
    """Raises ValueError for a value that cannot be sent, such as a reward that is not finite."""
    try:
        if isinstance(outcome, Failed):
            reason = as_utf8(outcome.reason[:_REASON_LENGTH])
            return OutcomeMessage(failure=Failure(reason=reason, message=as_utf8(outcome.message)))
        if not all(math.isfinite(number) for number in (outcome.reward, *outcome.turn_rewards)):
            raise ValueError(f"a reward must be finite, not {outcome.reward}")
        return OutcomeMessage(
            reward=outcome.reward,
            metrics=dict(outcome.metrics),
            metadata=to_struct(outcome.metadata),
            turn_rewards=outcome.turn_rewards,
        )
    except Exception as error:
        # The values come from the agent. They can have any type, nest without end, or exceed any float.
        raise ValueError(f"the outcome cannot be sent: {error}") from error


def as_utf8(text: str) -> str:
    """Replaces lone surrogates, which file names can contain and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def read_outcome(outcome: OutcomeMessage) -> Outcome | Failed | None:
    """Reads an outcome from the wire; None if there is none yet."""
    match outcome.WhichOneof("result"):
        case "reward":
            return Outcome(
                outcome.reward,
                dict(outcome.metrics),
                from_struct(outcome.metadata),
                tuple(outcome.turn_rewards),
            )
        case "failure":
            return Failed(outcome.failure.reason, outcome.failure.message)
        case None:
            return None
