"""F5: each role is stopped with SIGSTOP for a while. Nothing is lost, and late messages of a
replaced trainer are refused.

Several are stopped at the same time, each for a different while. A stopped role must cost nothing
but time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable
from itertools import count as numbers
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client import connect
from penstock.wire.security import open_channel
from tests.faults.history import Answer, Step, read_outcome, read_runs
from tests.faults.history_sources import check_what_is_left
from tests.faults.report import COUNT, Report
from tests.faults.test_f3_killed_engine import TRAJECTORIES, Script
from tests.faults.workers import crew
from tests.support.harness import (
    BROKE_WHILE_WRITING,
    CompleteTrajectoryRequest,
    GetServerInfoRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    RenewLeaseRequest,
    SubmitTasksRequest,
    Wire,
    hello,
    serve,
)
from tests.support.processes import Server, server_process, stopped

FILE = "tests/faults/test_f5_stopped.py::"
ROOMY = {"max_lag": 1_000, "groups_per_step": 1_000}
ROLES = 3
"""The roles share the count of the table."""
AT_ONCE = 6
KEEPALIVE_SECONDS = 10.0
"""Either end may close a connection that is silent for longer."""

Pause = Callable[[random.Random], float]


@pytest.fixture
def pause(report: Report, pytestconfig: pytest.Config) -> Pause:
    """How long a process is stopped."""
    longest = min(60.0, pytestconfig.getoption("fault_seconds"))

    def seconds(rng: random.Random) -> float:
        return rng.uniform(0.2, 1.0) if report.count is None else rng.uniform(5.0, longest)

    return seconds


class Stops:
    """How many stops there are, and how many at a time."""

    def __init__(self, report: Report, role: str, test: str) -> None:
        self._report, self._role, self._test = report, role, test
        wanted = COUNT if report.count is None else -(-report.count // ROLES)
        self.at_once = min(AT_ONCE, wanted)
        self._batches = -(-wanted // self.at_once)

    async def make(self, one: Callable[[int, random.Random], Awaitable[None]]) -> None:
        """Call `one` with the number of each stop and a separate random generator."""

        async def batch(rng: random.Random) -> None:
            seeds = [rng.random() for _ in range(self.at_once)]
            async with asyncio.TaskGroup() as stops:
                for place, seed in enumerate(seeds):
                    stops.create_task(_await(one(place, random.Random(seed))))

        where, name = f"F5 {self._role}", f"{self._role} stopped"
        await self._report.repeat(where, name, FILE + self._test, self._batches, batch)

    def survived(self) -> None:
        count = self._batches * self.at_once
        self._report.survived(f"F5 {self._role}", f"{self._role} stopped", count)


async def _await(awaitable: Awaitable[None]) -> None:
    await awaitable


async def test_a_stopped_server_loses_nothing(tmp_path: Path, report: Report, pause: Pause) -> None:
    stops = Stops(report, "server", "test_a_stopped_server_loses_nothing")
    async with contextlib.AsyncExitStack() as stack:
        servers: list[Server] = []
        for place in range(stops.at_once):
            folder = tmp_path / str(place)
            folder.mkdir()
            servers.append(
                await stack.enter_async_context(server_process(folder, "--step-seconds", "0.004"))
            )
        names = numbers()

        async def stop(place: int, rng: random.Random) -> None:
            server = servers[place]
            scripts = [Script.draw(f"t-{next(names)}", rng) for _ in range(TRAJECTORIES)]
            async with connect(server.address) as client:
                callers = [asyncio.create_task(script.run(client)) for script in scripts]
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                with stopped(server.process.pid):
                    await asyncio.sleep(pause(rng))
                async with asyncio.timeout(60):
                    found = await asyncio.gather(*callers)
            assert found == [script.expected() for script in scripts]

        await stops.make(stop)
    stops.survived()


async def test_what_was_renewed_while_the_server_stood_still_is_kept(tmp_path: Path) -> None:
    settings = ("--set", "leases.seconds=3", "--set", "leases.grace_seconds=3")
    async with (
        server_process(tmp_path, *settings) as server,
        open_channel(server.address, None) as channel,
    ):
        wire = Wire(channel)
        task = {"task_id": "task", "group_size": 1, "text": "?"}
        await wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        leases = wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=1))
        held = (await leases.read()).trajectory_id
        with stopped(server.process.pid):
            renewing = asyncio.ensure_future(
                wire.RenewLease(RenewLeaseRequest(trajectory_ids=[held]))
            )
            await asyncio.sleep(5.0)
        assert list((await renewing).expired_trajectory_ids) == []
        outcome = {"failure": {"reason": "GIVEN_UP"}}
        closed = await wire.CompleteTrajectory(
            CompleteTrajectoryRequest(trajectory_id=held, outcome=outcome)
        )
        # Retried like any failed attempt, and not because its lease expired.
        assert closed.retried
        leases.cancel()


async def test_what_a_stopped_agent_held_is_leased_again_and_counts_once(
    tmp_path: Path, report: Report, pause: Pause
) -> None:
    test = "test_what_a_stopped_agent_held_is_leased_again_and_counts_once"
    stops = Stops(report, "agent", test)
    async with crew(tmp_path, workers=stops.at_once + 1) as site:
        victims = list(site.workers.values())

        async def stop(place: int, rng: random.Random) -> None:
            await site.submit(4)
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            with stopped(victims[place].pid):
                await asyncio.sleep(pause(rng))
            # Its late messages about leases that moved to another agent are refused.
            await site.all_done()

        await stops.make(stop)
        await site.check()
    stops.survived()


async def test_what_a_replaced_trainer_says_late_is_refused(
    tmp_path: Path, report: Report, pause: Pause
) -> None:
    stops = Stops(report, "trainer", "test_what_a_replaced_trainer_says_late_is_refused")
    folders = [tmp_path / str(place) for place in range(stops.at_once)]
    answers: list[list[Answer]] = [[] for _ in folders]
    ledgers: list[list[Step]] = [[] for _ in folders]
    async with contextlib.AsyncExitStack() as stack:
        servers: list[Harness] = []
        for folder in folders:
            folder.mkdir()
            settings = (f"journal.folder={folder / 'journal'}", "journal.durability=process")
            servers.append(await stack.enter_async_context(serve(folder, *settings)))
        epochs = numbers(10, 10)

        async def stop(place: int, rng: random.Random) -> None:
            epoch, groups = next(epochs), rng.randint(1, 3)
            answers[place] += await _accepted(servers[place], epoch, groups)
            ledgers[place].append(await _replace(servers[place], epoch, groups, pause(rng)))

        await stops.make(stop)
    for folder, ledger, told in zip(folders, ledgers, answers, strict=True):
        history = check_what_is_left(folder / "journal", ledger, told)
        assert not history.held, "each of them was trained"
    stops.survived()


async def _accepted(harness: Harness, epoch: int, count: int) -> list[Answer]:
    """Make `count` accepted groups; return their agent's log."""
    found: list[Answer] = []
    for name in (f"{epoch}-{index}" for index in range(count)):
        turn = await harness.generate(name, group_id=name, group_size=1)
        completed = await harness.complete(name)
        outcome = read_outcome(Outcome(reward=1.0))
        found.append(Answer(name, name, outcome, completed, runs=read_runs(turn.segments)))
    return found


