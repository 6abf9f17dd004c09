"""F7: a network that delays, throttles, resets, closes, cuts, goes dark and flips bits.

Real clients talk to a server process through a TCP proxy (`proxy`). If bytes are late, or
connections end in any way, the run still ends, every group is trained once, and every token is the
one that was sampled. Plaintext gRPC cannot detect flipped bits: see `test_flipped_bits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.v1 import weights_pb2
from penstock.wire.channel import (
    KEEPALIVE_INTERVAL_MS,
    KEEPALIVE_TIMEOUT_MS,
    client_options,
)
from penstock.wire.security import Security
from penstock.wire.upload import NotStaged, upload
from tests.faults.fake_server import ServerProcess, fake_server
from tests.faults.lateness import watched_lateness
from tests.faults.proxy import Proxy, Way, proxying
from tests.faults.report import Report, report_of
from tests.faults.workload import Workload
from tests.support import harness
from tests.support.authorities import authority, server_certificate, write_certificate
from tests.support.harness import (
    GetServerInfoRequest,
    LeaseTasksRequest,
    SubmitTasksRequest,
    Task,
    Wire,
    header,
    hello,
    sequence,
    weights_of,
)

GROUPS = 6
LEASES = ("leases.grace_seconds=1", "leases.seconds=5", "leases.max_attempts=1000")
SPOILED_SECONDS = 5.0
ASTRAY_SECONDS = 5.0
"""Time after which an upload is given up here. The server is idle, and an upload takes a millisecond."""
LIMIT_SECONDS = 90
FILES = 6
NOTICED_SECONDS = (KEEPALIVE_INTERVAL_MS + KEEPALIVE_TIMEOUT_MS) / 1000
SLACK_SECONDS = 1.0
"""Tolerance for timers on two busy cores."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    folder = tmp_path_factory.mktemp("proxied")
    with fake_server(folder, *LEASES, step_seconds=0.002) as process:
        yield process


# Disturbances, repeated for as long as the run lasts

Trouble = Callable[[Proxy, random.Random], Awaitable[None]]


async def late(proxy: Proxy, rng: random.Random) -> None:
    for conditions in proxy.conditions.values():
        conditions.latency_seconds = rng.uniform(0.0, 0.06)
    await asyncio.sleep(rng.uniform(0.05, 0.3))


async def slow(proxy: Proxy, rng: random.Random) -> None:
    for conditions in proxy.conditions.values():
        conditions.bytes_per_second = rng.uniform(20_000, 200_000)
    await asyncio.sleep(rng.uniform(0.05, 0.3))


async def resets(proxy: Proxy, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0.02, 0.3))
    proxy.reset_all()


async def half_closes(proxy: Proxy, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0.02, 0.3))
    proxy.half_close_all(rng.choice(list(Way)))


async def cuts(proxy: Proxy, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0.02, 0.3))
    proxy.truncate_all(rng.choice(list(Way)), rng.randrange(1, 1_500))


async def dark(proxy: Proxy, rng: random.Random) -> None:
    """Go dark in one or both directions. Afterwards the held bytes still arrive."""
    await asyncio.sleep(rng.uniform(0.02, 0.3))
    for way in rng.choice(([Way.UP], [Way.DOWN], list(Way))):
        proxy.conditions[way].go_dark()
    await asyncio.sleep(rng.uniform(0.05, 0.5))
    if rng.random() < 0.3:
        proxy.reset_all()
    proxy.clear()


async def refused(proxy: Proxy, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0.02, 0.3))
    proxy.refusing = True
    proxy.reset_all()
    await asyncio.sleep(rng.uniform(0.05, 0.4))
    proxy.refusing = False


async def everything(proxy: Proxy, rng: random.Random) -> None:
    await rng.choice((late, slow, resets, half_closes, cuts, dark, refused))(proxy, rng)
    if rng.random() < 0.5:
        proxy.clear()


TROUBLES: tuple[Trouble, ...] = (
    late,
    slow,
    resets,
    half_closes,
    cuts,
    dark,
    refused,
    everything,
)


