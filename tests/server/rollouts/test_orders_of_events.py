"""What changes while a call waits, in orders of events that the test chooses."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from opentelemetry.context import Context

from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import EngineLost
from penstock.server.groups.recovery import recover_from
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.rollouts import buffering
from penstock.v1.trajectory_pb2 import FINISH_REASON_ABORTED
from penstock.wire import codec
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from tests.server.groups.test_wire_tasks import lease, submit, take, task
from tests.support.harness import (
    ContinueRequest,
    GenerateRequest,
    Harness,
    WeightProbe,
    collect,
    sampling,
    sequence,
    serve,
    until,
)
from tests.support.zero_window import zero_window

LONG = "x" * 20_000
"""Encoded in a thread."""


def slow_text(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = harness.serving.renderer
    encode = renderer.encode_text

    def slowly(text: str, *, first: bool) -> Any:
        if len(text) >= len(LONG):
            time.sleep(0.5)
        return encode(text, first=first)

    monkeypatch.setattr(renderer, "encode_text", slowly)


def failing(harness: Harness) -> asyncio.Event:
    """The engine's next request is taken, and fails before its first token when the event is set."""
    go = asyncio.Event()
    generate = harness.engine.generate

    async def fail_once(request: Any) -> Any:
        harness.engine.generate = generate  # type: ignore[method-assign]

        async def deltas() -> Any:
            await go.wait()
            raise RuntimeError("the engine had a moment")
            yield

        return deltas()

    harness.engine.generate = fail_once  # type: ignore[method-assign]
    return go


def extending(harness: Harness, name: str) -> asyncio.Future[Any]:
    request = ContinueRequest(trajectory_id=name, text=LONG, sampling_params=sampling(2))
    return asyncio.ensure_future(harness.serving.opening.extend(request, Context()))


async def test_a_record_that_was_withdrawn_while_its_observation_was_encoded_takes_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = f"journal.folder={tmp_path / 'journal'}"
    async with serve(tmp_path, journal, max_context=200_000) as harness:
        serving = harness.serving
        slow_text(harness, monkeypatch)
        go = failing(harness)
        request = GenerateRequest(trajectory_id="t", text="hello", sampling_params=sampling(4))
        turn, how = await serving.opening.open(request, Context())
        stream = serving.events.stream(turn, how, Context())
        assert "started" in await anext(stream)
        go.set()
        await until(lambda: not turn.in_flight)
        extended = extending(harness, "t")
        await asyncio.sleep(0.05)
        with pytest.raises(DomainError):
            await anext(stream)
        with pytest.raises(DomainError) as refused:
            await extended
        assert refused.value.reason == Reason.TRAJECTORY_UNKNOWN
        assert not serving.turns.in_flight
        # The id is free, and the next server can read the journal.
        await harness.generate("t")
    async with serve(tmp_path, journal, max_context=200_000) as harness:
        assert harness.serving.store.find("t") is not None


async def test_an_observation_belongs_after_the_turn_that_its_caller_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tmp_path, max_context=200_000) as harness:
        slow_text(harness, monkeypatch)
        await harness.generate("t", text="hi", sampling_params=sampling(2))
        extended = extending(harness, "t")
        await asyncio.sleep(0.05)
        await harness.resume("t", text="other", sampling_params=sampling(2))
        with pytest.raises(DomainError) as refused:
            await extended
        assert refused.value.reason == Reason.TURN_IN_FLIGHT
        record = harness.serving.store.get("t")
        assert record.turn_count == 2 and not record.growing


async def test_every_reader_of_a_failed_turn_gets_its_error(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        serving = harness.serving
        await harness.generate("root")
        go = failing(harness)
        request = GenerateRequest(
            trajectory_id="branch",
            parent_trajectory_id="root",
            text="x",
            sampling_params=sampling(4),
        )
        turn, how = await serving.opening.open(request, Context())

        async def follow() -> None:
            async for _ in serving.events.stream(turn, how, Context()):
                pass

        following = [asyncio.ensure_future(follow()) for _ in range(3)]
        await asyncio.sleep(0.05)
        go.set()
        errors = await asyncio.gather(*following, return_exceptions=True)
        assert [type(error) for error in errors] == [DomainError] * 3
        assert not serving.store.get("root").children


async def test_a_refused_close_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tmp_path) as harness:
        await submit(harness, task("a", 1))
        call = lease(harness, 1)
        taken = await take(call)

        def full(byte_count: int) -> None:
            raise DomainError(Reason.DISK_FULL, "full")

        with monkeypatch.context() as patched:
            patched.setattr(harness.serving.journal, "check_room", full)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await harness.fail(taken.trajectory_id)
        assert read_failure(refused.value).reason == "DISK_FULL"
        assert harness.serving.store.open_count == 0
        await harness.generate(taken.trajectory_id)
        assert await harness.complete(taken.trajectory_id)
        call.cancel()


