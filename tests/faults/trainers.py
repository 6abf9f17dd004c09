"""Trainers that tests kill, their server, and checks that hold for any run, however it went.

The server and its worker are in this process, around the fake engine. Each trainer is a separate
process that trains a tiny model (see `trainer_processes`). The ledger alone shows what a run
trained on. It is compared with what the server accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from penstock.client import Patience, Task, Trajectory, Worker, WorkerSettings
from penstock.client.calls import Calls
from penstock.server.engine.protocol import AdapterLimits
from penstock.trainer.state.ledger import RefusedEntry, StepEntry, read_ledger
from tests.faults.agent_log import write_down
from tests.faults.history_sources import check_what_is_left
from tests.support.trainer_processes import TrainerProcess, start_trainer_process
from tests.trainer.test_end_to_end import Server, configure, letters, sampled, serving

GROUPS_PER_STEP = 2
JOURNAL, AGENTS = "journal", "agents.jsonl"
"""Files of the server and its worker in a run's folder."""
# One task in this many has no successful attempt.
FAILING = 9
KILLED = -signal.SIGKILL


class Nursery:
    """Starts trainers by forking, one at a time."""

    def __init__(self) -> None:
        self._process: TrainerProcess | None = None

    @property
    def pid(self) -> int:
        """The process id of the running trainer."""
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended."""
        assert self._process is not None
        return self._process.returncode is not None

    async def begin(self, config: Path, log: Path, *, resume: bool, failpoints: str = "") -> None:
        """Start a trainer. `end` returns its exit code."""
        environment = {**os.environ, "PENSTOCK_FAILPOINTS": failpoints}
        self._process = await start_trainer_process(config, resume=resume, env=environment, log=log)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def terminate(self) -> None:
        """Ask it to stop after the current step."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    async def end(self) -> int:
        """Wait for its exit code, negative if a signal ended it."""
        assert self._process is not None
        return await self._process.wait()


@contextlib.contextmanager
def nursing() -> Iterator[Nursery]:
    """Provide trainers until the end of the block."""
    nursery = Nursery()
    try:
        yield nursery
    finally:
        nursery.kill()


