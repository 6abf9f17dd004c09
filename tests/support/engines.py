"""Processes forked from one that has vLLM loaded, because importing it takes 11 s of CPU: the process of an
engine, or a whole server with it.

The product spawns its engine process. `tests/server/vllm/test_engine_process.py` and the tests that start
`penstock serve` as a program do too.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing import reduction
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.server.vllm import environment

CONTEXT = multiprocessing.get_context("forkserver")
SMALL_CACHE = ("--kv-cache-memory-bytes", str(64 << 20))
"""To clear the gigabytes that are the default takes seconds, and each test process would have them."""
LOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "penstock.server.vllm.engine",
    "penstock.server.vllm.worker.extension",
)


async def start_engine(arguments: Any) -> Any:
    """What `VllmEngine.start` does, with a forked engine process."""
    from penstock.server.vllm.engine import VllmEngine

    with forking():
        return await VllmEngine.start(arguments)


@contextlib.contextmanager
def forking() -> Generator[None]:
    """Fork the engine processes that start in this block."""
    _load()
    with (
        patch("vllm.v1.engine.utils.get_mp_context", lambda: CONTEXT),
        patch("penstock.server.vllm.process.binding_children", _binding),
    ):
        yield


def _load() -> None:
    # The loaded libraries read these once.
    environment.set_cpu_defaults()
    CONTEXT.set_forkserver_preload(list(LOADED))
    multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def _binding(prepare: Callable[[], None]) -> Generator[None]:
    """What `binding_children` does. The kernel would bind an engine process to the one that forks it."""
    process = multiprocessing.current_process()
    name = process.name
    process.name = _Name(name, prepare)
    try:
        yield
    finally:
        process.name = name


class _Name(str):
    __slots__ = ("prepare",)
    prepare: Callable[[], None]

    def __new__(cls, name: str, prepare: Callable[[], None]) -> _Name:
        made = super().__new__(cls, name)
        made.prepare = prepare
        return made

    def __reduce__(self) -> Any:
        return _arrive, (str(self), self.prepare, dict(os.environ))


def _arrive(name: str, prepare: Callable[[], None], variables: dict[str, str]) -> str:
    """Run in the forked process before its target."""
    os.environ.clear()
    os.environ.update(variables)
    # As vLLM names it, whose own call does not reach the title of a forked process.
    Path("/proc/self/comm").write_text("VLLM::Engine")
    threading.Thread(target=_die_with_starter, daemon=True).start()
    prepare()
    return name


def _die_with_starter() -> None:
    while (starter := multiprocessing.parent_process()) is None:
        time.sleep(0.01)
    multiprocessing.connection.wait([starter.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class ForkedProcess:
    """A function in a forked process. Has the part of asyncio's process interface that tests use."""

    def __init__(self, process: Any, stdin: int, stdout: asyncio.StreamReader, pipe: Any) -> None:
        self._process, self._stdin, self.stdout, self._pipe = process, stdin, stdout, pipe

    @classmethod
    async def start(cls, function: Callable[[], None]) -> ForkedProcess:
        """Run the function of a module with pipes as standard input and output."""
        await asyncio.to_thread(_load)
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        process = CONTEXT.Process(target=_Run(function, stdin, stdout))
        process.start()
        os.close(stdin)
        os.close(stdout)
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_stdout, "rb", 0)
        )
        return cls(process, to_stdin, reader, pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, line: str) -> None:
        os.write(self._stdin, line.encode() + b"\n")

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.join)

    async def close(self) -> None:
        self.kill()
        await self.wait()
        self._pipe.close()
        os.close(self._stdin)


class _Run:
    """Takes the two descriptors along to the forked process."""

    def __init__(self, function: Callable[[], None], stdin: int, stdout: int) -> None:
        self._function, self._streams = function, (stdin, stdout)

    def __getstate__(self) -> dict[str, Any]:
        return {"function": self._function, "streams": [*map(reduction.DupFd, self._streams)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._function = state["function"]
        self._streams = tuple(held.detach() for held in state["streams"])

    def __call__(self) -> None:
        stdin, stdout = self._streams
        os.dup2(stdin, 0)
        for stream in (1, 2):
            os.dup2(stdout, stream)
        for descriptor in self._streams:
            os.close(descriptor)
        self._function()
