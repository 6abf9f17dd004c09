"""F8: callers that ask and never read cost bounded memory, and nobody else their speed.

    make faults ARGS="-k f8 --fault-seconds 600"

They ask for turns, for leases of large tasks and for groups, and read nothing of the answers. Others
take turns meanwhile. Their speed is compared with what it is while as many callers ask for the same and
do read, in slices one after the other, because what else the machine does would otherwise decide.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Generator
from statistics import median
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

from penstock.wire.channel import client_options
from tests.faults.fake_server import ServerProcess, fake_server
from tests.faults.lateness import watched_lateness
from tests.faults.report import Report
from tests.harness import (
    CompleteTrajectoryRequest,
    GenerateRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    SubmitTasksRequest,
    Task,
    Wire,
    collect,
    sampling,
    sequence,
)

QUICK = 8
OTHERS = 4
SLICE_SECONDS = 1.5
QUICK_SLICE_SECONDS = 0.2
QUICK_SLICES = 6
TURN_TOKENS = 500
TASK_TOKENS = 10_000
"""Of the prompt of each task that is leased: 40 KB."""
TASKS_EACH = 700
"""For each caller that does not read: more than the buffers on the way to it hold."""
BATCH = 100
STREAMS, QUICK_STREAMS = 8, 1
"""Callers with so many large tasks; they take as much memory as they have to be."""
BUDGET_BYTES = 8 << 20
"""What one that does not read may cost the server."""
SPEED = 0.95
QUICK_SPEED = 0.5
"""What a run too short to say more asks for."""
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    folder = tmp_path_factory.mktemp("readers")
    settings = ("limits.groups_without_trainer=100000", "journal.durability=process")
    with fake_server(folder, *settings, step_seconds=0.004) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def others(server: ServerProcess) -> AsyncGenerator[Harness]:
    async with grpc.aio.insecure_channel(
        server.address, options=client_options(own_connection=True)
    ) as channel:
        unused = cast("Any", None)
        yield Harness(unused, unused, server.port, Wire(channel), channel)


async def take_turns(harness: Harness, seconds: float) -> float:
    """How many turns a second callers get that do read, while this process is not late itself."""
    turns = 0
    clock = asyncio.get_running_loop().time
    begun = clock()

    async def one() -> None:
        nonlocal turns
        while clock() - begun < seconds:
            name = f"other-{next(NUMBERS)}"
            turn = await harness.generate(name, sampling_params=sampling(8))
            assert len(turn.tokens) == 8
            await harness.complete(name)
            turns += 1

    async with watched_lateness() as lateness:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(OTHERS):
                tasks.create_task(one())
        took = clock() - begun
        return turns / max(took - await lateness.seconds(), 0.01)


async def slice_of(
    harness: Harness, channel: grpc.aio.Channel, count: int, seconds: float, *, read: bool
) -> float:
    """Speed of the others while so many callers ask for long turns, and read them or do not."""
    wire: Any = Wire(channel)
    names = [f"long-{next(NUMBERS)}" for _ in range(count)]
    calls = [
        wire.Generate(
            GenerateRequest(
                trajectory_id=name,
                tokens=sequence([1]),
                sampling_params=sampling(TURN_TOKENS),
                stream_options={"flush_interval": {"nanos": 1_000_000}},
            )
        )
        for name in names
    ]
    reading = [asyncio.ensure_future(collect(call)) for call in calls] if read else []
    speed = await take_turns(harness, seconds)
    for call in calls:
        call.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    for name in names:
        await close(harness, name)
    return speed


async def close(harness: Harness, name: str) -> None:
    """As soon as the turn that was cancelled is over."""
    request = CompleteTrajectoryRequest(trajectory_id=name, outcome=Outcome(reward=1.0))
    async with asyncio.timeout(20):
        while True:
            try:
                await harness.wire.CompleteTrajectory(request)
                return
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.FAILED_PRECONDITION, error
                await asyncio.sleep(0.01)


@pytest.mark.asyncio(loop_scope="module")
async def test_speed(
    server: ServerProcess, others: Harness, report: Report, request: pytest.FixtureRequest
) -> None:
    count = report.count or QUICK
    name, node = f"{count} unread turns", request.node.nodeid
    each = SLICE_SECONDS if report.count else QUICK_SLICE_SECONDS
    seconds = request.config.getoption("fault_seconds") if report.count else QUICK_SLICES * each
    speeds: dict[bool, list[float]] = {True: [], False: []}
    options = client_options(own_connection=True)
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        await slice_of(others, channel, count, each, read=True)
        before = server.footprint()
        for _ in range(max(1, round(seconds / 2 / each))):
            for read in random.Random(report.seed).sample((True, False), 2):
                speeds[read].append(await slice_of(others, channel, count, each, read=read))
        after = server.footprint()
    server.check_alive()
    # What else the machine has to do slows some of the slices.
    typical = median if report.count else max
    share = typical(speeds[False]) / typical(speeds[True])
    grown = (after.resident_bytes - before.resident_bytes) / 1e6
    wanted = SPEED if report.count else QUICK_SPEED
    if share < wanted or after.resident_bytes - before.resident_bytes > count * BUDGET_BYTES:
        report.failed("F8 fake", name, report.seed, node, 0, 1)
    assert share >= wanted, speeds
    assert after.resident_bytes - before.resident_bytes <= count * BUDGET_BYTES
    figures = f"{share:.2f} of the speed beside callers that read, {grown:+.0f} MB"
    report.survived("F8 fake", name, count, "callers", figures)


@pytest.mark.asyncio(loop_scope="module")
async def test_memory(
    server: ServerProcess, others: Harness, report: Report, request: pytest.FixtureRequest
) -> None:
    """Of streams whose messages are large: what is not read is not even leased."""
    count = min(report.count, STREAMS) if report.count else QUICK_STREAMS
    name, node = "unread leases", request.node.nodeid
    wire: Any = others.wire
    prompt = sequence([1] * TASK_TOKENS)
    for _ in range(count * TASKS_EACH // BATCH):
        tasks = [
            Task(task_id=f"large-{next(NUMBERS)}", group_size=1, tokens=prompt)
            for _ in range(BATCH)
        ]
        await wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
    before = server.footprint()
    channels = [
        grpc.aio.insecure_channel(server.address, options=client_options(own_connection=True))
        for _ in range(count)
    ]
    try:
        calls: list[Any] = []
        for index, channel in enumerate(channels):
            unread: Any = Wire(channel)
            lease = LeaseTasksRequest(agent_id=f"unread-{index}", concurrency=TASKS_EACH)
            calls.append(unread.LeaseTasks(lease))
        seconds = 5.0 if report.count else 0.5
        speed = await take_turns(others, seconds)
        after = server.footprint()
        waiting = (await wire.SubmitTasks(SubmitTasksRequest())).pending_count
        assert waiting > 0, "nothing was held back"
        for call in calls:
            call.cancel()
    finally:
        for channel in channels:
            await channel.close()
    server.check_alive()
    each = (after.resident_bytes - before.resident_bytes) / count
    if each > BUDGET_BYTES:
        report.failed("F8 fake", name, report.seed, node, 0, 1)
    assert each <= BUDGET_BYTES, f"{each / 1e6:.1f} MB each"
    figures = f"{each / 1e6:+.1f} MB each, {waiting} of {count * TASKS_EACH} tasks held back"
    figures += f"; others {speed:.0f} turns/s"
    report.survived("F8 fake", name, count, "callers", figures)
