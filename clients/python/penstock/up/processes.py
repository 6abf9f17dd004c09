"""Processes of this machine, each in its own session: starts them, watches them, and ends their groups.

No process outlives the one that started it. An ordinary end and Ctrl-C stop each process and then its
whole process group. If the parent is killed, the kernel ends its children.

The output of a process is always read, even if its log cannot be written; a full pipe would block the
process. A full disk costs only the log lines for which there is no room. A very long line is passed on in
parts.

`Running` is the interface to a process, whether on this machine (`Process`) or another (`ray_placement`).
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
from itertools import chain
from pathlib import Path
from typing import IO, BinaryIO, ParamSpec, Protocol

from penstock.common.answers import ending

logger = logging.getLogger(__name__)

# A new process first asks the kernel to end it when its parent ends, then becomes its program. This is a
# separate program because Python code between fork and exec can meet locks that other threads held, such
# as gRPC's, and wait for them forever. The signal mask is reset because Ray's processes block SIGINT, and
# children would inherit that.
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
"""From SIGTERM to SIGKILL when a run ends; a server drains in this time."""

SECONDS_TO_BREAK_OFF = 5.0
"""The same if the run is broken off: the result of the current step will not be used."""

SECONDS_FOR_LAST_WORDS = 5.0
"""How long to wait for remaining output after a process has ended."""

LOG_LINES_SHOWN = 25
LOG_BYTES_SHOWN = 64 << 10
"""Upper bound on the log bytes read: a log grows over all starts, and reading it blocks the event loop."""
LONGEST_LINE_BYTES = 1 << 20
"""A longer line is passed on as several lines."""

Parameters = ParamSpec("Parameters")


class ProcessFailed(Exception):
    """A process ended that should not have; the message includes the end of its log."""


@dataclass(frozen=True)
class Command:
    """A process to start: `Command("server", ("python", "-m", ...), Path("server.log"))`."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables added to this process's environment."""
    inherits_terminal: bool = False
    """Whether it shares this process's standard output, so that it can draw a live table."""
    files: Mapping[Path, str] = field(default_factory=dict[Path, str])
    """Files written on its host before it starts."""
    ranks: int = 1
    """Processes that compute together. Each gets its place in the environment variables of torchrun.
    More than one only if a placement starts them one by one (`ray_placement`)."""


class Running(Protocol):
    """One started process, on whatever host it runs."""

    @property
    def command(self) -> Command: ...

    @property
    def pid(self) -> int:
        """Its process id on its host; zero if it never started."""
        ...

    @property
    def host(self) -> str:
        """Address at which other processes reach its host."""
        ...

    async def wait(self) -> int:
        """Returns its exit status, once it has ended and its log holds all its output."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        ...

    async def stop(self, patience: float) -> None:
        """Sends SIGTERM, then SIGKILL after `patience` seconds; nothing of its group is left afterwards."""
        ...

    def kill(self) -> None:
        """Kills it and everything it started, immediately."""
        ...

    def ending(self, status: int) -> str:
        """How it ended, such as "was ended by SIGKILL"."""
        ...

    async def write(self, files: Mapping[Path, str]) -> None:
        """Writes files on its host, each atomically; does nothing if the process has ended."""
        ...


def read_tail(log: Path, byte_count: int) -> list[str]:
    """The lines in the last `byte_count` bytes of a log; the first may be cut. Raises OSError."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - byte_count))
        return file.read(byte_count).decode(errors="replace").splitlines()


def last_lines(running: Running, most: int) -> list[str]:
    """The last lines of its log, which also holds the output of its earlier starts."""
    try:
        return read_tail(running.command.log, LOG_BYTES_SHOWN)[-most:]
    except FileNotFoundError:
        return []


def explain(running: Running, status: int) -> str:
    """How it ended, with the end of its log."""
    lines = last_lines(running, LOG_LINES_SHOWN)
    tail = "\n".join(f"  | {line}" for line in lines) or "  | (it printed nothing)"
    command = running.command
    return f"the {command.name} {running.ending(status)}; the end of {command.log}:\n{tail}"


Take = Callable[[bytes], Awaitable[None]]
"""Takes one line, including its line end."""


