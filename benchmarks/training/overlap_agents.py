"""The agents of benchmarks/training/overlap.py: turns, waits for tools, and a log of weight versions.

Each outcome adds a line to the file named by $OVERLAP_LOG: the trajectory, and how many tokens each weight
version sampled. From that file and the trainer's ledger the benchmark computes every lag independently.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path

from penstock.client import Task, Trajectory
from penstock.demo.rewards import last_integer_is_answer

SHORTEST_SECONDS = 0.05
LONGEST_SECONDS = 5.0
TAIL = 1.0
"""Shape of the Pareto distribution. The mean wait is 0.23 s, and one wait in a hundred is cut off."""


def tool_seconds(rng: random.Random) -> float:
    return min(SHORTEST_SECONDS * rng.paretovariate(TAIL), LONGEST_SECONDS)


async def with_tools(task: Task, trajectory: Trajectory) -> None:
    """Takes a turn, waits for a tool that repeats the question, and takes the turn that is scored."""
    await trajectory.turn()
    # The same waits in every run.
    rng = random.Random(f"{task.index} {trajectory.sample_index}")
    await asyncio.sleep(tool_seconds(rng))
    await trajectory.turn("Look again: what is it?")


async def reward(task: Task, trajectory: Trajectory) -> float:
    """The demo's reward; also writes the log."""
    note(trajectory)
    return last_integer_is_answer(task, trajectory)


async def chance(task: Task, trajectory: Trajectory) -> float:
    """A random reward, different for siblings, so that every step costs the trainer the same."""
    note(trajectory)
    return random.Random(trajectory.trajectory_id).random()


def note(trajectory: Trajectory) -> None:
    """Adds a trajectory's line to the log."""
    counts: Counter[int] = Counter()
    for turn in trajectory.turns:
        for segment in turn.segments:
            if segment.from_policy:
                counts[segment.weight_version] += len(segment.token_ids)
    line = json.dumps({"trajectory_id": trajectory.trajectory_id, "tokens": dict(counts)})
    with Path(os.environ["OVERLAP_LOG"]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
