"""Calls that keep leases alive: any call that names a trajectory is a sign of life of its agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

from penstock.server.groups.attempts import Attempt
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.rollouts.unleased import OwnTrajectories
from penstock.server.turns.store import TrajectoryStore
from penstock.server.turns.trajectory import TrajectoryRecord


@dataclass(frozen=True, eq=False)
class CallLeases:
    queue: TaskQueue
    store: TrajectoryStore
    own: OwnTrajectories

    def called(self, trajectory_id: str) -> None:
        """Renew a trajectory's lease, even if the call fails."""
        if self.queue.renew(trajectory_id):
            return
        record = self.store.find(trajectory_id)
        root = None if record is None else self.store.root_of(record)
        if root is not None and not self.queue.renew(root.trajectory_id):
            self.own.touch(root)

    def group_called(self, group_id: str, is_callers: Callable[[str], bool]) -> None:
        """Renew the leases of those attempts of a group that belong to the caller."""
        for trajectory_id in self.queue.leased_of(group_id):
            if is_callers(trajectory_id):
                self.queue.renew(trajectory_id)

    @contextlib.contextmanager
    def open_call(self, record: TrajectoryRecord) -> Generator[None]:
        """Stop the lease while a call is open."""
        attempt = self.attempt_of(record)
        if attempt is None:
            yield
            return
        lease = self.queue.leases.call_began(attempt)
        try:
            yield
        finally:
            self.queue.leases.call_ended(attempt, lease)

    def attempt_of(self, record: TrajectoryRecord) -> Attempt | None:
        """The attempt that a trajectory belongs to, as its root or as a branch of it."""
        root = self.store.root_of(record)
        return None if root is None else self.queue.attempt_of(root.trajectory_id)
