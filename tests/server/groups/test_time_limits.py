"""Attempts that never end: each is over after its time limit, whatever its agent does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc

from penstock.wire.failure import read_failure
from tests.server.groups.test_wire_tasks import lease, open_leased, submit, take, task
from tests.support.harness import (
    CompleteTrajectoryRequest,
    ContinueRequest,
    GenerateRequest,
    RenewLeaseRequest,
    sampling,
    serve,
    until,
)

SHORT = ("leases.attempt_seconds=0.4", "leases.grace_seconds=0.1")


async def test_renewals_do_not_extend_an_attempt(tmp_path: Path) -> None:
    async with serve(tmp_path, *SHORT) as harness:
        await submit(harness, task("a", 1))
        call = lease(harness, 1, "agent")
        first = await take(call)
        assert first.time_limit.ToSeconds() == 0 and first.time_limit.nanos == 400_000_000
        renewed = 0
        while harness.serving.queue.held(first.trajectory_id) is not None:
            request = RenewLeaseRequest(trajectory_ids=[first.trajectory_id])
            answer = await harness.wire.RenewLease(request)
            renewed += not answer.expired_trajectory_ids
            await asyncio.sleep(0.01)
        assert renewed > 5
        # The same agent has room again, and gets the attempt once more.
        again = await take(call)
        assert (again.retry_count, again.sample_index) == (1, 0)


async def test_an_attempt_is_over_in_the_middle_of_a_turn(tmp_path: Path) -> None:
    settings = (*SHORT, "leases.max_attempts=1")
    async with serve(tmp_path, *settings, step_seconds=0.02) as harness:
        await submit(harness, task("a", 1, sampling_params=sampling(4000)))
        taken = await take(lease(harness, 1, "agent"))
        turn = harness.wire.Generate(GenerateRequest(trajectory_id=taken.trajectory_id))
        await turn.read()
        await until(lambda: harness.serving.buffer.buffered_count == 1)
        await until(lambda: not harness.serving.turns.in_flight)
        turn.cancel()
        (found,) = harness.serving.buffer.groups
        group = await harness.serving.buffer.read(found)
        assert b"ATTEMPT_TIMEOUT" in group and b"leases.attempt_seconds" in group
        assert harness.serving.closing.failures == {"ATTEMPT_TIMEOUT": 1}
        for late in (
            harness.wire.CompleteTrajectory(
                CompleteTrajectoryRequest(
                    trajectory_id=taken.trajectory_id, outcome={"reward": 1.0}
                )
            ),
            harness.wire.Continue(ContinueRequest(trajectory_id=taken.trajectory_id)).read(),
        ):
            try:
                await late
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error)
                assert failure.reason == "LEASE_EXPIRED"
                assert failure.metadata["retried"] == "false"
            else:
                raise AssertionError("it was accepted")


async def test_a_group_of_its_agents_own_is_over_although_its_agent_calls(tmp_path: Path) -> None:
    """Also the sibling that its agent never opened."""
    async with serve(tmp_path, *SHORT) as harness:
        await harness.generate("one", group_id="g", group_size=2)
        calls = 0
        while not harness.serving.buffer.buffered_count:
            await harness.wire.RenewLease(RenewLeaseRequest(trajectory_ids=["one"]))
            calls += 1
            await asyncio.sleep(0.01)
        assert calls > 5
        assert harness.serving.closing.failures == {"ATTEMPT_TIMEOUT": 2}


async def test_siblings_that_are_judged_together_wait_for_each_other(tmp_path: Path) -> None:
    """The first one ends early, and waits for one that fails when its time is nearly over."""
    async with serve(tmp_path, *SHORT) as harness:
        await submit(harness, task("a", 2))
        call = lease(harness, 2, "agent", whole_groups=True)
        first, hung = await take(call), await take(call)
        await open_leased(harness, first)
        ends_at = harness.serving.queue.held(first.trajectory_id).ends_at
        await asyncio.sleep(0.3)
        await harness.fail(hung.trajectory_id, "ATTEMPT_TIMEOUT")
        again = await take(call)
        assert (again.sample_index, again.retry_count) == (hung.sample_index, 1)
        await until(lambda: time.monotonic() > ends_at + 0.05)
        assert harness.serving.queue.held(first.trajectory_id) is not None
        # Both are judged.
        await open_leased(harness, again)
        await harness.complete(first.trajectory_id)
        assert await harness.complete(again.trajectory_id)


async def test_a_hung_attempt_does_not_hold_a_place_for_ever(tmp_path: Path) -> None:
    async with serve(tmp_path, *SHORT, "limits.groups_without_trainer=1") as harness:
        await submit(harness, task("hung", 1), task("next", 1))
        call = lease(harness, 8, "agent")
        names = [(await take(call)).task.task_id for _ in range(3)]
        # Each was leased once more after its limit, and failed in the end: the place is free.
        assert names == ["hung"] * 3
        await until(lambda: harness.serving.buffer.buffered_count == 1)
