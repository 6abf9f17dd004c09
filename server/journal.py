"""Durability: what must survive is appended here before it is acknowledged.

The store, the queue and the buffer know only this interface. `MemoryJournal` keeps nothing beyond the
process: what it is handed is as durable as the process itself. An on-disk journal implements the same
three methods and replays its records at start.

Order: a state change is made in memory first, its record appended second, and the caller answered
third; whoever asks for the same again meanwhile waits for the same append.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    """A task was accepted; `task` is the serialized message."""

    task_id: str
    task: bytes


@dataclass(frozen=True, slots=True)
class OutcomeRecorded:
    """A trajectory was closed; `trajectory` is the serialized message, outcome included."""

    trajectory_id: str
    group_id: str
    trajectory: bytes


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """Every sibling is complete; `group` is the serialized message."""

    group_id: str
    task_id: str
    group: bytes


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """A group left without being trained, for this reason."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupsReceipted:
    """Groups were used by a step, or refused where the step is zero."""

    group_ids: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class StepFinal:
    """A durable checkpoint contains every step up to this one."""

    step: int


Record = (
    TaskSubmitted | OutcomeRecorded | GroupFinished | GroupDropped | GroupsReceipted | StepFinal
)


class Journal(Protocol):
    """An append-only record of what was accepted."""

    async def append(self, records: Sequence[Record]) -> None:
        """Returns once the records are durable. Raises DISK_FULL or JOURNAL_CORRUPT."""
        ...

    def replay(self) -> AsyncIterator[Record]:
        """Every record, oldest first, as the last process left them."""
        ...

    async def close(self) -> None:
        """Writes what is buffered."""
        ...


class MemoryJournal:
    """Durable as far as the process is: its state is the store, the queue and the buffer themselves."""

    async def append(self, records: Sequence[Record]) -> None:
        """Nothing to do."""

    async def replay(self) -> AsyncIterator[Record]:
        """Nothing was left."""
        return
        yield  # Makes this an (empty) asynchronous generator.

    async def close(self) -> None:
        """Nothing is buffered."""
