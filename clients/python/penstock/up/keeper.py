"""Keeps one process on a node of a cluster: starts it, passes on its output, and forwards signals.

    start ──► read, until no lines are left ──► status
                  signal, write meanwhile

A keeper lives in an actor (`ray_placement`). When the actor's process ends for any reason, the kernel kills
the kept process. It does not kill that process's own children. A small watcher, which briefly outlives the
actor's process, kills the whole group. As with any pipe, a caller that does not read the output blocks the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from penstock.up.processes import Command, Process, write_files

LINES_WAITING = 4096
LINES_AT_ONCE = 512

# The watcher reads the id of a process group, and later a second word when the group has ended. If the pipe
# closes before the second word, the actor's process is dead, and the watcher kills the group. The watcher
# is not a child of that process, because Ray kills an actor's children along with the actor.
WATCH = """
import os, signal, sys
if os.fork():
    os._exit(0)
os.setsid()
told = sys.stdin.buffer.read().split()
if len(told) == 1:
    try:
        os.killpg(int(told[0]), signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


class FolderMissing(Exception):
    """The working folder of the commands does not exist on this node."""


class Keeper:
    """Starts and follows one process."""

    def __init__(self, folder: str) -> None:
        """Changes to `folder`, against which relative paths resolve. Raises FolderMissing."""
        try:
            os.chdir(folder)
        except OSError as error:
            raise FolderMissing(
                f"{folder}, where `penstock up` runs, must exist on every node: {error.strerror}"
            ) from error
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(LINES_WAITING)
        self._process: Process | None = None
        self._ending: asyncio.Task[None] | None = None
        self._watcher: int | None = None

    async def free_port(self) -> int:
        """A port of this host that is free at this moment."""
        with socket.socket() as listening:
            listening.bind(("", 0))
            return int(listening.getsockname()[1])

    async def start(self, command: Command) -> int:
        """Starts the process; returns its process id."""
        self._watcher = await asyncio.to_thread(_start_watcher)
        self._process = Process.start_piped(command, self._lines.put)
        self._tell_watcher(self._process.pid)
        self._ending = asyncio.create_task(self._end(self._process))
        return self._process.pid

    async def read(self) -> list[bytes]:
        """Waits for output and returns the next lines; an empty list once it has ended and all are read."""
        lines = [await self._lines.get()]
        while len(lines) < LINES_AT_ONCE and not self._lines.empty():
            lines.append(self._lines.get_nowait())
        told = [line for line in lines if line is not None]
        if told and len(told) < len(lines):
            # The end is returned separately, by the next call.
            self._lines.put_nowait(None)
        return told

    async def status(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(signal.Signals(number))

    async def write(self, files: Mapping[Path, str]) -> None:
        write_files(files)

    async def _end(self, process: Process) -> None:
        await process.wait()
        # Its group was killed when it ended, and the group id may be reused.
        self._tell_watcher("ended")
        if self._watcher is not None:
            os.close(self._watcher)
            self._watcher = None
        await self._lines.put(None)

    def _tell_watcher(self, what: object) -> None:
        assert self._watcher is not None
        # The watcher may have been killed; the process runs without it.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._watcher, f"{what}\n".encode())


def _start_watcher() -> int:
    """Starts the watcher; returns the write end of its pipe, which closes when this process ends."""
    watched, told = os.pipe()
    try:
        subprocess.run(
            (sys.executable, "-I", "-S", "-c", WATCH),
            stdin=watched,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    finally:
        os.close(watched)
    return told
