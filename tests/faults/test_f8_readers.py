"""F8: callers that never read their answers cost bounded memory, and do not slow down other callers.

    make faults ARGS="-k f8 --fault-seconds 600"

Non-reading callers request turns and leases of large tasks, each on its own connection, and read no
answers. A caller that is cut off, or has nothing more to get, requests again immediately. Other callers
take turns meanwhile. Their speed is compared with that at a second server, where as many callers make the
same requests and do read. Both servers have all their callers all the time, and speed is measured in
alternating slices. So other load of the machine affects both equally. For comparison, the speed is also
measured at a third server, which has no other callers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path
from statistics import median
from typing import Any, cast

import grpc
import httpx
import pytest

from penstock.wire.channel import client_options
from tests.faults.fake_server import ServerProcess, fake_server
from tests.faults.lateness import watched_lateness
from tests.faults.report import Report
from tests.support.harness import (
    CompleteTrajectoryRequest,
    GenerateRequest,
    GetServerInfoRequest,
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
TURN_TOKENS = 15_000
"""More bytes than the buffers between server and a non-reading caller hold."""
TURN_SECONDS = 30.0
"""Time after which a non-reading caller requests again, unless it was cut off before."""
STALLED_SECONDS = 5
BUDGET_MIB = 128
"""The servers' `limits.memory_bytes`, in MiB."""
TASK_TOKENS = 10_000
"""Size of the prompt of each leased task: 40 KB."""
TASKS_MIB = 512
"""`limits.memory_bytes` for a server that must have room for all of these at once."""
TASKS_EACH = 700
"""Tasks for each non-reading caller: more than the buffers between it and the server hold."""
BATCH = 100
STREAMS, QUICK_STREAMS = 8, 1
"""Callers with this many large tasks each; the tasks need memory in proportion."""
BUDGET_BYTES = 8 << 20
"""Memory that a non-reading caller may cost the server."""
SPEED = 0.95
PATIENCE_SECONDS = 30.0
NUMBERS = itertools.count()


SETTINGS = (
    "limits.groups_without_trainer=100000",
    "journal.durability=process",
    f"limits.stalled_seconds={STALLED_SECONDS}",
    f"limits.memory_bytes={BUDGET_MIB << 20}",
)
OPTIONS = ("--max-model-len", str(2 * TURN_TOKENS))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    folder = tmp_path_factory.mktemp("readers")
    with fake_server(folder, *SETTINGS, step_seconds=0.004, options=OPTIONS) as process:
        yield process


@contextlib.asynccontextmanager
async def connected(server: ServerProcess) -> AsyncGenerator[Harness]:
    """A connection to a server that is shared with no other caller."""
    options = client_options(own_connection=True)
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        unused = cast("Any", None)
        yield Harness(unused, unused, server.port, Wire(channel), channel)


async def take_turns(harness: Harness, seconds: float) -> float:
    """Measures turns per second of callers that read, while this process is not late itself."""
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


async def long_turns(harness: Harness, closer: Harness, *, read: bool) -> None:
    """Takes one long turn after the other on a connection until stopped, reading or not."""
    while True:
        name = f"long-{next(NUMBERS)}"
        request = GenerateRequest(
            trajectory_id=name,
            tokens=sequence([1]),
            sampling_params=sampling(TURN_TOKENS),
            stream_options={"flush_interval": {"nanos": 20_000_000}},
        )
        call: Any = harness.wire.Generate(request)
        try:
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(TURN_SECONDS):
                    await (collect(call) if read else call.code())
        finally:
            call.cancel()
        await close(closer, name)


