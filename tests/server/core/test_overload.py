"""Load beyond the server's limits is refused with a precise status,
and loses or changes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.core.memory_budget import KEPT_PART
from penstock.server.core.telemetry import MOST_REASONS, OTHER
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from tests.support.harness import (
    GenerateRequest,
    Harness,
    LeaseTasksRequest,
    StreamOptions,
    SubmitTasksRequest,
    Task,
    Wire,
    hello,
    sampling,
    sequence,
    serve,
    until,
)

BUDGET = 16 << 20


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    failure = read_failure(error.value)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return failure


def recounted(harness: Harness) -> tuple[int, int, int]:
    """The memory that the parts use, counted from scratch."""
    serving = harness.serving
    tasks = [*serving.queue.pending.copy()()]
    tasks += [group.task for group in serving.queue.groups if group.task is not None]
    return (
        sum(record.charged_bytes for record in serving.store.records()),
        sum(task.ByteSize() for task in tasks),
        sum(group.memory_bytes for group in serving.buffer.groups),
    )


def counted(harness: Harness) -> tuple[int, int, int]:
    """The memory that the budget has counted, without answers in flight."""
    return tuple(part() for part in harness.serving.budget.parts[:3])  # type: ignore[return-value]


async def test_tasks_beyond_the_budget_are_refused_all_or_none(tmp_path: Path) -> None:
    async with serve(tmp_path, f"limits.memory_bytes={BUDGET}") as harness:

        def request(name: str, size: int) -> Any:
            task = Task(task_id=name, group_size=1, tokens=sequence([1, 2, 3]))
            task.metadata["filler"] = "x" * size
            return SubmitTasksRequest(tasks=[task])

        for i in range(3):
            await harness.wire.SubmitTasks(request(f"t{i}", 5 << 20))
        failure = await refused(harness.wire.SubmitTasks(request("t3", 5 << 20)))
        assert failure.reason == "MEMORY_BUDGET" and failure.retry_after_seconds
        assert int(failure.metadata["limit"]) == BUDGET
        assert harness.serving.queue.pending.count == 3
        assert counted(harness) == recounted(harness)
        # A task that fits is still accepted.
        assert (await harness.wire.SubmitTasks(request("t4", 10))).accepted_count == 1


async def test_a_turn_that_might_not_fit_is_not_begun_and_fits_once_others_are_gone(
    tmp_path: Path,
) -> None:
    async with serve(
        tmp_path, f"limits.memory_bytes={BUDGET}", step_seconds=0.001, max_context=1_000_000
    ) as harness:
        long = sampling(700_000)
        calls = [
            asyncio.ensure_future(harness.generate(f"t{i}", sampling_params=long)) for i in range(2)
        ]
        for i in range(2):
            await harness.sampled(f"t{i}")
        failure = await refused(harness.generate("t2", sampling_params=long))
        assert failure.reason == "MEMORY_BUDGET"
        assert harness.serving.store.find("t2") is None
        assert counted(harness) == recounted(harness)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        # A finished turn takes only the memory of its tokens.
        async with asyncio.timeout(20):
            for turn in harness.serving.turns.in_flight:
                await turn.attempt.ended.wait()
        assert harness.serving.budget.used_bytes < BUDGET // 4
        await harness.generate("t2", sampling_params=sampling(8))


async def test_no_group_begins_near_the_bound_and_those_under_way_can_be_finished(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, f"limits.memory_bytes={BUDGET}") as harness:
        tasks = [Task(task_id=f"t{i}", group_size=1, tokens=sequence([1])) for i in range(3)]
        for task in tasks[:2]:
            task.metadata["filler"] = "x" * (7 << 20)
        for task in tasks:
            await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=3))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await call.read()
        # The run is replaced, so there is room again, and a waiting lease stream wakes up.
        await hello(harness.wire, 1, run_id="one")
        call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="b", concurrency=1))
        await hello(harness.wire, 2, run_id="two")
        await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks[2:]))
        async with asyncio.timeout(20):
            assert (await call.read()).task.task_id == "t2"


async def test_groups_in_memory_are_counted_until_they_are_final(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        for i in range(3):
            await harness.generate(f"g{i}", [5] * 300, group_id=f"g{i}", group_size=1)
            await harness.complete(f"g{i}")
        assert counted(harness) == recounted(harness)
        assert counted(harness)[2] > 3 * 1000
        exchange = await hello(harness.wire, groups_per_step=3)
        exchange.send(demand={"group_count": 3})
        ids = [(await exchange.receive("delivery")).delivery_id for _ in range(3)]
        exchange.send(receipt={"delivery_ids": ids, "step": 1})
        exchange.send(checkpoint={"step": 1})
        exchange.half_close()
        assert await exchange.call.read() is grpc.aio.EOF
        assert counted(harness) == recounted(harness) == (0, 0, 0)


async def test_groups_kept_beside_the_journal_are_counted_and_give_way(tmp_path: Path) -> None:
    """Cached groups give way to other uses of memory. Each group is still delivered, and leaves
    the cache once it has been."""
    settings = (f"limits.memory_bytes={BUDGET}", f"journal.folder={tmp_path / 'journal'}")
    async with serve(tmp_path, *settings, max_context=100_000) as harness:
        kept, budget = harness.serving.buffer.kept, harness.serving.budget

        async def finish(name: str) -> None:
            await harness.generate(name, [5] * 20_000, group_id=name, group_size=1)
            await harness.complete(name)

        for name in "abc":
            await finish(name)
        assert kept.byte_count > 3 * 80_000
        await harness.answers_read()
        assert budget.used_bytes == kept.byte_count
        exchange = await hello(harness.wire, groups_per_step=1000)
        exchange.send(demand={"group_count": 1})
        before = kept.byte_count
        assert (await exchange.receive("delivery")).group.group_id == "a"
        assert 0 < kept.byte_count < before
        await harness.answers_read()
        budget.check(BUDGET)
        assert kept.byte_count == budget.used_bytes == 0
        # The cache never exceeds its share of the budget.
        for number in range(BUDGET // KEPT_PART // 80_000):
            await finish(f"more-{number}")
        assert BUDGET // KEPT_PART - 90_000 < kept.byte_count <= BUDGET // KEPT_PART
        exchange.send(demand={"group_count": 2})
        names = [(await exchange.receive("delivery")).group.group_id for _ in range(2)]
        assert names == ["b", "c"]


async def test_reasons_that_others_choose_take_bounded_room(tmp_path: Path) -> None:
    """Reasons come from agents and from trainers that refuse groups. Both are counted forever, so
    the number and length of distinct reasons must be bounded."""
    async with serve(tmp_path, "limits.groups_without_trainer=1000") as harness:
        failures, drops = harness.serving.closing.failures, harness.serving.buffer.drops
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await harness.generate("long")
            await harness.fail("long", "x" * 257)
        assert read_failure(error.value).metadata["field"] == "outcome.failure.reason"
        assert not failures
        exchange = await hello(harness.wire)
        exchange.send(demand={"group_count": MOST_REASONS + 10})
        for number in range(MOST_REASONS + 10):
            await harness.generate(f"t{number}", group_id=f"g{number}", group_size=1)
            await harness.fail(f"t{number}", f"AGENTS_{number}")
            delivery = await exchange.receive("delivery")
            reason = f"TRAINERS_{number}" if number else "x" * 100_000
            exchange.send(
                receipt={
                    "delivery_ids": [delivery.delivery_id],
                    "rejection": {"reason": reason, "message": "no"},
                }
            )
        await harness.generate("last")
        await harness.fail("last", "AGENTS_3")
        assert failures["AGENTS_3"] == 2 and failures[OTHER] == 10
        await until(lambda: sum(drops.values()) == MOST_REASONS + 10)
        assert drops["TRAINERS_3"] == 1 and drops[OTHER] == 11
        for counted_reasons in (failures, drops):
            assert len(counted_reasons) == MOST_REASONS + (counted_reasons is failures)


async def test_a_caller_that_reads_nothing_is_cut_off_and_others_do_not_notice(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, "limits.stalled_seconds=0.5", max_context=4_000_000) as harness:
        narrow = [("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(harness.address, options=narrow) as channel:
            stalled = Wire(channel).Generate(
                GenerateRequest(
                    trajectory_id="stalled",
                    tokens=sequence([1, 2, 3]),
                    sampling_params=sampling(1_000_000),
                    stream_options=StreamOptions(flush_interval={"nanos": 1_000_000}),
                )
            )
            async with asyncio.timeout(20):
                while harness.serving.store.find("stalled") is None:
                    await asyncio.sleep(0.01)
                record = harness.serving.store.find("stalled")
                assert record is not None and record.turn is not None
                # The turn ends, because its caller did not ask for a turn that outlives the call.
                await record.turn.attempt.ended.wait()
                assert len((await harness.generate("other")).tokens) == 16
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for _ in stalled:
                    pass
            assert read_failure(error.value).reason == "SLOW_READER"
            assert record.policy_versions() and not record.closed


async def test_calls_that_come_while_the_process_is_busy_are_all_answered(tmp_path: Path) -> None:
    """By default gRPC cancels calls at random once 1,000 are waiting. Agents of a hub lost turns
    this way before they began."""
    count = 2_000
    async with serve(tmp_path) as harness:
        sent, answers = threading.Event(), Counter[str]()

        def call_many() -> None:
            with grpc.insecure_channel(harness.address, client_options(own_connection=True)) as own:
                call = own.unary_unary("/penstock.v1.RolloutService/GetServerInfo")
                # gRPC retries unary calls of this method, but not a cancelled call.
                call(b"")
                begun.set()
                waits.wait(60.0)
                calls = [call.future(b"", timeout=60.0) for _ in range(count)]
                sent.set()
                answers.update(str(one.code()) for one in calls)

        begun, waits = threading.Event(), threading.Event()
        calling = asyncio.create_task(asyncio.to_thread(call_many))
        await asyncio.to_thread(begun.wait, 60.0)
        waits.set()
        # Block the server's loop until every call has arrived.
        assert sent.wait(60.0)
        time.sleep(0.5)  # noqa: ASYNC251 - that is what is tested.
        await calling
        assert answers == {str(grpc.StatusCode.OK): count}
