"""Tasks that wait for their group to begin, and the tasks of a run that are not accepted again.

States of a task id:

    new --hold--> held --leave--> past --100,000 others left since--> forgotten
                   ^               |
                   +-----hold------+   its group was dropped, and it waits again

A task is *held* while it waits, while its group is under way, and while the trainer may still request its
completed group. The queue and the staleness gate bound their number. A task is *past* if a durable
checkpoint contains its group, or if the group counts as dropped. A trainer does not submit such a task
again, because its checkpoint records how far its data is consumed. Only a repeated call that was sent
earlier may still arrive.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError
from penstock.v1 import task_service_pb2, trajectory_pb2
from penstock.wire.reasons import Reason

MAX_PAST = 100_000


class KnownTasks:
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
        self._past.pop(task_id, None)
        self._held.add(task_id)

    def leave(self, task_id: str) -> None:
        """Move a held task to past when its group ends. Ignore other ids."""
        if task_id in self._held:
            self._held.remove(task_id)
            self._remember(task_id)

    def clear(self) -> None:
        self._held.clear()
        self._past.clear()

    def _remember(self, task_id: str) -> None:
        self._past[task_id] = None
        while len(self._past) > self._max_past:
            self._past.popitem(last=False)


class _Line:
    """Tasks of one purpose, in order. Those of one shape form a separate queue, because an agent takes
    either all tasks of a shape or none: so a task that it does not take delays no other."""

    def __init__(self) -> None:
        self.count = 0
        self._shapes: dict[tuple[int, int], deque[tuple[int, task_service_pb2.Task]]] = {}
        self._first = self._last = 0
        """Places of the first and the last task."""

    def copy(self) -> Callable[[], Iterator[task_service_pb2.Task]]:
        """Freezes the line, and returns what yields its tasks, in any thread."""
        shapes = [list(tasks) for tasks in self._shapes.values()]
        return lambda: (task for _, task in heapq.merge(*shapes))

    def append(self, task: task_service_pb2.Task) -> None:
        self._last += 1
        self._of(task).append((self._last, task))
        self.count += 1

    def appendleft(self, task: task_service_pb2.Task) -> None:
        self._first -= 1
        self._of(task).appendleft((self._first, task))
        self.count += 1

    def first(self, takes: Callable[[task_service_pb2.Task], bool]) -> task_service_pb2.Task | None:
        heads = [tasks[0] for tasks in self._shapes.values() if takes(tasks[0][1])]
        return min(heads)[1] if heads else None

    def kinds(self) -> Iterator[tuple[task_service_pb2.Task, int]]:
        """The first task of each shape, and how many there are."""
        return ((tasks[0][1], len(tasks)) for tasks in self._shapes.values())

    def pop_first_like(self, task: task_service_pb2.Task) -> task_service_pb2.Task:
        shape = _shape(task)
        _, first = self._shapes[shape].popleft()
        if not self._shapes[shape]:
            del self._shapes[shape]
        self.count -= 1
        return first

    def clear(self) -> None:
        self._shapes.clear()
        self.count = 0

    def _of(self, task: task_service_pb2.Task) -> deque[tuple[int, task_service_pb2.Task]]:
        return self._shapes.setdefault(_shape(task), deque())


def _shape(task: task_service_pb2.Task) -> tuple[int, int]:
    return task.group_size, task.finish_count


class PendingTasks:
    """Evaluation first, within a bound."""

    def __init__(self, changed: Broadcast, max_pending: int) -> None:
        self._changed = changed
        self._max_pending = max_pending
        self._tasks: dict[trajectory_pb2.Purpose.ValueType, _Line] = {
            trajectory_pb2.PURPOSE_EVAL: _Line(),
            trajectory_pb2.PURPOSE_TRAIN: _Line(),
        }
        self.known = KnownTasks()
        self.byte_count = 0

    @property
    def count(self) -> int:
        return sum(line.count for line in self._tasks.values())

    def count_of(self, tasks: Iterable[task_service_pb2.Task]) -> int:
        """Counts tasks that have the purposes of `tasks`, or all if `tasks` is empty. A submitter that
        keeps training tasks waiting has no use for waiting evaluation tasks."""
        purposes = {_effective(task.purpose) for task in tasks} or self._tasks.keys()
        return sum(self._tasks[purpose].count for purpose in purposes)

    def copy(self) -> Callable[[], Iterator[task_service_pb2.Task]]:
        """Freezes the queue, and returns what yields its tasks, in any thread: evaluation first, each
        purpose in its own order. No task ever changes."""
        lines = [line.copy() for line in self._tasks.values()]
        return lambda: chain.from_iterable(line() for line in lines)

    def check_room(self, count: int) -> None:
        """Raise QUEUE_FULL if one request has more tasks than could ever wait."""
        if count > self._max_pending:
            raise self._full(f"{count} tasks are more than the {self._max_pending} that may wait")

    def _full(self, message: str) -> DomainError:
        metadata = {"pending_count": self.count, "limit": self._max_pending}
        return DomainError(Reason.QUEUE_FULL, message, metadata, retry_after_seconds=5.0)

    def submit(
        self, tasks: Iterable[task_service_pb2.Task]
    ) -> tuple[list[task_service_pb2.Task], int]:
        """Add all tasks or none. Return the new ones and the number of those known already. Raises
        QUEUE_FULL if they do not fit."""
        fresh: dict[str, task_service_pb2.Task] = {}
        duplicates = 0
        for task in tasks:
            if task.task_id in self.known or task.task_id in fresh:
                duplicates += 1
            else:
                fresh[task.task_id] = task
        if self.count + len(fresh) > self._max_pending:
            raise self._full(f"{self.count} tasks are waiting, {len(fresh)} more do not fit")
        for task_id in fresh:
            self.known.hold(task_id)
        self.restore(fresh.values())
        if fresh:
            self._changed.notify()
        return list(fresh.values()), duplicates

    def resubmit(self, task: task_service_pb2.Task) -> None:
        """Put a known task back at the head of the queue; its group was dropped for age."""
        self.known.hold(task.task_id)
        self._tasks[_effective(task.purpose)].appendleft(task)
        self.byte_count += task.ByteSize()
        self._changed.notify()

    def restore(self, tasks: Iterable[task_service_pb2.Task]) -> None:
        for task in tasks:
            self._tasks[_effective(task.purpose)].append(task)
            self.byte_count += task.ByteSize()

    def first(
        self, takes: Callable[[task_service_pb2.Task], bool]
    ) -> Iterator[tuple[trajectory_pb2.Purpose.ValueType, task_service_pb2.Task]]:
        """The first task of each purpose that an agent takes, in the order in which groups are begun."""
        for purpose, line in self._tasks.items():
            if (task := line.first(takes)) is not None:
                yield purpose, task

    def kinds(
        self,
    ) -> Iterator[tuple[trajectory_pb2.Purpose.ValueType, task_service_pb2.Task, int]]:
        """The purpose, the first task and the number of each kind that an agent takes or not."""
        for purpose, line in self._tasks.items():
            for task, count in line.kinds():
                yield purpose, task, count

    def begin(
        self, purpose: trajectory_pb2.Purpose.ValueType, task: task_service_pb2.Task
    ) -> task_service_pb2.Task:
        """Take away a task that `first` returned."""
        begun = self._tasks[purpose].pop_first_like(task)
        assert begun is task
        self.byte_count -= task.ByteSize()
        return task

    def drop_all(self) -> int:
        """Forgets the known ones too. Returns how many were waiting."""
        dropped = self.count
        for line in self._tasks.values():
            line.clear()
        self.known.clear()
        self.byte_count = 0
        return dropped


def _effective(purpose: trajectory_pb2.Purpose.ValueType) -> trajectory_pb2.Purpose.ValueType:
    return purpose or trajectory_pb2.PURPOSE_TRAIN
