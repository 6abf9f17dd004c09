"""Real workers around an in-process server: who holds which leases, and whether every group is
delivered once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.up.processes import Process
from tests.faults.agents import LOG
from tests.faults.history import read_answers
from tests.faults.history_sources import check_what_is_left
from tests.faults.lateness import watched_lateness
from tests.support.harness import (
    Exchange,
    Harness,
    SubmitTasksRequest,
    Task,
    hello,
    sampling,
    serve,
)
from tests.support.processes import start_worker

GROUP_SIZE = 2
LEASE_SECONDS = 1.5
GRACE_SECONDS = 0.5
CONCURRENCY = 3


@dataclass
class Crew:
    """Workers, and their tasks."""

    harness: Harness
    folder: Path
    workers: dict[str, Process] = field(default_factory=dict[str, Process])
    """By agent id."""
    submitted: int = 0
    started: int = 0

    def start(self) -> str:
        """Start another worker; return its agent id."""
        agent_id = f"agent-{self.started}"
        self.started += 1
        self.workers[agent_id] = start_worker(
            self.folder,
            self.harness.address,
            *("--agent-id", agent_id, "--concurrency", str(CONCURRENCY)),
            *("--generate", "tests.faults.agents:generate"),
            name=agent_id,
            environment={LOG: str(self.folder)},
        )
        return agent_id

    async def submit(self, count: int) -> None:
        tasks = [
            Task(
                task_id=f"task-{self.submitted + index}",
                group_size=GROUP_SIZE,
                text=f"say {self.submitted + index}",
                sampling_params=sampling(20),
            )
            for index in range(count)
        ]
        self.submitted += count
        await self.harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))

    def held_by(self, agent_id: str) -> set[str]:
        """The trajectory ids that are leased to one agent now."""
        attempts = self.harness.serving.queue._attempts
        return {
            found
            for found, attempt in attempts.items()
            if attempt.holder is not None and attempt.holder.agent_id == agent_id
        }

    async def lets_go(self, trajectory_ids: set[str], seconds: float) -> None:
        """Wait until none of these is leased, because each was completed or given back.

        Fails after `seconds`, not counting the lateness of this process, which runs the server.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        async with asyncio.timeout(60), watched_lateness() as lateness:
            while trajectory_ids & set(self.harness.serving.queue._attempts):
                await asyncio.sleep(0.02)
            took = clock() - begun
            assert took - await lateness.seconds() <= seconds, f"leased for {took:.1f} s more"

    async def all_done(self, seconds: float = 60.0) -> None:
        """Wait until every submitted group is complete."""
        async with asyncio.timeout(seconds):
            while self.harness.serving.buffer.buffered_count < self.submitted:
                await asyncio.sleep(0.02)

    async def check(self) -> None:
        """Check that each group is delivered once, with each of its samples once, and that none
        failed.
        """
        trainer = await hello(self.harness.wire, max_lag=1_000, groups_per_step=100_000)
        trainer.send(demand={"group_count": self.submitted})
        groups = [await self._next(trainer) for _ in range(self.submitted)]
        assert len({group.task_id for group in groups}) == self.submitted
        for group in groups:
            assert sorted(t.sample_index for t in group.trajectories) == list(range(GROUP_SIZE))
            assert not any(t.outcome.HasField("failure") for t in group.trajectories), group
        trainer.half_close()

    def check_history(self) -> None:
        """Check the same after all processes have ended, from the journal and the agents' logs.

        Nothing is trained, so every group is still held.
        """
        answers = [
            answer for agent in self.folder.glob("*.jsonl") for answer in read_answers(agent)
        ]
        history = check_what_is_left(self.folder / "journal", answers=answers)
        assert {group.task_id for group in history.groups.values()} == {
            f"task-{index}" for index in range(self.submitted)
        }
        assert history.held == set(history.groups)

    async def _next(self, trainer: Exchange) -> Any:
        return (await trainer.receive("delivery")).group


@contextlib.asynccontextmanager
async def crew(folder: Path, workers: int = 2) -> AsyncGenerator[Crew]:
    """A server with short leases, and `workers` workers. The files they leave are checked in the end."""
    settings = (
        f"journal.folder={folder / 'journal'}",
        "journal.durability=process",
        f"leases.seconds={LEASE_SECONDS}",
        f"leases.grace_seconds={GRACE_SECONDS}",
        "leases.max_attempts=1000",
        "limits.groups_without_trainer=100000",
    )
    async with serve(folder, *settings, step_seconds=0.004) as harness:
        found = Crew(harness, folder)
        for _ in range(workers):
            found.start()
        try:
            yield found
        finally:
            for worker in found.workers.values():
                worker.kill()
                await worker.wait()
    found.check_history()
