"""The history of a real run, read from the files that it leaves."""

from __future__ import annotations

from pathlib import Path

from penstock.trainer.state.ledger import Ledger, RefusedEntry, StepEntry, TrainedGroup
from tests.faults.history import Answer, Kind, Step, explain_fake, read_outcome, violations
from tests.faults.history_sources import history_of, steps_of
from tests.faults.workload import Workload
from tests.support.harness import (
    CompleteTrajectoryRequest,
    Failure,
    LeaseTasksRequest,
    Outcome,
    SubmitTasksRequest,
    Task,
    serve,
)

GROUPS = 6


async def test_the_history_of_a_run_is_in_its_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with serve(tmp_path, f"journal.folder={journal}") as running:
        workload = Workload(running.address, GROUPS)
        await workload.run()
    history = history_of(journal, workload.ledger, workload.answers)
    assert len(history.used) == GROUPS
    assert violations(history, explain_fake) == []
    # A trainer that silently lost its last step: the server would not deliver those groups again.
    lost = history_of(journal, [*workload.ledger[:-1], Step(GROUPS, ())], workload.answers)
    assert {found.kind for found in violations(lost)} == {Kind.LOST}
    # A trainer that fell back to its last checkpoint and has not received them again yet.
    earlier = history_of(journal, workload.ledger[:-1], workload.answers)
    assert set(workload.ledger[-1].group_ids) == {v.subject for v in violations(earlier)}


async def test_a_failure_that_is_made_again_is_in_no_group(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with serve(tmp_path, f"journal.folder={journal}") as running:
        task = Task(task_id="task", group_size=1, text="?")
        await running.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        leases = running.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=1))
        held = await leases.read()
        failed = Outcome(failure=Failure(reason="BROKEN"))
        closed = await running.wire.CompleteTrajectory(
            CompleteTrajectoryRequest(trajectory_id=held.trajectory_id, outcome=failed)
        )
        leases.cancel()
    assert closed.retried and not closed.group_completed
    answer = Answer(held.trajectory_id, held.group_id, read_outcome(failed), retried=True)
    assert violations(history_of(journal, [], [answer])) == []


def test_steps_and_refusals_are_read_from_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begin()
    ledger.write(StepEntry(1, 1, "", (TrainedGroup("a", "task", ("a-0", "a-1")),)))
    ledger.refuse(RefusedEntry("b", "other", "ALL_FAILED"))
    ledger.close()
    steps, refused = steps_of(tmp_path / "ledger.jsonl")
    assert steps == [Step(1, ("a",), ("task",), ("a-0", "a-1"))]
    assert refused == {"b"}
