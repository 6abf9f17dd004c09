"""Makes the records of events that belong to no single trajectory or group.

`turns.records` makes those of trajectories and turns, `groups.attempts` and `turns.group_bytes` those
of groups.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.server.journal.protocol import Record
from penstock.v1 import task_service_pb2, trajectory_pb2
from penstock.wire.messages import (
    GroupDropped,
    GroupsEnded,
    GroupsReceipted,
    JournalRecord,
    LeasesExpired,
    RunReplaced,
    ServerStarted,
    SessionBegan,
    StepFinal,
    TaskAccepted,
    TasksKnown,
    TrajectoriesForgotten,
    TrajectoryClosed,
    WeightsActivated,
)


def server_started(start: int) -> Record:
    """A server began to write; `start` counts the servers so far."""
    return JournalRecord(server_started=ServerStarted(start=start))


def session_began(run_id: str, trainer_epoch: int, start_id: str, resume_step: int) -> Record:
    """A trainer began a session; groups trained after `resume_step` wait again."""
    return JournalRecord(
        session_began=SessionBegan(
            run_id=run_id,
            trainer_epoch=trainer_epoch,
            resume_step=resume_step,
            start_id=start_id,
        )
    )


def run_replaced(run_id: str) -> Record:
    """All state of a run was discarded."""
    return JournalRecord(run_replaced=RunReplaced(run_id=run_id))


def weights_activated(weight_version: int) -> Record:
    """The engines switched to this weight version."""
    return JournalRecord(weights_activated=WeightsActivated(weight_version=weight_version))


def task_accepted(task: task_service_pb2.Task, *, first: bool = False) -> Record:
    """A task was accepted and waits; with `first`, ahead of all others."""
    return JournalRecord(task_accepted=TaskAccepted(task=task, first=first))


def tasks_known(task_ids: Iterable[str]) -> Record:
    """Ids of tasks that are finished; a repeated submission is recognised by them."""
    return JournalRecord(tasks_known=TasksKnown(task_ids=task_ids))


def groups_ended(group_ids: Iterable[str]) -> Record:
    """Ids of groups that have ended."""
    return JournalRecord(groups_ended=GroupsEnded(group_ids=group_ids))


def trajectory_closed(
    trajectory_id: str,
    outcome: trajectory_pb2.Outcome | bytes,
    group_id: str,
    *,
    group_completed: bool = False,
    retried: bool = False,
) -> Record:
    """A trajectory was closed with this outcome, given whole or as its SHA-256."""
    digest = outcome if isinstance(outcome, bytes) else b""
    return JournalRecord(
        trajectory_closed=TrajectoryClosed(
            trajectory_id=trajectory_id,
            outcome=None if isinstance(outcome, bytes) else outcome,
            outcome_sha256=digest,
            group_id=group_id,
            group_completed=group_completed,
            retried=retried,
        )
    )


def trajectories_forgotten(trajectory_ids: Iterable[str]) -> Record:
    """Trajectories that are no longer needed."""
    return JournalRecord(
        trajectories_forgotten=TrajectoriesForgotten(trajectory_ids=trajectory_ids)
    )


def leases_expired(trajectory_ids: Iterable[str], *, retried: bool) -> Record:
    """Leases expired; `retried` says whether their attempts are made again."""
    return JournalRecord(
        leases_expired=LeasesExpired(trajectory_ids=trajectory_ids, retried=retried)
    )


def group_dropped(group_id: str, reason: str) -> Record:
    """A group was dropped without being trained."""
    return JournalRecord(group_dropped=GroupDropped(group_id=group_id, reason=reason))


def groups_receipted(group_ids: Iterable[str], step: int) -> Record:
    """A step trained these groups; step zero means that the trainer refused them."""
    return JournalRecord(groups_receipted=GroupsReceipted(group_ids=group_ids, step=step))


def step_final(step: int) -> Record:
    """A durable checkpoint contains every step up to this one."""
    return JournalRecord(step_final=StepFinal(step=step))
