"""Processes of one machine: started in sessions of their own, watched, and ended with all they started.

Whatever happens to the process that starts them, nothing stays behind: an ordinary end and Ctrl-C stop
each of them and then its whole process group; one that is killed takes them along, because the kernel was
asked to.

What a process prints is read whatever becomes of its log: one whose pipe nobody reads stands still. A full
disk costs the lines that it has no room for, and a line of any length is told, in parts.

`Running` is what the rest of the code sees of a process, be it one of this machine (`Process`) or of
another (`ray_placement`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, ParamSpec, Protocol

logger = logging.getLogger(__name__)

# What a process does first: it has the kernel end it when its parent ends, and becomes its program. As a
# program of its own, because Python code between fork and exec can meet locks that threads held, gRPC's
# for one, and then waits for them for ever. A process of Ray's blocks SIGINT, which would be inherited.
BECOME = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sys.argv[2]), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
os.execvp(sys.argv[3], sys.argv[3:])
"""
THIS_HOST = "127.0.0.1"
SECONDS_TO_END = 20.0
"""From SIGTERM to SIGKILL at the end of a run: a server drains."""

SECONDS_TO_BREAK_OFF = 5.0
"""The same where the run is broken off: nobody waits for a step that will not be used."""

SECONDS_FOR_LAST_WORDS = 5.0
"""How long the output of a process that has ended may still arrive."""

LOG_LINES_SHOWN = 25
LOG_BYTES_SHOWN = 64 << 10
"""At most: a log grows over all starts, and is read while everything else waits."""
LONGEST_LINE_BYTES = 1 << 20
"""What is longer goes on as further lines."""

Parameters = ParamSpec("Parameters")


class ProcessFailed(Exception):
    """A process ended that should not have; the message has the end of its log."""


@dataclass(frozen=True)
class Command:
    """What to start: `Command("server", ("python", "-m", ...), Path("server.log"))`."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to this process's own."""
    inherits_terminal: bool = False
    """Whether its standard output is this process's own, so that it can draw a live table."""
    files: Mapping[Path, str] = field(default_factory=dict[Path, str])
    """Written where it runs, before it starts."""
    ranks: int = 1
    """Processes that compute together, each told its place as torchrun does. More than one only where they
    are placed one by one: `ray_placement`."""


class Running(Protocol):
    """One started process, wherever it is."""

    @property
    def command(self) -> Command:
        """What was started."""
        ...

    @property
    def pid(self) -> int:
        """Its process id there; zero where it never came to be."""
        ...

    @property
    def host(self) -> str:
        """Where the others reach it."""
        ...

    async def wait(self) -> int:
        """Its exit status, once it has ended and all it printed is in the log."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        ...

    async def stop(self, patience: float) -> None:
        """Asks it to end, and makes it after `patience` seconds; nothing of its group is left then."""
        ...

    def kill(self) -> None:
        """Ends it and whatever it started, at once."""
        ...

    def ending(self, status: int) -> str:
        """What became of it, such as "was ended by SIGKILL"."""
        ...

    async def write(self, files: Mapping[Path, str]) -> None:
        """Writes files where it runs, each at once; what has ended gets none."""
        ...


def read_tail(log: Path, byte_count: int) -> list[str]:
    """The lines of so much at its end, of which the first may be cut. Raises OSError."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - byte_count))
        return file.read(byte_count).decode(errors="replace").splitlines()


def last_lines(running: Running, most: int) -> list[str]:
    """The end of its log, and of those of its earlier starts."""
    try:
        return read_tail(running.command.log, LOG_BYTES_SHOWN)[-most:]
    except FileNotFoundError:
        return []


def explain(running: Running, status: int) -> str:
    """What happened to it, with the end of its log."""
    lines = last_lines(running, LOG_LINES_SHOWN)
    tail = "\n".join(f"  | {line}" for line in lines) or "  | (it printed nothing)"
    command = running.command
    return f"the {command.name} {running.ending(status)}; the end of {command.log}:\n{tail}"


Take = Callable[[bytes], Awaitable[None]]
"""Takes a line, its end included."""


