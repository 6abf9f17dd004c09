"""Calls on expired leases, and groups without leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.server.core.errors import DomainError
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from tests.support.fakes import ByteRenderer, expected_tokens
from tests.support.harness import (
    AbortRequest,
    GenerateRequest,
    GetServerInfoRequest,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    SubmitTasksRequest,
    Task,
    collect,
    hello,
    sampling,
    sequence,
    serve,
    until,
)

EXPIRED = (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_EXPIRED")


async def failure(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    found = read_failure(caught.value)
    return found.code, found.reason


async def submit(harness: Harness, *task_ids: str) -> None:
    await harness.wire.SubmitTasks(
        SubmitTasksRequest(
            tasks=[
                Task(
                    task_id=task_id,
                    group_size=1,
                    tokens=sequence([1, 2, 3]),
                    sampling_params=sampling(8),
                )
                for task_id in task_ids
            ]
        )
    )


@asynccontextmanager
async def leasing(harness: Harness, concurrency: int = 1) -> AsyncGenerator[Any]:
    call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=concurrency))
    yield call
    call.cancel()


async def take(call: Any) -> Any:
    async with asyncio.timeout(20):
        return await call.read()


async def refused_everywhere(harness: Harness, trajectory_id: str) -> None:
    """Check that every call that names the trajectory reports an expired lease."""
    attempts = {
        "GetTrajectory": harness.wire.GetTrajectory(
            GetTrajectoryRequest(trajectory_id=trajectory_id)
        ),
        "Continue": harness.resume(trajectory_id, tokens=sequence([1])),
        "resume": harness.resume(trajectory_id),
        "Generate": harness.generate(trajectory_id),
        "branch": harness.generate("late", [9], parent_trajectory_id=trajectory_id),
        "reward": harness.complete(trajectory_id),
        "failure": harness.fail(trajectory_id),
    }
    found = {name: await failure(call) for name, call in attempts.items()}
    assert found == dict.fromkeys(attempts, EXPIRED), trajectory_id


async def open_with_branches(harness: Harness, lease: Any) -> tuple[str, ...]:
    root = lease.trajectory_id
    await collect(harness.wire.Generate(GenerateRequest(trajectory_id=root)))
    await harness.generate(f"{root}-branch", [9], parent_trajectory_id=root)
    await harness.generate(f"{root}-leaf", [8], parent_trajectory_id=f"{root}-branch")
    return root, f"{root}-branch", f"{root}-leaf"


async def test_a_deadline_that_moves_just_before_it_is_waited_for_counts(harness: Harness) -> None:
    queue = harness.serving.queue
    next_deadline = queue.next_deadline

    def and_then_it_moves() -> float | None:
        queue.next_deadline = next_deadline  # type: ignore[method-assign]
        asyncio.get_running_loop().call_soon(harness.pass_lease_time)
        return next_deadline()

    await submit(harness, "one")
    async with leasing(harness) as call:
        await take(call)
        queue.next_deadline = and_then_it_moves  # type: ignore[method-assign]
        queue.leases.sooner.notify()
        assert (await take(call)).retry_count == 1


@pytest.mark.parametrize("max_attempts", [2, 1], ids=["made again", "failed"])
async def test_an_expired_lease_is_always_said_to_be_one(tmp_path: Path, max_attempts: int) -> None:
    async with serve(tmp_path, f"leases.max_attempts={max_attempts}") as harness:
        await submit(harness, "one", "two")
        async with leasing(harness) as call:
            lease = await take(call)
            ids = await open_with_branches(harness, lease)
            harness.pass_lease_time()
            again = await take(call)  # The expired lease frees its slot.
            assert again.retry_count == (max_attempts == 2)
            for trajectory_id in ids:
                await refused_everywhere(harness, trajectory_id)
            # A trajectory that was never opened is still unknown.
            assert (await failure(harness.complete("nobody")))[1] == "TRAJECTORY_UNKNOWN"


async def test_the_branches_of_a_replaced_runs_leases_have_expired(harness: Harness) -> None:
    await hello(harness.wire, run_id="one")
    await submit(harness, "one")
    async with leasing(harness) as call:
        ids = await open_with_branches(harness, await take(call))
        await hello(harness.wire, epoch=2, run_id="two")
        for trajectory_id in ids:
            await refused_everywhere(harness, trajectory_id)


async def test_a_branch_that_never_began_does_not_expire_with_its_root(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.02) as harness:
        await submit(harness, "one")
        async with leasing(harness) as call:
            lease = await take(call)
            root = lease.trajectory_id
            await collect(harness.wire.Generate(GenerateRequest(trajectory_id=root)))
            # Refused before the engine gets it, as if it had never been requested.
            refuse = harness.serving.switch.refuse
            refuse(DomainError(Reason.WEIGHTS_INCONSISTENT, "told to refuse"))
            code, _ = await failure(harness.generate("branch", [9], parent_trajectory_id=root))
            assert code == grpc.StatusCode.UNAVAILABLE
            refuse(None)
            harness.pass_lease_time()
            await take(call)
            # The id belongs to no lease, so it can be used.
            turn = await harness.generate("branch", [9])
            assert turn.tokens == expected_tokens([9], [0] * 16)[0]


async def test_a_lease_that_runs_out_while_the_prompt_is_encoded_is_refused(
    tmp_path: Path,
) -> None:
    encoding, encoded = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(ByteRenderer):
        def encode_text(self, text: str, *, first: bool) -> NDArray[np.int32]:
            loop.call_soon_threadsafe(encoding.set)
            asyncio.run_coroutine_threadsafe(encoded.wait(), loop).result(20)
            return super().encode_text("x", first=first)

    async with serve(tmp_path, renderer=Slow()) as harness:
        await submit(harness, "one")
        async with leasing(harness) as call:
            lease = await take(call)
            opening = asyncio.ensure_future(
                harness.generate(lease.trajectory_id, text="y" * 20_000)
            )
            await encoding.wait()
            harness.pass_lease_time()
            await take(call)
            encoded.set()
            assert await failure(opening) == EXPIRED
            # No turn may run on an attempt that now belongs to another agent.
            assert not harness.serving.turns.in_flight
            assert harness.serving.store.open_count == 0


async def test_a_group_without_leases_lives_while_any_sibling_is_called(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.02) as harness:
        place = {"group_id": "mine", "group_size": 3}
        turn = asyncio.ensure_future(
            harness.generate("t0", sample_index=0, sampling_params=sampling(60), **place)
        )
        # t1 is open and idle for longer than a lease; t2 is not opened yet.
        await harness.generate("t1", sample_index=1, sampling_params=sampling(1), **place)
        await harness.sampled("t0")
        harness.pass_lease_time()
        assert not turn.done()
        assert not await harness.complete("t1")
        await harness.generate("t2", sample_index=2, sampling_params=sampling(1), **place)
        assert len((await turn).tokens) == 60
        assert not await harness.complete("t2")
        assert await harness.complete("t0")
        exchange = await hello(harness.wire)
        exchange.send(demand={"group_count": 1})
        delivery = await exchange.receive("delivery")
        outcomes = [t.outcome.WhichOneof("result") for t in delivery.group.trajectories]
        assert outcomes == ["reward"] * 3


async def test_a_group_without_leases_ends_a_lease_after_its_last_call(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.01) as harness:
        turn = asyncio.ensure_future(
            harness.generate("t0", group_id="mine", group_size=2, sampling_params=sampling(400))
        )
        await harness.sampled("t0")
        harness.pass_lease_time()
        exchange = await hello(harness.wire)
        exchange.send(demand={"group_count": 1})
        await exchange.nothing()
        request = AbortRequest()
        request.all.SetInParent()
        await harness.wire.Abort(request)
        await turn
        attempt = harness.serving.queue.attempt_of("t0")
        assert attempt is not None
        await until(lambda: not attempt.open_calls)
        harness.pass_lease_time()
        delivery = await exchange.receive("delivery")
        reasons = {t.outcome.failure.reason for t in delivery.group.trajectories}
        assert reasons == {"LEASE_EXPIRED"}


async def test_leases_that_run_out_together_wait_for_the_journal_together(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 20
    journal = harness.serving.closing.journal
    append, waiting, go_on = journal.append, 0, asyncio.Event()

    def slow(records: Any, **fields: Any) -> Any:
        async def end() -> Any:
            nonlocal waiting
            appending = append(records, **fields)
            waiting += records[0].WhichOneof("record") == "leases_expired"
            await go_on.wait()
            return await appending

        return asyncio.ensure_future(end())

    await submit(harness, *(f"task-{number}" for number in range(count)))
    async with leasing(harness, count) as call:
        first = {(await take(call)).trajectory_id for _ in range(count)}
        monkeypatch.setattr(journal, "append", slow)
        harness.pass_lease_time()
        await until(lambda: waiting == count)
        go_on.set()
        again = {(await take(call)).trajectory_id for _ in range(count)}
    assert len(first) == len(again) == count and not first & again


async def test_no_task_is_begun_before_the_trainer_that_is_awaited_names_its_contract(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, "weights.await_trainer=true") as harness:
        call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=8))
        await submit(harness, "first", "second", "third")
        # The server answers a later call, and still no group has begun.
        await harness.wire.GetServerInfo(GetServerInfoRequest())
        assert harness.serving.admission.outstanding == 0
        await hello(harness.wire, max_lag=0, groups_per_step=2)
        names = {(await call.read()).task.task_id for _ in range(2)}
        assert names == {"first", "second"}
        # As many leases as the contract has slots.
        assert harness.serving.admission.outstanding == 2
        call.cancel()
