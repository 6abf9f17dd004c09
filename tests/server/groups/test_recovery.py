"""A killed server restarts on its journal and keeps everything it had answered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
from collections.abc import AsyncGenerator
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.server.core.errors import DomainError
from penstock.server.groups.attempts import Attempt, AttemptState, Group, group_changed
from penstock.server.groups.recovery import Recovered, snapshot
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.protocol import Deferred, EncodedRecord, Stored
from penstock.server.journal.records import tasks_known
from penstock.server.rollouts import buffering
from penstock.server.turns.encoding import encode_group, group_finished
from penstock.v1 import journal_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from penstock.wire.messages import JournalRecord, Segment, TrajectoryOpened, TurnChanged
from penstock.wire.reasons import Reason
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    AbortRequest,
    CompleteTrajectoryRequest,
    ContinueRequest,
    Exchange,
    Failure,
    GenerateRequest,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    RenewLeaseRequest,
    SubmitTasksRequest,
    Task,
    collect,
    hello,
    hold_back_switches,
    sampling,
    sequence,
    serve,
    until,
)

SEEDS = int(os.environ.get("PENSTOCK_TEST_SEEDS", "10"))
ABORTED = trajectory_pb2.FINISH_REASON_ABORTED
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
STOP = trajectory_pb2.FINISH_REASON_STOP


@contextlib.asynccontextmanager
async def on_disk(
    folder: Path, *settings: str, step_seconds: float = 0.0
) -> AsyncGenerator[Harness]:
    """A server with its journal in `folder`/journal."""
    folder.mkdir(exist_ok=True)
    async with serve(
        folder,
        f"journal.folder={folder / 'journal'}",
        "journal.segment_bytes=1048576",
        *settings,
        step_seconds=step_seconds,
    ) as harness:
        yield harness


def killed(folder: Path, name: str = "after") -> Path:
    """Copy what a server killed now would leave, for a restarted server."""
    copy = folder.with_name(f"{folder.name}-{name}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "journal", copy / "journal")
    return copy


async def submit(harness: Harness, *names: str, group_size: int = 2, **fields: Any) -> Any:
    tasks = [
        Task(
            task_id=name,
            group_size=group_size,
            tokens=sequence([1, 2, 3]),
            sampling_params=sampling(8),
            index=index,
            **fields,
        )
        for index, name in enumerate(names)
    ]
    return await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))


async def lease(harness: Harness, count: int, agent: str = "agent") -> tuple[Any, list[Any]]:
    """Lease attempts; return the stream, which must stay open, and the leases."""
    call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id=agent, concurrency=count))
    async with asyncio.timeout(20):
        leases = [await call.read() for _ in range(count)]
    return call, leases


async def work(harness: Harness, given: Any, reward: float = 1.0) -> list[int]:
    """Run one turn of a leased attempt and report its outcome."""
    turn = await collect(
        harness.wire.Generate(
            GenerateRequest(trajectory_id=given.trajectory_id, sampling_params=sampling(8))
        )
    )
    await harness.complete(given.trajectory_id, reward)
    return turn.tokens


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return str(read_failure(error.value).reason)


async def stored(harness: Harness, trajectory_id: str) -> Any:
    return await harness.wire.GetTrajectory(GetTrajectoryRequest(trajectory_id=trajectory_id))


async def compact(harness: Harness) -> None:
    """Replace everything written so far by a snapshot."""
    journal = harness.serving.journal
    assert isinstance(journal, LogJournal)
    await journal._begin_compaction()
    assert journal._compacting is not None
    await journal._compacting


async def state(harness: Harness) -> list[str]:
    """The whole recoverable state, in canonical order."""
    journal = harness.serving.journal
    found: list[str] = []
    serving = harness.serving
    parts = (serving.queue, serving.store, serving.buffer, serving.drops.notices)
    taken = list(snapshot(0, serving.session.run, 0, *parts))
    for item in chain.from_iterable(
        item.make() if isinstance(item, Deferred) else (item,) for item in taken
    ):
        record = item
        if isinstance(item, Stored):
            record = JournalRecord.FromString(await journal.read(item))
        elif isinstance(item, EncodedRecord):
            record = JournalRecord.FromString(b"".join(item.parts))
        if record.HasField("tasks_known"):
            record.tasks_known.task_ids[:] = sorted(record.tasks_known.task_ids)
        if record.HasField("leases_expired"):
            record.leases_expired.trajectory_ids[:] = sorted(record.leases_expired.trajectory_ids)
        found.append(str(record))
    return sorted(found)


# Recovery of each kind of state


async def test_tasks_wait_in_their_order_and_are_known(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await submit(first, "x", "y", "z")
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        answer = await submit(second, "y", "z", "new")
        assert (answer.accepted_count, answer.duplicate_count, answer.pending_count) == (1, 2, 4)
        _, leases = await lease(second, 4)
        assert [given.task.task_id for given in leases] == ["x", "x", "y", "y"]


async def test_a_task_that_is_final_is_known_to_the_next_server(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await finish_groups(first, "final", "refused", "used", "waits")
        exchange = await hello(first.wire, groups_per_step=4)
        exchange.send(demand={"group_count": 3})
        ids = [(await exchange.receive("delivery")).delivery_id for _ in range(3)]
        exchange.send(receipt={"delivery_ids": ids[:1], "step": 1})
        exchange.send(checkpoint={"step": 1})
        exchange.send(receipt={"delivery_ids": ids[1:2], "rejection": {"reason": "NO_USE"}})
        exchange.send(receipt={"delivery_ids": ids[2:], "step": 2})
        exchange.half_close()
        assert await exchange.call.read() is grpc.aio.EOF
        assert list(first.serving.queue.pending.known)[:2] == ["final", "refused"]
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        assert list(second.serving.queue.pending.known)[:2] == ["final", "refused"]
        answer = await submit(second, "final", "refused", "used", "waits", "new")
        assert (answer.accepted_count, answer.duplicate_count) == (1, 4)


async def test_a_group_under_way_goes_on_where_it_was(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await submit(first, "x", group_size=3)
        _, leases = await lease(first, 3)
        done = await work(first, leases[0], 0.5)
        opened = await first.generate(leases[1].trajectory_id, sampling_params=sampling(8))
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        # The agents that held the leases continue the opened attempt and open the other one.
        again = await stored(second, leases[1].trajectory_id)
        assert again.open and again.last_turn.finish_reason == LENGTH
        observed = await second.resume(leases[1].trajectory_id, tokens=sequence([9]))
        context = [1, 2, 3, *opened.tokens, 9]
        assert observed.tokens == expected_tokens(context, [0] * 8)[0]
        assert not await second.complete(leases[1].trajectory_id)
        # The server repeats the answer that it gave to the same outcome.
        assert not await second.complete(leases[0].trajectory_id, 0.5)
        assert await refused(second.complete(leases[0].trajectory_id, 0.75)) == "OUTCOME_DIFFERS"
        await second.generate(leases[2].trajectory_id, sampling_params=sampling(8))
        assert await second.complete(leases[2].trajectory_id)
        exchange = await hello(second.wire)
        exchange.send(demand={"group_count": 1})
        group = (await exchange.receive("delivery")).group
        assert [t.outcome.reward for t in group.trajectories] == [0.5, 1.0, 1.0]
        assert [int(t) for t in codec.token_ids(group.trajectories[0].segments[1])] == done


async def test_leases_that_nobody_calls_on_run_out_and_are_made_again(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await submit(first, "x", group_size=2)
        _, leases = await lease(first, 2)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        answer = await second.wire.RenewLease(
            RenewLeaseRequest(trajectory_ids=[leases[0].trajectory_id])
        )
        assert not answer.expired_trajectory_ids
        second.pass_lease_time()
        _, again = await lease(second, 2, "another")
        assert {given.retry_count for given in again} == {1}
        late = second.generate(leases[1].trajectory_id, sampling_params=sampling(8))
        assert await refused(late) == "LEASE_EXPIRED"
        after_that = killed(after, "again")
    async with on_disk(after_that) as third:
        late = third.generate(leases[1].trajectory_id, sampling_params=sampling(8))
        assert await refused(late) == "LEASE_EXPIRED"


async def test_a_turn_that_was_cut_off_is_continued_at_its_last_record(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a", step_seconds=0.005) as first:
        call = asyncio.ensure_future(first.generate("t", sampling_params=sampling(300)))
        await first.sampled("t")
        (turn,) = first.serving.turns.in_flight
        assert turn.policy_token_count
        # The opening was queued before this append. Sampling itself never waits for the disk.
        await first.serving.journal.append([])
        after = killed(tmp_path / "a")
        call.cancel()
    async with on_disk(after) as second:
        cut = await stored(second, "t")
        assert cut.open and cut.last_turn.finish_reason == ABORTED
        assert cut.last_turn.policy_token_count == 0
        rest = await second.resume("t")
        assert rest.tokens == expected_tokens([1, 2, 3], [0] * 300)[0]
        assert rest.finished.finish_reason == LENGTH


async def test_an_aborted_turn_goes_on_at_the_exact_token_with_what_is_left_of_its_budget(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "a", step_seconds=0.005) as first:
        call = asyncio.ensure_future(first.generate("t", sampling_params=sampling(200)))
        await first.sampled("t")
        request = AbortRequest()
        request.all.SetInParent()
        await first.wire.Abort(request)
        begun = await call
        assert 0 < len(begun.tokens) < 200
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        rest = await second.resume("t")
        assert begun.tokens + rest.tokens == expected_tokens([1, 2, 3], [0] * 200)[0]
        assert rest.finished.policy_token_count == 200


async def test_the_start_of_a_run_is_known_to_the_next_server(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await hello(first.wire, 1, start_id="one")
        await finish_groups(first, "a")
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        await compact(second)
        after_that = killed(after, "again")
    async with on_disk(after_that) as third:
        exchange = await hello(third.wire, 2, start_id="one")
        exchange.send(demand={"group_count": 1})
        assert (await exchange.receive("delivery")).group.task_id == "a"
        exchange = await hello(third.wire, 3, start_id="another")
        assert (await exchange.receive("notice")).reason == "RUN_REPLACED"
        last = killed(after_that, "last")
    async with on_disk(last) as fourth:
        exchange = await hello(fourth.wire, 4, start_id="another")
        assert fourth.serving.buffer.drops == {}
        assert (await submit(fourth, "a", group_size=1)).accepted_count == 1


async def test_why_the_last_turn_ended_is_not_that_the_next_one_had_no_room(tmp_path: Path) -> None:
    """Three turns fill the context: one ended by a stop token at its end, one cut off there, and
    one aborted. A server that was killed twice, the second time after a snapshot, delivers them
    with the right finish reasons."""
    async with on_disk(tmp_path / "a", step_seconds=0.002) as first:
        room = first.engine.description.max_context_length
        prompt = [1] * (room - 60)
        written = expected_tokens(prompt, [0] * 60)[0]
        place = next(i for i in range(20, 60) if written[i] not in written[:i])
        await submit(first, "x", group_size=3)
        _, leases = await lease(first, 3)
        names = [given.trajectory_id for given in leases]
        ends = sampling(60, stop_token_ids=[written[place]])
        await first.generate(names[0], prompt, sampling_params=ends)
        await first.generate(names[1], prompt, sampling_params=sampling(place))
        call = asyncio.ensure_future(first.generate(names[2], prompt, sampling_params=sampling(60)))
        await first.sampled(names[2], 12)
        request = AbortRequest()
        request.all.SetInParent()
        await first.wire.Abort(request)
        cut = len((await call).tokens)
        assert 12 <= cut < 60
        for name in names:
            for _ in range(2):
                full = await first.resume(name, tokens=sequence([2] * 60))
                assert (full.tokens, full.finished.finish_reason) == ([], LENGTH)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        before = await state(second)
        await compact(second)
        after_that = killed(after, "again")
    async with on_disk(after_that) as third:
        assert await state(third) == before
        for name in names:
            await third.complete(name)
        exchange = await hello(third.wire)
        exchange.send(demand={"group_count": 1})
        group = (await exchange.receive("delivery")).group
    assert [t.finish_reason for t in group.trajectories] == [STOP, LENGTH, ABORTED]
    assert [t.turn_count for t in group.trajectories] == [1, 1, 1]


async def test_a_branch_is_closed_with_its_parent(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await submit(first, "x", group_size=1)
        _, (given,) = await lease(first, 1)
        await first.generate(given.trajectory_id, sampling_params=sampling(8))
        await first.generate("branch", parent_trajectory_id=given.trajectory_id)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        await second.resume("branch", tokens=sequence([5]))
        assert await second.complete(given.trajectory_id)
        exchange = await hello(second.wire)
        exchange.send(demand={"group_count": 1})
        group = (await exchange.receive("delivery")).group
        assert [t.trajectory_id for t in group.trajectories] == [given.trajectory_id, "branch"]


async def test_a_callers_own_group_and_a_trajectory_of_its_own(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await first.generate("g0", group_id="g", group_size=2, sample_index=0)
        await first.complete("g0", 0.25)
        await first.generate("alone")
        await first.complete("alone", 0.75)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        assert (await stored(second, "alone")).trajectory.outcome.reward == 0.75
        await second.generate("g1", group_id="g", group_size=2, sample_index=1)
        assert await second.complete("g1")
        assert await refused(second.generate("g2", group_id="g", group_size=2)) == "FIELD_INVALID"


async def finish_groups(harness: Harness, *names: str) -> None:
    await submit(harness, *names, group_size=1)
    call, leases = await lease(harness, len(names))
    for given in leases:
        await work(harness, given)
    call.cancel()


async def test_groups_are_delivered_until_a_checkpoint_contains_them(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await finish_groups(first, "a", "b", "c", "d")
        exchange = await hello(first.wire, groups_per_step=4)
        exchange.send(demand={"group_count": 3})
        ids = [(await exchange.receive("delivery")).delivery_id for _ in range(3)]
        # a is final, b is used but not final, c is delivered but not used, and d waits.
        exchange.send(receipt={"delivery_ids": ids[:1], "step": 1})
        exchange.send(checkpoint={"step": 1})
        exchange.send(receipt={"delivery_ids": ids[1:2], "step": 2})
        exchange.send(demand={"group_count": 1})
        last = await exchange.receive("delivery")
        rejection = {"reason": "USELESS"}
        exchange.send(receipt={"delivery_ids": [last.delivery_id], "rejection": rejection})
        exchange.half_close()
        assert await exchange.call.read() is grpc.aio.EOF
        after = killed(tmp_path / "a")
    for resume_step, expected in ((2, ["c"]), (1, ["b", "c"])):
        copy = killed(after, f"resumed{resume_step}")
        async with on_disk(copy) as second:
            exchange = await hello(second.wire, 2, groups_per_step=4, resume_step=resume_step)
            exchange.send(demand={"group_count": 4})
            again = [await exchange.receive("delivery") for _ in expected]
            assert [delivery.group.task_id for delivery in again] == expected
            # Delivery ids of the killed server never repeat.
            assert min(delivery.delivery_id for delivery in again) > max(ids)
            await exchange.nothing()


async def test_groups_that_a_trainer_went_back_behind_wait_for_another_server_too(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "a") as first:
        await finish_groups(first, "a", "b")
        exchange = await hello(first.wire, groups_per_step=4)
        exchange.send(demand={"group_count": 2})
        ids = [(await exchange.receive("delivery")).delivery_id for _ in range(2)]
        exchange.send(receipt={"delivery_ids": ids[:1], "step": 1})
        exchange.send(receipt={"delivery_ids": ids[1:], "step": 2})
        exchange.half_close()
        assert await exchange.call.read() is grpc.aio.EOF
        # Step 2 is lost, and the new step 2 consists of other groups.
        await hello(first.wire, 2, groups_per_step=4, resume_step=1)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        exchange = await hello(second.wire, 3, groups_per_step=4, resume_step=2)
        exchange.send(demand={"group_count": 1})
        assert (await exchange.receive("delivery")).group.task_id == "b"
        exchange.send(checkpoint={"step": 2})
        await exchange.nothing()


async def test_an_older_trainer_stays_refused(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await hello(first.wire, 7)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        assert await refused(hello(second.wire, 7)) == "STALE_EPOCH"
        await hello(second.wire, 8)


async def test_another_run_takes_over_and_what_the_one_before_left_stays_gone(
    tmp_path: Path,
) -> None:
    async with on_disk(tmp_path / "a") as first:
        await finish_groups(first, "a", "b")
        await hello(first.wire, 1)
        await submit(first, "waiting")
        await hello(first.wire, 2, run_id="another")
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        answer = await submit(second, "waiting", "a")
        assert (answer.accepted_count, answer.pending_count) == (2, 2)
        assert second.serving.buffer.held_count == 0


@pytest.mark.parametrize("how", ["other bytes", "no bytes"])
async def test_a_group_that_rots_on_the_disk_is_dropped_and_its_task_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with on_disk(tmp_path / "a") as harness:
        await finish_groups(harness, "a", "b")
        (group, _) = list(harness.serving.buffer.groups)
        where = group.stored
        path = harness.serving.journal._segments.paths[where.segment]
        if how == "other bytes":
            with path.open("r+b") as file:
                file.seek(where.offset + where.length // 2)
                file.write(b"rot")
        else:
            read = os.pread

            def pread(descriptor: int, length: int, offset: int) -> bytes:
                if (
                    Path(f"/proc/self/fd/{descriptor}").readlink() == path
                    and offset == where.offset
                ):
                    raise OSError(errno.EIO, "Input/output error")
                return read(descriptor, length, offset)

            monkeypatch.setattr(os, "pread", pread)
        # Otherwise the first delivery would come from memory.
        harness.serving.buffer.kept.clear()
        exchange = await hello(harness.wire)
        exchange.send(demand={"group_count": 2})
        assert (await exchange.receive("delivery")).group.task_id == "b"
        assert (await exchange.receive("notice")).reason == "JOURNAL_CORRUPT"
        _, (given,) = await lease(harness, 1)
        assert given.task.task_id == "a"
        await work(harness, given)
        assert (await exchange.receive("delivery")).group.task_id == "a"


@pytest.mark.parametrize("compacted", [False, True], ids=["appended", "compacted"])
async def test_a_trainer_is_told_of_dropped_groups_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    """It would wait for their tasks for ever."""
    monkeypatch.setattr(buffering, "MAX_GROUP_BYTES", 100)
    async with on_disk(tmp_path / "before") as harness:
        await submit(harness, "large", group_size=1)
        call, (given,) = await lease(harness, 1)
        await work(harness, given)
        await until(lambda: harness.serving.buffer.drops["GROUP_TOO_LARGE"] == 1)
        call.cancel()
        if compacted:
            await compact(harness)
        folder = killed(tmp_path / "before")
    async with on_disk(folder) as harness:
        trainer = await hello(harness.wire)
        notice = await trainer.receive("notice")
        assert (notice.reason, notice.task_id) == ("GROUP_TOO_LARGE", "large")
        assert notice.group_id == given.group_id and "bytes" in notice.message
        await trainer.nothing()
        await compact(harness)
        folder = killed(folder)
        trainer.half_close()
    # It was told, so the next one does not repeat it.
    async with on_disk(folder) as harness:
        trainer = await hello(harness.wire, 2)
        await trainer.nothing()
        trainer.half_close()


async def test_in_the_middle_of_a_run_turns_wait_for_the_trainers_version(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await hello(first.wire)
        await first.upload(3)
        # The answer is sent before the record is durable, so wait for the record.
        await first.serving.journal.append(())
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        call = asyncio.ensure_future(second.generate("t"))
        exchange = await hello(second.wire, 2, weight_version=3)
        done, _ = await asyncio.wait([call], timeout=0.2)
        assert not done and second.serving.switch.awaiting_trainer
        await second.upload(3)
        assert set((await call).versions) == {3}
        assert not second.serving.switch.awaiting_trainer
        del exchange
    # A trainer that starts a new run with the base model is believed.
    async with on_disk(killed(after, "anew")) as third:
        await hello(third.wire, 3, run_id="another")
        assert set((await third.generate("u")).versions) == {0}


@pytest.mark.parametrize("sampled", [True, False])
async def test_that_is_known_also_before_the_record_of_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    async with on_disk(tmp_path / "a") as first:
        await hello(first.wire)
        written = hold_back_switches(first, monkeypatch)
        switch = asyncio.create_task(first.upload(1))
        async with asyncio.timeout(20):
            while not first.serving.switch.active_version:
                await asyncio.sleep(0)
        if sampled:
            assert set((await first.generate("t")).versions) == {1}
        else:
            await submit(first, "a")
            await lease(first, 1)
        after = killed(tmp_path / "a")
        written.set_result([])
        await switch
    async with on_disk(after) as second:
        assert second.serving.switch.awaiting_trainer
        assert second.serving.admission.trainer_awaited


async def test_a_caller_that_is_gone_leaves_its_group_in_its_place(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as harness:
        await harness.generate("g0", group_id="g", group_size=1)
        request = CompleteTrajectoryRequest(trajectory_id="g0", outcome=Outcome(reward=1.0))
        call = harness.wire.CompleteTrajectory(request)
        while not harness.serving.store.closed_mark("g0"):
            await asyncio.sleep(0)
        call.cancel()
        exchange = await hello(harness.wire)
        exchange.send(demand={"group_count": 1})
        assert (await exchange.receive("delivery")).group.group_id == "g"


async def test_who_asks_again_what_is_known_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_disk(tmp_path / "a") as harness:
        await submit(harness, "known")

        def full(byte_count: int) -> None:
            raise DomainError(Reason.DISK_FULL, f"no room for {byte_count} bytes")

        monkeypatch.setattr(harness.serving.journal, "check_room", full)
        assert (await submit(harness, "known")).duplicate_count == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await submit(harness, "known", "new")
        assert read_failure(caught.value).reason == "DISK_FULL"
        assert harness.serving.queue.pending.count == 1


async def test_a_full_journal_refuses_what_is_new_and_takes_what_makes_room(
    tmp_path: Path,
) -> None:
    async with on_disk(
        tmp_path / "a", "journal.max_bytes=4194304", "limits.groups_without_trainer=1000"
    ) as harness:
        refusal = ""
        for i in range(400):
            try:
                await harness.generate(
                    f"g{i}",
                    [7] * 250,
                    group_id=f"g{i}",
                    group_size=1,
                    sampling_params=sampling(250),
                )
                request = CompleteTrajectoryRequest(
                    trajectory_id=f"g{i}", outcome=Outcome(reward=1)
                )
                request.outcome.metadata["filler"] = "x" * 20_000
                await harness.wire.CompleteTrajectory(request)
            except grpc.aio.AioRpcError as error:
                refusal = str(read_failure(error).reason)
                break
        assert refusal == "DISK_FULL"
        held = harness.serving.buffer.held_count
        assert held > 10
        exchange = await hello(harness.wire, groups_per_step=held, max_lag=8)
        exchange.send(demand={"group_count": held})
        ids = [(await exchange.receive("delivery")).delivery_id for _ in range(held)]
        exchange.send(receipt={"delivery_ids": ids, "step": 1})
        exchange.send(checkpoint={"step": 1})
        async with asyncio.timeout(20):
            while harness.serving.buffer.held_count:
                await asyncio.sleep(0.01)
        # Repeat the same call.
        turn = harness.serving.store.find(f"g{i}")
        if turn is None:
            await harness.generate(f"g{i}", group_id=f"g{i}", group_size=1)
        assert await harness.complete(f"g{i}")


# Any order of events


class Chaos:
    """An agent and a trainer that take random actions over the wire."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.random = random.Random(seed)
        self.tasks = 0
        self.leases: list[Any] = []
        self.streams: list[Any] = []
        self.opened: list[str] = []
        self.own = 0
        self.exchange: Exchange | None = None
        self.epoch = 0
        self.step = 0
        self.final = 0
        self.in_hand: list[int] = []

    async def one(self) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        await getattr(self, self.random.choice(names))()

    async def do_submit(self) -> None:
        names = [f"task{self.tasks + i}" for i in range(self.random.randint(1, 3))]
        self.tasks += len(names)
        size = self.random.randint(1, 4)
        wanted = self.random.choice((0, self.random.randint(0, size)))
        await submit(self.harness, *names, group_size=size, finish_count=wanted)

    async def do_lease(self) -> None:
        call = self.harness.wire.LeaseTasks(
            LeaseTasksRequest(agent_id="chaos", concurrency=self.random.randint(1, 4))
        )
        self.streams.append(call)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.03):
                while True:
                    self.leases.append(await call.read())

    async def do_generate(self) -> None:
        if self.leases:
            given = self.leases.pop(self.random.randrange(len(self.leases)))
            await self.harness.generate(given.trajectory_id, sampling_params=sampling(8))
            self.opened.append(given.trajectory_id)

    async def do_own(self) -> None:
        self.own += 1
        fields = (
            {"group_id": f"own{self.own}", "group_size": self.random.randint(1, 2)}
            if self.random.random() < 0.6
            else {}
        )
        await self.harness.generate(f"own{self.own}", **fields)
        self.opened.append(f"own{self.own}")

    async def do_branch(self) -> None:
        if self.opened:
            self.own += 1
            parent = self.random.choice(self.opened)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.harness.generate(f"branch{self.own}", parent_trajectory_id=parent)

    async def do_continue(self) -> None:
        if self.opened:
            name = self.random.choice(self.opened)
            observation = ContinueRequest(trajectory_id=name, tokens=sequence([4, 5]))
            await collect(self.harness.wire.Continue(observation))

    async def do_complete(self) -> None:
        if self.opened:
            name = self.opened.pop(self.random.randrange(len(self.opened)))
            outcome = (
                Outcome(reward=self.random.random())
                if self.random.random() < 0.7
                else Outcome(failure=Failure(reason="CHAOS"))
            )
            request = CompleteTrajectoryRequest(trajectory_id=name, outcome=outcome)
            await self.harness.wire.CompleteTrajectory(request)

    async def do_fail_unopened(self) -> None:
        if self.leases:
            await self.harness.fail(self.leases.pop().trajectory_id)

    async def do_session(self) -> None:
        self.epoch += 1
        run = "run" if self.random.random() < 0.9 else f"run{self.epoch}"
        if run != "run":
            self.leases.clear()
            self.opened = [n for n in self.opened if n.startswith("own")]
        # A restarted trainer resumes from its last checkpoint; a trainer that lost its
        # stream resumes where it was.
        self.step = self.random.choice((self.step, self.final))
        self.exchange = await hello(
            self.harness.wire,
            self.epoch,
            run_id=run,
            resume_step=self.step,
            max_lag=8,
            groups_per_step=8,
        )
        self.in_hand.clear()

    async def do_compact(self) -> None:
        journal = self.harness.serving.journal
        assert isinstance(journal, LogJournal)
        if journal._compacting is None and self.random.random() < 0.3:
            await journal.append(())
            await journal._begin_compaction()

    async def do_train(self) -> None:
        if self.exchange is None:
            return
        self.exchange.send(demand={"group_count": 2})
        with contextlib.suppress(TimeoutError):
            for _ in range(2):
                async with asyncio.timeout(0.05):
                    message = await self.exchange.call.read()
                if message is grpc.aio.EOF:
                    return
                if message.WhichOneof("message") == "delivery":
                    self.in_hand.append(message.delivery.delivery_id)
        # A cancelled read may have swallowed a message, so the session ends here.
        self.exchange, exchange = None, self.exchange
        if self.in_hand:
            self.step += 1
            exchange.send(receipt={"delivery_ids": self.in_hand, "step": self.step})
            if self.random.random() < 0.5:
                exchange.send(checkpoint={"step": self.step})
                self.final = self.step
        exchange.half_close()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_after_any_order_of_events_another_server_holds_the_same(
    tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "a"
    async with on_disk(folder, "limits.groups_without_trainer=1000") as first:
        chaos = Chaos(first, seed)
        for _ in range(60):
            try:
                await chaos.one()
            except grpc.aio.AioRpcError as error:
                # A replaced run took the trajectory or its lease away.
                assert read_failure(error).reason in (
                    "LEASE_EXPIRED",
                    "TRAJECTORY_UNKNOWN",
                    "TRAJECTORY_CLOSED",
                    "QUEUE_FULL",
                ), error
        for stream in chaos.streams:
            stream.cancel()
        await first.serving.closing.wait_durable()
        journal = first.serving.journal
        assert isinstance(journal, LogJournal)
        await journal.append(())
        if journal._compacting is not None:
            # A copy made while files come and go would not show a single moment.
            await journal._compacting
        before = await state(first)
        after = killed(folder)
    async with on_disk(after) as second:
        # To the journal, a delivered group is the same as a waiting one.
        assert await state(second) == before


def test_a_turn_that_compaction_overtook_has_as_many_tokens_as_are_counted() -> None:
    """The record of the turn's opening was queued before the snapshot and written after it. The
    snapshot already has two sampled tokens, which must not be counted twice."""

    def turn(policy: int, *segments: Any, token_count: int = 0, **fields: Any) -> JournalRecord:
        changed = TurnChanged(
            trajectory_id="x",
            budget=8,
            context_token_count=3,
            policy_token_count=policy,
            request_count=1,
            turn_count=1,
            token_count=token_count,
            segments=segments,
            **fields,
        )
        return JournalRecord(turn_changed=changed)

    def segment(author: trajectory_pb2.Author.ValueType, count: int) -> Any:
        logprobs = [0.0] * count if author == trajectory_pb2.AUTHOR_POLICY else []
        return Segment(
            author=author,
            token_ids=codec.array_bytes(np.arange(count, dtype=np.int32)),
            logprobs=codec.array_bytes(np.array(logprobs, np.float32), codec.LOGPROB),
        )

    prompt = segment(trajectory_pb2.AUTHOR_CONTEXT, 3)
    opened = JournalRecord(
        trajectory_opened=TrajectoryOpened(
            trajectory_id="x", form=journal_pb2.PROMPT_FORM_TOKENS, group_id="g"
        )
    )
    two, all_of_it = (segment(trajectory_pb2.AUTHOR_POLICY, count) for count in (2, 8))
    found, where = Recovered(), Stored(1, 16, 64)
    for record in (opened, turn(2, prompt, two), opened, turn(0, prompt)):
        found.apply(record, where)
        record = found.trajectories["x"]
        if record.turn is not None:
            assert (record.token_count, record.turn.policy_token_count) == (5, 2)
            assert record.turn.resumable
    ended = turn(8, all_of_it, token_count=3, finish_reason=LENGTH)
    for _ in range(2):
        found.apply(ended, where)
        record = found.trajectories["x"]
        assert record.turn is not None and record.turn.finish_reason == LENGTH
        assert (record.token_count, record.turn.policy_token_count) == (11, 8)
    assert [s.token_count for s in record.segments] == [3, 8]


async def test_a_record_that_compaction_overtook_says_nothing(tmp_path: Path) -> None:
    """The record was queued before compaction and written after it. It must not
    change the recovered state."""
    found = Recovered()
    where = Stored(1, 16, 64)
    task = Task(task_id="t", group_size=1)
    group = Group("g", 1, task, trajectory_pb2.PURPOSE_TRAIN, 0)
    group.attempts = [Attempt(group, 0, 0, "g-0-0", state=AttemptState.LEASED)]
    # The group is complete, so the snapshot has no task for it. The
    # record of its end was queued too.
    whole = encode_group("g", "t", trajectory_pb2.PURPOSE_TRAIN, (), range(1))
    encoded = group_finished(whole, task, 0, has_policy_tokens=False)
    finished = JournalRecord.FromString(b"".join(encoded.parts))
    for record in (tasks_known(["t"]), group_changed(group), finished):
        found.apply(record, where)
    assert not found.groups and set(found.finished) == {"g"}
    found.apply(group_changed(group), where)
    assert not found.groups
