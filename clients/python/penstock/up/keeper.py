"""What stands beside one process on a node of a cluster: starts it, tells what it prints, passes signals.

    start ──► read, again and again until there is no more ──► status
                  signal, write meanwhile

It lives in an actor (`ray_placement`), and the process with it: the kernel kills the process where the
actor's own ends, however that comes. What the process started, the kernel does not: a small watcher
outlives the actor's process by a moment and kills the group. Who does not read the output holds the process
up, as with any pipe.
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
from dataclasses import replace
from pathlib import Path

from penstock.up.processes import Command, Process, write_files

LINES_WAITING = 4096
LINES_AT_ONCE = 512

# Told the id of a process group, and later that it ended: where the pipe ends without that, so has who held
# it. No child of the one it watches, for Ray kills an actor's children as it kills the actor.
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
    """The folder that commands are run in is not on this node."""


class Keeper:
    """Keeps one process."""

    def __init__(self, folder: str) -> None:
        """In this folder, where relative paths begin. Raises FolderMissing."""
        try:
            os.chdir(folder)
        except OSError as error:
            raise FolderMissing(
                f"{folder}, where `penstock up` runs, has to be on every node: {error.strerror}"
            ) from error
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(LINES_WAITING)
        self._process: Process | None = None
        self._ending: asyncio.Task[None] | None = None
        self._watcher: int | None = None

    async def free_port(self) -> int:
        """A port of this host that nobody has just now."""
        with socket.socket() as listening:
            listening.bind(("", 0))
            return int(listening.getsockname()[1])

    async def start(self, command: Command) -> int:
        """Starts it; returns its process id."""
        self._watcher = await asyncio.to_thread(_start_watcher)
        self._process = Process.start_piped(command, self._lines.put)
        self._tell_watcher(self._process.pid)
        self._ending = asyncio.create_task(self._end(self._process))
        return self._process.pid

    async def read(self) -> list[bytes]:
        """The next lines, as soon as there are any; none once it has ended and all are told."""
        lines = [await self._lines.get()]
        while len(lines) < LINES_AT_ONCE and not self._lines.empty():
            lines.append(self._lines.get_nowait())
        told = [line for line in lines if line is not None]
        if told and len(told) < len(lines):
            # The end is told by itself.
            self._lines.put_nowait(None)
        return told

    async def status(self) -> int:
        """Its exit status, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def signal(self, number: int) -> None:
        """Passes a signal on."""
        if self._process is not None:
            self._process.signal(signal.Signals(number))

    async def write(self, files: Mapping[Path, str]) -> None:
        """Writes files."""
        write_files(files)

    async def _end(self, process: Process) -> None:
        await process.wait()
        # Its group has ended with it, and the id may be another's one day.
        self._tell_watcher("ended")
        if self._watcher is not None:
            os.close(self._watcher)
            self._watcher = None
        await self._lines.put(None)

    def _tell_watcher(self, what: object) -> None:
        assert self._watcher is not None
        # Whoever killed it: the process runs all the same.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._watcher, f"{what}\n".encode())


def _start_watcher() -> int:
    """Returns the end of the pipe that it is told by, which closes as this process ends."""
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


def for_nodes(command: Command) -> Command:
    """As it is sent to a node: its log stays here, and no terminal is there."""
    return replace(command, log=Path(), inherits_terminal=False)
