"""The journaled components of a server: restored from the journal at start, read for its snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from penstock.server.groups.admission import Admission
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer, InJournal, KeptGroups
from penstock.server.groups.recovery import FinishedGroup, Recovered, snapshot
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal, SnapshotItem
from penstock.server.rollouts.unleased import OwnTrajectories
from penstock.server.rpc.trainer.session import CurrentSession
from penstock.server.turns.store import TrajectoryStore

# Delivery ids start above all that an earlier server assigned.
DELIVERY_IDS_PER_START = 1 << 32


@dataclass(frozen=True, slots=True)
class JournaledState:
    queue: TaskQueue
    store: TrajectoryStore
    buffer: GroupBuffer
    admission: Admission
    own: OwnTrajectories
    session: CurrentSession

    def restore(self, found: Recovered, journal: Journal) -> None:
        self.queue.restore(
            [found.tasks[task_id] for task_id in found.pending],
            found.groups.values(),
            found.ended,
        )
        held = (group.task_id for group in found.finished.values() if group.task_id)
        self.queue.pending.known.restore(found.known, chain(found.tasks, held))
        for trajectory_id, retried in found.expired.items():
            self.queue.leases.remember_expired([trajectory_id], retried=retried)
        self.store.restore(found.trajectories.values(), found.closed.items())
        for record in found.trajectories.values():
            record.keep_written_from(journal.refers_from)
            root = self.store.root_of(record) if record.parent_trajectory_id else None
            # Includes attempts that failed with their lease: they wait for their siblings.
            attempt = None if root is None else self.queue.held(root.trajectory_id)
            if attempt is not None:
                attempt.branches.add(record.trajectory_id)
        self.own.restore()
        groups = [_buffered(group, journal, self.buffer.kept) for group in found.finished.values()]
        # Without a journal, a receipt for a delivery of an earlier server may still arrive.
        last = found.starts * DELIVERY_IDS_PER_START if journal.on_disk else time.time_ns()
        self.buffer.restore(groups, last)
        self.admission.restore(
            (group.group_id, group.admitted_version, group.oldest_version)
            for group in groups
            if group.training and not group.step
        )
        self.session.restore(found.run_id, found.trainer_epoch, found.start_id)

    def snapshot(self, starts: int, weight_version: int) -> Iterator[SnapshotItem]:
        run = self.session.run
        return snapshot(starts, run, weight_version, self.queue, self.store, self.buffer)


def _buffered(group: FinishedGroup, journal: Journal, kept: KeptGroups) -> BufferedGroup:
    journal.hold(group.stored)
    return BufferedGroup(
        group.group_id,
        group.task_id,
        group.purpose,
        InJournal(journal, group.stored, kept),
        group.trajectory_ids,
        group.task,
        group.admitted_version,
        group.oldest_version,
        group.byte_count,
        step=group.step,
    )