@contextlib.asynccontextmanager
async def troubled(proxy: Proxy, rng: random.Random, trouble: Trouble) -> AsyncGenerator[None]:
    """Repeat the disturbance until the end of the block."""

    async def go_on() -> None:
        while True:
            await trouble(proxy, rng)

    going_on = asyncio.create_task(go_on())
    try:
        yield
    finally:
        going_on.cancel()
        await asyncio.wait([going_on])
        proxy.clear()
    if not going_on.cancelled():
        going_on.result()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trouble" not in metafunc.fixturenames:
        return
    report = report_of(metafunc.config)
    chosen = TROUBLES
    if report.count is None:
        # Two in each test run, so that over many runs all are used.
        chosen = (random.Random(report.seed).choice(TROUBLES[:-1]), everything)
    metafunc.parametrize("trouble", chosen, ids=[trouble.__name__ for trouble in chosen])


RUNS = iter(range(1 << 30))


async def test_a_run(
    server: ServerProcess, trouble: Trouble, report: Report, request: pytest.FixtureRequest
) -> None:
    name = trouble.__name__
    files = server.footprint().files
    lost = [0]

    async def happen(rng: random.Random) -> None:
        async with asyncio.timeout(LIMIT_SECONDS), proxying(server.port, rng) as proxy:
            workload = Workload(proxy.address, GROUPS, f"run-{next(RUNS)}")
            async with troubled(proxy, rng, trouble):
                await workload.run()
            workload.check()
            lost[0] += workload.lost_attempts
        server.check_alive()

    count = report.count or 1
    await report.repeat("F7 fake", name, request.node.nodeid, count, happen)
    await files_closed(server, files)
    groups = count * GROUPS
    figures = f"{groups} groups trained once each, {lost[0]} attempts made again"
    report.survived("F7 fake", name, count, "runs", figures)


async def files_closed(server: ServerProcess, files: int) -> None:
    """Wait until the server has as few open files as before."""
    async with asyncio.timeout(20):
        while server.footprint().files > files + FILES:
            await asyncio.sleep(0.1)


async def test_flipped_bits(tmp_path: Path, report: Report, request: pytest.FixtureRequest) -> None:
    """A flipped bit in plaintext never causes a crash, a hang, or changed weights.

    On a real network TCP's checksum detects it, and otherwise TLS. Tokens have no separate
    checksum, so a bit that flips in transit can turn one token into another.
    """
    flipped, refused = 0, 0

    async def happen(rng: random.Random) -> None:
        nonlocal flipped, refused
        # A server for each case, because a flipped epoch or version can be one that no later one exceeds.
        async with harness.serve(tmp_path) as running, proxying(running.port, rng) as proxy:
            for version in range(1, 4):
                refused += not await upload_spoiled(proxy, version)
            flipped += proxy.up.flipped
            proxy.clear()
            wanted = {
                b"".join(tensor.tobytes() for tensor in weights_of(version).values())
                for version in range(4)
            }
            # A flipped bit may change a version's number, but the bytes are those of some version.
            assert {bytes(payload) for payload in running.engine.payloads} <= wanted
            turn = await running.generate("after")
            assert set(turn.versions) == {running.serving.switch.active_version}

    async def upload_spoiled(proxy: Proxy, version: int) -> bool:
        options = client_options(own_connection=True)
        async with grpc.aio.insecure_channel(proxy.address, options=options) as channel:
            head, data = header(version)
            message = weights_pb2.WeightHeader.FromString(head.SerializeToString())
            await channel.channel_ready()
            proxy.up.flips = 0.7
            try:
                async with asyncio.timeout(20):
                    await upload(channel, message, [data], silent_seconds=ASTRAY_SECONDS)
            except (grpc.aio.AioRpcError, NotStaged, TimeoutError) as error:
                assert not isinstance(error, TimeoutError), "it hangs"
                return False
            finally:
                proxy.up.clear()
        return True

    count = report.count or 3
    await report.repeat("F7 fake", "flipped bits", request.node.nodeid, count, happen)
    figures = (
        f"{flipped} bits flipped, {refused} of {3 * count} uploads refused, no wrong byte loaded"
    )
    report.survived("F7 fake", "flipped bits", count, "times", figures)


