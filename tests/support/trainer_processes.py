"""Trainers as separate processes, started by fork, because a short test would otherwise spend most
of its time loading libraries.

    python -m tests.support.trainer_processes SOCKET MODEL

Each test process has one nursery, started with the first trainer, that has the libraries loaded. A
connection to its socket sends an order in JSON and two descriptors for output. The nursery forks a
watcher, and the watcher forks the trainer: `penstock train` from its configuration to its exit
code. The watcher answers with a line that has the trainer's pid, and after the end with a line that
has its exit code. The code is negative if a signal ended the trainer. The nursery ends when its
standard input closes, which happens when the tests end.

`tests.support.forked_command` has it run any other `penstock` command, which is killed if the connection
closes before it ends.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

from tests.faults.trainer_nursery import load
from tests.support.tiny_model import make_tiny_model

ASKED = 3
"""Exit code of a trainer that was asked to stop before it was done."""
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class TrainerProcess:
    """Has the part of asyncio's process interface that tests use."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader, end: Any
    ) -> None:
        self.pid = pid
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        self._ending = asyncio.create_task(self._end(*end))

    async def _end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        line = await reader.readline()
        writer.close()
        assert line, "the watcher is gone"
        self.returncode = int(line)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Everything the trainer writes from now on; returns after it has ended."""
        out, err, _ = await asyncio.gather(self.stdout.read(), self.stderr.read(), self.wait())
        return out, err


@functools.cache
def nursery() -> Path:
    """The socket of this process's nursery."""
    folder = tempfile.TemporaryDirectory(prefix="trainers-")
    path = Path(folder.name)
    model = make_tiny_model(path / "model", layers=1)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(path / "socket"), str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        # Ctrl-C must reach only the tests, which then end the nursery.
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the nursery did not come up"
    # Keep both alive as long as the tests run.
    _LIVING.append((process, folder))
    return path / "socket"


_LIVING: list[Any] = []


async def start_trainer_process(
    config: Path,
    *,
    resume: bool = False,
    env: dict[str, str] | None = None,
    log: Path | None = None,
) -> TrainerProcess:
    """Start `penstock train` with this configuration. `env` replaces this process's environment.
    Output is appended to `log`, or is readable from the process without one."""
    environment = {**(env or os.environ), **ENVIRONMENT}
    order = {"config": str(config), "resume": resume, "env": environment}
    where = await asyncio.to_thread(nursery)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(where))
    readers: list[asyncio.StreamReader] = []
    written: list[int] = []
    for _ in range(2):
        reading, writing = os.pipe()
        if log is not None:
            os.close(writing)
            writing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        written.append(writing)
        readers.append(await _reader(reading))
    data = json.dumps(order).encode()
    socket.send_fds(connection, [len(data).to_bytes(4, "little")], written)
    connection.sendall(data)
    for descriptor in written:
        os.close(descriptor)
    end = await asyncio.open_unix_connection(sock=connection)
    pid = int(await end[0].readline())
    return TrainerProcess(pid, *readers, end)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    return reader


# The nursery process.


def main() -> None:
    os.environ |= ENVIRONMENT
    where, model = sys.argv[1:]
    load(model)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(where)
    listener.listen()
    # The nursery never waits for the watchers.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        head, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
        data = connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        if os.fork() == 0:
            listener.close()
            watch(connection, json.loads(data), descriptors)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


def watch(connection: socket.socket, order: dict[str, Any], descriptors: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        connection.close()
        become_trainer(order, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{pid}\n".encode())
    if "command" in order:
        ended = os.pidfd_open(pid)
        ready, _, _ = select.select([connection, ended], [], [])
        if ended not in ready:
            os.kill(pid, signal.SIGKILL)
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become_trainer(order: dict[str, Any], descriptors: list[int]) -> None:
    code = 70
    try:
        for stream, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(order["env"])
        if "command" in order:
            os.chdir(order["folder"])
            # As of `penstock up`, which reads the lines.
            cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True)
            from penstock.cli.__main__ import main

            main(order["command"])
            code = 0
        else:
            from penstock.trainer.__main__ import train

            code = train(Path(order["config"]), [], order["resume"], False)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
