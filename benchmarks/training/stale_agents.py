"""The agents of benchmarks/training/corrections.py for a model whose sampling alone makes no stale data."""

from __future__ import annotations

import asyncio
import os

from penstock.client import Task, Trajectory
from penstock.demo.rewards import last_integer_is_answer


async def late_reward(task: Task, trajectory: Trajectory) -> float:
    """The demo's reward, returned $VERDICT_SECONDS after the answer was sampled."""
    await asyncio.sleep(float(os.environ["VERDICT_SECONDS"]))
    return last_integer_is_answer(task, trajectory)
