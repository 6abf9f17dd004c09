"""Attempts and groups that close, expire, are delivered or dropped are in exactly one place at any
moment, in memory and on disk. A reader or a kill in between finds all of them."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format, struct_pb2
from google.protobuf.message import DecodeError

from penstock.server.core.errors import DomainError
from penstock.server.groups.recovery import Recovered
from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.server.journal.records import step_final
from penstock.server.turns.encoding import decode_group
from penstock.v1 import trainer_service_pb2
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from tests.server.groups.test_recovery import killed, lease, on_disk, submit, work
from tests.support.harness import (
    AbortRequest,
    CompleteTrajectoryRequest,
    ContinueRequest,
    Demand,
    Failure,
    GenerateRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    StreamOptions,
    SubmitTasksRequest,
    Task,
    delta,
    header,
    hello,
    messages,
    payload,
    sampling,
    send,
    sequence,
    serve,
    until,
)

pytestmark = pytest.mark.timeout(60)

DROP = trainer_service_pb2.LATE_POLICY_DROP
REQUEUE = trainer_service_pb2.LATE_POLICY_REQUEUE


def kinds(records: Any, *, hold_last: bool = False) -> list[str]:
    """The kinds of records not yet encoded, and "group_finished" for a finished group."""
    found = [record.WhichOneof("record") for record in records if hasattr(record, "WhichOneof")]
    return [*found, "group_finished"] if hold_last else found


class Disk:
    """Delays the journal's answer to appends of one kind. `reached` is set once such a record is
    durable; set `go_on` to let the append return."""

    def __init__(self, harness: Harness, kind: str) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        journal: Any = harness.serving.journal
        append = journal.append

        def late(records: Any, **fields: Any) -> Any:
            async def end() -> Any:
                found = await appending
                self.reached.set()
                await self.go_on.wait()
                return found

            appending = append(records, **fields)
            return asyncio.ensure_future(end()) if kind in kinds(records, **fields) else appending

        journal.append = late


async def compact(harness: Harness) -> None:
    journal: Any = harness.serving.journal
    await journal.append(())
    await journal._begin_compaction()
    await journal._compacting


async def delivered(harness: Harness) -> list[tuple[str, float]]:
    """For each sibling of the only group in the buffer: its failure reason and its reward."""
    (group,) = harness.serving.buffer.groups
    found = decode_group(await harness.serving.buffer.read(group))
    return [(t.outcome.failure.reason, t.outcome.reward) for t in found.trajectories]


# Leases that expire


async def test_siblings_that_run_out_together_are_written_down_together(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s", "leases.max_attempts=1") as harness:
        disk = Disk(harness, "leases_expired")
        await submit(harness, "task")
        call, _ = await lease(harness, 2)
        harness.pass_lease_time()
        await disk.reached.wait()
        left = killed(tmp_path / "s")
        disk.go_on.set()
        call.cancel()
    async with on_disk(left) as harness:
        assert await delivered(harness) == [("LEASE_EXPIRED", 0.0)] * 2
        assert len(harness.serving.queue.groups) == 0


async def test_a_sibling_that_ends_while_others_run_out_is_delivered_with_what_became_of_them(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s", "leases.max_attempts=1") as harness:
        disk = Disk(harness, "leases_expired")
        await submit(harness, "task", group_size=3)
        call, leases = await lease(harness, 3)
        for leased in leases:
            await harness.generate(leased.trajectory_id)
        (group,) = harness.serving.queue.groups
        for attempt in group.attempts[:2]:
            attempt.deadline -= 3600
        harness.serving.queue.leases.sooner.notify()
        await disk.reached.wait()
        await harness.complete(leases[2].trajectory_id, 0.5)
        disk.go_on.set()
        assert await delivered(harness) == [("LEASE_EXPIRED", 0.0)] * 2 + [("", 0.5)]
        assert not harness.serving.store.records() and not harness.serving.store.open_count
        call.cancel()


async def test_a_detached_turn_whose_lease_runs_out_ends_and_its_attempt_is_made_again(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s", step_seconds=0.01) as harness:
        await submit(harness, "task", group_size=1)
        call, (given,) = await lease(harness, 1)
        turn = harness.wire.Generate(
            GenerateRequest(
                trajectory_id=given.trajectory_id,
                sampling_params=sampling(400),
                stream_options=StreamOptions(detach=True),
            )
        )
        await turn.read()
        turn.cancel()
        (attempt,) = [a for group in harness.serving.queue.groups for a in group.attempts]
        await until(lambda: not attempt.open_calls)
        harness.pass_lease_time()
        async with asyncio.timeout(20):
            again = await call.read()
        assert again.retry_count == 1
        await until(lambda: not harness.serving.turns.in_flight)
        await work(harness, again)
        assert await delivered(harness) == [("", 1.0)]
        call.cancel()


async def test_an_attempt_with_a_branch_that_ran_out_waits_for_its_sibling_over_a_restart(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s", "leases.max_attempts=1") as harness:
        await submit(harness, "task")
        call, (first, second) = await lease(harness, 2)
        await harness.generate(first.trajectory_id)
        branch = {"prompt": (1, 2, 3, 9), "parent_trajectory_id": first.trajectory_id}
        await harness.generate("branch", **branch)
        (group,) = harness.serving.queue.groups
        group.attempts[0].deadline -= 3600
        harness.serving.queue.leases.sooner.notify()
        await until(lambda: group.attempts[0].state.final)
        await harness.serving.journal.append(())
        left = killed(tmp_path / "s")
        call.cancel()
    async with on_disk(left) as harness:
        await work(harness, second, 0.5)
        expired = ("LEASE_EXPIRED", 0.0)
        assert await delivered(harness) == [expired, expired, ("", 0.5)]


async def test_no_id_that_an_agent_takes_is_that_of_an_attempt_that_was_never_opened(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s") as harness:
        failed = asyncio.ensure_future(harness.life.failed())
        for run in ("first", "second"):
            exchange = await hello(harness.wire, 1 + (run == "second"), run_id=run)
            # Group ids are unique within a run.
            await harness.generate(run, group_id="x", group_size=2, sample_index=0)
            await harness.generate(f"x-1-unopened-{run}")
            harness.pass_lease_time()
            await until(lambda: harness.serving.buffer.buffered_count == 1)
            exchange.call.cancel()
        assert not failed.done()
        failed.cancel()


# Closes that overlap a compaction or are cut off by a kill


async def test_a_race_is_over_in_one_place(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s", step_seconds=0.01) as harness:
        await submit(harness, "race", group_size=3, finish_count=2)
        call, (first, second, third) = await lease(harness, 3)
        await work(harness, first, 0.75)
        running = harness.wire.Generate(
            GenerateRequest(trajectory_id=third.trajectory_id, sampling_params=sampling(400))
        )
        await running.read()
        await harness.generate(second.trajectory_id)
        abort, go_on = harness.engine.abort, asyncio.Event()

        async def slow(request_ids: Any) -> None:
            await go_on.wait()
            await abort(request_ids)

        harness.engine.abort = slow  # type: ignore[method-assign]
        last = asyncio.ensure_future(harness.complete(second.trajectory_id, 0.5))
        await until(lambda: len(harness.serving.queue.groups) == 0)
        await compact(harness)
        left = killed(tmp_path / "s")
        go_on.set()
        await last
        call.cancel()
    async with on_disk(left) as harness:
        assert await delivered(harness) == [("", 0.75), ("", 0.5)]
        assert await harness.complete(second.trajectory_id, 0.5)
        assert (await submit(harness, "race")).duplicate_count == 1


async def test_what_branched_from_an_attempt_that_a_race_leaves_out_is_forgotten_with_it(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s", "leases.max_attempts=1") as harness:
        await submit(harness, "race", group_size=3, finish_count=2)
        call, (first, second, third) = await lease(harness, 3)
        await harness.generate(first.trajectory_id)
        branch = {"prompt": (1, 2, 3, 9), "parent_trajectory_id": first.trajectory_id}
        await harness.generate("branch", **branch)
        await harness.fail(first.trajectory_id)
        await work(harness, second)
        await work(harness, third)
        assert not harness.serving.store.records() and not harness.serving.store.byte_count
        left = killed(tmp_path / "s")
        call.cancel()
    async with on_disk(left) as harness:
        assert not harness.serving.store.records()


def cut_last(folder: Path, kind: str) -> None:
    """Remove the last record, as a kill during an append would."""
    files = find_files(folder / "journal")
    record, place = list(read_records(files, Reading()))[-1]
    assert record.WhichOneof("record") == kind
    path = dict(files.all)[place.segment]
    data = bytearray(path.read_bytes())
    data[place.offset :] = bytes(len(data) - place.offset)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("reward", "kind", "refers_from"),
    [(0.75, "group_referred", 1), (0.75, "group_finished", 1 << 20), (None, "group_changed", 1)],
    ids=["last", "last whole", "retried"],
)
async def test_a_close_that_was_cut_in_two_is_as_if_it_had_never_been(
    tmp_path: Path, reward: float | None, kind: str, refers_from: int
) -> None:
    outcome = (
        Outcome(reward=reward)
        if reward is not None
        else Outcome(failure=Failure(reason="BROKEN", message=""))
    )
    setting = f"journal.refers_from_bytes={refers_from}"
    async with on_disk(tmp_path / "s", setting) as harness:
        await submit(harness, "task", group_size=1)
        call, (given,) = await lease(harness, 1)
        await harness.generate(given.trajectory_id)
        closing = CompleteTrajectoryRequest(trajectory_id=given.trajectory_id, outcome=outcome)
        await harness.wire.CompleteTrajectory(closing)
        left = killed(tmp_path / "s")
        call.cancel()
    cut_last(left, kind)
    async with on_disk(left) as harness:
        assert harness.serving.store.open_count == (reward is not None)
        closed = await harness.wire.CompleteTrajectory(closing)
        if reward is None:
            assert closed.retried
            call, (again,) = await lease(harness, 1)
            assert again.retry_count == 1
            call.cancel()
        else:
            assert closed.group_completed
            assert await delivered(harness) == [("", 0.75)]
        assert harness.serving.store.open_count == 0


async def test_what_a_sibling_was_closed_with_is_kept_for_as_long_as_its_group_waits(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s") as harness:
        harness.serving.store._max_remembered = 3
        await submit(harness, "slow")
        call, (first, second) = await lease(harness, 2)
        await work(harness, first, 0.75)
        for number in range(5):
            await harness.generate(f"other-{number}")
            await harness.complete(f"other-{number}")
        await harness.complete(first.trajectory_id, 0.75)
        assert harness.serving.store.open_count == 0
        await compact(harness)
        left = killed(tmp_path / "s")
        call.cancel()
    async with on_disk(left) as harness:
        await work(harness, second, 0.25)
        assert await delivered(harness) == [("", 0.75), ("", 0.25)]


# Runs, trainers and their streams


async def test_a_group_that_is_being_written_down_goes_with_its_run(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1, run_id="first")
        disk = Disk(harness, "group_finished")
        await submit(harness, "task", group_size=1)
        call, (given,) = await lease(harness, 1)
        await harness.generate(given.trajectory_id)
        last = asyncio.ensure_future(harness.complete(given.trajectory_id))
        await disk.reached.wait()
        second = await hello(harness.wire, 2, run_id="second")
        disk.go_on.set()
        await last
        assert "1 groups dropped" in (await second.receive("notice")).message
        assert not list(harness.serving.buffer.groups)
        assert not harness.serving.admission.outstanding
        left = killed(tmp_path / "s")
        for stream in (exchange, second):
            stream.call.cancel()
        call.cancel()
    async with on_disk(left) as harness:
        assert not list(harness.serving.buffer.groups)


async def test_a_compaction_does_not_bring_back_what_went_with_its_run(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s") as harness:
        journal: Any = harness.serving.journal
        exchange = await hello(harness.wire, 1, run_id="first")
        await submit(harness, "task", group_size=1)
        call, (given,) = await lease(harness, 1)
        await harness.generate(given.trajectory_id)
        may_write, write, write_batch = (
            threading.Event(),
            journal._segments.write,
            journal._write_batch,
        )

        def late(payloads: Any) -> Any:
            may_write.wait()
            return write(payloads)

        async def then_compact() -> bool:
            count = len(journal._batch)
            written = await write_batch()
            if count > 1:
                journal._pace.pressed = True
            return written

        journal._segments.write = late
        journal.append([step_final(0)])
        await until(lambda: not journal._queue)
        last = asyncio.ensure_future(harness.complete(given.trajectory_id))
        await until(lambda: len(journal._queue) == 1)
        coming = asyncio.ensure_future(hello(harness.wire, 2, run_id="second"))
        # One batch contains the group and the end of its run, and a compaction follows immediately.
        await until(lambda: len(journal._queue) == 2)
        journal._write_batch = then_compact
        may_write.set()
        await last
        second = await coming
        await until(lambda: journal.compactions > 0)
        await journal.append(())
        left = killed(tmp_path / "s")
        for stream in (exchange, second):
            stream.call.cancel()
        call.cancel()
    async with on_disk(left) as harness:
        assert not list(harness.serving.buffer.groups)
        assert not harness.serving.admission.outstanding


@pytest.mark.parametrize("late_policy", [DROP, REQUEUE], ids=["drop", "requeue"])
async def test_groups_that_were_selected_as_the_stream_was_lost_come_on_the_next(
    tmp_path: Path, late_policy: Any
) -> None:
    contract = {"max_lag": 1, "groups_per_step": 1, "late_policy": late_policy}
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1, **contract)
        await submit(harness, "old", group_size=1)
        call, (given,) = await lease(harness, 1)
        await work(harness, given)
        for version in (1, 2):
            await harness.upload(version, trainer_epoch=1)
        await submit(harness, "new", group_size=1)
        await work(harness, await call.read())
        await until(lambda: harness.serving.buffer.buffered_count == 2)
        disk = Disk(harness, "group_dropped")
        exchange.send(demand=Demand(group_count=2))
        await disk.reached.wait()
        exchange.call.cancel()
        await until(lambda: not harness.serving.session.connected)
        disk.go_on.set()
        exchange = await hello(harness.wire, 2, weight_version=2, **contract)
        # The new stream also gets the notices that the lost stream did not deliver.
        assert (await exchange.receive("notice")).task_id == "old"
        exchange.send(demand=Demand(group_count=2))
        assert (await exchange.receive("delivery")).group.task_id == "new"
        exchange.call.cancel()
        call.cancel()


@pytest.mark.parametrize(
    "contract",
    [{"max_lag": 0}, {"max_lag": 2, "late_policy": trainer_service_pb2.LATE_POLICY_WAIT}],
    ids=["synchronous", "wait"],
)
async def test_a_stream_that_is_lost_while_a_step_computes_takes_no_place_of_the_next(
    tmp_path: Path, contract: Any
) -> None:
    contract = {**contract, "groups_per_step": 2}
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1, **contract)
        await submit(harness, *(f"task-{number}" for number in range(8)), group_size=1)
        call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=8))

        async def take(count: int) -> list[Any]:
            exchange.send(demand=Demand(group_count=count))
            return [await exchange.receive("delivery") for _ in range(count)]

        for _ in range(2):
            await work(harness, await call.read())
        batch = await take(2)
        exchange.call.cancel()
        await until(lambda: not harness.serving.session.connected)
        exchange = await hello(harness.wire, 2, **contract)
        # The step is done: upload its weights, and send the receipt for the
        # deliveries of the lost stream.
        await harness.upload(1, trainer_epoch=2, staged=True)
        exchange.send(switch_weights={"weight_version": 1})
        await exchange.receive("weight_receipt")
        receipt = {"delivery_ids": [delivery.delivery_id for delivery in batch], "step": 1}
        exchange.send(receipt=receipt)
        again = await take(2)
        assert {one.group.task_id for one in again} == {one.group.task_id for one in batch}
        receipt["delivery_ids"] = [delivery.delivery_id for delivery in again]
        exchange.send(receipt=receipt)
        async with asyncio.timeout(20):
            for _ in range(2):
                await work(harness, await call.read())
            fresh = await take(2)
        assert not {one.group.task_id for one in fresh} & {one.group.task_id for one in batch}
        exchange.call.cancel()
        call.cancel()


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_group_that_cannot_be_read_leaves_its_place_to_another(
    tmp_path: Path, max_lag: int
) -> None:
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1, max_lag=max_lag, groups_per_step=1)
        await submit(harness, "task", group_size=1)
        call, (given,) = await lease(harness, 1)
        await work(harness, given)
        await until(lambda: harness.serving.buffer.buffered_count == 1)
        harness.serving.buffer.kept.clear()
        journal: Any = harness.serving.journal
        read = journal.read

        async def unreadable(_: Any) -> bytes:
            raise DomainError(Reason.JOURNAL_CORRUPT, "a bad sector")

        journal.read = unreadable
        exchange.send(demand=Demand(group_count=1))
        assert (await exchange.receive("notice")).reason == "JOURNAL_CORRUPT"
        journal.read = read
        async with asyncio.timeout(20):
            await work(harness, await call.read(), 0.5)
        await exchange.receive("delivery")
        exchange.call.cancel()
        call.cancel()


async def test_the_middle_of_a_run_is_known_over_any_number_of_starts(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1)
        await harness.upload(5, trainer_epoch=1)
        left = killed(tmp_path / "s", "first")
        exchange.call.cancel()
    for start in ("second", "third"):
        async with on_disk(left) as harness:
            assert harness.serving.switch.awaiting_trainer
            await compact(harness)
            left = killed(left, start)


async def test_what_was_found_in_the_journal_is_not_kept_beside_what_was_made_of_it(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s") as harness:
        await harness.generate("open")
        left = killed(tmp_path / "s")
    async with on_disk(left) as harness:
        gc.collect()
        assert not [found for found in gc.get_objects() if isinstance(found, Recovered)]
        assert harness.serving.store.find("open") is not None


async def test_an_upload_that_is_repeated_is_fenced_like_the_first(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1)
        request = messages(*header(5, trainer_epoch=1))
        uploads: Any = harness.serving.uploads
        staged_response = uploads._staged_response

        def replaced(accepted: Any) -> Any:
            uploads.fence(2)
            return staged_response(accepted)

        uploads._staged_response = replaced
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await send(harness, request)
            assert read_failure(refused.value).reason == "STALE_EPOCH"
        assert harness.serving.weights.active_version == 0
        exchange.call.cancel()


async def test_the_trainer_holds_a_version_that_it_uploads_again(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1)
        request = messages(*header(5, trainer_epoch=1))
        uploads: Any = harness.serving.uploads
        activate = uploads._activate

        async def lost(*_: Any) -> None:
            raise DomainError(Reason.ENGINE_LOST, "the connection breaks")

        uploads._activate = lost
        with pytest.raises(grpc.aio.AioRpcError):
            await send(harness, request)
        uploads._activate = activate
        await send(harness, request)
        assert harness.serving.weights.active_version == 5
        assert harness.serving.admission.trainer_version == 5
        exchange.call.cancel()


async def test_the_base_of_a_difference_stays_while_its_memory_is_made(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "s") as harness:
        await harness.upload(1)
        await harness.upload(2, staged=True)
        memory: Any = harness.serving.weights.stage._memory
        allocate, reached, go_on = memory.allocate, asyncio.Event(), asyncio.Event()

        async def late(count: int) -> Any:
            reached.set()
            await go_on.wait()
            return await allocate(count)

        memory.allocate = late
        sending = asyncio.ensure_future(send(harness, messages(*delta(3, 1))))
        await reached.wait()
        memory.allocate = allocate
        await harness.serving.weights.activate(2, None)
        go_on.set()
        await sending
        assert harness.serving.weights.active_version == 3
        assert harness.serving.weights.stage.held_bytes == len(payload(0)[0])


async def test_a_version_is_told_to_be_active_once_its_uploader_may_write_again(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "s") as harness:
        exchange = await hello(harness.wire, 1)
        held: Any = harness.serving.weights.held
        replace, reached, go_on = held.replace, asyncio.Event(), asyncio.Event()

        async def late(staged: Any) -> None:
            reached.set()
            await go_on.wait()
            await replace(staged)

        held.replace = late
        await harness.upload(1, staged=True, trainer_epoch=1)
        exchange.send(switch_weights={"weight_version": 1})
        await reached.wait()
        again = asyncio.ensure_future(hello(harness.wire, 2))
        done, _ = await asyncio.wait([again], timeout=0.2)
        assert not done
        go_on.set()
        second = await again
        for stream in (exchange, second):
            stream.call.cancel()


@pytest.mark.parametrize("shape", ["lists", "objects"])
async def test_what_agents_and_trainers_nest_can_be_read_wherever_it_is_held(
    tmp_path: Path, shape: str
) -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value] if shape == "lists" else {"a": value}
        return json_format.ParseDict({"x": value}, struct_pb2.Struct()).SerializeToString()

    async with on_disk(tmp_path / "s") as harness:
        await submit(harness, "task", group_size=1)
        call, (given,) = await lease(harness, 1)
        await harness.generate(given.trajectory_id)
        for depth in (60, 29, 24, 23):
            outcome = Outcome(reward=0.5)
            task = Task(task_id=f"deep-{depth}", group_size=1, tokens=sequence([1]))
            try:
                outcome.metadata.MergeFromString(nested(depth))
                task.metadata.MergeFromString(nested(depth))
            except DecodeError:
                continue
            closing = CompleteTrajectoryRequest(trajectory_id=given.trajectory_id, outcome=outcome)
            calls = (
                lambda c=closing: harness.wire.CompleteTrajectory(c),
                lambda t=task: harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[t])),
            )
            for ask in calls:
                if depth == 23:
                    await ask()
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await ask()
                assert read_failure(refused.value).reason in ("FIELD_INVALID", "MALFORMED_MESSAGE")
        exchange = await hello(harness.wire, 1)
        exchange.send(demand=Demand(group_count=1))
        await exchange.receive("delivery")
        left = killed(tmp_path / "s")
        exchange.call.cancel()
        call.cancel()
    async with on_disk(left) as harness:
        queue = harness.serving.queue
        assert queue.pending.count + len(queue.groups) == 1
        assert len(list(harness.serving.buffer.groups)) == 1


async def test_a_turn_is_resumed_only_where_there_is_room_for_what_it_may_still_write(
    tmp_path: Path,
) -> None:
    async with serve(
        tmp_path, "limits.memory_bytes=16777216", step_seconds=0.05, max_context=100_000
    ) as harness:
        names = [f"t{number}" for number in range(30)]
        for name in names:
            call = harness.wire.Generate(
                GenerateRequest(
                    trajectory_id=name,
                    tokens=sequence([1, 2, 3]),
                    sampling_params=sampling(1_000, ignore_eos=True),
                )
            )
            while (await call.read()).WhichOneof("event") != "started":
                pass
        await harness.wire.Abort(AbortRequest(all={}))
        budget = harness.serving.budget
        refusals: list[Any] = []
        for name in names:
            request = ContinueRequest(
                trajectory_id=name,
                sampling_params=sampling(90_000, ignore_eos=True),
                stream_options=StreamOptions(detach=True),
            )
            call = harness.wire.Continue(request)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                refusals.append(read_failure(error))
        assert {refusal.reason for refusal in refusals} == {"MEMORY_BUDGET"}
        assert 0 < len(refusals) < len(names)
        assert budget.used_bytes <= budget.limit_bytes
        # A refused trajectory is unchanged, and may be resumed with a smaller budget.
        record = harness.serving.store.find(names[-1])
        assert record is not None and record.sampling.max_tokens == 1_000
        await harness.wire.Abort(AbortRequest(all={}))
