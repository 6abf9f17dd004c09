"""Final reward by off-policy correction, on the demo's task with data that is made stale on purpose.

    python -m benchmarks.training.corrections [--smollm2] [--steps N] [--seeds 3]
        [--only tis,icepop] [--out FOLDER]

Runs are like `penstock demo`, with these changes: the learning rate is doubled, a step has two optimizer
updates, `max_lag` is 8, and the freshness controller is off (`freshness = false`). So the server always has
the groups of nine steps in flight, and the trainer gets groups as old as `max_lag` allows. `fresh` is the
same with `max_lag` 0, which leaves little to correct.

By default it trains the small model of `support.taught_model`, 120 steps a run, about an hour in all.
Training that model is faster than sampling from it, so its data would not get old. Therefore its rewards
come late, and the attempts of nine steps are in flight. `--smollm2` trains SmolLM2-135M-Instruct, 50 steps
a run, which takes two to six hours.

Seeds are interleaved. With `--out FOLDER`, a repeated call makes only the runs that are not yet complete.

It prints for each correction:

- the mean reward of the last ten steps of each seed;
- the mean lag of the trained tokens;
- the mean and the largest weight;
- the share of tokens that it masked or cut.

The last line is one JSON object: {"final_reward": {"off": [..], ..}}, one figure a seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.support.demo_runs import SMOLLM2, Model, Setup, run_once
from benchmarks.support.taught_model import taught_in
from rich.console import Console
from rich.table import Table

from penstock.demo.summary import read_lines

MAX_LAG = 8
UPDATES_PER_STEP = 2
LAST_STEPS = 10
SMOLLM2_STEPS = 50
VERDICT_SECONDS = 6.0
"""Delay of the small model's rewards: longer than sampling and training nine steps take."""


@dataclass(frozen=True)
class Arm:
    """One correction, and the `max_lag` it is measured with."""

    correction: Mapping[str, object]
    max_lag: int = MAX_LAG


ARMS = {
    "fresh": Arm({"level": "off"}, max_lag=0),
    "off": Arm({"level": "off"}),
    "as if fresh": Arm({"level": "off", "ratio_to": "proximal"}),
    "tis": Arm({"level": "token", "mode": "clip", "quantity": "ratio", "threshold": 2.0}),
    "tis by sequence": Arm(
        {"level": "sequence", "mode": "clip", "quantity": "ratio", "threshold": 2.0}
    ),
    "icepop": Arm({"level": "token", "mode": "mask", "quantity": "ratio", "threshold": [0.5, 5.0]}),
    "kl mask": Arm({"level": "token", "mode": "mask", "quantity": "kl", "threshold": 0.5}),
    "sequence mask": Arm(
        {"level": "sequence", "mode": "mask", "quantity": "ratio", "threshold": [0.8, 1.25]}
    ),
}


def train(folder: Path, arm: Arm, model: Model, steps: int, seed: int) -> list[dict[str, Any]]:
    """Returns the records of one run's steps. If `folder` has a complete run, it is not repeated."""
    rate = 2 * model.scale.learning_rate
    scale = replace(model.scale, max_lag=arm.max_lag, learning_rate=rate)
    # SmolLM2's data gets old without a delay, because training it is slower than sampling from it.
    late = model is not SMOLLM2 and arm.max_lag > 0
    setup = Setup(
        scale,
        steps,
        seed,
        in_flight=scale.attempts_in_flight * (1 + arm.max_lag if late else 1),
        reward="benchmarks.training.stale_agents:late_reward"
        if late
        else "penstock.demo.rewards:last_integer_is_answer",
        server_options=("--set", "freshness=false"),
        trainer_sections={
            "train": {"updates_per_step": UPDATES_PER_STEP},
            "algorithm": {"correction": arm.correction},
        },
        environment={"VERDICT_SECONDS": str(VERDICT_SECONDS)},
        model=model.folder,
    )
    run_once(folder, setup)
    return read_lines(folder / "metrics.jsonl")


def values_of(runs: list[list[dict[str, Any]]], name: str) -> list[float]:
    """Values of one figure over every step of every run that has it."""
    return [step[name] for steps in runs for step in steps if step[name] is not None]


def mean_of(runs: list[list[dict[str, Any]]], name: str) -> float | None:
    """Mean of `values_of`; None without values."""
    values = values_of(runs, name)
    return fmean(values) if values else None


def shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares off-policy corrections on stale data.")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, help="steps of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default=",".join(ARMS), help="corrections to run")
    parser.add_argument(
        "--out", type=Path, help="keep the runs' folders here, and resume from them"
    )
    arguments = parser.parse_args()
    arms = {name: ARMS[name] for name in arguments.only.split(",")}
    console = Console(width=120)
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = SMOLLM2 if arguments.smollm2 else taught_in(folder)
        steps = arguments.steps or (SMOLLM2_STEPS if arguments.smollm2 else model.scale.steps)
        for seed in range(arguments.seeds):
            for name, arm in arms.items():
                place = folder / f"{name.replace(' ', '-')}-{seed}"
                runs[name].append(train(place, arm, model, steps, seed))
                console.print(f"[dim]{place.name}: {reward(runs[name][-1]):.3f}[/]")
    table = Table(title=f"{steps} steps, {arguments.seeds} seeds, learning rate doubled")
    for column in (
        "correction", "reward, last", "deviation", "each seed", "lag", "weight", "largest",
        "masked", "cut", "clipped by the loss",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    rewards = {name: [reward(steps) for steps in found] for name, found in runs.items()}
    for name, found in runs.items():
        table.add_row(
            name,
            f"{fmean(rewards[name]):.3f}",
            f"{stdev(rewards[name]):.3f}" if len(found) > 1 else "",
            "  ".join(f"{value:.3f}" for value in rewards[name]),
            shown(mean_of(found, "lag_mean"), ".2f"),
            shown(mean_of(found, "correction_weight_mean"), ".3f"),
            shown(max(values_of(found, "correction_weight_max"), default=None), ".2f"),
            shown(mean_of(found, "correction_masked"), ".1%"),
            shown(mean_of(found, "correction_clipped"), ".1%"),
            shown(mean_of(found, "clip_fraction"), ".1%"),
        )
    console.print(table)
    print(json.dumps({"final_reward": rewards}))


def reward(steps: list[dict[str, Any]]) -> float:
    """Mean reward of the last steps of a run."""
    return fmean(step["reward_mean"] for step in steps[-LAST_STEPS:])


if __name__ == "__main__":
    main()
