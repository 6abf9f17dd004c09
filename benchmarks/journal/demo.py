"""The cost of the journal in the demo: speed with durable groups and outcomes, and without.

    python -m benchmarks.journal.demo [--steps 16] [--rounds 3]

Each round runs `penstock demo` from the same seed with `--durability fsync`, `process` and `none`, in
random order. Speed is trained tokens per second, from the end of the trainer's third step to that of its
last. Before that the server is still filling up. Ratios are taken within a round, because machines are
shared and noisy, and the median is printed.

The last line is one JSON object: tokens per second with `fsync` and with `process`, each as a ratio to
`none`: {"fsync": .., "process": ..}
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from penstock.demo.summary import read_run

DURABILITIES = ("fsync", "process", "none")
FILLING_STEPS = 3


def tokens_per_second(folder: Path, steps: int, durability: str) -> float:
    """Trained tokens per second of one demo."""
    command = [sys.executable, "-m", "penstock.client", "demo", "--steps", str(steps)]
    command += ["--target", "none"]
    command += ["--out", str(folder), "--durability", durability]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    found = read_run(folder).steps
    assert len(found) == steps, f"{len(found)} of {steps} steps"
    counted = found[FILLING_STEPS:]
    seconds = counted[-1].time - found[FILLING_STEPS - 1].time
    return sum(step.tokens for step in counted) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the cost of the journal in the demo.")
    parser.add_argument("--steps", type=int, default=16, help="steps of each demo")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds, each with one demo of every kind"
    )
    arguments = parser.parse_args()
    if arguments.steps <= FILLING_STEPS + 1:
        parser.error(f"--steps must be more than {FILLING_STEPS + 1}")
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            order = random.sample(DURABILITIES, len(DURABILITIES))
            rounds.append(
                {
                    kind: tokens_per_second(
                        Path(folder) / f"{number}-{kind}", arguments.steps, kind
                    )
                    for kind in order
                }
            )
    table = Table(title=f"demo of {arguments.steps} steps, {arguments.rounds} rounds")
    for column in (
        "journal",
        "tokens per second",
        "ratio to none, median",
        "ratio to none, each round",
    ):
        table.add_column(column, justify="right")
    ratios: dict[str, float] = {}
    for kind in DURABILITIES:
        each = [found[kind] / found["none"] for found in rounds]
        ratios[kind] = median(each)
        speed = median(found[kind] for found in rounds)
        shown = "  ".join(f"{ratio:.3f}" for ratio in each)
        table.add_row(kind, f"{speed:.0f}", f"{ratios[kind]:.3f}", shown)
    Console(width=100).print(table)
    print(json.dumps({kind: round(ratios[kind], 4) for kind in DURABILITIES if kind != "none"}))


if __name__ == "__main__":
    main()
