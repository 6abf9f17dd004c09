"""Servers and workers as separate processes, for tests that kill, stop and restart them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from penstock.up.processes import Command, FirstMatch, Process
from penstock.up.supervisor import SERVING
from tests.support.ports import HeldPort

ENGINE = re.compile(r"^fake engine process (\d+)$")
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}


@dataclass
class Server:
    """`tests.support.fake_serve`, or another command, across any number of restarts on one port."""

    folder: Path
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict[str, str])
    command: tuple[str, ...] = ("-m", "tests.support.fake_serve")
    held: HeldPort = field(default_factory=HeldPort)
    """Keeps the port reserved between two starts."""
    engine_pid: int = 0
    """The engine process of the latest start, with --engine-process."""
    processes: list[Process] = field(default_factory=list[Process])
    serves: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each start once the server serves."""

    @property
    def address(self) -> str:
        """The address that every start listens on."""
        return f"127.0.0.1:{self.held.number}"

    @property
    def process(self) -> Process:
        """The process of the latest start."""
        return self.processes[-1]

    @property
    def log(self) -> str:
        """The output of all starts."""
        return (self.folder / "server.log").read_text(errors="replace")

    async def start(self, *options: str) -> None:
        """Start the server; return when it serves."""
        found: list[str] = []
        serves = FirstMatch(SERVING)

        def on_line(line: str) -> None:
            if (match := ENGINE.match(line)) is not None:
                found.append(match[1])
            serves(line)

        command = (sys.executable, *self.command, "--listen", self.address)
        command += (*self.options, *options)
        path = self.folder / "server.log"
        environment = {**ENVIRONMENT, **self.environment}
        process = Process.start(Command("server", command, path, environment), on_line)
        self.processes.append(process)
        assert await serves.wait(process) == self.address
        if found:
            self.engine_pid = int(found[0])
        self.serves.set()

    async def kill(self) -> None:
        """Send SIGKILL; return when the process is gone."""
        self.process.kill()
        await self.process.wait()

    async def restart(self, *options: str) -> None:
        """Send SIGKILL and start again on the same port."""
        await self.kill()
        await self.start(*options)

    async def wait(self, seconds: float = 30.0) -> int:
        """The exit status, once the server has exited without being killed."""
        async with asyncio.timeout(seconds):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def server_process(
    folder: Path, *options: str, journal: tuple[str, ...] | None = None
) -> AsyncGenerator[Server]:
    """A fake-engine server with a journal. By default the journal is in `folder`, which must exist;
    `journal` gives other journal settings."""
    if journal is None:
        journal = (f"journal.folder={folder / 'journal'}", "journal.segment_bytes=1048576")
    given = [part for setting in journal for part in ("--set", setting)]
    server = Server(folder, (*given, *options))
    try:
        await server.start()
        yield server
    finally:
        for process in server.processes:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def worker_process(
    folder: Path, address: str, *options: str, name: str = "worker"
) -> AsyncGenerator[Process]:
    """A `penstock rollout` process, killed at the end of the block."""
    worker = start_worker(folder, address, *options, name=name)
    try:
        yield worker
    finally:
        worker.kill()
        await worker.wait()


def start_worker(
    folder: Path,
    address: str,
    *options: str,
    name: str = "worker",
    environment: Mapping[str, str] | None = None,
) -> Process:
    """Start a `penstock rollout` process."""
    command = (sys.executable, "-m", "penstock.cli", "rollout", "--server", address, *options)
    environment = {**ENVIRONMENT, **(environment or {})}
    return Process.start(Command(name, command, folder / f"{name}.log", environment))


def engines_of(pid: int) -> list[psutil.Process]:
    """The vLLM engine processes among a process's descendants, found by the name that they
    set first. vLLM's hardware probes also start processes. A probe may exit between being
    listed and being inspected."""
    return [child for child in psutil.Process(pid).children(recursive=True) if _is_engine(child)]


def _is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith("VLLM::Engine")
    return False


@contextlib.contextmanager
def stopped(pid: int):
    """Stop a process with SIGSTOP until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
