"""What changes at a server while a version is filled or sent, in orders that the test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch
import xxhash

from penstock.server.core.errors import DomainError, to_status
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.core.errors import ServerFull, ServerLost
from penstock.trainer.evaluation.evaluation import Evaluator
from penstock.trainer.exchange.stream import Exchange, RunFacts
from penstock.trainer.weights import sender as sender_module
from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.trainer.weights.transports import Transport
from penstock.v1 import weights_pb2
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from penstock.wire.messages import StalenessContract
from penstock.wire.reasons import Reason
from tests.support.harness import Harness, header, messages, send, serve, weights_of
from tests.support.harness import upload as wire_upload

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]
KEEP = weights_pb2.IN_FLIGHT_POLICY_KEEP


def weights(scale: float) -> Weights:
    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(1).items():
            yield name, torch.full(tensor.shape, scale)

    return named


class Trainer:
    """The part of a trainer that publishes, with a real exchange."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher

    async def step(self, version: int, scale: float) -> None:
        async with asyncio.timeout(30):
            await self.publisher.fill(weights(scale), version, uploads=True)
            await self.publisher.stage(version)
            await self.publisher.confirm(version, self.publisher.switch(version))


@contextlib.asynccontextmanager
async def trainer_of(harness: Harness) -> AsyncGenerator[Trainer]:
    facts = RunFacts("run", StalenessContract(max_lag=4, groups_per_step=2), KEEP, 0, 0)
    own = client_options(own_connection=True)
    async with (
        grpc.aio.insecure_channel(harness.address) as channel,
        grpc.aio.insecure_channel(harness.address, options=own) as bulk,
    ):
        exchange = Exchange(channel, facts, give_up_after_seconds=5, stopping=asyncio.Event())
        await exchange.open()

        async def restore(welcome: Any) -> None:
            raise AssertionError("the server did not restart")

        running = asyncio.create_task(exchange.run(restore))
        compute = ComputeThread()
        copy = WeightCopy(compute)
        copy.dtype = "float32"
        publisher = Publisher(copy, [Sender(bulk, copy, exchange)])
        try:
            yield Trainer(publisher)
        finally:
            running.cancel()
            publisher.close()
            compute.close()
            await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("push", ["active", "staged", "broken"])
async def test_an_upload_by_hand_changes_nothing_for_a_live_run(tmp_path: Path, push: str) -> None:
    """It took the trainer's next number: the run sampled the foreign weights as its own, and ended."""
    async with serve(tmp_path) as harness, trainer_of(harness) as trainer:
        await trainer.step(1, 1.25)
        epoch = time.time_ns() + 10**9
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            if push == "broken":
                head, data = header(2, trainer_epoch=epoch)
                head.tensors[0].name = "wrong"
                await send(harness, messages(head, data))
            else:
                staged = push == "staged"
                await wire_upload(harness.wire, 2, staged=staged, trainer_epoch=epoch)
        if push != "broken":
            failure = read_failure(refused.value)
            assert (failure.code, failure.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "TRAINER_CONNECTED",
            )
            assert failure.metadata["run_id"] == "run"
        for version in (2, 3):
            await trainer.step(version, 10.0 * version)
            assert harness.serving.switch.active_version == version
            active = harness.serving.weights._active
            assert active is not None
            own = [xxhash.xxh3_64_intdigest(t.numpy()) for _, t in weights(10.0 * version)()]
            assert list(active.hashes.values()) == own


class Exchanged:
    """Stands in for an `Exchange`; its server is restored when the test says so."""

    in_flight, trainer_epoch, held_version = 0, 1, 1

    def __init__(self) -> None:
        self.restored, self.left = asyncio.Event(), asyncio.Event()
        self.restored.set()

    async def answer(self, wait: Any) -> Any:
        return await wait


class Recorded(Transport):
    """Keeps what was sent, and the memory that it was read from."""

    async def send(self, header: Any, parcel: Any) -> weights_pb2.UpdateWeightsResponse:
        self.sent, self.payload = bytes(parcel.payload.file.view), parcel.payload
        return weights_pb2.UpdateWeightsResponse(state=weights_pb2.WEIGHT_STATE_STAGED)


