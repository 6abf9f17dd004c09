"""Remembers the tasks of a run, so that `SubmitTasks` does not accept one twice.

States of a task id:

    new --hold--> held --leave--> past --100,000 others left since--> forgotten
                   ^               |
                   +-----hold------+   its group was dropped, and it waits again

A task is *held* while it waits, while its group is under way, and while the trainer may still request its
completed group. The queue and the staleness gate bound their number. A task is *past* if a durable
checkpoint contains its group, or if the group counts as dropped. A trainer does not submit such a task
again, because its checkpoint records how far its data is consumed. Only a repeated call that was sent
earlier may still arrive. So the newest past ids are remembered, like the outcomes of trajectories.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain

MAX_PAST = 100_000


class KnownTasks:
    """Ids of held tasks, and of up to `max_past` past ones."""

    def __init__(self, max_past: int = MAX_PAST) -> None:
        self._max_past = max_past
        self._held: set[str] = set()
        self._past: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._held or task_id in self._past

    def __iter__(self) -> Iterator[str]:
        """All ids; past ones first, oldest first."""
        return chain(self._past, self._held)

    def restore(self, known: Iterable[str], held: Iterable[str]) -> None:
        """`known` is oldest first."""
        self._held.update(held)
        for task_id in known:
            if task_id not in self._held:
                self._remember(task_id)

    def hold(self, task_id: str) -> None:
        """Hold a task, which may have been past."""
        self._past.pop(task_id, None)
        self._held.add(task_id)

    def leave(self, task_id: str) -> None:
        """Move a held task to past when its group ends. Ignore other ids."""
        if task_id in self._held:
            self._held.remove(task_id)
            self._remember(task_id)

    def clear(self) -> None:
        """Called when another run begins or the same one starts over."""
        self._held.clear()
        self._past.clear()

    def _remember(self, task_id: str) -> None:
        self._past[task_id] = None
        while len(self._past) > self._max_past:
            self._past.popitem(last=False)
