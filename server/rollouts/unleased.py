"""Trajectories that their callers opened for themselves: without a lease, a group or a parent.

    opened ──► open ──► closed ──► forgotten: for newer ones, or where the memory is needed
                 └────► expired: no call came for `leases.own_seconds`

- While one is open it has a place among the open trajectories, and its tokens in memory. That its agent is
  there says every call on it, or on a branch of it, and a turn in flight. One that expired is gone with its
  branches; whoever comes late is told LEASE_EXPIRED.
- A closed one stays readable for a while. What others need goes before, in memory and in the journal: the
  one that was closed first makes room first.
- Where the server itself stood still, each has the grace of leases left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from penstock.server.core.broadcast import Broadcast
from penstock.server.groups.lease_clock import LeaseClock
from penstock.server.journal.records import Journal, leases_expired, trajectories_forgotten
from penstock.server.turns.store import TrajectoryRecord, TrajectoryStore

logger = logging.getLogger(__name__)

KEPT_CLOSED = 1_000
"""Closed ones that are readable, at most."""
STOOD_STILL_SECONDS = 0.5
"""A clock that is later than this was not waiting for its turn: the process had none."""


class OwnTrajectories:
    """Which there are, and for how long."""

    def __init__(
        self,
        store: TrajectoryStore,
        journal: Journal,
        leases: LeaseClock,
        changed: Broadcast,
        clock: Callable[[], float],
        seconds: float,
    ) -> None:
        """An open one is held for `seconds` without a call."""
        self._store = store
        self._journal = journal
        self._leases = leases
        self._changed = changed
        self._clock = clock
        self._seconds = seconds
        self._open: OrderedDict[str, float] = OrderedDict()
        """When each was called last, in that order."""
        self._closed: OrderedDict[str, int] = OrderedDict()
        """What each takes, in the order of their closes."""
        self.byte_count = 0
        """What the closed ones take of the memory budget."""

    def opened(self, record: TrajectoryRecord) -> None:
        """One is open, from now on."""
        self._open[record.trajectory_id] = self._clock()

    def touch(self, record: TrajectoryRecord) -> None:
        """There was a call on it, or on a branch of it."""
        root = self._store.root_of(record)
        if root is not None and root.trajectory_id in self._open:
            self._open[root.trajectory_id] = self._clock()
            self._open.move_to_end(root.trajectory_id)

    def withdrawn(self, trajectory_id: str) -> None:
        """It was forgotten before anything came of it."""
        self._open.pop(trajectory_id, None)

    def closed(self, record: TrajectoryRecord) -> list[str]:
        """It is closed; returns what was forgotten for it."""
        self._open.pop(record.trajectory_id, None)
        self._keep(record)
        oldest = list(self._closed)[: max(0, len(self._closed) - KEPT_CLOSED)]
        # It stands in no group's way any more.
        self._changed.notify()
        return self._forget_closed(oldest)

    def give_way(self, byte_count: int) -> None:
        """Frees at least so many bytes, as far as there are."""
        oldest: list[str] = []
        for trajectory_id, taken in self._closed.items():
            if byte_count <= 0:
                break
            oldest.append(trajectory_id)
            byte_count -= taken
        if oldest:
            self._journal.begin_append([trajectories_forgotten(self._forget_closed(oldest))])

    def restore(self) -> None:
        """Takes up what another server left in the store."""
        for record in self._store.records():
            if record.group_id or record.parent_trajectory_id:
                continue
            if record.closed:
                self._keep(record)
            else:
                self.opened(record)

    async def expire(self) -> None:
        """Forgets those that nobody calls. Runs for as long as the server does."""
        while True:
            # Meanwhile deadlines only come to be later, and new ones are.
            first = next(iter(self._open.values()), self._clock())
            deadline = first + self._seconds
            await asyncio.sleep(max(0.0, deadline - self._clock()))
            if self._clock() - deadline > STOOD_STILL_SECONDS:
                self._forgive()
            self._expire_due()

    def _expire_due(self) -> None:
        due = self._clock() - self._seconds
        for trajectory_id, called in list(self._open.items()):
            if called > due:
                return
            record = self._store.find(trajectory_id)
            if record is None:
                del self._open[trajectory_id]
                continue
            members = record.with_branches()
            if any(member.turn is not None and member.turn.in_flight for member in members):
                # When it ends that is said too.
                self.touch(record)
                continue
            del self._open[trajectory_id]
            logger.warning("nobody called %s for %g s: it is gone", trajectory_id, self._seconds)
            lost = [member.trajectory_id for member in members]
            for name in lost:
                self._store.forget(name)
            self._leases.remember_expired(lost, retried=False)
            self._journal.begin_append(
                [leases_expired(lost, retried=False), trajectories_forgotten(lost)]
            )
            self._changed.notify()

    def _forgive(self) -> None:
        least = self._clock() - self._seconds + self._leases.rules.grace_seconds
        for trajectory_id, called in self._open.items():
            self._open[trajectory_id] = max(called, least)

    def _keep(self, record: TrajectoryRecord) -> None:
        taken = sum(member.charged_bytes for member in record.with_branches())
        self._closed[record.trajectory_id] = taken
        self.byte_count += taken

    def _forget_closed(self, trajectory_ids: list[str]) -> list[str]:
        """Returns their ids, those of their branches too."""
        forgotten: list[str] = []
        for trajectory_id in trajectory_ids:
            self.byte_count -= self._closed.pop(trajectory_id)
            record = self._store.find(trajectory_id)
            if record is not None:
                forgotten += [member.trajectory_id for member in record.with_branches()]
        for name in forgotten:
            self._store.forget(name)
        return forgotten
