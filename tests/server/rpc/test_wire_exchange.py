"""The Exchange stream: credit, receipts, redelivery, replacement and switches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.rollouts import buffering
from penstock.v1 import trainer_service_pb2
from penstock.wire.failure import read_failure
from tests.support.harness import (
    Exchange,
    ExchangeRequest,
    Harness,
    Hello,
    LeaseTasksRequest,
    SubmitTasksRequest,
    Task,
    hello,
    sampling,
    sequence,
    serve,
)


async def finish_groups(harness: Harness, *names: str, index: int = 0) -> None:
    """Submit tasks with one sample each, and finish them."""
    await harness.wire.SubmitTasks(
        SubmitTasksRequest(
            tasks=[
                Task(task_id=name, group_size=1, tokens=sequence([1, 2]), index=index + number)
                for number, name in enumerate(names)
            ]
        )
    )
    call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=100))
    for _ in names:
        async with asyncio.timeout(20):
            attempt = await call.read()
        await harness.generate(attempt.trajectory_id, [1, 2], sampling_params=sampling(4))
        await harness.complete(attempt.trajectory_id)
    call.cancel()


async def ended(exchange: Exchange) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(20):
            while await exchange.call.read() is not grpc.aio.EOF:
                pass
            code = await exchange.call.code()
            assert code != grpc.StatusCode.OK
            raise AssertionError(code)
    found = read_failure(caught.value)
    return found.code, found.reason


async def refused(harness: Harness, *requests: Any) -> tuple[grpc.StatusCode, str]:
    exchange = Exchange(harness.wire)
    for request in requests:
        exchange.outgoing.put_nowait(request)
    return await ended(exchange)


async def test_demand_is_credit(harness: Harness) -> None:
    exchange = await hello(harness.wire)
    await finish_groups(harness, "a", "b", "c")
    await exchange.nothing()
    exchange.send(demand={"group_count": 2})
    first, second = await exchange.receive("delivery"), await exchange.receive("delivery")
    assert [first.group.task_id, second.group.task_id] == ["a", "b"]
    assert 0 < first.delivery_id < second.delivery_id
    await exchange.nothing()
    exchange.send(demand={"group_count": 1})
    assert (await exchange.receive("delivery")).group.task_id == "c"
    exchange.half_close()
    assert await exchange.call.code() == grpc.StatusCode.OK


async def test_groups_without_receipt_are_delivered_again_and_no_others(harness: Harness) -> None:
    exchange = await hello(harness.wire, 1, groups_per_step=4)
    await finish_groups(harness, "a", "b", "c", "d")
    exchange.send(demand={"group_count": 4})
    deliveries = {}
    for _ in range(4):
        delivery = await exchange.receive("delivery")
        deliveries[delivery.group.task_id] = delivery
    exchange.send(receipt={"delivery_ids": [deliveries["a"].delivery_id], "step": 1})
    exchange.send(receipt={"delivery_ids": [deliveries["b"].delivery_id], "step": 2})
    exchange.send(
        receipt={
            "delivery_ids": [deliveries["c"].delivery_id],
            "rejection": {"reason": "NOT_WANTED"},
        }
    )
    exchange.half_close()
    assert await exchange.call.code() == grpc.StatusCode.OK
    assert harness.serving.buffer.drops == {"NOT_WANTED": 1}
    # The trainer resumes from its state after step 1: b was trained later, d never.
    exchange = await hello(harness.wire, 2, resume_step=1, groups_per_step=4)
    exchange.send(demand={"group_count": 4})
    again = [await exchange.receive("delivery") for _ in range(2)]
    assert {d.group.task_id for d in again} == {"b", "d"}
    assert all(d.redelivery_count == 1 for d in again)
    assert min(d.delivery_id for d in again) > max(d.delivery_id for d in deliveries.values())
    await exchange.nothing()


async def test_a_receipt_for_a_server_before_means_no_group_of_this_one(tmp_path: Path) -> None:
    """Delivery ids keep increasing even after a server loses its whole state."""
    delivered: list[int] = []
    for name in ("a", "b"):
        async with serve(tmp_path) as harness:
            exchange = await hello(harness.wire)
            await finish_groups(harness, name)
            exchange.send(demand={"group_count": 1})
            delivered.append((await exchange.receive("delivery")).delivery_id)
            receipt = {"delivery_ids": delivered[:1], "rejection": {"reason": "NO_USE"}}
            exchange.send(receipt=receipt)
            exchange.half_close()
            assert await exchange.call.code() == grpc.StatusCode.OK
            assert harness.serving.buffer.drops.get("NO_USE", 0) == (name == "a")
            assert harness.serving.buffer.held_count == (0 if name == "a" else 1)
    assert delivered[0] < delivered[1]


async def test_a_checkpoint_makes_receipts_final(harness: Harness) -> None:
    exchange = await hello(harness.wire, 1)
    await finish_groups(harness, "a")
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    exchange.send(receipt={"delivery_ids": [delivery.delivery_id], "step": 1})
    exchange.send(checkpoint={"step": 1})
    exchange.half_close()
    assert await exchange.call.code() == grpc.StatusCode.OK
    assert harness.serving.buffer.held_count == 0
    exchange = await hello(harness.wire, 2, resume_step=0)
    exchange.send(demand={"group_count": 1})
    await exchange.nothing()


async def test_a_newer_trainer_ends_the_older_session(harness: Harness) -> None:
    older = await hello(harness.wire, 5)
    older.send(demand={"group_count": 3})
    newer = await hello(harness.wire, 6)
    assert await ended(older) == (grpc.StatusCode.ABORTED, "SESSION_REPLACED")
    stale = Hello(run_id="run", trainer_epoch=6, staleness={"groups_per_step": 1, "max_lag": 1})
    assert await refused(harness, ExchangeRequest(hello=stale)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "STALE_EPOCH",
    )
    # The older session's demand ended with it.
    await finish_groups(harness, "a")
    newer.send(demand={"group_count": 1})
    assert (await newer.receive("delivery")).group.task_id == "a"


async def test_what_is_wrong_with_a_message_is_said(harness: Harness) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    good = {"run_id": "r", "trainer_epoch": 9, "staleness": {"groups_per_step": 1}}
    assert await refused(harness, None) == (invalid, "HELLO_EXPECTED")
    assert await refused(harness, ExchangeRequest(demand={"group_count": 1})) == (
        invalid,
        "HELLO_EXPECTED",
    )
    for change in (
        {"run_id": ""},
        {"start_id": "x" * 257},
        {"trainer_epoch": 0},
        {"weight_version": -1},
        {"resume_step": -1},
        {"staleness": {"groups_per_step": 0}},
        {"staleness": {"groups_per_step": 1, "max_lag": -1}},
        {"staleness": {"groups_per_step": 1, "late_policy": 99}},
    ):
        message = ExchangeRequest(hello=Hello(**{**good, **change}))
        assert await refused(harness, message) == (invalid, "FIELD_INVALID"), change
    for index, bad in enumerate(
        (
            {"hello": Hello(**good)},
            {"demand": {"group_count": 0}},
            {"demand": {"group_count": 1, "purpose": 99}},
            {"receipt": {"delivery_ids": [1]}},
            {"receipt": {"delivery_ids": [1], "step": -1}},
            {"checkpoint": {"step": -1}},
            {},
        )
    ):
        exchange = await hello(harness.wire, 20 + index)
        exchange.send(**bad)
        assert await ended(exchange) == (invalid, "FIELD_INVALID"), bad
    # Receipts for unknown deliveries change nothing.
    exchange = await hello(harness.wire, 99)
    exchange.send(receipt={"delivery_ids": [12345], "step": 1})
    await finish_groups(harness, "a")
    exchange.send(demand={"group_count": 1})
    await exchange.receive("delivery")


async def test_switch_answers_every_push(harness: Harness) -> None:
    exchange = await hello(harness.wire)
    exchange.send(switch_weights={"weight_version": 3})
    receipt = await exchange.receive("weight_receipt")
    assert receipt.rejection.reason == "WEIGHT_VERSION_NOT_STAGED"
    assert (receipt.weight_version, receipt.active_weight_version) == (3, 0)
    await harness.upload(3, staged=True)
    exchange.send(switch_weights={"weight_version": 3})
    receipt = await exchange.receive("weight_receipt")
    assert not receipt.HasField("rejection")
    assert receipt.active_weight_version == 3
    assert receipt.HasField("pause")


@pytest.mark.parametrize(
    ("policy", "notice"),
    [
        (trainer_service_pb2.LATE_POLICY_DROP, "GROUP_DROPPED"),
        (trainer_service_pb2.LATE_POLICY_REQUEUE, "GROUP_REQUEUED"),
        (trainer_service_pb2.LATE_POLICY_MASK, None),
    ],
)
async def test_late_groups_by_policy(harness: Harness, policy: Any, notice: str | None) -> None:
    exchange = await hello(harness.wire, max_lag=1, groups_per_step=1, late_policy=policy)
    await finish_groups(harness, "a")
    for version in (1, 2):
        await harness.upload(version, staged=True)
        exchange.send(switch_weights={"weight_version": version})
        await exchange.receive("weight_receipt")
    exchange.send(demand={"group_count": 1})
    if notice is None:
        delivery = await exchange.receive("delivery")
        assert delivery.group.oldest_weight_version == 0
        return
    said = await exchange.receive("notice")
    assert (said.reason, said.task_id) == (notice, "a")
    call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=1))
    if notice == "GROUP_REQUEUED":
        async with asyncio.timeout(20):
            assert (await call.read()).task.task_id == "a"
    else:
        reading = asyncio.ensure_future(call.read())
        done, _ = await asyncio.wait([reading], timeout=0.2)
        assert not done


async def test_a_task_whose_group_no_message_carries_is_named(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffering, "MAX_GROUP_BYTES", 10)
    exchange = await hello(harness.wire)
    await finish_groups(harness, "a")
    said = await exchange.receive("notice")
    assert (said.reason, said.task_id) == ("GROUP_TOO_LARGE", "a")


async def test_another_run_takes_nothing_over_and_what_is_dropped_is_counted(
    harness: Harness,
) -> None:
    exchange = await hello(harness.wire, 1, run_id="one")
    await finish_groups(harness, "a", "b")
    await harness.wire.SubmitTasks(
        SubmitTasksRequest(tasks=[Task(task_id="c", group_size=1, tokens=sequence([1]))])
    )
    other = await hello(harness.wire, 2, run_id="two")
    assert await ended(exchange) == (grpc.StatusCode.ABORTED, "SESSION_REPLACED")
    other.send(demand={"group_count": 1})
    assert (await other.receive("notice")).reason == "RUN_REPLACED"
    assert harness.serving.buffer.drops == {"RUN_REPLACED": 2}
    await finish_groups(harness, "a")
    assert (await other.receive("delivery")).group.task_id == "a"


async def test_a_run_that_begins_anew_takes_nothing_over_from_its_earlier_start(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = await hello(harness.wire, 1, start_id="first")
    await finish_groups(harness, "a", "b")
    waiting = [Task(task_id="c", group_size=1, tokens=sequence([1]))]
    await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=waiting))
    exchange.send(demand={"group_count": 1})
    used = await exchange.receive("delivery")
    exchange.send(receipt={"delivery_ids": [used.delivery_id], "step": 1})
    # A newer trainer ends this stream, and what the server has not read of it is lost.
    exchange.half_close()
    assert await exchange.call.read() is grpc.aio.EOF
    # A resumed trainer, and one that does not know its start id, belong to the same start.
    for epoch, start_id in ((2, "first"), (3, ""), (4, "first")):
        exchange = await hello(harness.wire, epoch, start_id=start_id, resume_step=1)
        answer = await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=waiting))
        assert (answer.accepted_count, answer.duplicate_count) == (0, 1)
        assert harness.serving.buffer.drops == {}
    # No trainer is connected to receive notices of groups dropped now.
    exchange.half_close()
    assert await exchange.call.read() is grpc.aio.EOF
    with monkeypatch.context() as patched:
        patched.setattr(buffering, "MAX_GROUP_BYTES", 10)
        await finish_groups(harness, "d")
    exchange = await hello(harness.wire, 5, start_id="second")
    notice = await exchange.receive("notice")
    assert notice.reason == "RUN_REPLACED"
    assert notice.message == "run run was restarted from scratch: 0 tasks, 2 groups dropped"
    assert harness.serving.buffer.drops["RUN_REPLACED"] == 2
    exchange.send(demand={"group_count": 3})
    await finish_groups(harness, "a", "c", "d")
    # The group that was too large before the new start causes no notice.
    again = [(await exchange.receive("delivery")).group for _ in range(3)]
    assert [group.task_id for group in again] == ["a", "c", "d"]
    assert used.group.group_id not in [group.group_id for group in again]


async def test_a_changed_contract_keeps_what_is_under_way(harness: Harness) -> None:
    exchange = await hello(harness.wire, 1, max_lag=4, groups_per_step=2)
    await finish_groups(harness, "a", "b", "c")
    exchange.half_close()
    await exchange.call.code()
    exchange = await hello(harness.wire, 2, max_lag=1, groups_per_step=1)
    exchange.send(demand={"group_count": 3})
    found = [await exchange.receive("delivery") for _ in range(3)]
    assert {d.group.task_id for d in found} == {"a", "b", "c"}
