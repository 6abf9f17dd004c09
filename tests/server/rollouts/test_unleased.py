"""Unleased trajectories: how long they stay, and what they give way to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.journal import appending
from penstock.wire.failure import read_failure
from tests.support.harness import (
    AbortRequest,
    CompleteTrajectoryRequest,
    Failure,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    RenewLeaseRequest,
    SubmitTasksRequest,
    Task,
    sampling,
    sequence,
    serve,
    until,
)

BUDGET = 16 << 20
LONG = [1, 2, 3] * 10_000


async def refused(call: Awaitable[Any]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return read_failure(caught.value).reason


def is_held(harness: Harness, trajectory_id: str) -> bool:
    return harness.serving.store.find(trajectory_id) is not None


async def use_up(harness: Harness, prefix: str, count: int) -> None:
    for number in range(count):
        await harness.generate(f"{prefix}{number}", LONG, sampling_params=sampling(8))
        await harness.complete(f"{prefix}{number}")


async def lease_one(harness: Harness, task_id: str) -> tuple[Any, str]:
    task = Task(task_id=task_id, group_size=1, tokens=sequence([1]))
    await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
    call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=1))
    async with asyncio.timeout(20):
        return call, (await call.read()).trajectory_id


# Memory


async def test_closed_ones_give_way_to_what_needs_the_memory_the_oldest_first(
    tmp_path: Path,
) -> None:
    settings = (
        f"limits.memory_bytes={BUDGET}",
        f"journal.folder={tmp_path / 'journal'}",
        "journal.segment_bytes=1048576",
    )
    async with serve(tmp_path, *settings, max_context=40_000) as harness:
        await use_up(harness, "a", 90)
        assert harness.serving.budget.used_bytes <= BUDGET
        assert not is_held(harness, "a0") and is_held(harness, "a89")
        # Closed trajectories do not prevent a group from beginning.
        call, _ = await lease_one(harness, "task")
        call.cancel()
        # A request that needs most of the memory evicts them. A request that cannot fit next
        # to memory in use evicts none.
        task = Task(task_id="large", group_size=1, tokens=sequence([1]))
        task.metadata["filler"] = "x" * (10 << 20)
        await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        held = harness.serving.own.byte_count
        assert 0 < held < 6 << 20
        task.task_id = "another"
        assert await refused(harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))) == (
            "MEMORY_BUDGET"
        )
        assert harness.serving.own.byte_count == held
        count = len(harness.serving.store.records())
    # A restarted server does not recover the evicted trajectories either.
    async with serve(tmp_path, *settings, max_context=40_000) as harness:
        assert len(harness.serving.store.records()) == count
        assert harness.serving.own.byte_count == held
        await use_up(harness, "b", 60)


async def asked_until_it_fits(ask: Callable[[], Awaitable[Any]]) -> int:
    """Repeat the call until it fits; return the number of refusals. Each
    refusal evicts older trajectories."""
    refusals = 0
    async with asyncio.timeout(20):
        while True:
            try:
                await ask()
            except grpc.aio.AioRpcError as error:
                assert read_failure(error).reason == "DISK_FULL"
                refusals += 1
                await asyncio.sleep(0.02)
            else:
                return refusals


async def test_closed_ones_give_way_to_what_needs_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appending, "SHORTEST_WAIT_SECONDS", 0.01)
    settings = (f"journal.folder={tmp_path / 'journal'}", "journal.max_bytes=16777216")
    async with serve(tmp_path, *settings, max_context=40_000) as harness:
        refusals = 0
        for number in range(120):
            name = f"a{number}"
            for ask in (
                partial(harness.generate, name, LONG, sampling_params=sampling(8)),
                partial(harness.complete, name),
            ):
                refusals += await asked_until_it_fits(ask)
        assert refusals
        assert not is_held(harness, "a0") and is_held(harness, "a119")


async def test_one_goes_with_its_branches(tmp_path: Path) -> None:
    folder = f"journal.folder={tmp_path / 'journal'}"
    async with serve(tmp_path, folder) as harness:
        await harness.generate("root")
        await harness.generate("branch", parent_trajectory_id="root")
        await harness.complete("root")
        harness.serving.own.give_way(1)
        await harness.answers_read()
        assert not is_held(harness, "root") and not is_held(harness, "branch")
        assert harness.serving.budget.used_bytes == harness.serving.own.byte_count == 0
    async with serve(tmp_path, folder) as harness:
        assert not harness.serving.store.records()


# Time


async def test_one_that_nobody_calls_gives_its_place_back(tmp_path: Path) -> None:
    settings = (
        "limits.open_trajectories=2",
        "leases.own_seconds=0.3",
        f"journal.folder={tmp_path / 'journal'}",
    )
    async with serve(tmp_path, *settings) as harness:
        await harness.generate("root")
        await harness.generate("branch", parent_trajectory_id="root")
        await until(lambda: not harness.serving.store.records())
        _, trajectory_id = await lease_one(harness, "task")
        await harness.generate(trajectory_id)
        for name in ("root", "branch"):
            assert await refused(harness.resume(name)) == "LEASE_EXPIRED"
    async with serve(tmp_path, *settings) as harness:
        assert not is_held(harness, "root")
        assert await refused(harness.generate("branch")) == "LEASE_EXPIRED"


def pass_time(harness: Harness, seconds: float) -> None:
    """Pretend that no call came for this long."""
    own: Any = harness.serving.own
    for trajectory_id in own._open:
        own._open[trajectory_id] -= seconds
    own._expire_due()


CALLS: dict[str, Callable[[Harness, str], Awaitable[object]]] = {
    "GetTrajectory": lambda harness, name: harness.wire.GetTrajectory(
        GetTrajectoryRequest(trajectory_id=name)
    ),
    "Abort": lambda harness, name: harness.wire.Abort(
        AbortRequest(trajectories={"trajectory_ids": [name]})
    ),
    "RenewLease": lambda harness, name: harness.wire.RenewLease(
        RenewLeaseRequest(trajectory_ids=[name])
    ),
    "Continue": lambda harness, name: harness.resume(name, text="x"),
    "a refused Continue": lambda harness, name: refused(harness.resume(name)),
    "a refused Generate": lambda harness, name: refused(harness.generate(name)),
    "a refused close": lambda harness, name: refused(
        harness.wire.CompleteTrajectory(
            CompleteTrajectoryRequest(trajectory_id=name, outcome=Outcome(failure=Failure()))
        )
    ),
}


@pytest.mark.parametrize("call", CALLS)
async def test_every_call_keeps_it_that_of_a_branch_too(tmp_path: Path, call: str) -> None:
    async with serve(tmp_path, "leases.own_seconds=1000") as harness:
        await harness.generate("root")
        await harness.generate("branch", parent_trajectory_id="root")
        for name in ("root", "branch"):
            pass_time(harness, 800)
            await CALLS[call](harness, name)
        pass_time(harness, 800)
        assert is_held(harness, "root") and is_held(harness, "branch")
        pass_time(harness, 800)
        assert not is_held(harness, "root") and not is_held(harness, "branch")


async def test_a_turn_in_flight_keeps_it_and_its_end_begins_the_time_anew(tmp_path: Path) -> None:
    async with serve(tmp_path, "leases.own_seconds=1000", step_seconds=0.01) as harness:
        turn = asyncio.ensure_future(harness.generate("root", sampling_params=sampling(400)))
        await harness.sampled("root")
        for _ in range(2):
            pass_time(harness, 2000)
        assert is_held(harness, "root")
        own: Any = harness.serving.own
        own._open["root"] -= 2000
        await harness.wire.Abort(AbortRequest(all={}))
        await turn
        own._expire_due()
        assert is_held(harness, "root")


async def test_others_know_no_such_time(tmp_path: Path) -> None:
    async with serve(tmp_path, "leases.own_seconds=1000") as harness:
        await harness.generate("grouped", group_id="g", group_size=2)
        _, leased = await lease_one(harness, "task")
        await harness.generate(leased)
        pass_time(harness, 2000)
        assert is_held(harness, "grouped") and is_held(harness, leased)


async def test_one_that_is_restored_has_its_whole_time(tmp_path: Path) -> None:
    settings = ("leases.own_seconds=1000", f"journal.folder={tmp_path / 'journal'}")
    async with serve(tmp_path, *settings) as harness:
        await harness.generate("root")
        pass_time(harness, 800)
    async with serve(tmp_path, *settings) as harness:
        pass_time(harness, 800)
        assert is_held(harness, "root")
        pass_time(harness, 800)
        assert not is_held(harness, "root")


# Leases


@pytest.mark.parametrize("call", [name for name in CALLS if name != "Continue"])
async def test_every_call_renews_a_lease(tmp_path: Path, call: str) -> None:
    async with serve(tmp_path) as harness:
        stream, trajectory_id = await lease_one(harness, "task")
        await harness.generate(trajectory_id)
        attempt = harness.serving.queue.attempt_of(trajectory_id)
        assert attempt is not None
        attempt.deadline -= 30
        before = attempt.deadline
        await CALLS[call](harness, trajectory_id)
        assert attempt.deadline > before + 25
        stream.cancel()


async def test_the_abort_of_a_group_renews_its_leases(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        stream, trajectory_id = await lease_one(harness, "task")
        attempt = harness.serving.queue.attempt_of(trajectory_id)
        assert attempt is not None
        attempt.deadline -= 30
        before = attempt.deadline
        await harness.wire.Abort(AbortRequest(groups={"group_ids": [attempt.group.group_id]}))
        assert attempt.deadline > before + 25
        stream.cancel()