class Process:
    """A running process of this machine."""

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
        """Starts a process in its own session, so that a terminal's Ctrl-C does not reach it.

        Every line that it prints goes to its log, and to `on_line` if given. Needs a running event loop.
        """
        write_files(command.files)
        log = command.log.open("ab", buffering=0)
        output = None if command.inherits_terminal else subprocess.PIPE
        process = _spawn(command, output, log, signal.SIGTERM)
        return cls(command, process, _copy_to_log(process.stdout, log, on_line))

    @classmethod
    def start_piped(cls, command: Command, take: Take) -> Process:
        """Starts a process without a log. `take` gets every line; reading pauses until `take` returns.

        When this process ends, the kernel kills the new one with SIGKILL: no process is left that could
        wait for a gentler end.
        """
        write_files(command.files)
        process = _spawn(command, subprocess.PIPE, subprocess.PIPE, signal.SIGKILL)
        return cls(command, process, _copy_both(process, take))

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group id."""
        return self._process.pid

    async def wait(self) -> int:
        # Shielded: a cancelled caller must not cancel the future that others wait for.
        status = await asyncio.shield(self._ended)
        await asyncio.wait((self._copying,), timeout=SECONDS_FOR_LAST_WORDS)
        return status

    def signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            self._process.send_signal(number)

    async def stop(self, patience: float) -> None:
        await halt(self, self._ended, patience)

    def kill(self) -> None:
        # Its group was killed when it ended, and its id may have been reused since.
        if not self._ended.done():
            self._kill_group()

    def ending(self, status: int) -> str:
        return ending(status)

    async def write(self, files: Mapping[Path, str]) -> None:
        write_files(files)

    def _watch_end(self) -> None:
        """Watches a pidfd for its end. asyncio's own wait would also wait for its children."""
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            # Leftover children serve no purpose any more, and would keep its output open.
            self._kill_group()
            self._ended.set_result(self._process.wait())

        loop.add_reader(descriptor, ended)

    def _kill_group(self) -> None:
        # It leads its group, so the group has its id. The group outlives it if a child does.
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
    """Reads an output until it ends, and passes each line to `take`."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    while line := await _next_line(reader):
        await take(line)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line, including its line end; empty at the end of the output."""
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError:
        return await reader.readexactly(LONGEST_LINE_BYTES) + b"\n"


def log_writer(log: IO[bytes]) -> Callable[[bytes], None]:
    """Makes a function that writes all its data to an unbuffered log. The function raises OSError."""

    def write(data: bytes) -> None:
        # When room runs out, a write may be partial.
        while data:
            data = data[log.write(data) :]

    return write


def going_on(act: Callable[Parameters, object], what: str) -> Callable[Parameters, None]:
    """Wraps a best-effort action: an OSError, such as a full disk, is logged under `what` and ignored.

    Repeated failures are logged once, until the action succeeds again.
    """
    fails = False

    def going(*args: Parameters.args, **named: Parameters.kwargs) -> None:
        nonlocal fails
        try:
            act(*args, **named)
        except OSError as error:
            if not fails:
                logger.warning("%s: %s; dropping output until this is resolved", what, error)
            fails = True
        else:
            fails = False

    return going


def write_files(files: Mapping[Path, str]) -> None:
    """Replaces each file atomically, readable only by this user because it may hold secrets."""
    for path, text in files.items():
        if _is_there(path, text):
            continue  # Unchanged; needs no room on the disk.
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes of this host may write the same file.
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
    """Waits for a process's first matching line; pass it to `Process.start` as `on_line`."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def __call__(self, line: str) -> None:
        if not self._found.done() and (match := self._pattern.search(line)) is not None:
            self._found.set_result(match.group(1))

    @property
    def found(self) -> str | None:
        """The first group of the match; None until a line matches."""
        return self._found.result() if self._found.done() else None

    async def wait(self, process: Running) -> str:
        """Returns the first group of the match. Raises ProcessFailed if the process ends without one."""
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait((self._found, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._found.done():
                raise ProcessFailed(explain(process, ended.result()))
            return self._found.result()
        finally:
            ended.cancel()


async def halt(running: Running, ended: asyncio.Future[int], patience: float) -> None:
    """Has a process end, which sets `ended`; kills it after `patience` seconds."""
    running.signal(signal.SIGTERM)
    try:
        await asyncio.wait((ended,), timeout=patience)
    finally:
        running.kill()
    await running.wait()


async def end(processes: Sequence[Running]) -> None:
    """Stops the processes one by one, the last started first; an interruption kills the rest."""
    await end_in_turn([[process] for process in reversed(processes)], SECONDS_TO_END)


async def end_in_turn(stages: Sequence[Sequence[Running]], patience: float) -> None:
    """Stops one stage after another, each stage's processes together; an interruption kills the rest."""
    try:
        for stage in stages:
            await asyncio.gather(*(process.stop(patience) for process in stage))
    finally:
        for process in chain.from_iterable(stages):
            process.kill()


async def break_off(processes: Sequence[Running]) -> None:
    """Stops all processes at once, with little patience; an interruption kills the rest."""
    await end_in_turn([processes], SECONDS_TO_BREAK_OFF)
