"""Groups that finish with the first n of m siblings instead of waiting for the slowest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.wire.failure import read_failure
from tests.server.groups.test_recovery import killed, on_disk
from tests.support.harness import (
    ContinueRequest,
    GenerateRequest,
    GetServerInfoRequest,
    Harness,
    LeaseTasksRequest,
    RenewLeaseRequest,
    SubmitTasksRequest,
    Task,
    collect,
    hello,
    sampling,
    sequence,
)


async def submit(harness: Harness, size: int, wanted: int, name: str = "race") -> None:
    task = Task(
        task_id=name, group_size=size, finish_count=wanted, tokens=sequence([1, 2, 3]), index=0
    )
    await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))


async def lease(harness: Harness, count: int, **fields: Any) -> tuple[Any, list[Any]]:
    call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=count, **fields))
    async with asyncio.timeout(10):
        return call, [await call.read() for _ in range(count)]


async def turn(harness: Harness, given: Any, max_tokens: int = 4) -> Any:
    request = GenerateRequest(
        trajectory_id=given.trajectory_id, sampling_params=sampling(max_tokens)
    )
    return await collect(harness.wire.Generate(request))


async def refusal(awaitable: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return str(read_failure(caught.value).reason)


async def delivered(harness: Harness) -> Any:
    exchange = await hello(harness.wire, groups_per_step=4)
    exchange.send(demand={"group_count": 1})
    return (await exchange.receive("delivery")).group


async def test_a_group_is_complete_with_the_first_that_end(slow: Harness) -> None:
    await submit(slow, 3, 2)
    _, leases = await lease(slow, 3)
    first, second, third = leases
    late = asyncio.ensure_future(turn(slow, third, max_tokens=4000))
    await slow.sampled(third.trajectory_id)
    await turn(slow, second)
    assert not await slow.complete(second.trajectory_id)
    await turn(slow, first)
    assert await slow.complete(first.trajectory_id, 0.5)
    # The unneeded turn is aborted, and its agent learns that the lease expired.
    assert (await late).finished.finish_reason != 0
    assert len((await late).tokens) < 4000
    name = third.trajectory_id
    again = slow.wire.Continue(ContinueRequest(trajectory_id=name))
    assert await refusal(collect(again)) == "LEASE_EXPIRED"
    assert await refusal(slow.complete(name)) == "LEASE_EXPIRED"
    renewed = await slow.wire.RenewLease(RenewLeaseRequest(trajectory_ids=[name]))
    assert list(renewed.expired_trajectory_ids) == [name]
    assert not renewed.retried_trajectory_ids
    info = await slow.wire.GetServerInfo(GetServerInfoRequest())
    assert (info.load.running_turn_count, info.load.open_trajectory_count) == (0, 0)
    assert slow.serving.closing.left_out == 1
    group = await delivered(slow)
    found = [(t.sample_index, t.outcome.reward) for t in group.trajectories]
    assert found == [(first.sample_index, 0.5), (second.sample_index, 1.0)]


async def test_what_was_not_begun_never_is(harness: Harness) -> None:
    await submit(harness, 5, 1)
    call, (given,) = await lease(harness, 1)
    await turn(harness, given)
    assert await harness.complete(given.trajectory_id)
    assert len(harness.serving.queue.groups) == 0
    # The stream's place is free, and nothing of the old group waits for it.
    await submit(harness, 1, 0, "next")
    async with asyncio.timeout(10):
        assert (await call.read()).task.task_id == "next"


async def test_failures_take_no_place(harness: Harness) -> None:
    await submit(harness, 3, 2)
    call, leases = await lease(harness, 3)
    failed = leases.pop(0)
    for _ in range(2):
        assert not await harness.fail(failed.trajectory_id)
        failed = await call.read()
    # This was the last attempt, so its failure is final.
    assert not await harness.fail(failed.trajectory_id)
    for number, given in enumerate(leases):
        await turn(harness, given)
        assert await harness.complete(given.trajectory_id) == (number == 1)
    # A repeated close gets the same confirmation.
    assert not await harness.fail(failed.trajectory_id)
    group = await delivered(harness)
    assert [t.sample_index for t in group.trajectories] == [1, 2]


async def test_where_too_many_fail_the_group_is_complete_with_the_last(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a", "leases.max_attempts=1") as harness:
        await submit(harness, 3, 2)
        _, leases = await lease(harness, 3)
        assert not await harness.fail(leases[0].trajectory_id)
        await turn(harness, leases[1])
        assert not await harness.complete(leases[1].trajectory_id)
        assert await harness.fail(leases[2].trajectory_id)
        group = await delivered(harness)
        kinds = [t.outcome.WhichOneof("result") for t in group.trajectories]
        assert kinds == ["failure", "reward", "failure"]


@pytest.mark.parametrize("ended", [0, 1, 2])
async def test_another_server_goes_on_with_the_race(tmp_path: Path, ended: int) -> None:
    async with on_disk(tmp_path / "a") as first:
        await submit(first, 4, 2)
        _, leases = await lease(first, 4)
        for given in leases:
            await turn(first, given)
        for given in leases[:ended]:
            await first.complete(given.trajectory_id)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        for number, given in enumerate(leases[ended:2], ended):
            assert await second.complete(given.trajectory_id) == (number == 1)
        for given in leases[2:]:
            assert await refusal(second.complete(given.trajectory_id)) == "LEASE_EXPIRED"
        assert second.serving.store.open_count == 0
        group = await delivered(second)
        wanted = [given.trajectory_id for given in leases[:2]]
        assert [t.trajectory_id for t in group.trajectories] == wanted


async def test_agents_that_judge_whole_groups_get_no_races(harness: Harness) -> None:
    await submit(harness, 2, 1)
    whole = harness.wire.LeaseTasks(
        LeaseTasksRequest(agent_id="judge", concurrency=8, whole_groups=True)
    )
    reading = asyncio.ensure_future(whole.read())
    _, leases = await lease(harness, 2)
    assert {given.task.task_id for given in leases} == {"race"}
    assert not reading.done()
    await submit(harness, 2, 2, "no race")
    async with asyncio.timeout(10):
        assert (await reading).task.task_id == "no race"


@pytest.mark.parametrize("wanted", [-1, 3])
async def test_a_count_that_cannot_be_is_refused(harness: Harness, wanted: int) -> None:
    assert await refusal(submit(harness, 2, wanted)) == "FIELD_INVALID"
    assert harness.serving.queue.pending.count == 0


async def test_everybody_at_once(slow: Harness) -> None:
    """All attempts end at about the same time. Exactly `finish_count` of them are in the group,
    and each learns whether it is."""
    exchange = await hello(slow.wire, groups_per_step=4)
    for number in range(6):
        await submit(slow, 8, 3, f"race {number}")
        call, leases = await lease(slow, 8)

        async def attempt(given: Any) -> bool:
            try:
                await turn(slow, given, max_tokens=2 + given.sample_index)
                await slow.complete(given.trajectory_id)
            except grpc.aio.AioRpcError as error:
                assert read_failure(error).reason == "LEASE_EXPIRED", error
                return False
            return True

        won = await asyncio.gather(*(attempt(given) for given in leases))
        assert sum(won) == 3
        exchange.send(demand={"group_count": 1})
        group = (await exchange.receive("delivery")).group
        names = {given.trajectory_id for given, ended in zip(leases, won, strict=True) if ended}
        assert {t.trajectory_id for t in group.trajectories} == names
        assert slow.serving.store.open_count == 0
        call.cancel()
