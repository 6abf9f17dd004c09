"""Unread answers: how much of the server their callers may use, and for how long. Also
calls beyond the server's limit."""

from __future__ import annotations

import asyncio
import gc
import weakref
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client import Patience, connect
from penstock.common.token_file import hash_token, new_token
from penstock.server.security import gate as authorization
from penstock.server.security.callers import COPIES
from penstock.v1 import task_service_pb2
from penstock.wire.failure import read_failure
from penstock.wire.security import Security, open_channel
from tests.support.harness import (
    CompleteTrajectoryRequest,
    Failure,
    GenerateRequest,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    SubmitTasksRequest,
    Task,
    sampling,
    sequence,
    serve,
    until,
)
from tests.support.zero_window import zero_window

GET = "penstock.v1.RolloutService/GetTrajectory"
LEASE = "penstock.v1.TaskService/LeaseTasks"
WATCH = "grpc.health.v1.Health/Watch"
CHECK = "grpc.health.v1.Health/Check"


def account(harness: Harness) -> Any:
    """The account of the only calling host."""
    (found,) = harness.serving.callers._accounts.values()
    return found


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return read_failure(caught.value)


async def submit(harness: Harness, count: int, token_count: int) -> None:
    for number in range(count):
        task = Task(task_id=f"k{number}", group_size=1, tokens=sequence([1] * token_count))
        await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))


async def test_a_call_with_one_answer_is_open_until_that_is_read(tmp_path: Path) -> None:
    limited = ("limits.caller.calls=8", "limits.memory_bytes=268435456")
    async with serve(tmp_path, *limited, max_context=200_000) as harness:
        await harness.generate("t", [1] * 100_000)
        request = GetTrajectoryRequest(trajectory_id="t")
        size = (await harness.wire.GetTrajectory(request)).ByteSize()
        await harness.answers_read()
        used = harness.serving.budget.used_bytes
        async with zero_window(harness.port) as caller:
            for _ in range(50):
                await caller.call(GET, request)
            await until(lambda: len(caller.ended) == 42)
            assert account(harness).calls == 8
            await until(lambda: account(harness).unread == 8 * size)
            assert harness.serving.budget.used_bytes == used + COPIES * 8 * size
            failure = await refused(harness.wire.GetTrajectory(request))
            assert (failure.reason, failure.metadata["limit"]) == ("CALLER_LIMIT", "calls")
        await until(lambda: not account(harness).calls)
        await harness.answers_read()
        assert account(harness).unread == 0 and harness.serving.budget.used_bytes == used
        await harness.wire.GetTrajectory(request)


async def test_who_is_cut_off_gives_back_what_it_had_and_not_what_grpc_holds(
    tmp_path: Path,
) -> None:
    limited = ("limits.stalled_seconds=0.3", "limits.caller.unread_bytes=1000000")
    async with serve(tmp_path, *limited, max_context=200_000) as harness:
        await submit(harness, 4, 100_000)
        queue = harness.serving.queue
        async with zero_window(harness.port) as caller:
            request = LeaseTasksRequest(agent_id="a", concurrency=4)
            calls = [await caller.call(LEASE, request) for _ in range(4)]
            # Two calls exceed the limit. Each of the other two has one lease, until it is cut off.
            await until(lambda: len(caller.ended) == 2)
            await until(lambda: account(harness).calls == 2)
            assert 800_000 < account(harness).unread < 1_000_000
            attempts = [a for group in queue.groups for a in group.attempts if a.state.leased]
            await until(lambda: all(a.holder is None for a in attempts))
            assert account(harness).calls == 2 and caller.ended < set(calls)
            failure = await refused(harness.wire.LeaseTasks(request).read())
            assert failure.reason == "CALLER_LIMIT" and failure.retry_after_seconds == 1.0
            assert failure.metadata["limit"] == "unread_bytes"
        await until(lambda: not account(harness).calls)
        assert account(harness).unread == 0
        lease = await harness.wire.LeaseTasks(request).read()
        assert lease.task.tokens.token_ids


async def test_who_reads_after_all_is_told_why_it_was_cut_off(tmp_path: Path) -> None:
    narrow = [("grpc.http2.lookahead_bytes", 65_535), ("grpc.http2.bdp_probe", 0)]
    async with serve(tmp_path, "limits.stalled_seconds=0.3", max_context=2_000_000) as harness:
        await submit(harness, 1, 1_000_000)
        async with grpc.aio.insecure_channel(
            harness.address, options=[*narrow, ("grpc.max_receive_message_length", -1)]
        ) as channel:
            # The caller never reads the first message.
            call: Any = channel.unary_stream(
                f"/{LEASE}",
                request_serializer=LeaseTasksRequest.SerializeToString,
                response_deserializer=task_service_pb2.LeaseTasksResponse.FromString,
            )(LeaseTasksRequest(agent_id="a", concurrency=1))
            queue = harness.serving.queue
            await until(lambda: any(a.state.leased for g in queue.groups for a in g.attempts))
            (group,) = queue.groups
            await until(lambda: group.attempts[0].holder is None)
            assert (await call.read()).task.task_id == "k0"
            assert (await refused(call.read())).reason == "SLOW_READER"


