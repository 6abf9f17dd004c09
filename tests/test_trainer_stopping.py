"""How a run ends that is asked to stop: with its server there, away, or lost meanwhile.

The whole walk in this process, around a policy that computes nothing, against a scripted server.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from rich.console import Console

from penstock.trainer.__main__ import _Parts, _walk
from penstock.trainer.compute import ComputeThread
from penstock.trainer.config import TrainerConfig
from penstock.trainer.exchange import Contract, Exchange
from penstock.trainer.loop import IN_FLIGHT, TrainingLoop
from penstock.trainer.metrics import MetricsWriter
from penstock.trainer.policy import StepResult
from penstock.trainer.publisher import Publisher
from penstock.trainer.stopping import unless
from penstock.trainer.tasks import Problem, TaskFeeder
from penstock.v1 import trainer_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from tests.scripted_trainer_server import Progress, ScriptedServer, Session

Welcome = codec.twin(trainer_service_pb2.Welcome)
GroupDelivery = codec.twin(trainer_service_pb2.GroupDelivery)
WeightReceipt = codec.twin(weights_pb2.WeightReceipt)
TrajectoryGroup = codec.twin(trajectory_pb2.TrajectoryGroup)
Trajectory = codec.twin(trajectory_pb2.Trajectory)
Segment = codec.twin(trajectory_pb2.Segment)
Outcome = codec.twin(trajectory_pb2.Outcome)


class Scalars:
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Numbers:
    def problem(self, index: int) -> Problem:
        return Problem((("user", str(index)),), {}, "numbers")


class StillPolicy:
    """Counts its steps; each ends when it may."""

    def __init__(self) -> None:
        self.steps = 0
        self.copies = 0
        self.computing, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def step(self, batches: Sequence[Any], token_count: int) -> StepResult:
        self.computing.set()
        assert self.may_end.wait(20)
        self.steps += 1
        return StepResult(applied=True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.copies += 1
        yield "a.weight", torch.full((3,), float(self.steps))

    def save_model(self, folder: Path) -> None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@dataclass
class Run:
    """A walk under way, and what it leaves behind."""

    policy: StillPolicy
    exchange: Exchange
    loop: TrainingLoop
    stopping: asyncio.Event
    walk: asyncio.Task[None]
    folder: Path
    saved: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Step and weight version of each checkpoint, and the steps the policy had done by then."""

    async def ends(self, seconds: float = 3.0) -> None:
        async with asyncio.timeout(seconds):
            await self.walk

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    address: str,
    *,
    step: int = 0,
    next_index: int = 0,
    outstanding: Sequence[int] = (),
) -> AsyncGenerator[Run]:
    config = TrainerConfig.model_validate(
        {
            "run": {"steps": 100},
            "model": {"path": "none"},
            "data": {"group_size": 2, "reasoning_gym": {"name": "chain_sum"}},
            "train": {"groups_per_step": 1},
            "weights": {"transport": "inline"},
            "checkpoint": {"every_steps": 50},
        }
    )
    policy, compute, stopping = StillPolicy(), ComputeThread(1), asyncio.Event()
    saved: list[tuple[int, int, int]] = []
    metrics = MetricsWriter(folder, Scalars(), Console(file=io.StringIO()), steps=100)
    options, own = client_options(), client_options(own_connection=True)
    async with (
        grpc.aio.insecure_channel(address, options=options) as channel,
        grpc.aio.insecure_channel(address, options=own) as bulk,
    ):
        publisher = Publisher(bulk, compute, shared_memory=False)
        exchange = Exchange(
            channel,
            run_id="r",
            contract=Contract(max_lag=4, groups_per_step=1),
            in_flight=IN_FLIGHT["keep"],
            weight_version=step,
            step=step,
            give_up_after_seconds=60.0,
            stopping=stopping,
        )
        tasks = TaskFeeder(
            channel,
            Numbers(),
            config.data,
            run_id="r",
            pending_target=4,
            next_index=next_index,
            outstanding=outstanding,
        )
        loop = TrainingLoop(
            config,
            policy=policy,
            compute=compute,
            exchange=exchange,
            publisher=publisher,
            tasks=tasks,
            metrics=metrics,
            checkpoint=lambda step, version: saved.append((step, version, policy.steps)),
            stopping=stopping,
            step=step,
            share_prefixes=False,
        )
        parts = _Parts(exchange, publisher, metrics, loop)
        walk = asyncio.create_task(_walk(parts, stopping))
        try:
            yield Run(policy, exchange, loop, stopping, walk, folder, saved)
        finally:
            policy.may_end.set()
            walk.cancel()
            await asyncio.wait((walk,))
            publisher.close()
            metrics.close()
            compute.close()


def delivery(number: int) -> Any:
    """The group of one task, sampled by the first weights."""

    def trajectory(sibling: int) -> Any:
        prompt = Segment(
            author=trajectory_pb2.AUTHOR_CONTEXT,
            token_ids=codec.array_bytes(np.array([1, 2], np.int32)),
        )
        answer = Segment(
            author=trajectory_pb2.AUTHOR_POLICY,
            token_ids=codec.array_bytes(np.array([3 + sibling], np.int32)),
            logprobs=codec.array_bytes(np.array([-1.0], np.float32), codec.LOGPROB),
            temperature=1.0,
        )
        return Trajectory(
            trajectory_id=f"{number}-{sibling}",
            segments=[prompt, answer],
            outcome=Outcome(reward=float(sibling)),
        )

    group = TrajectoryGroup(
        group_id=f"g{number}", task_id=f"r/{number}", trajectories=[trajectory(0), trajectory(1)]
    )
    return GroupDelivery(delivery_id=number + 1, group=group)


async def greet(session: Session, active: int = 0) -> None:
    await session.receive("hello")
    await session.send(welcome=Welcome(active_weight_version=active))


async def stage(requests: AsyncIterator[Any], context: Any) -> None:
    """Takes an upload."""
    version = (await anext(requests)).header.weight_version
    await context.write(Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_READY))
    async for _ in requests:
        pass
    await context.write(Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_STAGED))


class Stalling(ScriptedServer):
    """Goes through one step, and stands still at one stage of it for ever."""

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
            # The group is there by now: this is what the gathered batch is replaced by.
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
            # What did not reach the server is not counted as sent.
            assert bool(record["upload_bytes"]) == receipted


async def test_a_step_that_computes_is_finished_and_saved_without_the_server(
    tmp_path: Path,
) -> None:
    async with Stalling("none") as server, running(tmp_path, server.address) as run:
        run.policy.may_end.clear()
        await asyncio.to_thread(run.policy.computing.wait, 10)
        await server.server.stop(0)
        run.stopping.set()
        await run.exchange.left.wait()
        assert not run.walk.done()
        run.policy.may_end.set()
        await run.ends()
        assert run.saved == STEP_ONE
        assert [record["step"] for record in run.records] == [1]
        assert "receipt" not in server.heard
        # Nobody takes these weights: they are not even copied.
        assert run.policy.copies == 0


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
        # Not due: asked to stop, the trainer saves what it has.
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


async def test_a_group_that_the_checkpoint_contains_is_receipted_and_not_trained_again(
    tmp_path: Path,
) -> None:
    done = asyncio.Event()

    async def session(session: Session) -> None:
        await greet(session, active=1)
        assert (await session.receive("demand")).group_count == 1
        await session.send(delivery=delivery(0))
        receipt = await session.receive("receipt")
        assert (list(receipt.delivery_ids), receipt.step) == ([1], 1)
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