async def test_flipped_bits_under_tls(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    """With TLS, every flipped bit is a lost connection, which loses nothing."""
    certificate, key = write_certificate(tmp_path, "server", server_certificate())
    ca = tmp_path / "ca.pem"
    authority().cert_pem.write_to_path(str(ca))
    settings = (f"security.certificate={certificate}", f"security.key={key}", *LEASES)
    flipped, count = 0, report.count or 1
    with fake_server(tmp_path, *settings, step_seconds=0.002) as server:

        async def happen(rng: random.Random) -> None:
            nonlocal flipped
            async with asyncio.timeout(LIMIT_SECONDS), proxying(server.port, rng) as proxy:
                for conditions in proxy.conditions.values():
                    conditions.flips = rng.choice((0.01, 0.05))
                name = f"run-{next(RUNS)}"
                workload = Workload(proxy.address, GROUPS, name, Security(ca=ca))
                running = asyncio.create_task(workload.run())
                await asyncio.wait([running], timeout=SPOILED_SECONDS)
                proxy.clear()
                await running
                workload.check()
                flipped += proxy.up.flipped + proxy.down.flipped
            server.check_alive()

        await report.repeat("F7 fake", "flipped bits, TLS", request.node.nodeid, count, happen)
    figures = f"{flipped} bits flipped, {count * GROUPS} groups trained once each"
    report.survived("F7 fake", "flipped bits, TLS", count, "runs", figures)


async def test_darkness_is_noticed(
    server: ServerProcess, report: Report, request: pytest.FixtureRequest
) -> None:
    """Idle callers and the server both notice a dark network within the keepalive's time."""
    if report.count is None:
        pytest.skip("takes as long as the keepalive: make faults")
    count = min(report.count, 100)
    rng = random.Random(report.seed)
    async with proxying(server.port, rng) as proxy:
        slowest = await notice(server, proxy, count, rng)
    report.survived(
        "F7 fake",
        "silence noticed",
        count,
        "connections",
        f"slowest caller {slowest[0]:.1f} s, server {slowest[1]:.1f} s",
    )


async def notice(
    server: ServerProcess, proxy: Proxy, count: int, rng: random.Random
) -> tuple[float, float]:
    """Open lease streams at different moments, then go dark. Returns how long callers and server took."""
    clock = asyncio.get_running_loop().time
    leased, noticed = asyncio.Event(), list[float]()
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as direct:
        wire = Wire(direct)
        # A new run, so that the server drops what other tests left.
        await hello(wire, 1 << 61, run_id=f"dark-{rng.random()}", max_lag=100, groups_per_step=100)
        task = Task(task_id="dark", group_size=1, tokens=sequence([1]))
        await wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))

        async def wait_in_the_dark(number: int) -> None:
            options = client_options(own_connection=True)
            async with grpc.aio.insecure_channel(proxy.address, options=options) as channel:
                await asyncio.sleep(number * 10.0 / count)
                request = LeaseTasksRequest(agent_id=f"dark-{number}", concurrency=1)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in Wire(channel).LeaseTasks(request):
                        leased.set()
                noticed.append(clock())
                assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

        waiting = [asyncio.create_task(wait_in_the_dark(number)) for number in range(count)]
        await asyncio.sleep(10.5)
        assert leased.is_set()
        async with watched_lateness() as lateness:
            proxy.go_dark()
            begun = clock()
            # A caller outside the darkness gets the attempt, once the server has noticed and the
            # grace is over.
            async for lease in wire.LeaseTasks(LeaseTasksRequest(agent_id="lit", concurrency=1)):
                assert lease.task.task_id == "dark"
                break
            server_seconds = clock() - begun - 1.0
            await asyncio.gather(*waiting)
            caller_seconds = max(noticed) - begun
            late = await lateness.seconds()
        await wire.GetServerInfo(GetServerInfoRequest())
    limit = NOTICED_SECONDS + SLACK_SECONDS + late
    assert caller_seconds <= limit
    assert server_seconds <= limit
    return caller_seconds, server_seconds


def test_a_proxy_that_spoils_nothing_is_not_noticed(request: Any) -> None:
    """Checks the proxy without disturbances; test_a_run uses it with them."""

    async def talk() -> bytes:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while piece := await reader.read(1_000):
                writer.write(piece)
            writer.close()

        listener = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with listener, proxying(port) as proxy:
            host, _, number = proxy.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(bytes(range(256)) * 1_000)
            writer.write_eof()
            found = await reader.read()
            writer.close()
        return found

    assert asyncio.run(talk()) == bytes(range(256)) * 1_000
