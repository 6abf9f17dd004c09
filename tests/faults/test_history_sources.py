"""The history of a real run, read from what it leaves on the disk."""

from __future__ import annotations

from pathlib import Path

from penstock.trainer.ledger import Ledger, RefusedEntry, StepEntry, TrainedGroup
from tests.faults.history import Kind, Step, explain_fake, violations
from tests.faults.history_sources import history_of, steps_of
from tests.faults.workload import Workload
from tests.harness import serve

GROUPS = 6


async def test_the_history_of_a_run_is_in_its_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with serve(tmp_path, f"journal.folder={journal}") as running:
        workload = Workload(running.address, GROUPS)
        await workload.run()
    history = history_of(journal, workload.ledger, workload.answers)
    assert len(history.used) == GROUPS
    assert violations(history, explain_fake) == []
    # A trainer that lost its last step without telling: nobody would deliver those groups again.
    lost = history_of(journal, [*workload.ledger[:-1], Step(GROUPS, ())], workload.answers)
    assert {found.kind for found in violations(lost)} == {Kind.LOST}
    # One that fell back to its last checkpoint and was not given them yet.
    earlier = history_of(journal, workload.ledger[:-1], workload.answers)
    assert set(workload.ledger[-1].group_ids) == {v.subject for v in violations(earlier)}


def test_steps_and_refusals_are_read_from_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begin()
    ledger.write(StepEntry(1, 1, "", (TrainedGroup("a", "task", ("a-0", "a-1")),)))
    ledger.refuse(RefusedEntry("b", "other", "ALL_FAILED"))
    ledger.close()
    steps, refused = steps_of(tmp_path / "ledger.jsonl")
    assert steps == [Step(1, ("a",), ("task",), ("a-0", "a-1"))]
    assert refused == {"b"}
