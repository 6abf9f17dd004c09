"""Summarizes what a journal holds, for `penstock journal list`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.server.groups.recovery import FinishedGroup, Recovered, recover
from penstock.server.journal.disk.reading import NoJournal, StoredJournal
from penstock.server.journal.protocol import JournalUnreadable, Record, Stored
from penstock.server.journal.tools.export import State, purpose_name, state_of
from penstock.wire import codec


@dataclass(frozen=True)
class WaitingTask:
    """A task that no worker has taken yet."""

    task_id: str
    purpose: str
    group_size: int
    data_source: str
    data_index: int


@dataclass(frozen=True)
class AttemptLine:
    trajectory_id: str
    retry_count: int
    leased: bool
    closed: bool


@dataclass(frozen=True)
class GroupUnderWay:
    group_id: str
    task_id: str
    purpose: str
    group_size: int
    admitted_weight_version: int
    attempts: tuple[AttemptLine, ...]


@dataclass(frozen=True)
class OpenTrajectory:
    trajectory_id: str
    group_id: str
    sample_index: int
    turn_count: int
    token_count: int


@dataclass(frozen=True)
class FinishedLine:
    group_id: str
    task_id: str
    purpose: str
    state: State
    step: int | None
    """Step that trained it, if no durable checkpoint contains that step yet."""
    trajectory_count: int
    token_count: int
    byte_count: int
    admitted_weight_version: int
    oldest_weight_version: int | None
    """None if the policy sampled no tokens, like `newest_weight_version`."""
    newest_weight_version: int | None


@dataclass(frozen=True)
class Contents:
    """The summary of a journal; `penstock journal list --json` prints exactly these fields."""

    folder: str
    writer: int | None
    """Id of the process that writes to it, if visible from here."""
    starts: int
    run_id: str
    trainer_epoch: int
    weight_version: int
    stored_bytes: int
    torn_bytes: int
    tasks_waiting: tuple[WaitingTask, ...]
    groups_under_way: tuple[GroupUnderWay, ...]
    open_trajectories: tuple[OpenTrajectory, ...]
    finished_groups: tuple[FinishedLine, ...]


def read_contents(journal: StoredJournal) -> Contents:
    """Summarize the state that a server would start from. Raises SegmentCorrupt and NoJournal."""
    counts: dict[str, tuple[int, int]] = {}
    found = recover_stored(journal, _counted(journal.records(), counts))
    return Contents(
        folder=str(journal.folder),
        writer=journal.writer,
        starts=found.starts,
        run_id=found.run_id,
        trainer_epoch=found.trainer_epoch,
        weight_version=found.weight_version,
        stored_bytes=sum(segment.end for segment in journal.segments),
        torn_bytes=sum(segment.torn_bytes for segment in journal.segments),
        tasks_waiting=tuple(
            WaitingTask(
                task.task_id,
                purpose_name(task.purpose),
                task.group_size,
                task.data_source,
                task.index,
            )
            for task in (found.tasks[task_id] for task_id in found.pending)
        ),
        groups_under_way=tuple(
            GroupUnderWay(
                group.group_id,
                group.task.task_id if group.task is not None else "",
                purpose_name(group.purpose),
                group.size,
                group.admitted_version,
                tuple(
                    AttemptLine(a.trajectory_id, a.retry_count, a.state.leased, a.state.final)
                    for a in group.attempts
                ),
            )
            for group in found.groups.values()
        ),
        open_trajectories=tuple(
            OpenTrajectory(
                record.trajectory_id,
                record.group_id,
                record.sample_index,
                record.turn_count,
                record.token_count,
            )
            for record in found.trajectories.values()
            if not record.closed
        ),
        finished_groups=tuple(
            _finished_line(group, *counts[group.group_id]) for group in found.finished.values()
        ),
    )


def _counted(
    records: Iterator[tuple[Record, Stored]], counts: dict[str, tuple[int, int]]
) -> Iterator[tuple[Record, Stored]]:
    """Pass the records through; `counts` receives each group's tokens and newest weight version."""
    for record, stored in records:
        kind = record.WhichOneof("record")
        if kind in ("group_finished", "group_referred"):
            referred = record.group_referred
            group = (referred.finished if kind == "group_referred" else record.group_finished).group
            tokens = sum(place.token_count for place in referred.segments) + sum(
                len(codec.token_ids(segment))
                for trajectory in group.trajectories
                for segment in trajectory.segments
            )
            counts[group.group_id] = tokens, group.newest_weight_version
        yield record, stored


def _finished_line(group: FinishedGroup, token_count: int, newest: int) -> FinishedLine:
    return FinishedLine(
        group.group_id,
        group.task_id,
        purpose_name(group.purpose),
        state_of(group),
        group.step or None,
        len(group.trajectory_ids),
        token_count,
        group.byte_count,
        group.admitted_version,
        group.oldest_version,
        newest if group.oldest_version is not None else None,
    )


def recover_stored(journal: StoredJournal, records: Iterator[tuple[Record, Stored]]) -> Recovered:
    """Raises SegmentCorrupt, and NoJournal if the records contradict each other."""
    try:
        return recover(records)
    except JournalUnreadable as error:
        raise NoJournal(f"{journal.folder}: {error}") from error
