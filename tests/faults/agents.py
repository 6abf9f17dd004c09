"""Agents of the fault tests' workers, used as `penstock rollout --generate
tests.faults.agents:generate`.
"""

from __future__ import annotations

import asyncio
import os
import random
from functools import cache
from pathlib import Path

from penstock.client import Task, Trajectory
from tests.faults.agent_log import write_down

LOG = "PENSTOCK_TEST_AGENT_LOG"
"""Environment variable that names a folder, in which `generate` logs the answers to its closes."""
HELD = "PENSTOCK_TEST_HELD"
"""Environment variable that names a file. Until it exists, `generate` begins no task but the first ones."""
FIRST_TASKS = 16
TOOL_ANSWERS = "PENSTOCK_TEST_TOOL_ANSWERS"
"""Environment variable that names a file. The tool of `waits` answers once the file exists."""


async def generate(task: Task, trajectory: Trajectory) -> float:
    """Take one to three turns, with short pauses between them."""
    while task.index >= FIRST_TASKS and HELD in os.environ and not Path(os.environ[HELD]).exists():
        await asyncio.sleep(0.05)
    rng = random.Random(trajectory.trajectory_id)
    if LOG in os.environ:
        # Each process has its own file, because lines written at the same time would mix.
        write_down(trajectory, Path(os.environ[LOG], f"{os.getpid()}.jsonl"))
    await trajectory.turn(max_tokens=rng.randint(1, 30), ignore_eos=True)
    for _ in range(rng.randint(0, 2)):
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        await trajectory.turn("and then?", max_tokens=rng.randint(1, 30), ignore_eos=True)
    return rng.random()


async def waits(task: Task, trajectory: Trajectory) -> float:
    """Take a turn, wait for a tool that answers late, take another turn."""
    await trajectory.turn(max_tokens=4, ignore_eos=True)
    await _tool().wait()
    await trajectory.turn("it says", max_tokens=4, ignore_eos=True)
    return 1.0


@cache
def _tool() -> asyncio.Event:
    """One event for all attempts of a process."""
    answered = asyncio.Event()
    _watching.add(asyncio.ensure_future(_watch(answered)))
    return answered


_watching: set[asyncio.Future[None]] = set()


async def _watch(answered: asyncio.Event) -> None:
    while not Path(os.environ[TOOL_ANSWERS]).exists():
        await asyncio.sleep(0.05)
    answered.set()
