"""F6: the network goes dark in the middle of a run, for seconds, and comes back.

The server is in a network namespace, behind a link that is set down, so that packets are lost
silently. No connection is closed, so only the keepalive can detect it. Agents and trainer are at
the other end, with one idle stream. Afterwards the run has ended, and every group was trained once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import grpc
import pytest

from penstock.v1 import trajectory_pb2
from penstock.wire.channel import (
    KEEPALIVE_INTERVAL_MS,
    KEEPALIVE_TIMEOUT_MS,
    client_options,
)
from tests.faults.fake_server import ServerProcess, fake_server
from tests.faults.lateness import watched_lateness
from tests.faults.namespace import Namespace, namespace, why_not
from tests.faults.report import Report
from tests.faults.workload import Workload
from tests.support.harness import GetServerInfoRequest, LeaseTasksRequest, Wire

GROUPS = 24
QUICK_GROUPS = 8
AT_ONCE = 5
QUICK_SECONDS = (0.3, 1.0)
DARK_SECONDS = (1.0, 22.0)
NOTICED_SECONDS = (KEEPALIVE_INTERVAL_MS + KEEPALIVE_TIMEOUT_MS) / 1000
SLACK_SECONDS = 1.0
LIMIT_SECONDS = 120.0


async def test_darkness(tmp_path: Path, report: Report, request: pytest.FixtureRequest) -> None:
    name, node, count = "link set down", request.node.nodeid, report.count or 1
    reason = why_not()
    if reason:
        report.skipped("F6 fake", name, reason)
        pytest.skip(reason)
    groups = GROUPS if report.count else QUICK_GROUPS
    noticed: list[float] = []
    places = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int) -> None:
        rng = random.Random(seed)
        async with places:
            with (
                namespace() as inside,
                fake_server(
                    tmp_path / str(seed),
                    "leases.grace_seconds=1",
                    "leases.seconds=5",
                    "leases.max_attempts=1000",
                    "security.insecure=true",
                    step_seconds=0.02,
                    host=inside.address,
                    prefix=inside.prefix,
                ) as server,
            ):
                async with asyncio.timeout(LIMIT_SECONDS):
                    seconds = rng.uniform(*(DARK_SECONDS if report.count else QUICK_SECONDS))
                    noticed.append(await happen(server, inside, rng, seconds, groups))
                server.check_alive()

    runs = [asyncio.create_task(one(report.seed + case)) for case in range(count)]
    for case, run in enumerate(runs):
        try:
            await run
        except BaseException as error:
            for other in runs:
                other.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            again = report.failed("F6 fake", name, report.seed + case, node, case, count)
            error.add_note(f"again: {again}")
            raise
    slowest = max(noticed)
    figures = f"{count * groups} groups trained once each"
    if slowest:
        figures += f"; noticed within {slowest:.1f} s"
    report.survived("F6 fake", name, count, figures=figures)


async def happen(
    server: ServerProcess, inside: Namespace, rng: random.Random, seconds: float, groups: int
) -> float:
    """One run with one darkness. Returns how long the idle stream took to notice it; 0 if it did not."""
    workload = Workload(server.address, groups)
    connected = asyncio.Event()
    idle = asyncio.create_task(wait_for_nothing(server.address, connected))
    await connected.wait()
    running = asyncio.create_task(workload.run())
    try:
        await asyncio.sleep(rng.uniform(0.05, 0.6))
        clock = asyncio.get_running_loop().time
        async with watched_lateness() as lateness:
            inside.go_dark()
            begun = clock()
            await asyncio.wait([idle], timeout=seconds)
            dark = clock() - begun
            late = await lateness.seconds()
        if idle.done():
            idle.result()
            await asyncio.sleep(max(0.0, seconds - dark))
        inside.go_on()
        assert dark <= NOTICED_SECONDS + SLACK_SECONDS + late, f"not noticed for {dark:.1f} s"
        await running
        workload.check()
        return dark if idle.done() else 0.0
    finally:
        for task in (running, idle):
            task.cancel()
        await asyncio.gather(running, idle, return_exceptions=True)


async def wait_for_nothing(address: str, connected: asyncio.Event) -> None:
    """Return when an idle stream is detected as lost."""
    options = client_options(own_connection=True)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await Wire(channel).GetServerInfo(GetServerInfoRequest(), wait_for_ready=True)
        connected.set()
        request = LeaseTasksRequest(
            agent_id="idle", concurrency=1, purpose=trajectory_pb2.PURPOSE_EVAL
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in Wire(channel).LeaseTasks(request):
                raise AssertionError("nobody submitted a task")