async def test_what_a_refused_call_held_is_free_at_once(tmp_path: Path) -> None:
    """The call may hold tens of megabytes, and refused callers try again."""
    held: list[weakref.ref[Any]] = []
    async with serve(tmp_path) as harness:
        closing = harness.serving.closing
        complete = closing.complete

        class Held:
            """Referenced only by the call."""

        async def watched(trajectory_id: str, outcome: Any) -> Any:
            marker = Held()
            held.append(weakref.ref(marker))
            return await complete(trajectory_id, outcome)

        closing.complete = watched  # type: ignore[method-assign]
        gc.collect()
        gc.disable()
        try:
            outcome = Outcome(failure=Failure(reason="x"))
            request = CompleteTrajectoryRequest(trajectory_id="none", outcome=outcome)
            for _ in range(3):
                assert (await refused(harness.wire.CompleteTrajectory(request))).reason == (
                    "TRAJECTORY_UNKNOWN"
                )
            await until(lambda: len(held) == 3 and not any(one() for one in held))
        finally:
            gc.enable()


# Calls beyond the server's limit


async def test_calls_beyond_what_the_server_takes_are_told_when_to_come_back(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, "limits.concurrent_calls=3", step_seconds=0.02) as harness:
        calls = [
            harness.wire.Generate(
                GenerateRequest(
                    trajectory_id=f"t{number}",
                    tokens=sequence([1]),
                    sampling_params=sampling(1000),
                )
            )
            for number in range(3)
        ]
        for call in calls:
            await call.read()
        failure = await refused(harness.generate("more"))
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
        )
        assert failure.retry_after_seconds == 1.0 and failure.metadata["limit"] == "3"
        assert harness.serving.callers.refusals["QUEUE_FULL"] == 1
        async with connect(harness.address, patience=Patience(overload_seconds=30)) as client:
            waiting = asyncio.create_task(client.trajectory("later").turn("hi", max_tokens=2))
            await until(lambda: harness.serving.callers.refusals["QUEUE_FULL"] == 2)
            for call in calls:
                call.cancel()
            assert (await waiting).finish_reason


async def test_who_need_not_say_who_he_is_leaves_places_for_others(tmp_path: Path) -> None:
    token, far = new_token(), datetime.now(UTC) + timedelta(days=1)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(
        f'[tokens."a"]\nrole = "admin"\nsha256 = "{hash_token(token).hex()}"\n'
        f"expires = {far:%Y-%m-%dT%H:%M:%SZ}\n"
    )
    settings = (f"security.tokens={tokens}", "limits.concurrent_calls=64")
    async with (
        serve(tmp_path, *settings, security=Security(token=token)) as harness,
        open_channel(harness.address) as anybody,
    ):
        watches = [anybody.unary_stream(f"/{WATCH}")(b"") for _ in range(80)]
        refusals = 0
        for watch in watches:
            try:
                await watch.read()
            except grpc.aio.AioRpcError as error:
                assert read_failure(error).reason == "QUEUE_FULL"
                refusals += 1
        assert refusals == 80 - 64 // authorization.ANYBODYS_PART
        await harness.generate("t")
        # A health probe uses another method.
        await anybody.unary_unary(f"/{CHECK}")(b"")
        for watch in watches:
            watch.cancel()


async def test_a_call_of_anybody_that_sends_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorization, "ANYBODYS_SECONDS", 0.3)
    async with serve(tmp_path) as harness, zero_window(harness.port) as caller:
        stream = await caller.call(CHECK)
        await until(lambda: stream in caller.ended)
        assert not account(harness).calls


@pytest.mark.parametrize("method", ["RolloutService/Generate", "TaskService/SubmitTasks"])
async def test_a_call_whose_message_does_not_come_ends(tmp_path: Path, method: str) -> None:
    path = f"penstock.v1.{method}"
    async with (
        serve(tmp_path, "limits.stalled_seconds=0.5") as harness,
        zero_window(harness.port) as caller,
    ):
        stream = await caller.call(path)
        await until(lambda: stream in caller.ended)
        assert not account(harness).calls
