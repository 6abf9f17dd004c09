"""A small run of the real clients: agents take turns and give rewards, and a trainer uses the
groups.

Each side writes down its answers, so that `history` can decide afterwards what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from penstock.client import connect
from penstock.client.calls import Patience
from penstock.client.client import Client
from penstock.client.errors import PenstockError
from penstock.client.leases import Attempt
from penstock.client.outcome import Outcome
from penstock.client.sampling import SamplingParams
from penstock.client.tasks import Task
from penstock.trainer.exchange.stream import Exchange, RunFacts
from penstock.v1 import trainer_service_pb2, weights_pb2
from penstock.wire.security import Security, open_channel
from tests.faults.agent_log import answered
from tests.faults.history import (
    Answer,
    Group,
    History,
    Step,
    explain_fake,
    read_group,
    step_with,
    violations,
)
from tests.support.harness import StalenessContract

GROUPS_PER_STEP = 2
GROUP_SIZE = 2
AGENTS = 2
CONCURRENCY = 4
PATIENCE = Patience(call_seconds=10.0, reconnect_seconds=90.0, overload_seconds=90.0)
LOST = ("LEASE_EXPIRED", "TRAJECTORY_CLOSED", "TRAJECTORY_UNKNOWN")
"""Reasons with which an agent learns that its attempt was lost to another."""


@dataclass
class Workload:
    """One run, from its first task to its last step."""

    address: str
    """Of the server, or of a proxy in front of it."""
    groups: int
    name: str = "run"
    security: Security | None = None
    filler_bytes: int = 0
    """Extra bytes in each outcome."""
    answers: list[Answer] = field(default_factory=list[Answer])
    ledger: list[Step] = field(default_factory=list[Step])
    delivered: dict[str, Group] = field(default_factory=dict[str, Group])
    lost_attempts: int = 0

    async def run(self) -> None:
        """Run until every task is trained."""
        async with asyncio.TaskGroup() as tasks:
            agents = [tasks.create_task(self._agent(number)) for number in range(AGENTS)]
            await self._trainer()
            for agent in agents:
                agent.cancel()

    def check(self) -> None:
        """Check that each task was trained once, and that each token matches its label."""
        history = History(self.answers, self.ledger, self.delivered)
        assert violations(history, explain_fake) == []
        trained = [name for step in self.ledger for name in step.task_ids]
        assert sorted(trained) == sorted(f"{self.name}-{n}" for n in range(self.groups))

    # Agents

    async def _agent(self, number: int) -> None:
        agent_id = f"{self.name}-agent-{number}"
        async with connect(self.address, patience=PATIENCE, security=self.security) as client:
            leases = client.lease_tasks(CONCURRENCY, agent_id=agent_id, resume_aborted=True)
            async with leases, asyncio.TaskGroup() as attempts:
                async for attempt in leases:
                    attempts.create_task(self._attempt(attempt))

    async def _attempt(self, attempt: Attempt) -> None:
        trajectory = attempt.trajectory
        rng = random.Random(trajectory.trajectory_id)
        metadata = {"filler": "x" * self.filler_bytes} if self.filler_bytes else {}
        outcome = Outcome(float(rng.randrange(10)), metadata=metadata)
        try:
            await trajectory.turn()
            for _ in range(rng.randrange(3)):
                await trajectory.turn([rng.randrange(200) for _ in range(3)])
            closed = await trajectory.complete(outcome)
        except PenstockError as error:
            if error.reason not in LOST:
                raise
            self.lost_attempts += 1
            return
        self.answers.append(answered(trajectory, outcome, closed))

    # The trainer

    async def _trainer(self) -> None:
        async with (
            open_channel(self.address, self.security, own_connection=True) as channel,
            connect(self.address, patience=PATIENCE, security=self.security) as client,
        ):
            exchange = Exchange(
                channel,
                RunFacts(
                    run_id=self.name,
                    contract=StalenessContract(max_lag=100, groups_per_step=GROUPS_PER_STEP),
                    in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP,
                    weight_version=0,
                    step=0,
                ),
                give_up_after_seconds=90.0,
                stopping=asyncio.Event(),
            )
            await exchange.open()
            reading = asyncio.ensure_future(exchange.run(_nothing_to_restore))
            stepping = asyncio.ensure_future(self._steps(exchange, client))
            try:
                await asyncio.wait([reading, stepping], return_when=asyncio.FIRST_COMPLETED)
                if not stepping.done():
                    reading.result()
                await stepping
            finally:
                for task in (reading, stepping):
                    task.cancel()
                await asyncio.gather(reading, stepping, return_exceptions=True)

    async def _steps(self, exchange: Exchange, client: Client) -> None:
        await self._submit(client)
        for step in range(1, -(-self.groups // GROUPS_PER_STEP) + 1):
            count = min(GROUPS_PER_STEP, self.groups - (step - 1) * GROUPS_PER_STEP)
            exchange.demand(count)
            batch = [await exchange.next_group() for _ in range(count)]
            groups = [read_group(group) for group in batch]
            self.delivered |= {group.group_id: group for group in groups}
            self.ledger.append(step_with(step, groups))
            exchange.receipt(batch, step)
            exchange.checkpoint(step)
        await exchange.ready.wait()
        await exchange.close(timeout_seconds=2.0)

    async def _submit(self, client: Client) -> None:
        tasks = [
            Task(
                f"{self.name}-{number}",
                prompt=[1 + number % 200, 2, 3],
                group_size=GROUP_SIZE,
                index=number,
                sampling=SamplingParams(max_tokens=8),
            )
            for number in range(self.groups)
        ]
        while True:
            # As the real trainer does: tasks that are already known change nothing.
            with contextlib.suppress(PenstockError):
                await client.submit_tasks(tasks)
                return


async def _nothing_to_restore(_: trainer_service_pb2.Welcome) -> None:
    """The fake engine's weights never change here, so there is nothing to restore."""
