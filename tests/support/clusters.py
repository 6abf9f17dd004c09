"""`penstock up` with engine servers behind a hub, run as a process whose parts tests kill.

Training of a tiny model, the hub and the workers are real. The engine servers use the fake engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from penstock.demo.tasks import write_printable
from penstock.demo.tiny import write_model
from penstock.up.processes import Command, Process
from tests.faults.agents import HELD
from tests.support.forked_command import NURSERY
from tests.support.trainer_processes import nursery

ROLES = ("engine-1", "engine-2", "hub", "worker", "trainer")
MARK = "PENSTOCK_TEST_MARK"

logger = logging.getLogger(__name__)

FILE = """
[up]
out = "{folder}/out"
restarts = 1000
restart_window_seconds = 3

[cluster]
placement = "{placement}"

[engines]
count = 2

[serve]
listen = "127.0.0.1:0"
http.listen = ""
leases = {{ seconds = 3, grace_seconds = 1, max_attempts = 1000 }}
[serve.engine]
model = "{folder}/model"
step-seconds = 0.002

[rollout]
generate = "tests.faults.agents:generate"
concurrency = 8
agent-id = "{folder}/out"

[train]
run.steps = {steps}
run.save_model = false
model.dtype = "float32"
model.threads = 1
data.group_size = 2
data.sampling.max_tokens = 8
data.jsonl.path = "{folder}/tasks.jsonl"
train.groups_per_step = 2
train.learning_rate = 1e-2
checkpoint.every_steps = 2
"""


def write_cluster(folder: Path, placement: str, steps: int) -> Path:
    """Write the cluster file, and the model and tasks that it names."""
    write_model(folder / "model")
    write_printable(folder / "tasks.jsonl")
    path = folder / "cluster.toml"
    path.write_text(FILE.format(folder=folder, placement=placement, steps=steps))
    return path


@dataclass
class Cluster:
    folder: Path
    process: Process
    ending: asyncio.Task[int]
    mark: str
    printed: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def out(self) -> Path:
        """The run's output folder."""
        return self.folder / "out"

    @property
    def steps(self) -> int:
        """Steps made so far. A step that a restarted trainer repeats counts again."""
        return sum(bool(re.match(r"step \d+/", line)) for line in self.printed)

    @property
    def events(self) -> str:
        """The text of the run's event log."""
        return (self.out / "events.log").read_text()

    def roles(self) -> dict[str, dict[str, Any]]:
        """The state of each role, by name, from the run's state file;
        empty before that file exists."""
        try:
            told = json.loads((self.out / "state.json").read_text())["roles"]
        except FileNotFoundError:
            return {}
        return {role["name"]: role for role in told}

    async def until(self, true: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until `true()` holds. It is checked after every printed line and every 0.1 s."""
        async with asyncio.timeout(seconds):
            while not true():
                assert not self.ending.done(), "\n".join(self.printed[-40:])
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 0.1)

    async def step(self, further: int = 1) -> None:
        """Wait for this many more steps."""
        wanted = self.steps + further
        await self.until(lambda: self.steps >= wanted)

    async def kill(self, name: str, *, actor: bool) -> int:
        """Wait for the role to run, then send SIGKILL to its process, or to the actor that contains
        it. Return the id of the role's process once it is gone."""
        await self.until(lambda: self.runs(name))
        pid = self.roles()[name]["pid"]
        victim = psutil.Process(pid).ppid() if actor else pid
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(30):
            while is_alive(pid):
                await asyncio.sleep(0.01)
        return pid

    def runs(self, name: str) -> bool:
        """Whether the role is running or serving."""
        return self.roles().get(name, {}).get("state") in ("running", "serving")

    def go_on(self) -> None:
        """Let the agents of a held cluster begin the remaining tasks."""
        (self.folder / "goes-on").touch()

    async def came_back(self, name: str, killed: int) -> None:
        """Wait until the role runs again, as another process."""
        await self.until(lambda: self.runs(name) and self.roles()[name]["pid"] != killed)


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, placement: str, steps: int, *, held: bool = False
) -> AsyncGenerator[Cluster]:
    """Run a cluster; kill it on exit. Tests then check with `all_gone`
    that its processes end too. A `held` one makes eight steps and waits for `go_on`."""
    path = write_cluster(folder, placement, steps)
    command = (sys.executable, "-m", "tests.support.up_with_fakes", str(path))
    running: Cluster

    def on_line(line: str) -> None:
        running.printed.append(line)
        running.changed.set()

    mark = uuid.uuid4().hex
    environment = {MARK: mark}
    if held:
        environment[HELD] = str(folder / "goes-on")
    if placement == "processes":
        environment[NURSERY] = str(await asyncio.to_thread(nursery))
    process = Process.start(Command("up", command, folder / "up.log", environment), on_line)
    running = Cluster(folder, process, asyncio.create_task(process.wait()), mark)
    try:
        yield running
    finally:
        process.kill()
        await running.ending


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def processes_of(mark: str) -> dict[int, str]:
    """Live processes that inherited this mark, by id, with their command lines."""
    found: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark and is_alive(process.pid):
                found[process.pid] = " ".join(process.cmdline())
    return found


async def all_gone(mark: str) -> None:
    """Fail if a process with this mark is still alive after 20 seconds."""
    async with asyncio.timeout(20):
        while left := processes_of(mark):
            logger.info("left: %s", left)
            await asyncio.sleep(0.2)
