"""Only one trainer writes: late uploads of an older trainer, and switches to unknown versions."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.core.errors import DomainError
from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire.failure import Failure, read_failure
from tests.support.harness import (
    AbortRequest,
    Exchange,
    GetServerInfoRequest,
    Harness,
    Hello,
    InlineSource,
    LeaseTasksRequest,
    StalenessContract,
    SubmitTasksRequest,
    SwitchWeights,
    Task,
    header,
    hello,
    messages,
    sampling,
    send,
    sequence,
    serve,
    shared,
    until,
)


class Upload:
    """An upload whose messages are sent one by one."""

    def __init__(self, harness: Harness, version: int, epoch: int, **fields: Any) -> None:
        head, data = header(version, trainer_epoch=epoch, **fields)
        self.rest = messages(head, data)
        self.call = harness.wire.UpdateWeights()

    async def begin(self) -> None:
        await self.call.write(self.rest.pop(0))
        await self.call.read()

    async def finish(self) -> list[Any]:
        for message in self.rest:
            await self.call.write(message)
        await self.call.done_writing()
        return await self.read_on()

    async def read_on(self) -> list[Any]:
        responses: list[Any] = []
        while (response := await self.call.read()) is not grpc.aio.EOF:
            responses.append(response)
        return responses


async def failing(work: Any) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return read_failure(caught.value)


async def active(harness: Harness) -> int:
    return int((await harness.wire.GetServerInfo(GetServerInfoRequest())).active_weight_version)


def tasks(name: str, **of_trainer: Any) -> Any:
    task = Task(task_id=name, group_size=1, tokens=sequence([1]))
    return SubmitTasksRequest(tasks=[task], **of_trainer)


@pytest.mark.parametrize(("run", "epoch"), [("other", 8), ("run", 8)], ids=["run", "trainer"])
async def test_late_tasks_of_a_trainer_that_was_replaced_are_refused(
    harness: Harness, run: str, epoch: int
) -> None:
    await hello(harness.wire, 7)
    accepted = await harness.wire.SubmitTasks(tasks("run/1", run_id="run", trainer_epoch=7))
    assert accepted.accepted_count == 1
    newer = await hello(harness.wire, epoch, run_id=run)
    late = tasks("run/2", run_id="run", trainer_epoch=7)
    failure = await failing(harness.wire.SubmitTasks(late))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert failure.metadata == {"trainer_epoch": "7", "current": "8"}
    assert harness.serving.queue.pending.count == (1 if run == "run" else 0)
    # The current trainer, and a caller that is not a trainer.
    await harness.wire.SubmitTasks(tasks(f"{run}/3", run_id=run, trainer_epoch=8))
    await harness.wire.SubmitTasks(tasks("by hand"))
    newer.half_close()


async def test_of_an_epoch_another_run_is_another_trainer(harness: Harness) -> None:
    await hello(harness.wire, 7)
    failure = await failing(harness.wire.SubmitTasks(tasks("x/1", run_id="other", trainer_epoch=7)))
    assert failure.reason == "STALE_EPOCH"


async def test_a_trainer_that_is_replaced_while_its_tasks_are_looked_at(harness: Harness) -> None:
    await hello(harness.wire, 7)
    many = SubmitTasksRequest(
        tasks=[Task(task_id=f"run/{i}", group_size=1, tokens=sequence([1])) for i in range(1_500)],
        run_id="run",
        trainer_epoch=7,
    )
    late = asyncio.create_task(harness.serving.tasks.submit_tasks(many))
    # The call yields to the event loop midway.
    await asyncio.sleep(0)
    harness.serving.session._epoch = 8
    with pytest.raises(DomainError) as caught:
        await late
    assert caught.value.reason == "STALE_EPOCH"
    assert harness.serving.queue.pending.count == 0


async def test_a_trainer_that_goes_before_its_welcome_is_gone(tmp_path: Path) -> None:
    async with serve(tmp_path, f"journal.folder={tmp_path / 'journal'}") as harness:
        journal, session = harness.serving.journal, harness.serving.session
        append, appended = journal.append, asyncio.Event()

        async def stuck(records: Any) -> None:
            appended.set()
            await asyncio.Event().wait()

        journal.append = stuck  # type: ignore[method-assign]
        leaving = Exchange(harness.wire)
        contract = StalenessContract(max_lag=1, groups_per_step=1)
        leaving.send(hello=Hello(run_id="run", trainer_epoch=5, staleness=contract))
        await appended.wait()
        assert session.connected
        leaving.call.cancel()
        await until(lambda: not session.connected)
        journal.append = append  # type: ignore[method-assign]
        await hello(harness.wire, 6)
        assert session.connected


async def test_an_upload_by_an_older_epoch_is_refused_though_nobody_said_hello(
    harness: Harness,
) -> None:
    await harness.upload(1, trainer_epoch=5)
    failure = await failing(send(harness, messages(*header(2, trainer_epoch=3))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert failure.metadata == {"trainer_epoch": "3", "current": "5"}
    assert await active(harness) == 1
    await harness.upload(2, trainer_epoch=5)
    assert await active(harness) == 2


async def test_an_upload_under_way_ends_when_a_newer_trainer_says_hello(harness: Harness) -> None:
    old = Upload(harness, 1, epoch=1)
    await old.begin()
    await hello(harness.wire, epoch=2)
    failure = await failing(old.read_on())
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert await active(harness) == 0
    await harness.upload(1, trainer_epoch=2)
    assert await active(harness) == 1


async def test_an_upload_that_hangs_makes_room_for_that_of_a_newer_trainer(
    harness: Harness,
) -> None:
    old = Upload(harness, 1, epoch=1)
    await old.begin()
    await harness.upload(1, trainer_epoch=2)
    failure = await failing(old.read_on())
    assert failure.reason == "STALE_EPOCH"
    assert await active(harness) == 1


async def test_an_upload_of_the_same_trainer_waits_its_turn(harness: Harness) -> None:
    first = Upload(harness, 1, epoch=1)
    await first.begin()
    failure = await failing(send(harness, messages(*header(2, trainer_epoch=1))))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "UPLOAD_IN_PROGRESS")
    await first.finish()
    assert await active(harness) == 1


async def test_a_caller_that_hangs_up_is_not_taken_for_an_older_trainer(harness: Harness) -> None:
    first = Upload(harness, 1, epoch=1)
    await first.begin()
    first.call.cancel()
    async with asyncio.timeout(20):
        while True:
            try:
                await harness.upload(1, trainer_epoch=1)
                break
            except grpc.aio.AioRpcError as error:
                assert read_failure(error).reason == "UPLOAD_IN_PROGRESS"
                await asyncio.sleep(0.02)
    assert await active(harness) == 1


async def test_a_switch_to_what_was_never_uploaded_does_not_move_the_gate(
    harness: Harness,
) -> None:
    exchange = await hello(harness.wire, epoch=1)
    exchange.send(switch_weights=SwitchWeights(weight_version=99))
    receipt = await exchange.receive("weight_receipt")
    assert receipt.rejection.reason == "WEIGHT_VERSION_NOT_STAGED"
    assert receipt.active_weight_version == 0
    task = Task(task_id="task", group_size=1, text="hello", sampling_params=sampling())
    await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
    leases = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=1))
    async with asyncio.timeout(20):
        lease = await leases.read()
    assert lease.task.task_id == "task"
    leases.cancel()


async def test_a_resumed_turn_says_under_which_version_it_goes_on(slow: Harness) -> None:
    begun = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(200)))
    async with asyncio.timeout(20):
        while not slow.serving.turns.sampling:
            await asyncio.sleep(0.01)
    await slow.wire.Abort(AbortRequest(all={}))
    assert (await begun).started.weight_version == 0
    await slow.upload(1)
    resumed = await slow.resume("t")
    assert resumed.started.weight_version == 1
    assert set(resumed.versions) == {1}


async def test_a_version_that_is_required_is_waited_for_while_it_is_switched_to(
    slow: Harness,
) -> None:
    """DRAIN delays the switch until the turn in flight has ended."""
    long = asyncio.ensure_future(slow.generate("long", sampling_params=sampling(60)))
    await slow.sampled("long")
    switch = asyncio.ensure_future(slow.upload(1, in_flight=weights_pb2.IN_FLIGHT_POLICY_DRAIN))
    async with asyncio.timeout(20):
        while not slow.serving.switch.switching:
            await asyncio.sleep(0.01)
    turn = await slow.generate("required", required_weight_version=1)
    assert set(turn.versions) == {1}
    assert set((await long).versions) == {0}
    await switch


async def test_shared_memory_can_be_named_as_a_segment(harness: Harness) -> None:
    head, data = header(1)
    with shared(head, data) as (copy, path):
        copy.shared_memory.name = path.name
        await send(harness, [messages(copy, b"")[0], messages(copy, b"")[-1]])
    assert await active(harness) == 1


async def test_memory_that_no_tensor_needs_is_not_set_aside(harness: Harness) -> None:
    head, _ = header(1, inline=InlineSource(length_bytes=1 << 30))
    failure = await failing(send(harness, messages(head, b"")[:1]))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert failure.metadata["field"] == "header.inline.length_bytes"
    assert not list(Path(tempfile.gettempdir()).glob("penstock-test-*"))


async def test_turns_of_a_run_that_was_replaced_stop_sampling(slow: Harness) -> None:
    await hello(slow.wire, epoch=1, run_id="one")
    task = Task(task_id="task", group_size=1, text="hello", sampling_params=sampling(400))
    await slow.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
    leases = slow.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=1))
    lease = await leases.read()
    turn = asyncio.ensure_future(slow.generate(lease.trajectory_id, text="hello"))
    async with asyncio.timeout(20):
        while not slow.serving.turns.sampling:
            await asyncio.sleep(0.01)
        await hello(slow.wire, epoch=2, run_id="two")
        await slow.serving.turns.wait_idle()
    ended = await turn
    assert ended.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
    leases.cancel()
