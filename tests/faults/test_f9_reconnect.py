"""F9: a thousand clients lose their connections at the same moment, and reconnect within seconds.

Each has its own connection through a proxy that resets all of them at once, and an open stream of
leases. Each asks again as soon as it is cut off.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator

import grpc
import pytest

from penstock.wire.channel import client_options
from tests.faults.fake_server import ServerProcess, fake_server
from tests.faults.lateness import watched_lateness
from tests.faults.proxy import Proxy, proxying
from tests.faults.report import Report
from tests.support.harness import GetServerInfoRequest, LeaseTasksRequest, Wire

CLIENTS = 1_000
QUICK = 50
BACK_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
FILES = 6
STARTING = 50
"""How many clients connect at a time at the start, which is not measured."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    with fake_server(tmp_path_factory.mktemp("reconnect")) as process:
        yield process


class Crowd:
    """Clients with a stream each, and the set of those that are connected."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._starting = asyncio.Semaphore(STARTING)
        self.count = count
        self.there: set[int] = set()
        """Clients that have an answer and an open stream since the last reset."""
        self.all_there = asyncio.Event()
        self.lost = 0

    async def client(self, number: int) -> None:
        """Run one client until it is cancelled."""
        options = client_options(own_connection=True)
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            wire = Wire(channel)
            async with self._starting:
                await wire.GetServerInfo(GetServerInfoRequest(), wait_for_ready=True)
            while True:
                request = LeaseTasksRequest(agent_id=f"client-{number}", concurrency=1)
                leases = wire.LeaseTasks(request, wait_for_ready=True)
                try:
                    await wire.GetServerInfo(GetServerInfoRequest(), wait_for_ready=True)
                    self.there.add(number)
                    if len(self.there) == self.count:
                        self.all_there.set()
                    async for _ in leases:
                        raise AssertionError("nobody submitted a task")
                except grpc.aio.AioRpcError as error:
                    assert error.code() == grpc.StatusCode.UNAVAILABLE, error
                    self.lost += 1

    async def cut(self, proxy: Proxy) -> float:
        """Reset all connections. Returns the seconds until the last is back, without this process's
        lateness.
        """
        self.there.clear()
        self.all_there.clear()
        clock = asyncio.get_running_loop().time
        begun = clock()
        cut = proxy.reset_all()
        assert cut >= self.count
        async with asyncio.timeout(PATIENCE_SECONDS), watched_lateness() as lateness:
            await self.all_there.wait()
            took = clock() - begun
            return max(0.0, took - await lateness.seconds())


async def test_reconnect(
    server: ServerProcess, report: Report, request: pytest.FixtureRequest
) -> None:
    count, clients = report.count or 1, CLIENTS if report.count else QUICK
    name, node = f"{clients} clients at once", request.node.nodeid
    took: list[float] = []
    before = server.footprint().files
    async with proxying(server.port) as proxy:
        crowd = Crowd(proxy.address, clients)
        people = [asyncio.create_task(crowd.client(number)) for number in range(clients)]
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await crowd.all_there.wait()
            connected = server.footprint().files

            async def happen(rng: random.Random) -> None:
                took.append(await crowd.cut(proxy))
                assert took[-1] <= BACK_SECONDS, f"the last was back after {took[-1]:.1f} s"
                await files_at_most(server, connected + FILES)

            await report.repeat("F9 fake", name, node, count, happen)
        finally:
            for person in people:
                person.cancel()
            await asyncio.gather(*people, return_exceptions=True)
    await files_at_most(server, before + FILES)
    server.check_alive()
    figures = f"the last back after {max(took):.1f} s; no file left open"
    report.survived("F9 fake", name, count, figures=figures)


async def files_at_most(server: ServerProcess, files: int) -> None:
    """Wait for closing connections to be closed."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while server.footprint().files > files:
            await asyncio.sleep(0.1)