@contextlib.asynccontextmanager
async def callers(server: ServerProcess, count: int, *, read: bool) -> AsyncGenerator[Harness]:
    """This many callers with long turns, and a connection for another caller."""
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(connected(server))
        places = [await stack.enter_async_context(connected(server)) for _ in range(count)]
        tasks = [asyncio.create_task(long_turns(place, other, read=read)) for place in places]
        try:
            yield other
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def close(harness: Harness, name: str) -> None:
    """Closes the trajectory as soon as its cancelled turn is over."""
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
async def test_speed_and_memory(
    server: ServerProcess,
    report: Report,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    count = report.count or QUICK
    name, node = f"{count} callers that read nothing", request.node.nodeid
    each = SLICE_SECONDS if report.count else QUICK_SLICE_SECONDS
    seconds = request.config.getoption("fault_seconds") if report.count else QUICK_SLICES * each
    speeds: dict[str, list[float]] = {"unread": [], "read": [], "alone": []}
    rng, clock = random.Random(report.seed), asyncio.get_running_loop().time
    settings, options = SETTINGS, OPTIONS
    with (
        fake_server(tmp_path / "read", *settings, step_seconds=0.004, options=options) as baseline,
        fake_server(tmp_path / "alone", *settings, step_seconds=0.004, options=options) as quiet,
    ):
        async with contextlib.AsyncExitStack() as stack:
            before = peak = server.footprint().resident_bytes
            others = {
                "unread": await stack.enter_async_context(callers(server, count, read=False)),
                "read": await stack.enter_async_context(callers(baseline, count, read=True)),
                "alone": await stack.enter_async_context(connected(quiet)),
            }
            await asyncio.sleep(each)
            begun = clock()
            while clock() - begun < seconds:
                for beside in rng.sample(list(others), len(others)):
                    speeds[beside].append(await take_turns(others[beside], each))
                peak = max(peak, server.footprint().resident_bytes)
            lasted = clock() - begun
        baseline.check_alive()
    server.check_alive()
    # Slices of a round see the same other load. Interruptions hit each server equally often.
    pairs = [bare / read for bare, read in zip(speeds["unread"], speeds["read"], strict=True)]
    alone = [bare / alone for bare, alone in zip(speeds["unread"], speeds["alone"], strict=True)]
    share = median(pairs)
    grown, budget = peak - before, BUDGET_MIB << 20
    # `make faults` alone judges speed: slices of a fifth of a second follow the load of the machine.
    slow = bool(report.count) and share < SPEED
    if slow or grown > budget:
        report.failed("F8 fake", name, report.seed, node, 0, 1)
    assert not slow, speeds
    assert grown <= budget
    figures = (
        f"for {lasted:.0f} s; others {share:.2f} of the speed beside callers that read, "
        f"{median(alone):.2f} of that beside none, of {len(pairs)} rounds; "
        f"{grown / 1e6:+.0f} MB at most, of a budget of {budget / 1e6:.0f}"
    )
    report.survived("F8 fake", name, count, "callers", figures)


async def test_memory(report: Report, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """For streams with large messages: if they are not read, nothing more is leased."""
    settings = (*SETTINGS, f"limits.memory_bytes={TASKS_MIB << 20}")
    with fake_server(tmp_path, *settings, step_seconds=0.004, options=OPTIONS) as server:
        async with connected(server) as others:
            await look_at_memory(server, others, report, request)


async def look_at_memory(
    server: ServerProcess, others: Harness, report: Report, request: pytest.FixtureRequest
) -> None:
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


PIECE = 1_500
"""Turns of this many tokens, streamed one by one, exceed the buffers of a narrow connection."""


def requests_over_http() -> dict[str, bytes]:
    """Requests by kind: a whole and a streamed turn, an unknown path, and half a head."""
    said = {"model": "m", "messages": [{"role": "user", "content": "x" * 200}]}

    def post(body: bytes) -> bytes:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
        return head.encode() + b"\r\n\r\n" + body

    return {
        "whole": post(json.dumps({**said, "max_tokens": PIECE}).encode()),
        "streamed": post(json.dumps({**said, "max_tokens": PIECE, "stream": True}).encode()),
        "nowhere": b"GET /" + b"x" * 12_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        "half": b"GET /v1/models HTTP/1.1\r\nx: ",
    }


async def ask_on(port: int, rng: random.Random, heard: Counter[str], *, read: bool) -> None:
    """Repeats one kind of request, and changes the kind when it is cut off.

    A caller that reads is never cut off, and changes the kind after a while.
    """
    loop, requests = asyncio.get_running_loop(), requests_over_http()
    while True:
        kind = rng.choice(list(requests))
        async with contextlib.AsyncExitStack() as stack:
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            stack.enter_context(contextlib.suppress(ConnectionError, TimeoutError))
            if read:
                await stack.enter_async_context(asyncio.timeout(STALLED_SECONDS))
            else:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            if read:
                reading = asyncio.create_task(read_all(connection))
                stack.push_async_callback(asyncio.wait, [reading])
                stack.callback(reading.cancel)
            await loop.sock_sendall(connection, requests[kind])
            if kind == "half":
                await loop.sock_recv(connection, 1)
            else:
                while True:
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
                    await loop.sock_sendall(connection, requests[kind])
        heard[kind] += 1


async def read_all(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
            pass


class HttpPlace:
    """A server of chat completions, and its callers."""

    def __init__(self, server: ServerProcess, port: int, client: httpx.AsyncClient) -> None:
        self.server = server
        self.port = port
        self._client = client
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.heard: Counter[str] = Counter()
        """How often its many callers were answered or cut off, by kind."""

    async def ask(self) -> None:
        """Take one short turn as another caller."""
        said = [{"role": "user", "content": "hello"}]
        asked = {"model": "m", "max_tokens": 8, "messages": said}
        assert (await self._client.post(self._url, json=asked)).status_code == 200

    async def speed(self, seconds: float) -> float:
        """Measures short turns per second, while this process is not late itself."""
        turns, clock = 0, asyncio.get_running_loop().time
        begun = clock()

        async def one() -> None:
            nonlocal turns
            while clock() - begun < seconds:
                await self.ask()
                turns += 1

        async with watched_lateness() as lateness:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(OTHERS):
                    tasks.create_task(one())
            return turns / max(clock() - begun - await lateness.seconds(), 0.01)


@contextlib.asynccontextmanager
async def http_place(
    folder: Path, rng: random.Random, count: int, *settings: str, read: bool
) -> AsyncGenerator[HttpPlace]:
    """A server with this many permanent callers, once another caller has been answered."""
    listen = ("--http-listen", "127.0.0.1:0", *OPTIONS)
    settings = (*SETTINGS, *settings)
    with fake_server(folder, *settings, step_seconds=0.004, options=listen) as server:
        async with connected(server) as other, httpx.AsyncClient(timeout=20) as client:
            port = (await other.wire.GetServerInfo(GetServerInfoRequest())).http_port
            place = HttpPlace(server, port, client)
            await place.ask()
            before = server.footprint()
            tasks = [
                asyncio.create_task(
                    ask_on(port, random.Random(rng.random()), place.heard, read=read)
                )
                for _ in range(count)
            ]
            try:
                yield place
                for task in tasks:
                    assert not task.done(), task.exception()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            async with asyncio.timeout(20):
                # The other callers keep their connections.
                while server.footprint().files > before.files + OTHERS:
                    await asyncio.sleep(0.1)
        server.check_alive()


def compare(speeds: dict[str, list[float]]) -> Iterator[tuple[str, float]]:
    """Speed next to non-reading callers relative to that elsewhere; slices of a round see the same other
    load."""
    for beside in ("read", "alone"):
        pairs = zip(speeds["unread"], speeds[beside], strict=True)
        yield beside, median(unread / other for unread, other in pairs)


@pytest.mark.asyncio(loop_scope="module")
async def test_http(report: Report, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    count = report.count or QUICK
    name, node = f"{count} callers over HTTP that read nothing", request.node.nodeid
    each = SLICE_SECONDS if report.count else QUICK_SLICE_SECONDS
    seconds = request.config.getoption("fault_seconds") if report.count else QUICK_SLICES * each
    rng, clock = random.Random(report.seed), asyncio.get_running_loop().time
    speeds: dict[str, list[float]] = {"unread": [], "read": [], "alone": []}
    # So that callers are cut off even in a run of seconds.
    settings = () if report.count else ("limits.stalled_seconds=1",)
    async with contextlib.AsyncExitStack() as stack:
        places = {
            beside: await stack.enter_async_context(
                http_place(tmp_path / beside, rng, callers, *settings, read=beside == "read")
            )
            for beside, callers in (("unread", count), ("read", count), ("alone", 0))
            # A run of seconds is too short for a comparison, and each server takes long to start.
            if report.count or beside == "unread"
        }
        unread = places["unread"]
        # None of its callers has got far yet.
        before = peak = unread.server.footprint()
        begun, files = clock(), before.files
        # On a busy machine the first caller is cut off later.
        while clock() < begun + seconds or (
            not unread.heard and clock() < begun + seconds + PATIENCE_SECONDS
        ):
            for beside in rng.sample(list(places), len(places)):
                speeds[beside].append(await places[beside].speed(each))
                now = unread.server.footprint()
                peak = max(peak, now, key=lambda one: one.resident_bytes)
                files = max(files, now.files)
        lasted = clock() - begun
    # The server cut off all kinds of callers that did not read.
    cut_off = unread.heard
    assert {"half", "whole", "streamed"} <= set(cut_off) if report.count else cut_off
    grown, budget = peak.resident_bytes - before.resident_bytes, BUDGET_MIB << 20
    compared = dict(compare(speeds)) if report.count else {}
    fast = not compared or compared["read"] >= SPEED
    if not fast or grown > budget:
        report.failed("F8 fake", name, report.seed, node, 0, 1)
    assert fast, (compared, speeds)
    assert grown <= budget
    figures = f"for {lasted:.0f} s; cut off {cut_off.total()} times; "
    if compared:
        figures += (
            f"others {compared['read']:.2f} of the speed beside callers that read, "
            f"{compared['alone']:.2f} of that beside none, of {len(speeds['read'])} rounds; "
        )
    figures += f"{grown / 1e6:+.0f} MB at most, of a budget of {budget / 1e6:.0f}; {files} files"
    report.survived("F8 fake", name, count, "callers", figures)
