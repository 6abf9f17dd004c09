"""Summarizes what a journal holds, for `penstock journal list`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.server.groups.attempts import Group
from penstock.server.groups.buffer import BufferedGroup
from penstock.server.groups.recovery import Recovered, recover
from penstock.server.journal.disk.reading import NoJournal, StoredJournal
from penstock.server.journal.protocol import JournalUnreadable, Record, Stored
from penstock.server.journal.tools.export import purpose_name, state_of
from penstock.wire import codec


def read_contents(journal: StoredJournal) -> dict[str, Any]:
    """Summarize the state that a server would start from. `penstock journal list --json` prints exactly
    this. Raises SegmentCorrupt and NoJournal."""
    counts: dict[str, tuple[int, int]] = {}
    found = recover_stored(journal, _counted(journal.records(), counts))
    return {
        "folder": str(journal.folder),
        "writer": journal.writer,
        "starts": found.starts,
        "run_id": found.run_id,
        "trainer_epoch": found.trainer_epoch,
        "weight_version": found.weight_version,
        "stored_bytes": sum(segment.end for segment in journal.segments),
        "torn_bytes": sum(segment.torn_bytes for segment in journal.segments),
        "tasks_waiting": [
            {
                "task_id": task.task_id,
                "purpose": purpose_name(task.purpose),
                "group_size": task.group_size,
                "data_source": task.data_source,
                "data_index": task.index,
            }
            for task in (found.tasks[task_id] for task_id in found.pending)
        ],
        "groups_under_way": [_under_way(group) for group in found.groups.values()],
        "open_trajectories": [
            {
                "trajectory_id": record.trajectory_id,
                "group_id": record.group_id,
                "sample_index": record.sample_index,
                "turn_count": record.turn_count,
                "token_count": record.token_count,
            }
            for record in found.trajectories.values()
            if not record.closed
        ],
        "finished_groups": [
            _finished(group, *counts[group.group_id]) for group in found.finished.values()
        ],
    }


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


def _under_way(group: Group) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task_id": group.task.task_id if group.task is not None else "",
        "purpose": purpose_name(group.purpose),
        "group_size": group.size,
        "admitted_weight_version": group.admitted_version,
        "attempts": [
            {
                "trajectory_id": attempt.trajectory_id,
                "retry_count": attempt.retry_count,
                "leased": attempt.state.leased,
                "closed": attempt.state.final,
            }
            for attempt in group.attempts
        ],
    }


def _finished(group: BufferedGroup, token_count: int, newest: int) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "purpose": purpose_name(group.purpose),
        "state": state_of(group),
        # The step that trained it, if no durable checkpoint contains that step yet.
        "step": group.step or None,
        "trajectory_count": len(group.trajectory_ids),
        "token_count": token_count,
        "byte_count": group.byte_count,
        "admitted_weight_version": group.admitted_version,
        # None if the policy sampled no tokens.
        "oldest_weight_version": group.oldest_version,
        "newest_weight_version": newest if group.oldest_version is not None else None,
    }


def recover_stored(journal: StoredJournal, records: Iterator[tuple[Record, Stored]]) -> Recovered:
    """Raises SegmentCorrupt, and NoJournal if the records contradict each other."""
    try:
        return recover(records)
    except JournalUnreadable as error:
        raise NoJournal(f"{journal.folder}: {error}") from error
