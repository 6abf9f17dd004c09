"""F2: the server is killed with SIGKILL at failpoints. Nothing that it acknowledged is missing
afterwards.

The restarted server is asked first. After all processes have ended, the files of all three sides
are checked too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.common.failpoints import VARIABLE
from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.wire import codec
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from tests.faults.history import Answer, Group, Step, read_group, read_outcome, read_runs, step_with
from tests.faults.history_sources import check_what_is_left
from tests.faults.report import Report
from tests.support.harness import (
    BROKE_WHILE_WRITING,
    CompleteTrajectoryRequest,
    Failure,
    GenerateRequest,
    GetTrajectoryRequest,
    LeaseTasksRequest,
    Outcome,
    SubmitTasksRequest,
    Task,
    Wire,
    collect,
    hello,
    sampling,
    sequence,
)
from tests.support.processes import Server, server_process

# Name -> the most hits before the one that kills. Some points are not hit often.
POINTS = {
    "journal.before_write": 40,
    "journal.before_fsync": 40,
    "journal.before_reply": 40,
    "journal.before_rotate": 3,
    "journal.before_snapshot_fsync": 1,
    "journal.before_snapshot_clean_up": 1,
    "closing.before_append": 8,
    "closing.before_offer": 8,
    "receipt.before_append": 3,
    "receipt.after_append": 3,
    "checkpoint.before_append": 2,
}
FIRST = dict.fromkeys([point for point in POINTS if point.startswith("journal.before_")], 2) | {
    "journal.before_snapshot_fsync": 1,
    "journal.before_snapshot_clean_up": 1,
}
"""Points whose first hit comes before the server serves any call."""
GROUPS = 16
GROUP_SIZE = 2
GROUPS_PER_STEP = 2
LEASE_SECONDS = 0.4
# Large enough that segments fill and are compacted.
METADATA_BYTES = 60_000


@dataclass
class Told:
    """What the server acknowledged, and what the trainer did."""

    tasks: list[str] = field(default_factory=list[str])
    outcomes: dict[str, Any] = field(default_factory=dict[str, Any])
    """By trajectory id."""
    turns: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Tokens of the turns whose end was received, by trajectory id."""
    trained: Counter[str] = field(default_factory=Counter[str])
    """How often each task was trained."""
    answers: list[Answer] = field(default_factory=list[Answer])
    ledger: list[Step] = field(default_factory=list[Step])
    delivered: dict[str, Group] = field(default_factory=dict[str, Group])
    """Trained groups as they were delivered."""
    step: int = 0
    saved: int = 0
    """The last step in a checkpoint."""

    def write_down(self, groups: list[Group]) -> None:
        """Add a step to the ledger, as a trainer does."""
        self.delivered |= {group.group_id: group for group in groups}
        self.ledger.append(step_with(self.step, groups))


