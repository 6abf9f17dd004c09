"""Shows a run's results as a table and a picture: `python -m research.figures runs/search [search.png]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROWS = 12
"""Rows of the table: the steps of a run are divided into this many parts."""
_STOPPED = "stopped_"


def read(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The steps and the evaluations of a run; empty if it has none yet."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    evaluations = [row for row in rows if row.get("kind") == "evaluation"]
    return [row for row in rows if row.get("kind") != "evaluation"], evaluations


def mean(steps: list[dict[str, Any]], *names: str) -> float:
    """Mean of a figure over the steps that have it; `names` is its path in a step's record."""
    values: list[float] = []
    for step in steps:
        found: Any = step
        for name in names:
            found = found.get(name)
        if found is not None:
            values.append(float(found))
    return sum(values) / len(values) if values else float("nan")


def print_summary(folder: Path) -> None:
    """Prints reward, turns, tool errors and lag over the run, and its evaluations."""
    from rich.console import Console
    from rich.table import Table

    steps, evaluations = read(folder)
    if not steps:
        return
    table = Table("steps", "reward", "F1", "found", "turns", "searches", "stopped", "overlong")
    for title in ("tool errors", "lag", "seconds"):
        table.add_column(title)
    size = max(1, -(-len(steps) // ROWS))
    for at in range(0, len(steps), size):
        part = steps[at : at + size]
        said = {
            name for step in part for name in step["outcome_metrics"] if name.startswith(_STOPPED)
        }
        table.add_row(
            f"{part[0]['step']}-{part[-1]['step']}",
            f"{mean(part, 'reward_mean'):.3f}",
            f"{mean(part, 'outcome_metrics', 'f1'):.3f}",
            f"{mean(part, 'outcome_metrics', 'found'):.2f}",
            f"{mean(part, 'outcome_metrics', 'turns'):.2f}",
            f"{mean(part, 'outcome_metrics', 'calls'):.2f}",
            f"{sum(mean(part, 'outcome_metrics', name) for name in said):.0%}",
            f"{mean(part, 'outcome_metrics', 'overlong'):.0%}",
            f"{mean(part, 'outcome_metrics', 'tool_errors'):.3f}",
            f"{mean(part, 'lag_mean'):.2f}",
            f"{mean(part, 'seconds'):.1f}",
        )
    # Output to a file has no width, so set one.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for row in evaluations:
        levels = ", ".join(
            f"{name} {one['reward_mean']:.3f}" for name, one in row["by_source"].items()
        )
        console.print(
            f"held out, version {row['weight_version']}: {row['reward_mean']:.3f} "
            f"± {row['reward_stderr']:.3f} ({levels})",
            highlight=False,
        )


def draw(folder: Path, path: Path) -> None:
    """Plots reward and its parts, then turns, stops and errors, by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, evaluations = read(folder)
    at = [row["step"] for row in steps]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    above.plot(at, smooth([row["reward_mean"] for row in steps]), label="reward, sampled")
    for name in ("f1", "found"):
        above.plot(
            at, smooth([row["outcome_metrics"][name] for row in steps]), alpha=0.5, label=name
        )
    above.errorbar(
        [row["step"] for row in evaluations],
        [row["reward_mean"] for row in evaluations],
        [row["reward_stderr"] for row in evaluations],
        color="#c4561f",
        marker="o",
        capsize=3,
        label="reward, held out, greedy",
    )
    for name in ("turns", "calls", "overlong", "tool_errors"):
        below.plot(at, smooth([row["outcome_metrics"][name] for row in steps]), label=name)
    below.plot(at, smooth([row["lag_mean"] for row in steps]), label="lag", linestyle=":")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.legend(loc="best")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)  # pyright: ignore[reportUnknownMemberType]


def smooth(values: list[float], around: int = 4) -> list[float]:
    """Moving average over `around` values on each side."""
    parts = [values[max(0, at - around) : at + around + 1] for at in range(len(values))]
    return [sum(part) / len(part) for part in parts]


if __name__ == "__main__":
    run = Path(sys.argv[1])
    print_summary(run)
    draw(run, Path(sys.argv[2]) if len(sys.argv) > 2 else run / "search.png")
