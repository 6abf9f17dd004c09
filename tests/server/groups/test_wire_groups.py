"""Finished groups over the wire: their ids, their size, who may still read
them, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from penstock.server.config.limits import LeasesSection
from penstock.server.core.aio import Broadcast
from penstock.server.groups.admission import Admission
from penstock.server.groups.attempts import Holder
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.rollouts import buffering
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    AbortRequest,
    CompleteTrajectoryRequest,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    SubmitTasksRequest,
    Task,
    hello,
    sampling,
    sequence,
    serve,
)

INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
CLOSED = (grpc.StatusCode.FAILED_PRECONDITION, "TRAJECTORY_CLOSED")
EVAL = trajectory_pb2.PURPOSE_EVAL


async def failure(awaitable: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    found = read_failure(caught.value)
    return found.code, found.reason


async def finish(harness: Harness, trajectory_id: str, group_id: str) -> None:
    """Run a group of one from its first turn to its outcome."""
    await harness.generate(trajectory_id, group_id=group_id, group_size=1)
    assert await harness.complete(trajectory_id)


async def get(harness: Harness, trajectory_id: str) -> Any:
    return await harness.wire.GetTrajectory(GetTrajectoryRequest(trajectory_id=trajectory_id))


async def close(harness: Harness, trajectory_id: str, metadata_bytes: int) -> Any:
    metadata = struct_pb2.Struct()
    metadata.fields["blob"].string_value = "x" * metadata_bytes
    return await harness.wire.CompleteTrajectory(
        CompleteTrajectoryRequest(
            trajectory_id=trajectory_id, outcome=Outcome(reward=1.0, metadata=metadata)
        )
    )


# A group's id


@pytest.mark.parametrize("trainer", [False, True], ids=["no trainer", "trainer"])
async def test_the_id_of_a_finished_group_is_refused(harness: Harness, trainer: bool) -> None:
    if trainer:
        await hello(harness.wire, groups_per_step=4)
    await finish(harness, "first", "mine")
    again = harness.generate("second", group_id="mine", group_size=1)
    assert await failure(again) == INVALID
    # The refused call takes neither the trajectory's id nor a slot.
    await finish(harness, "second", "other")
    assert harness.serving.buffer.buffered_count == harness.serving.admission.outstanding == 2
    assert len(harness.serving.queue.groups) == 0


async def test_the_id_of_a_delivered_group_is_refused_at_every_version(harness: Harness) -> None:
    exchange = await hello(harness.wire, groups_per_step=4)
    await finish(harness, "first", "mine")
    exchange.send(demand={"group_count": 1})
    await exchange.receive("delivery")
    assert await failure(harness.generate("a", group_id="mine", group_size=1)) == INVALID
    harness.serving.admission.advance(1)
    assert await failure(harness.generate("a", group_id="mine", group_size=1)) == INVALID
    # The group can still be delivered again.
    exchange.half_close()
    again = await hello(harness.wire, epoch=2, groups_per_step=4)
    again.send(demand={"group_count": 1})
    delivery = await again.receive("delivery")
    assert [t.trajectory_id for t in delivery.group.trajectories] == ["first"]


async def test_a_callers_group_cannot_take_the_id_of_a_leased_one(harness: Harness) -> None:
    await harness.wire.SubmitTasks(
        SubmitTasksRequest(tasks=[Task(task_id="t", group_size=1, tokens=sequence([1]))])
    )
    call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=1))
    lease = await call.read()
    assert await harness.complete(lease.trajectory_id)
    again = harness.generate("x", group_id=lease.group_id, group_size=1)
    assert await failure(again) == INVALID
    assert harness.serving.buffer.buffered_count == 1


async def test_another_run_may_use_the_ids_of_the_one_before(harness: Harness) -> None:
    await hello(harness.wire, run_id="one")
    await finish(harness, "first", "mine")
    exchange = await hello(harness.wire, epoch=2, run_id="two")
    await exchange.receive("notice")
    await finish(harness, "second", "mine")
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    assert [t.trajectory_id for t in delivery.group.trajectories] == ["second"]


def test_a_group_the_gate_refuses_leaves_nothing_behind() -> None:
    class Refuses(Admission):
        def admit(self, group_id: str, active_version: int) -> None:
            raise ValueError(group_id)

    changed = Broadcast()
    queue = TaskQueue(changed, Refuses(changed, lambda: 0.0, 8), LeasesSection(), lambda: 0.0)
    with pytest.raises(ValueError, match="mine"):
        queue.join("mine", 1, 0, "t", 0)
    assert len(queue.groups) == 0


# A group's size


async def test_an_outcome_that_is_too_large_is_refused_and_changes_nothing(
    harness: Harness,
) -> None:
    await harness.generate("t", group_id="mine", group_size=1)
    assert await failure(close(harness, "t", (1 << 20) + 1)) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MESSAGE_TOO_LARGE",
    )
    assert (await get(harness, "t")).open
    assert (await close(harness, "t", 1 << 19)).group_completed


async def test_a_group_no_message_can_carry_is_dropped_counted_and_its_place_is_free(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffering, "MAX_GROUP_BYTES", 10_000)
    exchange = await hello(harness.wire, groups_per_step=1)
    for index in range(2):
        await harness.generate(f"big-{index}", group_id="big", group_size=2, sample_index=index)
    assert not (await close(harness, "big-0", 6_000)).group_completed
    outstanding = harness.serving.admission.outstanding
    assert (await close(harness, "big-1", 6_000)).group_completed
    assert harness.serving.buffer.buffered_count == 0
    assert harness.serving.buffer.drops == {"GROUP_TOO_LARGE": 1}
    assert harness.serving.admission.outstanding == outstanding - 1
    assert harness.serving.buffer.drops == {"GROUP_TOO_LARGE": 1}
    notice = await exchange.receive("notice")
    assert (notice.group_id, notice.task_id, notice.reason) == ("big", "", "GROUP_TOO_LARGE")
    assert "10000" in notice.message
    assert await failure(get(harness, "big-0")) == CLOSED
    # The stream continues.
    await finish(harness, "small", "small")
    exchange.send(demand={"group_count": 1})
    assert (await exchange.receive("delivery")).group.group_id == "small"


async def test_the_largest_group_that_is_kept_can_be_delivered(harness: Harness) -> None:
    """A group of 64 siblings of almost 1 MiB each fits; 65 siblings do not."""
    exchange = await hello(harness.wire, groups_per_step=1)
    for group_id, size in (("fits", 64), ("over", 65)):
        for index in range(size):
            await harness.generate(
                f"{group_id}-{index}", group_id=group_id, group_size=size, sample_index=index
            )
            await close(harness, f"{group_id}-{index}", (1 << 20) - 400)
    assert harness.serving.buffer.drops == {"GROUP_TOO_LARGE": 1}
    assert (await exchange.receive("notice")).group_id == "over"
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    assert (delivery.group.group_id, len(delivery.group.trajectories)) == ("fits", 64)


# Reading a trajectory after its group is complete


async def test_a_trajectory_is_readable_while_its_group_is_held(harness: Harness) -> None:
    await harness.generate("t", group_id="mine", group_size=1)
    await harness.generate("branch", [9], parent_trajectory_id="t")
    await harness.complete("t", 0.5)
    exchange = await hello(harness.wire)
    for state in ("waiting", "delivered", "used"):
        for trajectory_id, prompt in (("t", [1, 2, 3]), ("branch", [9])):
            answer = await get(harness, trajectory_id)
            assert not answer.open, state
            assert answer.trajectory.outcome.reward == 0.5
            tokens = [int(t) for s in answer.trajectory.segments for t in codec.token_ids(s)]
            assert tokens == prompt + expected_tokens(prompt, [0] * 16)[0]
        if state == "waiting":
            exchange.send(demand={"group_count": 1})
            delivery = await exchange.receive("delivery")
        elif state == "delivered":
            exchange.send(receipt={"delivery_ids": [delivery.delivery_id], "step": 1})
    # A delivered trajectory can be read but not continued.
    assert await failure(harness.resume("t", tokens=sequence([1]))) == CLOSED
    exchange.send(checkpoint={"step": 1})
    exchange.half_close()
    assert await exchange.call.read() is grpc.aio.EOF
    assert await failure(get(harness, "t")) == CLOSED


# Branches


async def test_a_branch_may_begin_beside_its_parents_turn(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.005) as slow:
        exchange = await hello(slow.wire)
        fields = {"group_id": "mine", "group_size": 1}
        parent = asyncio.ensure_future(slow.generate("t", **fields, sampling_params=sampling(500)))
        await slow.sampled("t")
        branch = await slow.generate("branch", [9], parent_trajectory_id="t")
        assert len(branch.tokens) == 16
        assert not parent.done()
        refused = slow.complete("t")
        assert await failure(refused) == (grpc.StatusCode.FAILED_PRECONDITION, "TURN_IN_FLIGHT")
        await slow.wire.Abort(AbortRequest(trajectories={"trajectory_ids": ["t"]}))
        written = (await parent).tokens
        assert await slow.complete("t")
        late = slow.generate("late", [9], parent_trajectory_id="t")
        assert await failure(late) == CLOSED
        exchange.send(demand={"group_count": 1})
        trajectories = (await exchange.receive("delivery")).group.trajectories
        assert [t.trajectory_id for t in trajectories] == ["t", "branch"]
        tokens = [int(x) for s in trajectories[0].segments for x in codec.token_ids(s)]
        assert tokens == [1, 2, 3, *written]


# Evaluation groups that no trainer demands


async def leases(harness: Harness, count: int, **fields: Any) -> AsyncIterator[Any]:
    """Take `count` leases, then check that no more arrive for a while."""
    call = harness.wire.LeaseTasks(
        LeaseTasksRequest(**{"agent_id": "a", "concurrency": 4, **fields})
    )
    try:
        async with asyncio.timeout(20):
            for _ in range(count):
                yield await call.read()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await call.read()
    finally:
        call.cancel()


async def test_evaluation_groups_nobody_demands_are_bounded(tmp_path: Path) -> None:
    async with serve(tmp_path, "limits.evaluation_groups=6") as harness:
        tasks = [
            Task(task_id=f"e{i}", group_size=1, purpose=EVAL, tokens=sequence([1]))
            for i in range(20)
        ]
        tasks.append(Task(task_id="t", group_size=1, tokens=sequence([1])))
        await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
        seen = []
        async for lease in leases(harness, 7):
            seen.append(lease.task.task_id)
            await harness.complete(lease.trajectory_id)
        # Training continues next to the evaluation.
        assert sorted(seen) == ["e0", "e1", "e2", "e3", "e4", "e5", "t"]
        assert harness.serving.buffer.buffered_evaluation_count == 6
        # Each delivery makes room, and the server wakes the lease stream.
        waiting = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="b", concurrency=4))
        reading = asyncio.ensure_future(waiting.read())
        exchange = await hello(harness.wire)
        done, _ = await asyncio.wait([reading], timeout=0.2)
        assert not done
        exchange.send(demand={"group_count": 2, "purpose": EVAL})
        for _ in range(2):
            await exchange.receive("delivery")
        async with asyncio.timeout(20):
            taken = [(await reading).task.task_id, (await waiting.read()).task.task_id]
        assert taken == ["e6", "e7"]
        # A delivered group that is lost with its trainer waits again, and counts again.
        exchange.half_close()
        await hello(harness.wire, epoch=2)
        assert harness.serving.buffer.buffered_evaluation_count == 6
        async for lease in leases(harness, 0, agent_id="c"):
            raise AssertionError(lease)


def test_an_evaluation_group_counts_until_it_is_released() -> None:
    changed = Broadcast()
    admission = Admission(changed, lambda: 0.0, 8)
    queue = TaskQueue(changed, admission, LeasesSection(), lambda: 0.0, max_evaluation_groups=1)
    queue.pending.submit(Task(task_id=f"e{i}", group_size=1, purpose=EVAL) for i in range(2))
    holder = Holder("a", 4, EVAL)
    lease = queue.lease(holder, 0)
    assert lease is not None
    attempt = queue.attempt_of(lease.trajectory_id)
    assert attempt is not None
    settled = queue.settle(attempt, failed=False)
    assert settled.completed is not None
    # Complete, but not in the buffer yet.
    assert queue.lease(holder, 0) is None
    queue.release(lease.group.group_id)
    assert queue.lease(holder, 0) is not None
