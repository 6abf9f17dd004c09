"""Puts what a server's journal holds into the server's parts, at its start."""

from __future__ import annotations

import time
from itertools import chain

from penstock.server.assembly import Serving
from penstock.server.groups.recovery import Recovered

# Delivery ids start above all that an earlier server assigned.
DELIVERY_IDS_PER_START = 1 << 32


def restore(serving: Serving, found: Recovered) -> None:
    queue, store, journal = serving.queue, serving.store, serving.journal
    queue.restore(
        [found.tasks[task_id] for task_id in found.pending], found.groups.values(), found.ended
    )
    groups = found.finished.values()
    held = (group.task_id for group in groups if group.task_id)
    queue.pending.known.restore(found.known, chain(found.tasks, held))
    for trajectory_id, retried in found.expired.items():
        queue.leases.remember_expired([trajectory_id], retried=retried)
    store.restore(found.trajectories.values(), found.closed.items())
    for record in found.trajectories.values():
        record.keep_written_from(journal.refers_from)
        root = store.root_of(record) if record.parent_trajectory_id else None
        # Includes attempts that failed with their lease: they wait for their siblings.
        attempt = None if root is None else queue.held(root.trajectory_id)
        if attempt is not None:
            attempt.branches.add(record.trajectory_id)
    serving.own.restore()
    for group in groups:
        assert group.stored is not None
        journal.hold(group.stored)
    # Without a journal, a receipt for a delivery of an earlier server may still arrive.
    last = found.starts * DELIVERY_IDS_PER_START if journal.on_disk else time.time_ns()
    serving.buffer.restore(groups, last)
    serving.admission.restore(
        (group.group_id, group.admitted_version, group.oldest_version)
        for group in groups
        if group.training and not group.step
    )
    serving.drops.restore(found.notices)
    serving.session.restore(found.run_id, found.trainer_epoch, found.start_id)
