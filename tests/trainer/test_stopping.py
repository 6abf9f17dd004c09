"""How a run ends on a request to stop, with its server up, away, or lost meanwhile.

The whole run is in the test's process, with a policy that computes nothing and a scripted server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.trainer.core.aio import unless
from penstock.trainer.state.ledger import FILE, Ledger
from penstock.wire.messages import WeightReceipt, Welcome
from tests.support.scripted_trainer_server import ScriptedServer, Session, refuse
from tests.support.trainer_walk import delivery, greet, running, stage


class Stalling(ScriptedServer):
    """Completes one step, but blocks at one stage of it forever."""

    def __init__(self, stalled: str) -> None:
        super().__init__(self._serve)
        self._stalled = stalled
        self.reached = asyncio.Event()
        self.heard: list[str] = []
        self.uploads.append(self._take)
        if stalled.startswith("begin"):
            self.info.active_weight_version = 3

    async def _pass(self, stage: str) -> None:
        if stage == self._stalled:
            self.reached.set()
            await asyncio.Event().wait()

    async def _take(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._pass("begin: upload")
        await self._pass("upload")
        await stage(requests, context)

    async def _submit(self, request: Any, context: Any) -> Any:
        if len(self.tasks) == 4:
            # The group has arrived by now. This submission replaces its task.
            await self._pass("fill")
        response = await super()._submit(request, context)
        response.pending_count = 4
        return response

    async def _serve(self, session: Session) -> None:
        await greet(session, self.info.active_weight_version)
        async for request in session.requests:
            kind = request.WhichOneof("message")
            self.heard.append(kind)
            if kind == "switch_weights":
                await self._pass("begin: switch")
            elif kind == "demand":
                await self._pass("gather")
                await session.send(delivery=delivery(0))
            elif kind == "receipt":
                await self._pass("switch")


STEP_ONE = [(1, 1, 1)]


@pytest.mark.parametrize("asked_first", [True, False], ids=["asked first", "lost first"])
@pytest.mark.parametrize(
    ("stalled", "saved", "receipted"),
    [
        ("begin: upload", [], False),
        ("begin: switch", [], False),
        ("gather", [], False),
        ("fill", [], False),
        ("upload", STEP_ONE, False),
        ("switch", STEP_ONE, True),
    ],
)
async def test_a_stop_does_not_wait_for_a_server_that_is_away(
    tmp_path: Path,
    stalled: str,
    saved: list[tuple[int, int, int]],
    receipted: bool,
    asked_first: bool,
) -> None:
    async with Stalling(stalled) as server, running(tmp_path, server.address) as run:
        await server.reached.wait()
        if asked_first:
            run.stopping.set()
        await server.server.stop(0)
        run.stopping.set()
        await run.ends()
        assert run.exchange.left.is_set()
        assert run.saved == saved
        assert run.loop.step == len(saved) == run.policy.steps
        assert [record["step"] for record in run.records] == [step for step, *_ in saved]
        assert ("receipt" in server.heard) == receipted
        assert "checkpoint" not in server.heard
        for record in run.records:
            assert (record["weight_version"], record["reward_mean"]) == (1, 0.5)
            assert (record["seconds_switch"], record["pause_seconds"]) == (0.0, 0.0)
            # Bytes that did not reach the server do not count as sent.
            assert bool(record["upload_bytes"]) == receipted


async def test_a_step_that_computes_is_finished_and_saved_without_the_server(
    tmp_path: Path,
) -> None:
    async with Stalling("none") as server, running(tmp_path, server.address) as run:
        run.policy.may_end.clear()
        await asyncio.to_thread(run.policy.computing.wait, 60)
        copies = run.policy.copies
        await server.server.stop(0)
        run.stopping.set()
        await run.exchange.left.wait()
        assert not run.walk.done()
        run.policy.may_end.set()
        await run.ends()
        assert run.saved == STEP_ONE
        assert [record["step"] for record in run.records] == [1]
        assert "receipt" not in server.heard
        # No server takes these weights, so they are not even copied.
        assert run.policy.copies == copies


class Going(ScriptedServer):
    """Delivers a group for each demand, and accepts every version."""

    def __init__(self, active: int = 0) -> None:
        super().__init__(self._serve)
        self.info.active_weight_version = active
        self.uploads += [stage] * 3

    async def _serve(self, session: Session) -> None:
        await greet(session, self.info.active_weight_version)
        delivered = 0
        async for request in session.requests:
            kind = request.WhichOneof("message")
            if kind == "demand":
                await session.send(delivery=delivery(delivered))
                delivered += 1
            elif kind == "switch_weights":
                version = request.switch_weights.weight_version
                receipt = WeightReceipt(weight_version=version, active_weight_version=version)
                await session.send(weight_receipt=receipt)


async def test_a_step_that_is_done_again_without_the_server_leaves_the_ledger_as_it_was(
    tmp_path: Path,
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    async with Going() as server, running(before, server.address, steps=3) as run:
        await run.ends()
    after.mkdir()
    (after / FILE).write_bytes((before / FILE).read_bytes())
    async with Going(active=3) as server, running(after, server.address) as run:
        run.ledger.resume(0)
        run.policy.may_end.clear()
        await asyncio.to_thread(run.policy.computing.wait, 60)
        run.stopping.set()
        await server.server.stop(0)
        await run.exchange.left.wait()
        run.policy.may_end.set()
        await run.ends()
        assert run.saved == STEP_ONE
    assert (after / FILE).read_bytes() == (before / FILE).read_bytes()
    ledger = Ledger(after)
    ledger.resume(1)
    ledger.close()
    assert list(ledger.ahead) == [2, 3]


async def test_with_its_server_there_a_stop_finishes_the_step_and_tells_the_server(
    tmp_path: Path,
) -> None:
    waiting, seen = asyncio.Event(), list[str]()

    async def session(session: Session) -> None:
        await greet(session)
        await session.receive("demand")
        await session.send(delivery=delivery(0))
        assert (await session.receive("switch_weights")).weight_version == 1
        assert (await session.receive("receipt")).step == 1
        await session.send(weight_receipt=WeightReceipt(weight_version=1, active_weight_version=1))
        await session.receive("demand")
        waiting.set()
        # No checkpoint is due, but on a stop the trainer saves its state.
        seen.append(f"checkpoint {(await session.receive('checkpoint')).step}")
        with pytest.raises(StopAsyncIteration):
            await anext(session.requests)
        seen.append("closed")

    async with ScriptedServer(session) as server, running(tmp_path, server.address) as run:
        server.uploads.append(stage)
        await waiting.wait()
        run.stopping.set()
        await run.ends()
        assert seen == ["checkpoint 1", "closed"]
        assert run.saved == STEP_ONE
        assert not run.exchange.left.is_set()
        assert [record["step"] for record in run.records] == [1]


@pytest.mark.parametrize("asked_first", [True, False], ids=["asked first", "full first"])
async def test_a_stop_does_not_wait_for_room_for_the_weights(
    tmp_path: Path, asked_first: bool
) -> None:
    reached, may_answer, heard = asyncio.Event(), asyncio.Event(), list[str]()

    async def session(session: Session) -> None:
        await greet(session)
        async for request in session.requests:
            heard.append(request.WhichOneof("message"))
            if heard[-1] == "demand":
                await session.send(delivery=delivery(0))

    async def full(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        reached.set()
        if asked_first:
            await may_answer.wait()
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room for now")

    async with ScriptedServer(session) as server, running(tmp_path, server.address) as run:
        server.uploads += [full] * 100
        await reached.wait()
        run.stopping.set()
        may_answer.set()
        await run.ends()
        assert run.exchange.left.is_set()
        assert run.saved == STEP_ONE
        assert [record["step"] for record in run.records] == [1]
        assert not {"switch_weights", "receipt", "checkpoint"} & set(heard)


async def test_a_version_that_is_sampled_as_it_comes_may_be_there_when_its_answer_is_lost(
    tmp_path: Path,
) -> None:
    """As with a collective: the upload is the switch, and the stream is lost together with its answer."""
    lost, done = asyncio.Event(), asyncio.Event()
    server = ScriptedServer()

    async def first(session: Session) -> None:
        await greet(session)
        await session.receive("demand")
        await session.send(delivery=delivery(0))
        await lost.wait()
        await session.context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async def second(session: Session) -> None:
        hello = await session.receive("hello")
        assert hello.weight_version == 0
        await session.send(welcome=Welcome(active_weight_version=1))
        async for request in session.requests:
            if request.WhichOneof("message") == "switch_weights":
                assert request.switch_weights.weight_version == 1
                receipt = WeightReceipt(weight_version=1, active_weight_version=1)
                await session.send(weight_receipt=receipt)
            elif request.WhichOneof("message") == "receipt":
                assert request.receipt.step == 1
                done.set()

    async def loses_its_answer(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        server.info.active_weight_version = 1
        lost.set()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async def has_it(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "WEIGHT_VERSION_STALE")

    server._sessions += [first, second]
    server.uploads += [loses_its_answer, has_it]
    async with server, running(tmp_path, server.address) as run:
        await asyncio.wait_for(done.wait(), 20)
        run.stopping.set()
        await run.ends()
        assert run.saved == STEP_ONE
        assert not run.exchange.left.is_set()
        assert [record["weight_version"] for record in run.records] == [1]


async def test_a_group_of_a_task_that_the_checkpoint_contains_is_refused_and_not_trained(
    tmp_path: Path,
) -> None:
    done = asyncio.Event()

    async def session(session: Session) -> None:
        await greet(session, active=1)
        # The previous trainer may have ended before it reported this checkpoint.
        assert (await session.receive("checkpoint")).step == 1
        assert (await session.receive("demand")).group_count == 1
        await session.send(delivery=delivery(0))
        receipt = await session.receive("receipt")
        assert (list(receipt.delivery_ids), receipt.step) == ([1], 0)
        assert receipt.rejection.reason == "TASK_SETTLED"
        assert (await session.receive("demand")).group_count == 1
        await session.send(delivery=delivery(2))
        assert (await session.receive("switch_weights")).weight_version == 2
        receipt = await session.receive("receipt")
        assert (list(receipt.delivery_ids), receipt.step) == ([3], 2)
        done.set()
        await session.send(weight_receipt=WeightReceipt(weight_version=2, active_weight_version=2))
        async for _ in session.requests:
            pass

    server = ScriptedServer(session)
    server.info.active_weight_version = 1
    server.uploads.append(stage)
    async with (
        server,
        running(tmp_path, server.address, step=1, next_index=4, outstanding=(2, 3)) as run,
    ):
        await done.wait()
        run.stopping.set()
        await run.ends()
        assert run.policy.steps == 1
        assert run.saved == [(2, 2, 1)]


async def test_an_answer_counts_more_than_the_event() -> None:
    async def answer() -> int:
        return 3

    event = asyncio.Event()
    event.set()
    assert await unless(event, answer()) == 3
    assert await unless(event, asyncio.get_running_loop().create_future()) is None


async def test_a_wait_that_is_given_up_has_ended() -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("long")

    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await unless(event, long())
    assert ended == ["long"]
