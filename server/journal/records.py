"""Makes the records of events that belong to no single trajectory or group; `turns.records`,
`turns.encoding` and `groups.attempts` make the others. `penstock/v1/journal.proto` explains each."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.server.journal.protocol import Record
from penstock.v1 import task_service_pb2, trainer_service_pb2
from penstock.wire import messages


def server_started(start: int) -> Record:
    return messages.JournalRecord(server_started=messages.ServerStarted(start=start))


def session_began(run_id: str, trainer_epoch: int, start_id: str, resume_step: int) -> Record:
    return messages.JournalRecord(
        session_began=messages.SessionBegan(
            run_id=run_id,
            trainer_epoch=trainer_epoch,
            resume_step=resume_step,
            start_id=start_id,
        )
    )


def run_replaced(run_id: str) -> Record:
    return messages.JournalRecord(run_replaced=messages.RunReplaced(run_id=run_id))


def weights_activated(weight_version: int) -> Record:
    activated = messages.WeightsActivated(weight_version=weight_version)
    return messages.JournalRecord(weights_activated=activated)


def task_accepted(task: task_service_pb2.Task, *, first: bool = False) -> Record:
    """With `first`, the task waits ahead of all others."""
    return messages.JournalRecord(task_accepted=messages.TaskAccepted(task=task, first=first))


def tasks_known(task_ids: Iterable[str]) -> Record:
    return messages.JournalRecord(tasks_known=messages.TasksKnown(task_ids=task_ids))


def groups_ended(group_ids: Iterable[str]) -> Record:
    return messages.JournalRecord(groups_ended=messages.GroupsEnded(group_ids=group_ids))


def trajectories_forgotten(trajectory_ids: Iterable[str]) -> Record:
    forgotten = messages.TrajectoriesForgotten(trajectory_ids=trajectory_ids)
    return messages.JournalRecord(trajectories_forgotten=forgotten)


def leases_expired(trajectory_ids: Iterable[str], *, retried: bool) -> Record:
    """`retried` states whether their attempts are made again."""
    expired = messages.LeasesExpired(trajectory_ids=trajectory_ids, retried=retried)
    return messages.JournalRecord(leases_expired=expired)


def group_dropped(notice: trainer_service_pb2.Notice) -> Record:
    """`notice` is for the trainer; without a task there is nothing to tell it."""
    dropped = messages.GroupDropped(
        group_id=notice.group_id,
        reason=notice.reason,
        task_id=notice.task_id,
        message=notice.message,
    )
    return messages.JournalRecord(group_dropped=dropped)


def groups_receipted(group_ids: Iterable[str], step: int) -> Record:
    """Step zero means that the trainer refused the groups."""
    receipted = messages.GroupsReceipted(group_ids=group_ids, step=step)
    return messages.JournalRecord(groups_receipted=receipted)


def step_final(step: int) -> Record:
    return messages.JournalRecord(step_final=messages.StepFinal(step=step))