@pytest.mark.parametrize("how", ["fill", "relabel"])
async def test_a_payload_that_a_restored_server_reads_is_not_overwritten(how: str) -> None:
    """One server comes back while another one is still awaited."""
    compute = ComputeThread()
    copy = WeightCopy(compute)
    copy.dtype = "float32"
    exchanges, transports = [Exchanged(), Exchanged()], [Recorded(), Recorded()]
    senders = [
        Sender(cast("Any", None), copy, cast("Exchange", exchange), transports=[one], delta="off")
        for exchange, one in zip(exchanges, transports, strict=True)
    ]
    publisher = Publisher(copy, senders)
    await publisher.fill(weights(1.0), 1)
    exchanges[1].restored.clear()
    changing = asyncio.create_task(
        publisher.fill(weights(2.0), 2, uploads=True) if how == "fill" else publisher.relabel(2)
    )
    await asyncio.sleep(0.05)
    exchanges[0].restored.clear()
    assert await senders[0].upload(1) is not None
    exchanges[1].restored.set()
    await asyncio.sleep(0.1)
    assert not changing.done()
    assert bytes(transports[0].payload.file.view) == transports[0].sent and copy.version == 1
    exchanges[0].restored.set()
    await asyncio.wait_for(changing, 20)
    assert copy.version == 2
    publisher.close()
    compute.close()


async def test_prompts_of_an_evaluation_that_ended_meanwhile_are_not_sent_again() -> None:
    ready = asyncio.Event()
    ready.set()
    stream = SimpleNamespace(
        ready=ready, owed=0, since=0.0, deliver=None, demand=lambda count: None
    )
    current = SimpleNamespace(
        gone=asyncio.Event(),
        prompts=SimpleNamespace(asked={"t": SimpleNamespace(index=0, task_id="t")}),
        data_sources={},
    )
    one = SimpleNamespace(
        current=current,
        source=SimpleNamespace(problem=lambda index: SimpleNamespace(counted_under="x")),
        build_task=lambda prompt, problem: SimpleNamespace(),
    )
    calls = 0

    async def submit(server: int, tasks: Any) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.01)
        one.current = None
        raise ServerFull("full", 0.01)

    evaluator = Evaluator(
        cast("Any", [one]),
        cast("Any", SimpleNamespace(evaluations=(stream,))),
        *("run", cast("Any", submit), cast("Any", lambda record: None), asyncio.Event()),
    )
    async with asyncio.TaskGroup() as group:
        evaluator.open(group)
        await evaluator.submit_again(0)
    assert calls == 1


def refusal(reason: Reason, **metadata: object) -> grpc.aio.AioRpcError:
    status = to_status(DomainError(reason, "told so", metadata, retry_after_seconds=1.0))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)


def test_an_upload_that_a_lost_connection_left_is_waited_for() -> None:
    """The server reads all its bytes before another upload may begin: longer than a few attempts."""
    error = sender_module._lost_or(refusal(Reason.UPLOAD_IN_PROGRESS), "version 1")
    assert isinstance(error, ServerLost) and error.retry_after_seconds == 1.0
    assert not isinstance(error, ServerFull)
    replaced = sender_module._lost_or(refusal(Reason.STALE_EPOCH), "version 1")
    assert not isinstance(replaced, ServerLost)


@pytest.mark.parametrize(("current", "again"), [(1, True), (2, False)])
async def test_only_its_own_newer_epoch_lets_a_trainer_try_again(current: int, again: bool) -> None:
    sender = Sender(
        *(cast("Any", None), cast("Any", None), cast("Exchange", Exchanged())),
        transports=[cast("Any", SimpleNamespace(passing=()))],
    )
    failure = read_failure(refusal(Reason.STALE_EPOCH, current=current, trainer_epoch=1))
    assert await sender._passes(failure) is again