@dataclass
class Accepted:
    """The groups that the server accepted."""

    trajectories: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Trajectory ids of each group."""
    tasks: dict[str, str] = field(default_factory=dict[str, str])

    def watch(self, server: Server) -> None:
        """Record the groups that this server accepts from now on."""
        buffer = server.serving.buffer
        add = buffer.add

        def note(group: Any) -> None:
            assert group.group_id not in self.tasks, "a group was accepted twice"
            self.tasks[group.group_id] = group.task_id
            self.trajectories[group.group_id] = list(group.trajectory_ids)
            add(group)

        buffer.add = note  # type: ignore[method-assign]


async def ask(task: Task, trajectory: Trajectory) -> None:
    """Each sibling asks something different, because the fake engine answers equal prompts alike."""
    await trajectory.turn(f"Task {task.index}, sample {trajectory.sample_index}.")


async def judge(task: Task, trajectory: Trajectory) -> float:
    if task.index % FAILING == FAILING - 1:
        raise RuntimeError("this one cannot be solved")
    return await letters(task, trajectory)


@dataclass
class Stand:
    """A server with a worker, and the folder of one run."""

    server: Server
    folder: Path
    config: Path
    accepted: Accepted
    steps: int

    @property
    def log(self) -> Path:
        return self.folder / "trainer.log"

    def rows(self) -> list[dict[str, Any]]:
        """The records of its steps."""
        path = self.folder / "out" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def said(self) -> str:
        """The output of all its trainers."""
        return self.log.read_text() if self.log.exists() else ""


@contextlib.asynccontextmanager
async def standing(
    folder: Path,
    model: Path,
    /,
    *,
    steps: int,
    max_lag: int,
    every_steps: int,
    adapters: AdapterLimits | None = None,
    **sections: dict[str, Any],
) -> AsyncGenerator[Stand]:
    """A run that is ready to begin."""
    folder.mkdir(parents=True, exist_ok=True)
    journal = (f"journal.folder={folder / JOURNAL}", "journal.durability=process")
    async with (
        serving(model, step_seconds=0.0, adapters=adapters, settings=journal) as server,
        at_work(server.address, folder / AGENTS),
    ):
        accepted = Accepted()
        accepted.watch(server)
        settings: dict[str, dict[str, Any]] = {
            "run": {"steps": steps},
            "data": {"group_size": 2, "sampling": {"max_tokens": 6}},
            "train": {"groups_per_step": GROUPS_PER_STEP},
            "staleness": {"max_lag": max_lag},
            "checkpoint": {"every_steps": every_steps},
        }
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section}
        config = configure(folder, model, server.address, **settings)
        yield Stand(server, folder, config, accepted, steps)


@contextlib.asynccontextmanager
async def at_work(address: str, log: Path | None = None) -> AsyncGenerator[None]:
    """A worker that logs its answers to `log`."""

    async def asking(task: Task, trajectory: Trajectory) -> None:
        if log is not None:
            write_down(trajectory, log)
        await ask(task, trajectory)

    calls = Calls(address, Patience())
    worker = Worker(calls, asking, judge, WorkerSettings(concurrency=8, drain_seconds=0.1))
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await task
        await calls.close()


def model_of(stand: Stand) -> dict[str, bytes]:
    """The tensors of the model that a run saved, as bytes."""
    (path,) = (stand.folder / "out" / "model").glob("*.safetensors")
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def moments_of(stand: Stand) -> dict[str, np.ndarray[Any, Any]]:
    """The optimizer's state in a run's last checkpoint."""
    folder = stand.folder / "out" / "checkpoints" / f"step-{stand.steps:08d}"
    return load_file(folder / "optimizer.safetensors")


def check_lineage(stand: Stand) -> None:
    """Check that each accepted group was trained once in the surviving lineage, or is still waiting."""
    entries = read_ledger(stand.folder / "out" / "ledger.jsonl")
    steps = [entry for entry in entries if isinstance(entry, StepEntry)]
    refused = {entry.group_id for entry in entries if isinstance(entry, RefusedEntry)}
    assert [entry.step for entry in steps] == list(range(1, stand.steps + 1))
    versions = [entry.weight_version for entry in steps]
    assert versions == sorted(set(versions))
    groups = [group for entry in steps for group in entry.groups]
    assert len(groups) == stand.steps * GROUPS_PER_STEP
    for name, count in Counter(group.group_id for group in groups).items():
        assert count == 1, f"group {name} was trained {count} times"
    for name, count in Counter(group.task_id for group in groups).items():
        assert count == 1, f"task {name} was trained {count} times"
    trained = {group.group_id for group in groups}
    accepted = stand.accepted
    for group in groups:
        assert list(group.trajectory_ids) == accepted.trajectories[group.group_id]
        assert group.task_id == accepted.tasks[group.group_id]
    assert not trained & refused
    buffer = stand.server.serving.buffer
    left = {name for name in accepted.tasks if buffer.find(name) is not None}
    # The server has released every group in the last checkpoint. The groups it still has are untrained.
    assert not left & trained
    assert trained | refused | left == set(accepted.tasks)
    check_data(stand, {group.task_id for group in groups}, refused)


def check_history(stand: Stand) -> None:
    """Check the same after all processes have ended, from the journal, the ledger and the agents'
    log alone.
    """
    folder = stand.folder
    history = check_what_is_left(folder / JOURNAL, folder / "out" / "ledger.jsonl", folder / AGENTS)
    assert {answer.group_id for answer in history.answers} >= {
        name for step in history.ledger for name in step.group_ids
    }


def check_data(stand: Stand, trained: set[str], refused: set[str]) -> None:
    """Check that no prompt was skipped: every prompt before a trained one was trained too, or is in
    progress.
    """
    ends = {int(stand.accepted.tasks[name].rpartition("/")[2]) for name in refused}
    assert all(index % FAILING == FAILING - 1 for index in ends)
    done = {int(task.rpartition("/")[2]) for task in trained} | ends
    under_way = {
        int(task.rpartition("/")[2])
        for name, task in stand.accepted.tasks.items()
        if stand.server.serving.buffer.find(name) is not None
    }
    under_way |= {
        group.task.index
        for group in stand.server.serving.queue._groups.values()
        if group.task is not None
    }
    assert set(range(max(done))) <= done | under_way


def check_weights(stand: Stand) -> None:
    """Check that the server samples with the model that the trainer saved."""
    assert sampled(stand.server.engine) == model_of(stand)