async def test_a_turn_that_waits_is_aborted_when_the_server_stops(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        harness.serving.switch.await_trainer(True)
        request = GenerateRequest(
            trajectory_id="t", tokens=sequence([1, 2]), sampling_params=sampling(4)
        )
        turn = asyncio.ensure_future(collect(harness.wire.Generate(request)))
        await until(lambda: bool(harness.serving.turns.in_flight))
        await harness.life.stop(30.0)
        assert (await turn).finished.finish_reason == FINISH_REASON_ABORTED


async def test_a_watcher_that_reads_nothing_holds_up_no_stop(tmp_path: Path) -> None:
    """Anyone may watch the health, without a token."""
    async with serve(tmp_path) as harness, zero_window(harness.port) as caller:
        await caller.call("grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest())
        await asyncio.sleep(0.3)
        await asyncio.wait_for(harness.life.stop(0.0), 20)


async def test_every_watcher_is_told_though_another_left(harness: Harness) -> None:
    watch = harness.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    leaving, staying = (watch(health_pb2.HealthCheckRequest()) for _ in range(2))
    states = health_pb2.HealthCheckResponse
    assert (await leaving.read()).status == (await staying.read()).status == states.SERVING
    leaving.cancel()
    await asyncio.sleep(0.05)
    harness.serving.switch.await_trainer(True)
    assert (await asyncio.wait_for(staying.read(), 20)).status == states.NOT_SERVING
    unknown = watch(health_pb2.HealthCheckRequest(service="none"))
    assert (await unknown.read()).status == states.SERVICE_UNKNOWN
    staying.cancel()
    unknown.cancel()


async def test_turns_do_not_wait_for_a_verdict_that_never_comes(tmp_path: Path) -> None:
    """The engine resumed, sampled with the version that is not confirmed yet, and died."""
    async with serve(tmp_path, step_seconds=0.01, max_context=100_000) as harness:
        request = GenerateRequest(
            trajectory_id="t", tokens=sequence([1]), sampling_params=sampling(5_000)
        )
        turn = asyncio.ensure_future(collect(harness.wire.Generate(request)))
        await harness.sampled("t", 3)
        resume = harness.engine.resume

        async def dying() -> None:
            await resume()
            await asyncio.sleep(0.3)
            raise EngineLost("died")

        harness.engine.resume = dying  # type: ignore[method-assign]
        probe = WeightProbe(
            token_ids=codec.array_bytes(np.array([1, 2, 3], np.int32)),
            logprobs=codec.array_bytes(np.zeros(2, np.float32)),
            tolerance=1e9,
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await harness.upload(1, probe=probe)
        in_flight = harness.serving.turns.in_flight
        await asyncio.wait_for(harness.serving.turns.abort(in_flight), 20)
        await asyncio.gather(turn, return_exceptions=True)


async def test_a_drop_that_a_compaction_overtakes_is_told_by_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compaction begins after the drop is durable, and before anyone is told."""
    async with serve(tmp_path, f"journal.folder={tmp_path / 'journal'}") as harness:
        journal, queue = harness.serving.journal, harness.serving.queue
        assert isinstance(journal, LogJournal)
        await submit(harness, task("large", 1))
        call = lease(harness, 1)
        taken = await take(call)
        await harness.generate(taken.trajectory_id)
        monkeypatch.setattr(buffering, "MAX_GROUP_BYTES", 10)
        before = journal.compactions
        outgrown = lambda: journal.compactions == before and not queue.groups  # noqa: E731
        monkeypatch.setattr(journal, "_is_outgrown", outgrown)
        await harness.complete(taken.trajectory_id)
        await until(lambda: journal.compactions > before)
        await journal.append(())
        shutil.copytree(tmp_path / "journal", tmp_path / "left")
        call.cancel()
    left = LogJournal(
        tmp_path / "left", durability="process", max_bytes=1 << 30, segment_bytes=1 << 20
    )
    found = await recover_from(left)
    assert [(notice.reason, notice.task_id) for notice in found.notices] == [
        ("GROUP_TOO_LARGE", "large")
    ]
    assert "large" in found.known and not found.pending
    await left.close()
