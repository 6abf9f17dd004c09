"""Helpers for tests of workers that run external processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from penstock.client import Statistics, WorkerSettings
from penstock.client.calls import Calls, Patience
from penstock.client.external.agent import ExternalProcesses
from penstock.client.external.settings import Api, CommandSettings, Keep, SandboxUse
from penstock.client.external.worker import CommandWorker
from penstock.client.scoring import Agent
from penstock.wire.security import Security
from tests.support.harness import Harness, SubmitTasksRequest, Task, hello, sampling

ROOT = Path(__file__).resolve().parents[2]
OFF, LOCKED = SandboxUse.OFF, SandboxUse.REQUIRE
# Takes one turn; each test appends its own code.
TURN = """
import asyncio, json, os, sys
from penstock.client import connect
async def turn():
    async with connect(os.environ["PENSTOCK_ADDRESS"]) as penstock:
        return await penstock.trajectory(os.environ["PENSTOCK_TRAJECTORY_ID"]).turn(max_tokens=8)
taken = asyncio.run(turn())
def answer(**result):
    with open(os.environ["PENSTOCK_RESULT_FILE"], "w") as file:
        json.dump(result, file)
"""


def python(source: str) -> str:
    return f"exec {sys.executable} -c '{source}'"


@dataclass
class Site:
    """A worker that runs in this process."""

    worker: CommandWorker
    calls: Calls
    root: Path
    running: asyncio.Task[Statistics] = field(init=False)

    def folders(self) -> list[Path]:
        return [path for path in self.root.glob("attempt-*") if path.is_dir()]


def make(
    harness: Harness,
    root: Path,
    command: str,
    *,
    function: Agent | None = None,
    attempts: int | None = 1,
    concurrency: int = 4,
    drain_seconds: float = 20.0,
    security: Security | None = None,
    **options: Any,
) -> Site:
    settings = CommandSettings(
        command, **{"api": Api.GRPC, "sandbox": OFF, "folder": root / "work", **options}
    )
    security = security or Security()
    calls = Calls(harness.address, Patience(), security)
    processes = ExternalProcesses(calls, security, settings, function)
    working = WorkerSettings(
        concurrency=concurrency, attempts=attempts, drain_seconds=drain_seconds
    )
    return Site(CommandWorker(calls, processes, function, working), calls, root / "work")


async def run(harness: Harness, root: Path, command: str, **options: Any) -> Statistics:
    """Run a worker for one attempt, or for the number in `options`. Check that it leaves no attempt
    folder unless `keep` asks for it."""
    site = make(harness, root, command, **options)
    try:
        statistics = await asyncio.wait_for(site.worker.run(), 60)
    finally:
        await site.calls.close()
    if options.get("keep", Keep.NONE) is Keep.NONE:
        assert not site.folders()
    return statistics


@contextlib.asynccontextmanager
async def going(harness: Harness, root: Path, command: str, **options: Any) -> AsyncGenerator[Site]:
    """Run a worker while the `with` block executes."""
    site = make(harness, root, command, **{"attempts": None, **options})
    site.running = asyncio.create_task(site.worker.run())
    try:
        yield site
    finally:
        site.worker.stop()
        site.running.cancel()
        await asyncio.wait([site.running])
        await site.calls.close()


async def submit(harness: Harness, count: int = 1, **fields: Any) -> None:
    tasks = [
        Task(
            **{
                "task_id": f"task-{uuid.uuid4().hex[:8]}",
                "group_size": 1,
                "text": "hello",
                "sampling_params": sampling(8),
                **fields,
            }
        )
        for _ in range(count)
    ]
    await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))


async def delivered(harness: Harness, count: int = 1) -> list[Any]:
    """Outcomes that a trainer receives, one per sample."""
    trainer = await hello(harness.wire, max_lag=100, groups_per_step=100)
    trainer.send(demand={"group_count": count})
    groups = [(await trainer.receive("delivery")).group for _ in range(count)]
    trainer.half_close()
    return [trajectory.outcome for group in groups for trajectory in group.trajectories]


def matching(text: str, begin: str = "") -> list[psutil.Process]:
    """Processes with an argument that starts with `begin` and contains `text`."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                continue
            if any(a.startswith(begin) and text in a for a in process.cmdline()):
                found.append(process)
    return found


def marked(mark: str) -> list[psutil.Process]:
    """Processes that `fleeing` left behind. Shells that only have the mark in
    their command do not count."""
    return matching(mark, "import time")


def fleeing(mark: str) -> str:
    """A shell command that leaves a process behind in its own session, without its parent."""
    forever = f"import time, sys; time.sleep(10000) # {mark}"
    return f"(setsid {sys.executable} -I -S -c '{forever}' >/dev/null 2>&1 &)"
