"""The processes of benchmarks: lines to them and from them, with their processor time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A process that answers each line on standard input with a line on standard output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._counted = psutil.Process(process.pid)

    @property
    def cpu_seconds(self) -> float:
        """Processor time since the process started."""
        times = self._counted.cpu_times()
        return times.user + times.system

    @property
    def resident_bytes(self) -> int:
        return self._counted.memory_info().rss

    async def read(self) -> str:
        """Returns the next line of its output."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "the process ended"
        return line.decode().strip()

    async def ready(self) -> None:
        """Waits for the line `ready`, after whatever a library prints before it."""
        while await self.read() != "ready":
            pass

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def ask(self, line: str) -> str:
        """Writes a line and returns the answer."""
        self.write(line)
        return await self.read()

    def terminate(self) -> None:
        """Stops a process that does not stop when its standard input ends."""
        with contextlib.suppress(ProcessLookupError):  # Already ended, which the caller reports.
            self._process.terminate()

    async def end(self, seconds: float | None) -> None:
        """Closes its standard input; kills it if it does not end within these seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def started(
    *arguments: str, log: Path | None = None, end_seconds: float | None = 20.0
) -> AsyncGenerator[Process]:
    """Starts a Python process in the root of the checkout, and ends it on exit.

    After `end_seconds` it is killed. None waits for as long as an engine takes to shut down.
    """
    with contextlib.ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("ab"))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            limit=1 << 24,
        )
        own = Process(process)
        try:
            yield own
        finally:
            await own.end(end_seconds)


async def serving_address(process: Process) -> str:
    """Waits until `penstock serve` is listening; returns its address."""
    while " on " not in (line := await process.read()):
        pass
    return line.split(" on ")[1].split()[0]
