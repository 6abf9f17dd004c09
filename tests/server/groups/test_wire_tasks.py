"""Tasks, leases, retries and groups over the wire."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.v1 import trajectory_pb2
from penstock.wire.failure import read_failure
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    CompleteTrajectoryRequest,
    Failure,
    GenerateRequest,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    RenewLeaseRequest,
    SubmitTasksRequest,
    Task,
    Wire,
    collect,
    hello,
    sampling,
    sequence,
    serve,
)


def task(task_id: str, group_size: int = 2, **fields: Any) -> Any:
    return Task(
        **{
            "task_id": task_id,
            "group_size": group_size,
            "tokens": sequence([1, 2, 3]),
            "sampling_params": sampling(8),
            **fields,
        }
    )


async def submit(harness: Harness, *tasks: Any) -> tuple[int, int, int]:
    answer = await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
    return answer.accepted_count, answer.duplicate_count, answer.pending_count


def lease(harness: Harness, concurrency: int = 8, agent_id: str = "agent", **fields: Any) -> Any:
    request = LeaseTasksRequest(agent_id=agent_id, concurrency=concurrency, **fields)
    return harness.wire.LeaseTasks(request)


async def take(call: Any, seconds: float = 20.0) -> Any:
    async with asyncio.timeout(seconds):
        return await call.read()


async def none_now(call: Any, seconds: float = 0.15) -> asyncio.Future[Any]:
    """Check that no lease arrives for a while; return the pending read."""
    reading = asyncio.ensure_future(call.read())
    done, _ = await asyncio.wait([reading], timeout=seconds)
    assert not done
    return reading


async def failure(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    found = read_failure(caught.value)
    return found.code, found.reason


async def open_leased(harness: Harness, lease: Any) -> Any:
    return await collect(harness.wire.Generate(GenerateRequest(trajectory_id=lease.trajectory_id)))


async def test_submission_is_idempotent_by_task_id(harness: Harness) -> None:
    assert await submit(harness, task("a"), task("b"), task("a")) == (2, 1, 2)
    assert await submit(harness, task("b"), task("c")) == (1, 1, 3)
    # One invalid task refuses the whole call.
    assert await failure(submit(harness, task("d"), task("", 1))) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_INVALID",
    )
    assert await submit(harness) == (0, 0, 3)


async def test_an_attempt_goes_from_lease_to_group(harness: Harness) -> None:
    await submit(harness, task("a"))
    call = lease(harness)
    first, second = await take(call), await take(call)
    assert first.group_id == second.group_id
    assert [first.sample_index, second.sample_index] == [0, 1]
    assert first.task.task_id == "a"
    assert first.lease.seconds == 60
    turn = await open_leased(harness, first)
    # The task provides the prompt and the sampling parameters that the call leaves unset.
    assert turn.tokens == expected_tokens([1, 2, 3], [0] * 8)[0]
    assert not await harness.complete(first.trajectory_id, 0.5)
    exchange = await hello(harness.wire)
    exchange.send(demand={"group_count": 1})
    await exchange.nothing()
    await open_leased(harness, second)
    assert await harness.complete(second.trajectory_id, 1.5)
    delivery = await exchange.receive("delivery")
    assert delivery.group.task_id == "a"
    assert [t.outcome.reward for t in delivery.group.trajectories] == [0.5, 1.5]
    assert delivery.group.trajectories[0].trajectory_id == first.trajectory_id
    exchange.half_close()


async def test_a_stream_holds_at_most_its_concurrency(harness: Harness) -> None:
    await submit(harness, task("a", 4))
    call = lease(harness, 2)
    first, _ = await take(call), await take(call)
    waiting = await none_now(call)
    await open_leased(harness, first)
    await harness.complete(first.trajectory_id)
    assert (await waiting).sample_index == 2


async def test_a_failure_is_made_again_and_then_becomes_part_of_the_group(
    harness: Harness,
) -> None:
    await submit(harness, task("a", 1))
    call = lease(harness, 1)
    seen = []
    for retry in range(3):
        attempt = await take(call)
        assert attempt.retry_count == retry
        seen.append(attempt.trajectory_id)
        # An agent may fail before its first turn.
        completed = await harness.fail(attempt.trajectory_id, "TOOL_BROKE")
        assert completed == (retry == 2)
    assert len(set(seen)) == 3
    exchange = await hello(harness.wire)
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    assert [t.outcome.failure.reason for t in delivery.group.trajectories] == ["TOOL_BROKE"]


async def test_a_lost_agents_attempts_are_leased_again(tmp_path: Path) -> None:
    async with serve(tmp_path, "leases.grace_seconds=0.3") as harness:
        await submit(harness, task("a", 1))
        call = lease(harness, 1, "first")
        lost = await take(call)
        call.cancel()
        second = lease(harness, 1, "second")
        again = await take(second)
        assert again.trajectory_id != lost.trajectory_id
        assert again.retry_count == 1
        # Later calls of the lost agent are refused, with the reason.
        for late in (
            open_leased(harness, lost),
            harness.complete(lost.trajectory_id),
        ):
            assert await failure(late) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "LEASE_EXPIRED",
            )
        await open_leased(harness, again)
        assert await harness.complete(again.trajectory_id)


async def test_calls_and_renewals_keep_a_lease(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.02) as harness:
        await submit(harness, task("a", 2, sampling_params=sampling(50)))
        call = lease(harness, 2)
        busy, idle = await take(call), await take(call)
        # The turn takes longer than the lease; the open call keeps the lease alive.
        turn = asyncio.ensure_future(open_leased(harness, busy))
        await harness.sampled(busy.trajectory_id)
        for _ in range(6):
            harness.pass_lease_time(40)
            answer = await harness.wire.RenewLease(
                RenewLeaseRequest(trajectory_ids=[idle.trajectory_id, "unknown"])
            )
            assert list(answer.expired_trajectory_ids) == ["unknown"]
        assert len((await turn).tokens) == 50
        harness.pass_lease_time(70)
        answer = await harness.wire.RenewLease(
            RenewLeaseRequest(trajectory_ids=[idle.trajectory_id])
        )
        assert list(answer.expired_trajectory_ids) == [idle.trajectory_id]


async def test_whole_groups_go_to_one_agent(harness: Harness) -> None:
    await submit(harness, task("a", 2), task("big", 5), task("c", 2))
    one = lease(harness, 4, "one", whole_groups=True)
    first, second = await take(one), await take(one)
    assert {first.task.task_id, second.task.task_id} == {"a"}
    # The next group is more than this agent works on at a time: it delays none that fits.
    third, fourth = await take(one), await take(one)
    assert {third.task.task_id, fourth.task.task_id} == {"c"}
    two = lease(harness, 5, "two")
    assert {(await take(two)).task.task_id for _ in range(5)} == {"big"}


async def test_leases_are_gated_by_the_trainers_contract(harness: Harness) -> None:
    exchange = await hello(harness.wire, max_lag=0, groups_per_step=2)
    await submit(harness, *(task(f"t{i}", 1) for i in range(5)))
    call = lease(harness)
    first, second = await take(call), await take(call)
    waiting = await none_now(call)
    for attempt in (first, second):
        await open_leased(harness, attempt)
        await harness.complete(attempt.trajectory_id)
    exchange.send(demand={"group_count": 2})
    one, two = await exchange.receive("delivery"), await exchange.receive("delivery")
    # Synchronous training: no further group begins under this version.
    assert not waiting.done()
    exchange.send(receipt={"delivery_ids": [one.delivery_id, two.delivery_id], "step": 1})
    await harness.upload(1, staged=True)
    exchange.send(switch_weights={"weight_version": 1})
    receipt = await exchange.receive("weight_receipt")
    assert receipt.active_weight_version == 1
    third = await waiting
    turn = await open_leased(harness, third)
    assert turn.versions == [1] * 8


async def test_evaluation_tasks_pass_the_gate_and_have_demand_of_their_own(
    harness: Harness,
) -> None:
    exchange = await hello(harness.wire, max_lag=0, groups_per_step=1)
    evaluation = trajectory_pb2.PURPOSE_EVAL
    await submit(harness, task("t", 1), task("u", 1), task("e", 1, purpose=evaluation))
    training = lease(harness, 4, purpose=trajectory_pb2.PURPOSE_TRAIN)
    assert (await take(training)).task.task_id == "t"
    await none_now(training)
    call = lease(harness, 4, purpose=evaluation)
    attempt = await take(call)
    await open_leased(harness, attempt)
    await harness.complete(attempt.trajectory_id)
    exchange.send(demand={"group_count": 5})
    await exchange.nothing()
    exchange.send(demand={"group_count": 1, "purpose": evaluation})
    delivery = await exchange.receive("delivery")
    assert delivery.group.purpose == evaluation


async def test_a_callers_own_group_is_delivered_without_a_task(harness: Harness) -> None:
    for index in range(2):
        await harness.generate(f"mine-{index}", group_id="mine", group_size=2, sample_index=index)
    assert await failure(harness.generate("x", group_id="mine", group_size=2, sample_index=1)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_INVALID",
    )
    assert await failure(harness.generate("x", group_id="mine", group_size=3)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_INVALID",
    )
    assert not await harness.complete("mine-1", 1.0)
    assert await harness.complete("mine-0", 0.0)
    # A repeated call gets the same answer.
    assert await harness.complete("mine-0", 0.0)
    exchange = await hello(harness.wire)
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    assert delivery.group.group_id == "mine"
    assert [t.sample_index for t in delivery.group.trajectories] == [0, 1]


async def test_an_abandoned_group_of_a_caller_ends_in_failures(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        await harness.generate("mine-0", group_id="mine", group_size=2, sample_index=0)
        await harness.complete("mine-0", 1.0)
        harness.pass_lease_time()
        exchange = await hello(harness.wire)
        exchange.send(demand={"group_count": 1})
        delivery = await exchange.receive("delivery")
        kinds = [t.outcome.WhichOneof("result") for t in delivery.group.trajectories]
        assert kinds == ["reward", "failure"]
        assert delivery.group.trajectories[1].outcome.failure.reason == "LEASE_EXPIRED"


async def test_a_branch_shares_its_attempt(harness: Harness) -> None:
    await submit(harness, task("a", 1))
    attempt = await take(lease(harness, 1))
    await open_leased(harness, attempt)
    await harness.generate("sub", [9], parent_trajectory_id=attempt.trajectory_id)
    await harness.generate("own", [8], parent_trajectory_id="sub")
    await harness.complete("own", 0.25)
    assert await harness.complete(attempt.trajectory_id, 1.0)
    exchange = await hello(harness.wire)
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    found = {
        t.trajectory_id: (t.parent_trajectory_id, t.outcome.reward)
        for t in delivery.group.trajectories
    }
    assert found == {
        attempt.trajectory_id: ("", 1.0),
        "sub": (attempt.trajectory_id, 1.0),
        "own": ("sub", 0.25),
    }


async def test_the_queue_is_bounded_and_says_so(tmp_path: Path) -> None:
    async with serve(tmp_path, "limits.pending_tasks=3") as harness:
        await submit(harness, task("a"), task("b"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(harness, task("c"), task("d"))
        found = read_failure(caught.value)
        assert found.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert found.reason == "QUEUE_FULL"
        assert found.retry_after_seconds
        assert (await submit(harness, task("c")))[0] == 1


async def test_a_turn_cut_off_with_its_agent_leaves_only_the_grace(tmp_path: Path) -> None:
    async with serve(tmp_path, "leases.grace_seconds=0.3", step_seconds=0.02) as harness:
        await submit(harness, task("a", 1, sampling_params=sampling(400)))
        channel = grpc.aio.insecure_channel(harness.address)
        dying = Wire(channel)
        leases = dying.LeaseTasks(LeaseTasksRequest(agent_id="dying", concurrency=1))
        attempt = await take(leases)
        turn = dying.Generate(GenerateRequest(trajectory_id=attempt.trajectory_id))
        await turn.read()
        # As after SIGKILL: every call of the process ends at once.
        await channel.close()
        again = await take(lease(harness, 1))
        assert again.retry_count == 1
        assert not harness.serving.turns.in_flight


async def test_a_close_says_whether_the_attempt_is_made_again(harness: Harness) -> None:
    await submit(harness, task("a", 1))
    call = lease(harness, 1)
    for retried in (True, True, False):
        attempt = await take(call)
        for _ in range(2):  # A repeated call gets the same answer.
            answer = await harness.wire.CompleteTrajectory(
                CompleteTrajectoryRequest(
                    trajectory_id=attempt.trajectory_id,
                    outcome=Outcome(failure=Failure(reason="X")),
                )
            )
            assert answer.retried == retried
            assert answer.group_completed != retried


async def test_a_lost_stream_finds_how_the_turn_ended(harness: Harness) -> None:
    turn = await harness.generate("t", text="hello", sampling_params=sampling(5))
    answer = await harness.wire.GetTrajectory(GetTrajectoryRequest(trajectory_id="t"))
    assert answer.last_turn == turn.finished
    assert answer.last_turn.text
