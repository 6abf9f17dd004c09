"""Tasks that wait for their group to begin, evaluation first, within a bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.groups.known_tasks import KnownTasks
from penstock.v1 import task_service_pb2, trajectory_pb2
from penstock.wire.reasons import Reason


class PendingTasks:
    def __init__(self, changed: Broadcast, max_pending: int) -> None:
        self._changed = changed
        self._max_pending = max_pending
        # In the order in which groups are begun: evaluation first.
        self._tasks: dict[trajectory_pb2.Purpose.ValueType, deque[task_service_pb2.Task]] = {
            trajectory_pb2.PURPOSE_EVAL: deque(),
            trajectory_pb2.PURPOSE_TRAIN: deque(),
        }
        self.known = KnownTasks()
        self.byte_count = 0

    @property
    def count(self) -> int:
        return sum(len(tasks) for tasks in self._tasks.values())

    def count_of(self, tasks: Iterable[task_service_pb2.Task]) -> int:
        """Counts tasks that have the purposes of `tasks`, or all if `tasks` is empty. A submitter that
        keeps training tasks waiting has no use for waiting evaluation tasks."""
        purposes = {_effective(task.purpose) for task in tasks} or self._tasks.keys()
        return sum(len(self._tasks[purpose]) for purpose in purposes)

    @property
    def all(self) -> Iterator[task_service_pb2.Task]:
        """Evaluation first, each purpose in its own order."""
        return chain.from_iterable(self._tasks.values())

    def check_room(self, count: int) -> None:
        """Raise QUEUE_FULL if one request has more tasks than could ever wait."""
        if count > self._max_pending:
            raise DomainError(
                Reason.QUEUE_FULL,
                f"{count} tasks are more than the {self._max_pending} that may wait",
                {"pending_count": self.count, "limit": self._max_pending},
                retry_after_seconds=5.0,
            )

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
            raise DomainError(
                Reason.QUEUE_FULL,
                f"{self.count} tasks are waiting, {len(fresh)} more do not fit",
                {"pending_count": self.count, "limit": self._max_pending},
                retry_after_seconds=5.0,
            )
        for task in fresh.values():
            self.known.hold(task.task_id)
            self._tasks[_effective(task.purpose)].append(task)
            self.byte_count += task.ByteSize()
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
        self,
    ) -> Iterator[tuple[trajectory_pb2.Purpose.ValueType, task_service_pb2.Task]]:
        """The first task of each purpose, in the order in which groups are begun."""
        for purpose, tasks in self._tasks.items():
            if tasks:
                yield purpose, tasks[0]

    def pop(self, purpose: trajectory_pb2.Purpose.ValueType) -> task_service_pb2.Task:
        task = self._tasks[purpose].popleft()
        self.byte_count -= task.ByteSize()
        return task

    def drop_all(self) -> int:
        """Forget every task, known ones included. Return how many were waiting."""
        dropped = self.count
        for tasks in self._tasks.values():
            tasks.clear()
        self.known.clear()
        self.byte_count = 0
        return dropped


def _effective(purpose: trajectory_pb2.Purpose.ValueType) -> trajectory_pb2.Purpose.ValueType:
    if purpose == trajectory_pb2.PURPOSE_UNSPECIFIED:
        return trajectory_pb2.PURPOSE_TRAIN
    return purpose