class Run:
    """Agents and a trainer that run until the server is gone, and again after its restart."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self._server = server
        self._random = rng
        self.told = Told()
        self._epoch = 0

    @contextlib.asynccontextmanager
    async def wire(self) -> Any:
        async with grpc.aio.insecure_channel(
            self._server.address, options=client_options()
        ) as channel:
            yield Wire(channel)

    async def submit(self, wire: Any) -> int:
        """Submit all tasks; return how many were new."""
        tasks = [
            Task(
                task_id=f"task{i}",
                index=i,
                group_size=GROUP_SIZE,
                tokens=sequence([1, 2, i]),
                sampling_params=sampling(8),
            )
            for i in range(GROUPS)
        ]
        answer = await wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
        self.told.tasks = [task.task_id for task in tasks]
        return int(answer.accepted_count)

    async def agent(self, wire: Any) -> None:
        """Work on leased attempts for as long as the server lives."""
        call = wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=3))
        async with asyncio.TaskGroup() as working:
            while (given := await call.read()) is not grpc.aio.EOF:
                working.create_task(self._attempt(wire, given))

    async def _attempt(self, wire: Any, given: Any) -> None:
        trajectory_id = given.trajectory_id
        request = GenerateRequest(trajectory_id=trajectory_id, sampling_params=sampling(8))
        try:
            turn = await collect(wire.Generate(request))
            self.told.turns[trajectory_id] = turn.tokens
            outcome = Outcome(reward=self._random.random())
            if self._random.random() < 0.15:
                outcome = Outcome(failure=Failure(reason="UNLUCKY"))
            outcome.metadata["filler"] = "x" * METADATA_BYTES
            closed = await wire.CompleteTrajectory(
                CompleteTrajectoryRequest(trajectory_id=trajectory_id, outcome=outcome)
            )
            self.told.outcomes[trajectory_id] = outcome
            self.told.answers.append(
                Answer(
                    trajectory_id,
                    given.group_id,
                    read_outcome(outcome),
                    closed.group_completed,
                    closed.retried,
                    read_runs(turn.segments),
                )
            )
        except grpc.aio.AioRpcError as error:
            # If the lease expired on a busy machine, another agent has the attempt.
            if read_failure(error).reason != "LEASE_EXPIRED":
                raise

    async def train(self, wire: Any, *, until_done: bool = False) -> None:
        """Take batches and train them, saving every other step."""
        told = self.told
        told.step = told.saved
        self._epoch += 1
        exchange = await hello(
            wire, self._epoch, groups_per_step=GROUPS_PER_STEP, max_lag=8, resume_step=told.step
        )
        batch: list[Any] = []
        exchange.send(demand={"group_count": GROUPS_PER_STEP})
        while not (until_done and len(told.trained) == GROUPS):
            delivery = await exchange.receive("delivery", 20)
            if told.trained[delivery.group.task_id]:
                # A checkpoint contains it, but the server never received its receipt.
                exchange.send(receipt={"delivery_ids": [delivery.delivery_id], "step": told.step})
                exchange.send(demand={"group_count": 1})
                continue
            self._check(delivery.group)
            batch.append(delivery)
            if len(batch) < GROUPS_PER_STEP:
                continue
            told.step += 1
            told.trained.update(item.group.task_id for item in batch)
            told.write_down([read_group(item.group) for item in batch])
            ids = [item.delivery_id for item in batch]
            if told.step % 2 == 0:
                told.saved = told.step
            exchange.send(receipt={"delivery_ids": ids, "step": told.step})
            if told.step % 2 == 0:
                exchange.send(checkpoint={"step": told.step})
            exchange.send(demand={"group_count": GROUPS_PER_STEP})
            batch = []

    def lose_what_was_not_saved(self) -> None:
        """Let the trainer resume from its checkpoint too."""
        self.told.trained = Counter(
            {task: count for task, count in self.told.trained.items() if task in self._saved_tasks}
        )

    @property
    def _saved_tasks(self) -> set[str]:
        # All steps have the same size, so a checkpoint contains the first tasks.
        return set(list(self.told.trained)[: self.told.saved * GROUPS_PER_STEP])

    def _check(self, group: Any) -> None:
        """Check that every sibling is there, with the acknowledged outcome and tokens."""
        assert len(group.trajectories) == GROUP_SIZE
        for trajectory in group.trajectories:
            told = self.told.outcomes.get(trajectory.trajectory_id)
            if told is not None:
                assert trajectory.outcome.SerializeToString(
                    deterministic=True
                ) == told.SerializeToString(deterministic=True)
            tokens = self.told.turns.get(trajectory.trajectory_id)
            if tokens is not None:
                found = trajectory.segments[-1]
                assert [int(t) for t in codec.token_ids(found)] == tokens

    async def check_told(self, wire: Any) -> None:
        """Check that the server knows everything it acknowledged."""
        if self.told.tasks:
            assert await self.submit(wire) == 0
        for trajectory_id, outcome in self.told.outcomes.items():
            await wire.CompleteTrajectory(
                CompleteTrajectoryRequest(trajectory_id=trajectory_id, outcome=outcome)
            )
        for trajectory_id, tokens in self.told.turns.items():
            if trajectory_id in self.told.outcomes:
                continue
            try:
                found = await wire.GetTrajectory(GetTrajectoryRequest(trajectory_id=trajectory_id))
            except grpc.aio.AioRpcError as error:
                # Its outcome was durable but not acknowledged, and it has since been trained or retried.
                assert read_failure(error).reason in ("TRAJECTORY_CLOSED", "LEASE_EXPIRED"), error
                continue
            segment = found.trajectory.segments[-1]
            assert [int(t) for t in codec.token_ids(segment)] == tokens


LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def until_lost(work: list[Any]) -> None:
    """Run all of these until the server is gone. Each notices in a different way."""
    tasks = [asyncio.ensure_future(item) for item in work]
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        errors: list[BaseException] = [task.exception()] if task.exception() else []
        while errors:
            error = errors.pop()
            if isinstance(error, BaseExceptionGroup):
                errors += error.exceptions
            elif isinstance(error, grpc.aio.AioRpcError):
                assert error.code() in LOST or error.details() == BROKE_WHILE_WRITING, error
            elif isinstance(error, AssertionError):
                assert "the stream ended" in str(error), error
            elif error is not None and not isinstance(error, asyncio.CancelledError):
                raise error


def check_files(folder: Path) -> None:
    """Check that every record left by a killed server is whole."""
    for _ in read_records(find_files(folder / "journal"), Reading()):
        pass


async def kill_at(
    folder: Path, point: str, rng: random.Random, journal: tuple[str, ...] | None = None
) -> None:
    """One life that ends at this point, and the next. `journal` names one outside the folder."""
    folder.mkdir()
    settings = (
        f"leases.seconds={LEASE_SECONDS}",
        f"leases.grace_seconds={LEASE_SECONDS}",
        "leases.max_attempts=20",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    async with server_process(folder, *options, journal=journal) as server:
        await server.kill()
        server.environment[VARIABLE] = (
            f"{point}=kill@{rng.randint(FIRST.get(point, 1), POINTS[point])}"
        )
        await server.start()
        run = Run(server, rng)
        async with run.wire() as wire:

            async def begin() -> None:
                await run.submit(wire)
                await run.agent(wire)

            async with asyncio.timeout(60):
                ending = asyncio.ensure_future(server.wait())
                working = asyncio.ensure_future(until_lost([begin(), run.train(wire)]))
                await asyncio.wait([ending, working], return_when=asyncio.FIRST_COMPLETED)
                assert await ending == -9, f"{point} was never reached"
                await working
        del server.environment[VARIABLE]
        if journal is None:
            check_files(folder)
        await server.start()
        run.lose_what_was_not_saved()
        async with run.wire() as wire:
            await run.check_told(wire)
            if not run.told.tasks:
                await run.submit(wire)
            agents = asyncio.ensure_future(run.agent(wire))
            async with asyncio.timeout(60):
                await run.train(wire, until_done=True)
            agents.cancel()
            await asyncio.gather(agents, return_exceptions=True)
        assert run.told.trained == Counter(dict.fromkeys(run.told.tasks, 1))
    if journal is None:
        told = run.told
        check_what_is_left(folder / "journal", told.ledger, told.answers, told.delivered.values())


async def test_nothing_acknowledged_is_missing_after_a_kill(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    points = list(POINTS)
    if report.count is None:
        points = random.Random(report.seed).sample(points, 2)
    count = report.count or 1
    for point in points:

        async def happen(rng: random.Random, point: str = point) -> None:
            await kill_at(tmp_path / f"{point}-{rng.random()}", point, rng)

        await report.repeat("server", point, request.node.nodeid, count, happen)
        report.survived("server", point, count)
