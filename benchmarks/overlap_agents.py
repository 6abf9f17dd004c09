"""What the workers of benchmarks/overlap.py run: turns, waits on tools, and a log of what they saw.

Each outcome adds a line to the file that $OVERLAP_LOG names: the trajectory, and how many tokens each
weight version sampled. From it and the trainer's ledger alone the benchmark computes every lag again.
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
"""Shape of the Pareto distribution: the mean of the waits is 0.23 s, one in a hundred is cut."""


def tool_seconds(rng: random.Random) -> float:
    """One wait."""
    return min(SHORTEST_SECONDS * rng.paretovariate(TAIL), LONGEST_SECONDS)


async def with_tools(task: Task, trajectory: Trajectory) -> None:
    """A turn, a tool that answers what it was asked, and the turn that is scored."""
    await trajectory.turn()
    # The same waits in every run.
    rng = random.Random(f"{task.index} {trajectory.sample_index}")
    await asyncio.sleep(tool_seconds(rng))
    await trajectory.turn("Look again: what is it?")


async def reward(task: Task, trajectory: Trajectory) -> float:
    """As the demo's."""
    note(trajectory)
    return last_integer_is_answer(task, trajectory)


async def chance(task: Task, trajectory: Trajectory) -> float:
    """Of no meaning, and different for siblings, so that every step costs the trainer the same."""
    note(trajectory)
    return random.Random(trajectory.trajectory_id).random()


def note(trajectory: Trajectory) -> None:
    """Adds a line to the log."""
    counts: Counter[int] = Counter()
    for turn in trajectory.turns:
        for segment in turn.segments:
            if segment.from_policy:
                counts[segment.weight_version] += len(segment.token_ids)
    line = json.dumps({"trajectory_id": trajectory.trajectory_id, "tokens": dict(counts)})
    with Path(os.environ["OVERLAP_LOG"]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
