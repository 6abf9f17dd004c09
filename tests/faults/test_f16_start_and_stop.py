"""F16: a port in use fails loudly; SIGTERM under load drains, and loses nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

import grpc

from penstock.client import connect
from penstock.wire.channel import client_options
from tests.faults.report import Report
from tests.faults.test_f3_killed_engine import TRAJECTORIES, Script
from tests.support.harness import SubmitTasksRequest, Task, Wire, hello, sampling
from tests.support.processes import Server, server_process, worker_process

FILE = "tests/faults/test_f16_start_and_stop.py::"
GROUPS, GROUP_SIZE = 12, 2
SHORT_GRACE = ("--set", "leases.grace_seconds=1")
"""For attempts leased to a worker at the moment it stopped."""
WORK = ("--concurrency", "4", "--generate", "tests.faults.agents:generate")


async def test_a_port_in_use_fails_loudly(tmp_path: Path, report: Report) -> None:
    async with server_process(tmp_path) as server:
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.fake_serve", "--listen", server.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, errors = await asyncio.wait_for(second.communicate(), 30)
        assert (second.returncode, printed) == (1, b"")
        assert f"cannot listen on {server.address}".encode() in errors
        # The first server continues undisturbed.
        async with connect(server.address) as client:
            await client.server_info()
    report.survived("F16 fake", "port in use", 1)


async def test_sigterm_under_load_drains_and_loses_nothing(tmp_path: Path, report: Report) -> None:
    count = report.count or 1

    async def stop(rng: random.Random) -> None:
        folder = tmp_path / str(rng.randrange(1 << 32))
        folder.mkdir()
        drain = rng.choice(["drain_seconds=0.05", "drain_seconds=10"])
        options = ("--step-seconds", "0.004", "--set", drain, "--set", "leases.seconds=5")
        async with server_process(folder, *options) as server:
            await _stop_under_load(server, folder, rng)

    name = "SIGTERM under load"
    test = f"{FILE}test_sigterm_under_load_drains_and_loses_nothing"
    await report.repeat("F16 fake", name, test, count, stop)
    report.survived("F16 fake", name, count)


async def _stop_under_load(server: Server, folder: Path, rng: random.Random) -> None:
    async with (
        worker_process(folder, server.address, *WORK) as worker,
        connect(server.address) as client,
        grpc.aio.insecure_channel(server.address, options=client_options()) as channel,
    ):
        wire = Wire(channel)
        await wire.SubmitTasks(SubmitTasksRequest(tasks=[_task(i) for i in range(GROUPS)]))
        scripts = [Script.draw(f"own-{index}", rng) for index in range(TRAJECTORIES)]
        callers = [asyncio.create_task(script.run(client)) for script in scripts]
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        server.process.signal(signal.SIGTERM)
        assert await server.wait(20) == 0, server.log
        await server.start()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*callers)
        assert found == [script.expected() for script in scripts]
        trainer = await hello(wire, 1, max_lag=1_000, groups_per_step=1_000)
        trainer.send(demand={"group_count": GROUPS})
        groups = [(await trainer.receive("delivery", 60)).group for _ in range(GROUPS)]
        assert {group.task_id for group in groups} == {_task(i).task_id for i in range(GROUPS)}
        for group in groups:
            assert sorted(t.sample_index for t in group.trajectories) == list(range(GROUP_SIZE))
            assert not any(t.outcome.HasField("failure") for t in group.trajectories), group
        await trainer.nothing()
        # Without load, a stopped worker ends with status 0.
        worker.signal(signal.SIGTERM)
        assert await asyncio.wait_for(worker.wait(), 20) == 0


def _task(index: int) -> Task:
    return Task(
        task_id=f"task-{index}",
        group_size=GROUP_SIZE,
        text=f"say {index}",
        sampling_params=sampling(20),
    )


async def test_a_worker_is_stopped_under_load_and_gives_back_what_it_held(
    tmp_path: Path, report: Report
) -> None:
    async with (
        server_process(tmp_path, "--step-seconds", "0.004", *SHORT_GRACE) as server,
        worker_process(tmp_path, server.address, *WORK, "--drain-timeout", "0") as worker,
        grpc.aio.insecure_channel(server.address, options=client_options()) as channel,
    ):
        wire = Wire(channel)
        await wire.SubmitTasks(SubmitTasksRequest(tasks=[_task(i) for i in range(GROUPS)]))
        trainer = await hello(wire, 1, max_lag=1_000, groups_per_step=1_000)
        trainer.send(demand={"group_count": GROUPS})
        await trainer.receive("delivery", 30)
        worker.signal(signal.SIGTERM)
        assert await asyncio.wait_for(worker.wait(), 20) == 0
        async with worker_process(tmp_path, server.address, *WORK, name="another"):
            # A lease takes a minute to expire here, so none of these groups waited for that.
            for _ in range(GROUPS - 1):
                await trainer.receive("delivery", 30)
    report.survived("F16 fake", "worker, SIGTERM under load", 1)
