"""What the workers of the fault tests do: `penstock rollout --generate tests.faults.agents:generate`."""

from __future__ import annotations

import asyncio
import random

from penstock.client import Task, Trajectory


async def generate(task: Task, trajectory: Trajectory) -> float:
    """A few turns, now and then with a pause between them."""
    rng = random.Random(trajectory.trajectory_id)
    await trajectory.turn(max_tokens=rng.randint(1, 30), ignore_eos=True)
    for _ in range(rng.randint(0, 2)):
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        await trajectory.turn("and then?", max_tokens=rng.randint(1, 30), ignore_eos=True)
    return rng.random()
