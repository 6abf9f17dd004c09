"""Plots the results of a run: `python picture.py runs/math [math.png]`.

The upper panel shows the reward of each step, as sampled, and of each evaluation, greedy. The lower panel
shows the evaluations by level.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMOOTHED_STEPS = 9


def read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The steps and the evaluations of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if row.get("kind") == "evaluation"]
    return [row for row in rows if row.get("kind") != "evaluation"], evaluations


def smooth(values: list[float]) -> list[float]:
    """Moving average over SMOOTHED_STEPS values."""
    half = SMOOTHED_STEPS // 2
    around = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in around]


def draw(folder: Path, path: Path) -> None:
    steps, evaluations = read(folder)
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    at = [row["step"] for row in steps]
    rewards = [row["reward_mean"] for row in steps]
    above.plot(at, rewards, color="#c9d6e8", linewidth=1)
    above.plot(at, smooth(rewards), color="#3465a4", label="sampled while training")
    above.errorbar(
        [row["step"] for row in evaluations],
        [row["reward_mean"] for row in evaluations],
        [row["reward_stderr"] for row in evaluations],
        color="#c4561f",
        marker="o",
        capsize=3,
        label="evaluation: greedy, 64 problems of each level",
    )
    above.set_ylabel("reward")
    above.legend(loc="upper right")
    for level in evaluations[0]["by_source"] if evaluations else ():
        below.plot(
            [row["step"] for row in evaluations],
            [row["by_source"][level]["reward_mean"] for row in evaluations],
            marker="o",
            label=level,
        )
    below.set_ylabel("reward by level")
    below.set_xlabel("step")
    below.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    for axes in (above, below):
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run = Path(sys.argv[1])
    draw(run, Path(sys.argv[2]) if len(sys.argv) > 2 else run / "math.png")
