"""Which tasks a run has had: those that `SubmitTasks` must not accept again.

States of a task's id:

    new --hold--> held --leave--> past --100,000 others left since--> forgotten
                   ^               |
                   +-----hold------+   its group was thrown away, and it waits again

Held is a task that waits, one whose group is under way, and one whose finished group the trainer may still
ask for. Those are as many as wait and as the gate admits. Past is one whose group a durable checkpoint
contains, or that was counted as dropped: a trainer submits no such task again, because its checkpoint says
how far its data is consumed. What may still come is a call that was sent before, once more; so the newest
are remembered, as the outcomes of trajectories are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

MAX_PAST = 100_000


class KnownTasks:
    """Ids of tasks; bounded by what is held, and in what is remembered beyond that."""

    def __init__(self, max_past: int = MAX_PAST) -> None:
        self._max_past = max_past
        self._held: set[str] = set()
        self._past: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._held or task_id in self._past

    def __iter__(self) -> Iterator[str]:
        """All, those that left first first."""
        return chain(self._past, self._held)

    def restore(self, known: Iterable[str], held: Iterable[str]) -> None:
        """Takes up what another server knew, in that order."""
        self._held.update(held)
        for task_id in known:
            if task_id not in self._held:
                self._remember(task_id)

    def hold(self, task_id: str) -> None:
        """A task waits."""
        self._past.pop(task_id, None)
        self._held.add(task_id)

    def leave(self, task_id: str) -> None:
        """A task is done with, and so is its group. One that is not held stays as it is."""
        if task_id in self._held:
            self._held.remove(task_id)
            self._remember(task_id)

    def clear(self) -> None:
        """Another run begins, or the same one anew."""
        self._held.clear()
        self._past.clear()

    def _remember(self, task_id: str) -> None:
        self._past[task_id] = None
        while len(self._past) > self._max_past:
            self._past.popitem(last=False)