class Process:
    """One running process of this machine."""

    host = THIS_HOST

    def __init__(
        self,
        command: Command,
        process: subprocess.Popen[bytes],
        copying: Coroutine[None, None, None],
    ) -> None:
        self.command = command
        self._process = process
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watch_end()
        self._copying = asyncio.create_task(copying)

    @classmethod
    def start(cls, command: Command, on_line: Callable[[str], None] | None = None) -> Process:
        """Starts it in a session of its own, where a terminal's Ctrl-C does not reach it. Every line it
        prints goes to its log, and to `on_line` where given.

        To be called with a running event loop.
        """
        write_files(command.files)
        log = command.log.open("ab", buffering=0)
        output = None if command.inherits_terminal else subprocess.PIPE
        process = _spawn(command, output, log, signal.SIGTERM)
        return cls(command, process, _copy_to_log(process.stdout, log, on_line))

    @classmethod
    def start_piped(cls, command: Command, take: Take) -> Process:
        """The same without a log: `take` is given every line, and it waits where that waits. It is killed
        where this process ends: who could wait until it has ended is gone then.
        """
        write_files(command.files)
        process = _spawn(command, subprocess.PIPE, subprocess.PIPE, signal.SIGKILL)
        return cls(command, process, _copy_both(process, take))

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status, once it has ended and all it printed is in the log."""
        # Shielded: whoever stops waiting must not stop what others wait for.
        status = await asyncio.shield(self._ended)
        await asyncio.wait((self._copying,), timeout=SECONDS_FOR_LAST_WORDS)
        return status

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        if not self._ended.done():
            self._process.send_signal(number)

    async def stop(self, patience: float) -> None:
        """Asks it to end, and makes it after `patience` seconds; nothing of its group is left then."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait((self._ended,), timeout=patience)
        finally:
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """Ends it and whatever it started, at once."""
        # Once it has ended its group was killed with it, and its id may be another's by now.
        if not self._ended.done():
            self._kill_group()

    def ending(self, status: int) -> str:
        """What became of it."""
        return ending(status)

    async def write(self, files: Mapping[Path, str]) -> None:
        """Writes files, each at once."""
        write_files(files)

    def _watch_end(self) -> None:
        """Has the kernel say when it ends; asyncio's own wait would also wait for its children."""
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            # Whatever it left behind works for nobody any more, and keeps its output open.
            self._kill_group()
            self._ended.set_result(self._process.wait())

        loop.add_reader(descriptor, ended)

    def _kill_group(self) -> None:
        # It leads its own group, so the group has its id, and outlives it where a child does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _spawn(
    command: Command,
    output: int | None,
    errors: int | BinaryIO,
    when_orphaned: signal.Signals,
) -> subprocess.Popen[bytes]:
    become = (sys.executable, "-I", "-S", "-c", BECOME, str(os.getpid()), str(int(when_orphaned)))
    return subprocess.Popen(
        (*become, *command.arguments),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env={**os.environ, **command.environment},
        start_new_session=True,
    )


async def _copy_to_log(
    output: IO[bytes] | None, log: BinaryIO, on_line: Callable[[str], None] | None
) -> None:
    write = going_on(log_writer(log), str(log.name))

    async def take(line: bytes) -> None:
        write(line)
        if on_line is not None:
            on_line(line.decode(errors="replace").rstrip("\n"))

    with log:
        if output is not None:
            await _copy(output, take)


async def _copy_both(process: subprocess.Popen[bytes], take: Take) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    await asyncio.gather(_copy(process.stdout, take), _copy(process.stderr, take))


async def _copy(output: IO[bytes], take: Take) -> None:
    """Consumes an output until it ends; produces its lines."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    while line := await _next_line(reader):
        await take(line)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """Its end included; empty where there is no more."""
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError:
        return await reader.readexactly(LONGEST_LINE_BYTES) + b"\n"


def log_writer(log: IO[bytes]) -> Callable[[bytes], None]:
    """Writes all of what it is given to a log that is not buffered. Raises OSError."""

    def write(data: bytes) -> None:
        # Where room runs out, a part of it is written.
        while data:
            data = data[log.write(data) :]

    return write


def going_on(act: Callable[Parameters, object], what: str) -> Callable[Parameters, None]:
    """The same for what nothing depends on. An OSError, as of a full disk, goes no further: it is logged
    under the name `what`, and the next one only where it has worked in between."""
    fails = False

    def going(*args: Parameters.args, **named: Parameters.kwargs) -> None:
        nonlocal fails
        try:
            act(*args, **named)
        except OSError as error:
            if not fails:
                logger.warning("%s: %s; what comes is left out until that is over", what, error)
            fails = True
        else:
            fails = False

    return going


def write_files(files: Mapping[Path, str]) -> None:
    """Each is as it was, or whole, and nobody else's to read: there may be secrets in it."""
    for path, text in files.items():
        if _is_there(path, text):
            continue  # There is always room for it.
        path.parent.mkdir(parents=True, exist_ok=True)
        # Others of this host may write the same.
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.touch(mode=0o600)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)


def _is_there(path: Path, text: str) -> bool:
    try:
        return path.stat().st_mode & 0o777 == 0o600 and path.read_bytes() == text.encode()
    except FileNotFoundError:
        return False


class FirstMatch:
    """Waits for the first line of a process that matches; given to `Process.start` as `on_line`."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def __call__(self, line: str) -> None:
        """Takes a line."""
        if not self._found.done() and (match := self._pattern.search(line)) is not None:
            self._found.set_result(match.group(1))

    @property
    def found(self) -> str | None:
        """The match's first group, as soon as there is one."""
        return self._found.result() if self._found.done() else None

    async def wait(self, process: Running) -> str:
        """The match's first group. Raises ProcessFailed where the process ends without such a line."""
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((self._found, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._found.done():
                raise ProcessFailed(explain(process, ended.result()))
            return self._found.result()
        finally:
            ended.cancel()


def ending(status: int) -> str:
    """What an exit status says, such as "was ended by SIGKILL"."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited {status}"


async def end(processes: Sequence[Running]) -> None:
    """Stops them one after another, the last started first; an interruption kills what is left."""
    try:
        for process in reversed(processes):
            await process.stop(SECONDS_TO_END)
    finally:
        for process in processes:
            process.kill()


async def end_in_turn(stages: Sequence[Sequence[Running]], patience: float) -> None:
    """Stops one stage after another, all of a stage at once; an interruption kills what is left."""
    try:
        for stage in stages:
            await asyncio.gather(*(process.stop(patience) for process in stage))
    finally:
        for stage in stages:
            for process in stage:
                process.kill()


async def break_off(processes: Sequence[Running]) -> None:
    """Stops them all at once, soon; an interruption kills what is left."""
    try:
        await asyncio.gather(*(process.stop(SECONDS_TO_BREAK_OFF) for process in processes))
    finally:
        for process in processes:
            process.kill()
