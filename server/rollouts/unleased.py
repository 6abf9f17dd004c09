"""Unleased trajectories: opened by an agent without a lease, a group or a parent.

    opened ──► open ──► closed ──► forgotten: for newer ones, or when the memory is needed
                 └────► expired: no call for `leases.own_seconds`

- An open one counts toward the open trajectories and keeps its tokens in memory. Every call on it or on a
  branch of it is a sign of life of its agent, and so is a turn in flight. An expired one is forgotten along
  with its branches; later calls get LEASE_EXPIRED.
- A closed one stays readable until other uses of memory or journal need its room, oldest first.
- If the server itself stood still, each gets at least the grace period of leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.server.core.aio import Broadcast
from penstock.server.groups.lease_clock import LeaseClock
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import leases_expired, trajectories_forgotten
from penstock.server.turns.store import TrajectoryStore
from penstock.server.turns.trajectory import TrajectoryRecord

logger = logging.getLogger(__name__)

KEPT_CLOSED = 1_000
"""Most closed trajectories that stay readable."""
STOOD_STILL_SECONDS = 0.5
"""A timer that is later than this was not merely delayed: the process itself stood still."""


@dataclass(eq=False)
class OwnTrajectories:
    store: TrajectoryStore
    journal: Journal
    leases: LeaseClock
    changed: Broadcast
    clock: Callable[[], float]
    seconds: float
    """An open trajectory expires after this long without a call."""
    _open: OrderedDict[str, float] = field(default_factory=OrderedDict[str, float])
    """Time of the last call on each, oldest first."""
    _closed: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])
    """Bytes of each, in the order in which they were closed."""
    byte_count: int = 0
    """Memory budget that closed ones use."""

    def opened(self, record: TrajectoryRecord) -> None:
        self._open[record.trajectory_id] = self.clock()

    def touch(self, record: TrajectoryRecord) -> None:
        """Record a call on the trajectory or one of its branches."""
        root = self.store.root_of(record)
        if root is not None and root.trajectory_id in self._open:
            self._open[root.trajectory_id] = self.clock()
            self._open.move_to_end(root.trajectory_id)

    def withdrawn(self, trajectory_id: str) -> None:
        """Stop tracking a trajectory that was withdrawn before it had any tokens."""
        self._open.pop(trajectory_id, None)

    def closed(self, record: TrajectoryRecord) -> list[str]:
        """Return the ids forgotten to make room for it."""
        self._open.pop(record.trajectory_id, None)
        self._keep(record)
        oldest = list(self._closed)[: max(0, len(self._closed) - KEPT_CLOSED)]
        # A group that waited for room among the open trajectories may begin now.
        self.changed.notify()
        return self._forget_closed(oldest)

    def give_way(self, byte_count: int) -> None:
        """Forget closed trajectories until at least `byte_count` bytes are free, or none is left."""
        oldest: list[str] = []
        for trajectory_id, taken in self._closed.items():
            if byte_count <= 0:
                break
            oldest.append(trajectory_id)
            byte_count -= taken
        if oldest:
            self.journal.append([trajectories_forgotten(self._forget_closed(oldest))])

    def restore(self) -> None:
        """Track the trajectories that recovery put into the store."""
        for record in self.store.records():
            if record.group_id or record.parent_trajectory_id:
                continue
            if record.closed:
                self._keep(record)
            else:
                self.opened(record)

    async def expire(self) -> None:
        """Runs as long as the server."""
        while True:
            # Meanwhile, existing deadlines can only become later, and new ones are later too.
            first = next(iter(self._open.values()), self.clock())
            deadline = first + self.seconds
            await asyncio.sleep(max(0.0, deadline - self.clock()))
            if self.clock() - deadline > STOOD_STILL_SECONDS:
                self._forgive()
            self._expire_due()

    def _expire_due(self) -> None:
        due = self.clock() - self.seconds
        for trajectory_id, called in list(self._open.items()):
            if called > due:
                return
            record = self.store.find(trajectory_id)
            if record is None:
                del self._open[trajectory_id]
                continue
            members = record.with_branches()
            if any(member.growing for member in members):
                # A turn in flight counts as a call.
                self.touch(record)
                continue
            del self._open[trajectory_id]
            problem = "unleased trajectory %s had no call for %g s, dropping it"
            logger.warning(problem, trajectory_id, self.seconds)
            lost = [member.trajectory_id for member in members]
            for name in lost:
                self.store.forget(name)
            self.leases.remember_expired(lost, retried=False)
            self.journal.append([leases_expired(lost, retried=False), trajectories_forgotten(lost)])
            self.changed.notify()

    def _forgive(self) -> None:
        least = self.clock() - self.seconds + self.leases.rules.grace_seconds
        for trajectory_id, called in self._open.items():
            self._open[trajectory_id] = max(called, least)

    def _keep(self, record: TrajectoryRecord) -> None:
        taken = sum(member.charged_bytes for member in record.with_branches())
        self._closed[record.trajectory_id] = taken
        self.byte_count += taken

    def _forget_closed(self, trajectory_ids: list[str]) -> list[str]:
        """Return the ids forgotten, including branches."""
        forgotten: list[str] = []
        for trajectory_id in trajectory_ids:
            self.byte_count -= self._closed.pop(trajectory_id)
            record = self.store.find(trajectory_id)
            if record is not None:
                forgotten += [member.trajectory_id for member in record.with_branches()]
        for name in forgotten:
            self.store.forget(name)
        return forgotten
