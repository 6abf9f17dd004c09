"""Who is given an attempt, in orders of events that the test chooses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.groups.attempts import Holder, Lease
from penstock.server.journal.protocol import EncodedRecord
from penstock.v1 import trajectory_pb2
from tests.server.groups.test_wire_tasks import lease, none_now, open_leased, submit, take, task
from tests.support.harness import GenerateRequest, Harness, hello, sampling, serve, until


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "single"])
async def test_a_whole_group_that_lost_its_agent_is_anybodys(tmp_path: Path, whole: bool) -> None:
    """Its agent may have been the only one that works on whole groups, or on as many attempts at once."""
    async with serve(tmp_path, "leases.grace_seconds=0.2") as harness:
        await submit(harness, task("a", 3))
        lost = lease(harness, 3, "lost", whole_groups=True)
        attempts = [await take(lost) for _ in range(3)]
        await open_leased(harness, attempts[0])
        await harness.complete(attempts[0].trajectory_id)
        lost.cancel()
        (group,) = harness.serving.queue.groups
        await until(lambda: group.untouched)
        # A smaller agent that wants whole groups continues with what fits.
        await submit(harness, task("b", 2))
        smaller = lease(harness, 2, "smaller", whole_groups=True)
        assert {(await take(smaller)).task.task_id for _ in range(2)} == {"b"}
        other = lease(harness, 3, "other", whole_groups=whole)
        taken = [await take(other) for _ in range(3)]
        assert [(one.task.task_id, one.retry_count) for one in taken] == [("a", 1)] * 3


async def test_a_whole_group_is_nobodys_until_all_its_attempts_are_back(tmp_path: Path) -> None:
    async with serve(tmp_path, "leases.grace_seconds=0.2", step_seconds=0.02) as harness:
        await submit(harness, task("a", 2, sampling_params=sampling(400)))
        lost = lease(harness, 2, "lost", whole_groups=True)
        first, second = await take(lost), await take(lost)
        # A turn of the first is under way, so its lease does not run out. The second's does.
        turn = harness.wire.Generate(GenerateRequest(trajectory_id=first.trajectory_id))
        await turn.read()
        lost.cancel()
        (group,) = harness.serving.queue.groups
        await until(lambda: len(group.waiting) == 1)
        others = [lease(harness, 2, "whole", whole_groups=True), lease(harness, 2, "single")]
        waiting = [await none_now(call) for call in others]
        turn.cancel()
        done, _ = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        (taken,) = done
        assert (await taken).retry_count == 1
        assert second.trajectory_id != (await taken).trajectory_id


async def test_a_race_delays_no_whole_group(harness: Harness) -> None:
    await submit(harness, task("race", 2, finish_count=1), task("a", 2))
    call = lease(harness, 2, whole_groups=True)
    assert {(await take(call)).task.task_id for _ in range(2)} == {"a"}


async def test_groups_are_leased_one_after_the_other(harness: Harness) -> None:
    await submit(harness, *(task(name, 3) for name in "abc"))
    for whole in (False, True):
        call = lease(harness, 9, "agent", whole_groups=whole)
        if whole:
            await submit(harness, *(task(name, 3) for name in "def"))
        names = [(await take(call)).task.task_id for _ in range(9)]
        assert names == sorted(names)


def delay_leases(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> asyncio.Future[list[Any]]:
    """The record of the next lease becomes durable when the returned future is set."""
    written: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
    journal = harness.serving.journal
    append = journal.append

    def delayed(records: Any, **options: Any) -> Any:
        kinds = [r.WhichOneof("record") for r in records if not isinstance(r, EncodedRecord)]
        if kinds != ["group_changed"]:
            return append(records, **options)
        monkeypatch.setattr(journal, "append", append)
        append(records, **options)
        return written

    monkeypatch.setattr(journal, "append", delayed)
    return written


@pytest.mark.parametrize("whole", [False, True], ids=["single", "whole"])
async def test_a_lease_that_was_never_told_uses_up_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    async with serve(tmp_path, "leases.max_attempts=1") as harness:
        await submit(harness, task("a", 1))
        delay_leases(harness, monkeypatch)
        lost = lease(harness, 1, "lost", whole_groups=whole)
        queue = harness.serving.queue
        await until(lambda: any(a.state.leased for g in queue.groups for a in g.attempts))
        lost.cancel()
        again = await take(lease(harness, 1, "next", whole_groups=not whole))
        assert again.retry_count == 0
        await open_leased(harness, again)
        assert await harness.complete(again.trajectory_id)


async def test_a_lease_that_was_dealt_to_a_lost_stream_is_given_back(harness: Harness) -> None:
    """The stream ends between the deal and the moment in which it would hear of it."""
    lines, queue = harness.serving.lease_lines, harness.serving.queue
    holder = Holder("lost", 1, trajectory_pb2.PURPOSE_UNSPECIFIED)
    stream = asyncio.create_task(lines.next(holder, harness.serving.closing.give_back))
    await until(lambda: bool(lines._lines))
    queue.pending.submit([task("a", 1)])
    assert lines._deal()
    assert holder.full
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert not holder.held
    again = await take(lease(harness, 1, "next"))
    assert (again.task.task_id, again.retry_count) == ("a", 0)


async def test_what_is_given_back_survives_a_restart_as_never_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (f"journal.folder={tmp_path / 'journal'}", "leases.max_attempts=1")
    async with serve(tmp_path, *settings) as harness:
        await submit(harness, task("a", 1))
        delay_leases(harness, monkeypatch)
        lost = lease(harness, 1, "lost")
        queue = harness.serving.queue
        await until(lambda: any(a.state.leased for g in queue.groups for a in g.attempts))
        lost.cancel()
        await until(lambda: all(g.untouched for g in queue.groups))
    async with serve(tmp_path, *settings) as harness:
        (group,) = harness.serving.queue.groups
        assert group.untouched
        assert (await take(lease(harness, 1))).retry_count == 0


async def test_a_late_end_of_a_call_is_not_counted_against_the_next_lease(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        await submit(harness, task("a", 1))
        call = lease(harness, 1)
        first = await take(call)
        await open_leased(harness, first)
        leases, (group,) = harness.serving.leases, harness.serving.queue.groups
        record = harness.serving.store.get(first.trajectory_id)
        late = leases.open_call(record)
        late.__enter__()
        await harness.fail(first.trajectory_id)
        second = await take(call)
        assert second.retry_count == 1
        (attempt,) = group.attempts
        await open_leased(harness, second)
        with leases.open_call(harness.serving.store.get(second.trajectory_id)):
            assert attempt.open_calls == 1
            deadline = attempt.deadline
            late.__exit__(None, None, None)
            assert (attempt.open_calls, attempt.deadline) == (1, deadline)
        assert attempt.open_calls == 0


async def test_a_stream_that_cannot_take_a_task_delays_no_other(harness: Harness) -> None:
    """Every kind of stream waits. Each gets what only it can take, in whatever order the tasks come."""
    evaluation, training = trajectory_pb2.PURPOSE_EVAL, trajectory_pb2.PURPOSE_TRAIN
    small = lease(harness, 2, "small", whole_groups=True, purpose=training)
    large = lease(harness, 4, "large", whole_groups=True, purpose=training)
    evaluating = lease(harness, 1, "evaluating", purpose=evaluation)
    await until(lambda: len(harness.serving.lease_lines._lines) == 3)
    await submit(harness, task("four", 4), task("e", 1, purpose=evaluation), task("two", 2))
    assert {(await take(large)).task.task_id for _ in range(4)} == {"four"}
    assert {(await take(small)).task.task_id for _ in range(2)} == {"two"}
    assert (await take(evaluating)).task.task_id == "e"


async def test_a_full_stream_is_dealt_to_when_it_has_room(harness: Harness) -> None:
    await submit(harness, task("a", 1), task("b", 1))
    call = lease(harness, 1)
    first = await take(call)
    waiting = await none_now(call)
    await open_leased(harness, first)
    await harness.complete(first.trajectory_id)
    assert (await waiting).task.task_id == "b"


async def test_streams_are_served_in_the_order_in_which_they_came(harness: Harness) -> None:
    calls, lines = [], harness.serving.lease_lines._lines
    for number in range(5):
        calls.append(lease(harness, 1, f"agent-{number}"))
        await until(lambda n=number: sum(map(len, lines.values())) == n + 1)
    await submit(harness, *(task(str(number), 1) for number in range(5)))
    assert [(await take(call)).task.task_id for call in calls] == list("01234")


async def test_a_change_costs_one_look_for_a_line_of_any_length(harness: Harness) -> None:
    exchange = await hello(harness.wire, max_lag=0, groups_per_step=1)
    await submit(harness, task("a", 1), task("b", 1))
    calls = [lease(harness, 1, f"agent-{number}") for number in range(20)]
    lines = harness.serving.lease_lines
    await until(lambda: sum(map(len, lines._lines.values())) == 19)
    queue, looks = harness.serving.queue, 0

    def counted(*given: Any) -> Lease | None:
        nonlocal looks
        looks += 1
        return asked(*given)

    asked, queue.lease = queue.lease, counted  # type: ignore[method-assign]
    for _ in range(10):
        harness.serving.changed.notify()
        await asyncio.sleep(0.01)
    assert looks == 10
    for call in calls:
        call.cancel()
    exchange.call.cancel()


async def test_streams_that_wait_end_with_the_server(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        await submit(harness, task("a", 1))
        full, waiting = lease(harness, 1, "full"), lease(harness, 1, "waiting")
        await take(full)
        reads = [await none_now(call) for call in (full, waiting)]
        stopping = asyncio.create_task(harness.life.stop(5.0))
        for read in reads:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await stopping
