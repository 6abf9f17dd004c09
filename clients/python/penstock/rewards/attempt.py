"""What a reward of this room is called with, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from penstock.client.tasks import Task


class Answered(Protocol):
    """The part of a trajectory that these rewards read."""

    @property
    def text(self) -> str:
        """The policy's text in its last turn."""
        ...


Reward: TypeAlias = "Callable[[Task, Any], Any]"
"""A reward of (task, trajectory), as `penstock rollout --reward` takes it."""
PlainReward: TypeAlias = "Callable[[Task, Answered], float]"


def expected(task: Task, field: str) -> str:
    """The right answer. Raises KeyError if the task's metadata does not have the field."""
    answer = task.metadata[field]
    if not isinstance(answer, str | int | float):
        raise TypeError(f"metadata[{field!r}] must be a text or a number, got {answer!r}")
    return str(answer).strip()
