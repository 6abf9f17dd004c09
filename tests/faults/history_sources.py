"""Histories from the files that a run leaves: the server's journal, the trainer's ledger, the
agents' logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.trainer.state.ledger import StepEntry, read_ledger
from penstock.wire import codec
from penstock.wire.referred import positions, put_together
from tests.faults.history import (
    Answer,
    Group,
    History,
    Step,
    explain_fake,
    lineage,
    read_answers,
    read_group,
    read_outcome,
    violations,
)


@dataclass
class Journaled:
    """The contents of a journal, including everything that it still has."""

    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    used: dict[str, int] = field(default_factory=dict[str, int])
    dropped: set[str] = field(default_factory=set[str])
    open: set[str] = field(default_factory=set[str])
    closed: dict[str, str] = field(default_factory=dict[str, str])
    forgotten: set[str] = field(default_factory=set[str])
    final_step: int = 0
    turns: dict[tuple[str, int, int], Any] = field(default_factory=dict[tuple[str, int, int], Any])
    """Turn records, by trajectory id, number of tokens before the turn's segment, and its token count."""

    def read(self, record: Any) -> None:
        kind = record.WhichOneof("record")
        said = getattr(record, kind)
        if kind == "group_changed":
            self.open.add(said.group_id)
        elif kind == "trajectory_closed":
            if said.retried:
                # It belongs to no group, because another attempt replaces it.
                self.forgotten.add(said.trajectory_id)
            else:
                self.closed[said.trajectory_id] = read_outcome(said.outcome)
        elif kind == "trajectories_forgotten":
            self.forgotten.update(said.trajectory_ids)
        elif kind == "turn_changed":
            for position, segment in positions(said):
                count = len(codec.token_ids(segment))
                self.turns[said.trajectory_id, position, count] = said
        elif kind in ("group_finished", "group_referred"):
            finished = self._put_together(said) if kind == "group_referred" else said
            group = finished.group
            self.open.discard(group.group_id)
            self.groups[group.group_id] = read_group(group)
        elif kind == "group_dropped":
            self.open.discard(said.group_id)
            self.dropped.add(said.group_id)
        elif kind == "groups_receipted":
            if said.step:
                self.used |= dict.fromkeys(said.group_ids, said.step)
            else:
                self.dropped.update(said.group_ids)
        elif kind == "step_final":
            self.final_step = max(self.final_step, said.step)
        elif kind == "run_replaced":
            self.dropped |= self.open | set(self.groups)
            self.open.clear()

    def _put_together(self, referred: Any) -> Any:
        trajectories = referred.finished.group.trajectories
        return put_together(
            referred,
            [
                self.turns[
                    trajectories[place.trajectory].trajectory_id,
                    place.token_position,
                    place.token_count,
                ]
                for place in referred.segments
            ],
        )

    @property
    def held(self) -> frozenset[str]:
        """Groups that a server starting from this journal would still deliver."""
        final = {group_id for group_id, step in self.used.items() if step <= self.final_step}
        return frozenset(set(self.groups) - self.dropped - final)


def read_journal(folder: Path) -> Journaled:
    """Read the whole journal. No server may write to it."""
    found = Journaled()
    for record, _ in read_records(find_files(folder), Reading()):
        found.read(record)
    return found


def steps_of(ledger: Path) -> tuple[list[Step], set[str]]:
    """The steps of a trainer's ledger, and the groups that it refused."""
    steps: list[Step] = []
    refused: set[str] = set()
    for entry in read_ledger(ledger):
        if isinstance(entry, StepEntry):
            steps.append(
                Step(
                    entry.step,
                    tuple(group.group_id for group in entry.groups),
                    tuple(group.task_id for group in entry.groups),
                    tuple(name for group in entry.groups for name in group.trajectory_ids),
                )
            )
        else:
            refused.add(entry.group_id)
    return steps, refused


def history_of(
    journal: Path, ledger: Path | Sequence[Step], answers: Iterable[Answer] = ()
) -> History:
    """The history of a run whose server and trainer have ended."""
    found = read_journal(journal)
    steps, refused = steps_of(ledger) if isinstance(ledger, Path) else (list(ledger), set[str]())
    return History(
        list(answers),
        steps,
        found.groups,
        found.used,
        found.held,
        frozenset(found.open),
        found.closed,
        frozenset(found.dropped | refused),
        frozenset(found.forgotten),
    )


def with_delivered(history: History, groups: Iterable[Group]) -> History:
    """Add groups as they were delivered, in case the journal was compacted."""
    known = {group.group_id: group for group in groups}
    return replace(history, groups={**known, **history.groups})


def without_refusals_of_what_was_trained(history: History) -> History:
    """Ignore refusals of trained groups. A trainer refuses a group that its checkpoint already
    contains, so that the server stops delivering it.
    """
    trained = {found for step in lineage(history.ledger) for found in step.group_ids}
    return replace(history, dropped=history.dropped - trained)


def check_what_is_left(
    journal: Path,
    ledger: Path | Sequence[Step] = (),
    answers: Path | Sequence[Answer] = (),
    delivered: Iterable[Group] = (),
) -> History:
    """Check that a run of the fake engine kept its promises, from the files of its three ended
    sides.

    `delivered` has groups that a compaction may have removed from the journal. Returns the history.
    """
    told = read_answers(answers) if isinstance(answers, Path) else list(answers)
    history = with_delivered(history_of(journal, ledger, told), delivered)
    found = violations(without_refusals_of_what_was_trained(history), explain_fake)
    assert not found, [str(one) for one in found[:10]]
    return history