async def _replace(harness: Harness, epoch: int, groups: int, seconds: float) -> Step:
    """One trainer takes groups and stops; another takes over; then the first one continues and
    sends.

    Returns the step of the trainer that follows them.
    """
    late = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.faults.late_trainer"),
        *(harness.address, str(epoch), str(groups)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert late.stdin is not None
    assert late.stdout is not None
    try:
        assert await late.stdout.readline() == b"holding\n"
        with stopped(late.pid):
            late.stdin.write(b"go on\n")
            newer = await hello(harness.wire, epoch + 1, **ROOMY)
            assert len(await _delivered(newer, groups)) == groups
            await asyncio.sleep(seconds)
        said = (await late.stdout.read()).decode().splitlines()
        # The stream's status is lost if the trainer sends at the moment that it learns of the end, or
        # if the connection was closed meanwhile. Messages on a new connection are still refused.
        lost = said[0] == BROKE_WHILE_WRITING or seconds > KEEPALIVE_SECONDS
        assert said[0] == "SESSION_REPLACED" or lost
        assert said[1:] == ["STALE_EPOCH"]
    finally:
        if late.returncode is None:
            late.kill()
        await late.wait()
    newer.half_close()
    # Its receipts made nothing final: the next trainer gets the same groups and uses them.
    newest = await hello(harness.wire, epoch + 2, **ROOMY)
    used = await _delivered(newest, groups, step=epoch)
    assert len(used) == groups
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert (info.active_weight_version, list(info.staged_weight_versions)) == (0, [])
    newest.half_close()
    # The server handles the stream's messages before the stream ends, but not before other calls
    # are answered.
    assert await newest.call.read() is grpc.aio.EOF
    return Step(epoch, tuple(sorted(used)))


async def _delivered(trainer: Any, count: int, step: int = 0) -> set[str]:
    """Take `count` groups; return their ids. With a step, use them for it and make them final."""
    trainer.send(demand={"group_count": count})
    deliveries = [await trainer.receive("delivery") for _ in range(count)]
    if step:
        ids = [delivery.delivery_id for delivery in deliveries]
        trainer.send(receipt={"delivery_ids": ids, "step": step})
        trainer.send(checkpoint={"step": step})
    return {delivery.group.group_id for delivery in deliveries}
