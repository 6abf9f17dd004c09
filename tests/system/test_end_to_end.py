"""Server, worker and trainer as real processes on real vLLM, each killed with SIGKILL in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from tests.faults.report import Report
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("vllm")

MARK = "PENSTOCK_TEST_MARK"
# The keepalive interval and timeout of wire.channel, with room for a busy machine.
KEEPALIVE_SECONDS = 15 + 15


class Process:
    """A `penstock` command and its output so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self._changed:
                self.lines.append(line.decode(errors="replace").rstrip())
                self._changed.notify_all()

    async def says(self, *words: str, seconds: float = 90, since: int = 0) -> str:
        """Wait for a line that contains all these words, ignoring case; return it."""

        def found() -> str | None:
            for line in self.lines[since:]:
                if all(word in line.lower() for word in words):
                    return line
            return None

        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: found() is not None)
        except TimeoutError:
            raise AssertionError(f"{words} not said in: " + "\n".join(self.lines)) from None
        line = found()
        assert line is not None
        return line

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


def left_behind(mark: str) -> dict[int, str]:
    """The remaining processes of a test, recognised by a variable they inherit."""
    wanted = f"{MARK}={mark}".encode()
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


Start = Callable[..., "asyncio.Future[Process]"]


@pytest.fixture
async def start() -> AsyncGenerator[Callable[..., object]]:
    mark = uuid.uuid4().hex
    started: list[Process] = []

    async def run(*arguments: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        started.append(Process(process))
        return started[-1]

    run.mark = mark  # type: ignore[attr-defined]
    yield run
    for process in started:
        if process.process.returncode is None:
            await process.kill()
    for pid in left_behind(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


CONFIG = """
[server]
address = "{address}"
give_up_after_seconds = 5

[run]
id = "kills"
out = "{out}"
steps = 10000
save_model = false

[model]
path = "{model}"
dtype = "float32"
threads = 1

[data]
group_size = 2

[data.sampling]
temperature = 1.0
max_tokens = 8

[data.jsonl]
path = "{tasks}"

[train]
groups_per_step = 2
learning_rate = 1e-3
"""


def steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.timeout(300)
async def test_kill_9_of_each_part(
    tmp_path: Path, start: Callable[..., object], monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    if report.count is None:
        pytest.skip("takes a minute and a half: make faults; the demo's test kills one of them")
    model = make_tiny_model(tmp_path / "model")
    tasks = tmp_path / "tasks.jsonl"
    lines = [json.dumps({"prompt": f"say {i}", "answer": str(i)}) for i in range(50)]
    tasks.write_text("\n".join(lines))
    (tmp_path / "scoring.py").write_text(
        "def reward(task, trajectory):\n    return float(len(trajectory.text) % 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = await start(
        *("serve", "--model", str(model), "--dtype", "float32", "--max-model-len", "256"),
        *("--listen", "127.0.0.1:0", "--set", "leases.grace_seconds=1"),
    )  # type: ignore[misc]
    line = await server.says("penstock serving")
    address = line.split(" on ")[1].split()[0]
    out = tmp_path / "out"
    config = tmp_path / "train.toml"
    config.write_text(CONFIG.format(address=address, out=out, model=model, tasks=tasks))
    rollout = ("rollout", "--server", address, "--reward", "scoring:reward", "--concurrency", "8")
    worker = await start(*rollout)  # type: ignore[misc]
    trainer = await start("train", str(config))  # type: ignore[misc]
    await trainer.says("step", "reward")

    # The worker: the server notices at once, and a new worker takes over.
    await worker.kill()
    await server.says("agent", "is gone", seconds=KEEPALIVE_SECONDS)
    said = len(trainer.lines)
    worker = await start(*rollout)  # type: ignore[misc]
    await trainer.says("step", "reward", since=said + 1)

    # The trainer: the server notices at once, and a new trainer continues, over a collective.
    await trainer.kill()
    await server.says("trainer is gone", seconds=KEEPALIVE_SECONDS)
    collective = ("weights.transport=collective", "weights.collective.backend=gloo")
    trainer = await start("train", str(config), *(o for s in collective for o in ("--set", s)))  # type: ignore[misc]
    await trainer.says("step", "reward")
    assert worker.process.returncode is None

    # The server: worker and trainer both report it, neither hangs, and the engine process is gone too.
    said_by_worker, said_by_trainer = len(worker.lines), len(trainer.lines)
    await server.kill()
    await worker.says(
        "the server at", "is unavailable", since=said_by_worker, seconds=KEEPALIVE_SECONDS
    )
    await trainer.says("server", since=said_by_trainer, seconds=KEEPALIVE_SECONDS)
    async with asyncio.timeout(60):
        assert await trainer.process.wait() != 0
    worker.process.terminate()
    async with asyncio.timeout(30):
        await worker.process.wait()
    async with asyncio.timeout(15):
        while left_behind(start.mark):  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
