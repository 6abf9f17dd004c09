"""What the workers of the fault tests do: `penstock rollout --generate tests.faults.agents:generate`."""

from __future__ import annotations

import asyncio
import os
import random
from functools import cache
from pathlib import Path

from penstock.client import Task, Trajectory
from tests.faults.agent_log import write_down

LOG = "PENSTOCK_TEST_AGENT_LOG"
"""Names a folder: `generate` writes down there what its closes are answered."""
TOOL_ANSWERS = "PENSTOCK_TEST_TOOL_ANSWERS"
"""Names a file: the tool of `waits` answers once it is there."""


async def generate(task: Task, trajectory: Trajectory) -> float:
    """A few turns, now and then with a pause between them."""
    rng = random.Random(trajectory.trajectory_id)
    if LOG in os.environ:
        # Of each process its own: two lines that are written at once are none.
        write_down(trajectory, Path(os.environ[LOG], f"{os.getpid()}.jsonl"))
    await trajectory.turn(max_tokens=rng.randint(1, 30), ignore_eos=True)
    for _ in range(rng.randint(0, 2)):
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        await trajectory.turn("and then?", max_tokens=rng.randint(1, 30), ignore_eos=True)
    return rng.random()


async def waits(task: Task, trajectory: Trajectory) -> float:
    """A turn, a tool that answers late, another turn."""
    await trajectory.turn(max_tokens=4, ignore_eos=True)
    await _tool().wait()
    await trajectory.turn("it says", max_tokens=4, ignore_eos=True)
    return 1.0


@cache
def _tool() -> asyncio.Event:
    """One for all attempts of a process."""
    answered = asyncio.Event()
    _watching.add(asyncio.ensure_future(_watch(answered)))
    return answered


_watching: set[asyncio.Future[None]] = set()


async def _watch(answered: asyncio.Event) -> None:
    while not Path(os.environ[TOOL_ANSWERS]).exists():
        await asyncio.sleep(0.05)
    answered.set()
