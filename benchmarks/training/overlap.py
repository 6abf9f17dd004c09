"""Speed of overlapped training: steps per hour and idle time by `max_lag`, compared with the upper bound.

    python -m benchmarks.training.overlap [--rounds 1] [--steps 36] [--regimes tools,pinned,shared]
        [--max-lags 0,1,2,4,8] [--out FOLDER]
    python -m benchmarks.training.overlap --part reward [--smollm2] [--reward-steps 120] [--seeds 3]
        [--max-lags 0,1,2,4,8]

Trains SmolLM2-135M-Instruct on the demo's sums, 32 attempts a step, with server, worker and trainer as
separate processes, in three regimes:

    tools     each attempt takes two turns and waits for a tool between them, Pareto from 0.05 to 5 s with
              shape 1; the attempts of four steps are in flight. The engine has one core, the trainer the
              other
    pinned    single turns; the engine and the worker have one core, the trainer the other
    shared    single turns; every process may use every core, and the trainer has a thread on each. Both
              sides need the same cores, so the bound below, which assumes that they compute in parallel,
              is out of reach: only time that either side leaves idle can be gained

**The bound.** With `max_lag = 0` a step takes T_sync: t_generate, while the trainer waits, then t_train. An
overlapped step cannot be shorter than the longer of the two, unless the waits of one step overlap those of
the next. So the bound is T_sync / max(t_generate, t_train). `of_bound` is the speed-up over T_sync as a
share of the bound. It is above 1 if slow attempts no longer delay a batch (tools).

T is measured from the end of the tenth step, when the pipeline is full, to the end of the last one. Results
with far fewer steps than the default mean little: the controller sometimes tries one group less, and that
costs a step or two. t_generate is measured at `max_lag` 0, with the attempts of one step in flight. Rewards
are random and the learning rate is almost zero, so that every step costs the same.

**Lag** is counted independently. The worker logs how many tokens of each trajectory each version sampled,
and the trainer's ledger has the step that trained it. A violation is a step whose masked tokens are not
exactly those older than `max_lag`. The freshness controller (`freshness`) is on, as by default.

**Goals.** From `max_lag` 4 on, a run should reach 90 % of the bound, and the mean lag of its trained tokens
should be at most half of `max_lag`. No run should have a violation. Runs that miss a goal are listed under
their table.

A full benchmark takes hours. With `--out FOLDER` the runs' folders are kept. A repeated call with the same
folder makes only the runs that are not yet complete, so a benchmark can be interrupted and resumed.

`--part reward` trains each `max_lag` from the same seeds and compares the mean reward of the last ten
steps. It trains the small model of `support.taught_model`, or SmolLM2-135M-Instruct with `--smollm2`.

The last line is one JSON object: {"of_bound": {"tools": {"1": .., ..}, ..}, "lag_violations": 0}, or
{"final_reward": {"0": [..], ..}}.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.support.demo_runs import CORES, SMOLLM2, Model, Setup, run_once
from benchmarks.support.taught_model import taught_in
from rich.console import Console
from rich.table import Table

from penstock.demo.summary import read_lines
from penstock.trainer.state.ledger import StepEntry, read_ledger

FILLING_STEPS = 10
GROUPS_PER_STEP = 4
LAST_STEPS = 10
ASKED_FROM = 4
"""Smallest `max_lag` that should reach the two goals below."""
ASKED_SHARE = 0.9
"""Goal for the share of the bound."""
ASKED_LAG = 0.5
"""Largest mean lag of the trained tokens, as a share of `max_lag`."""


@dataclass(frozen=True)
class Regime:
    """How the processes share the machine, and how agents behave."""

    generate: str = ""
    engine_cores: tuple[int, ...] = CORES
    trainer_cores: tuple[int, ...] = CORES
    steps_in_flight: int = 1
    """Concurrent attempts of the worker, in steps' worth, if `max_lag` allows more than one step."""


AGENTS = "benchmarks.training.overlap_agents"
REGIMES = {
    "tools": Regime(f"{AGENTS}:with_tools", (CORES[0],), (CORES[-1],), steps_in_flight=4),
    "pinned": Regime("", (CORES[0],), (CORES[-1],)),
    "shared": Regime(),
}


@dataclass(frozen=True)
class Cell:
    """Figures of one run."""

    regime: str
    max_lag: int
    step_seconds: float
    wait_seconds: float
    """Time per step that the trainer waited for groups."""
    trainer_idle: float
    engine_idle: float
    """Share of the time without a turn in the engine."""
    lag_mean: float
    """Mean lag of the trained tokens, in versions."""
    masked: float
    """Share of the tokens that were masked."""
    violations: int
    reward: float
    """Mean reward of the last steps."""

    @property
    def bound_seconds(self) -> float:
        """The longer of generating and training a step; for a run with `max_lag` 0."""
        return max(self.wait_seconds, self.step_seconds - self.wait_seconds)

    @property
    def speed_up(self) -> float:
        """Upper bound of the speed-up; for a run with `max_lag` 0."""
        return self.step_seconds / self.bound_seconds


def run_cell(
    folder: Path,
    regime_name: str,
    max_lag: int,
    steps: int,
    seed: int,
    learning: Model | None = None,
) -> Cell:
    """Runs server, worker and trainer to the last step, unless `folder` already has the run."""
    regime = REGIMES[regime_name]
    model = learning or SMOLLM2
    scale = replace(model.scale, max_lag=max_lag)
    if not learning:
        scale = replace(scale, groups_per_step=GROUPS_PER_STEP, learning_rate=1e-9)
    setup = Setup(
        scale,
        steps,
        seed,
        scale.attempts_in_flight * min(regime.steps_in_flight, max_lag + 1),
        f"{AGENTS}:{'reward' if learning else 'chance'}",
        regime.generate,
        regime.engine_cores,
        regime.trainer_cores,
        environment={"OVERLAP_LOG": str(folder / "seen.jsonl")},
        model=model.folder,
    )
    run_once(folder, setup)
    return read_cell(folder, regime_name, max_lag)


def read_cell(folder: Path, regime: str, max_lag: int) -> Cell:
    """Reads the figures of a finished run."""
    steps = read_lines(folder / "metrics.jsonl")
    first = min(FILLING_STEPS, len(steps) // 2)
    counted = steps[first:]
    begin, end = steps[first - 1]["time"], steps[-1]["time"]
    seconds = (end - begin) / len(counted)
    load = [
        sample["running"]
        for sample in read_lines(folder / "activity.jsonl")
        if begin <= sample["time"] <= end
    ]
    wait = fmean(step["seconds_wait"] for step in counted)
    tokens = sum(step["tokens"] for step in counted)
    return Cell(
        regime,
        max_lag,
        seconds,
        wait,
        trainer_idle=wait / seconds,
        engine_idle=sum(not running for running in load) / max(1, len(load)),
        lag_mean=fmean(step["lag_mean"] for step in counted),
        masked=sum(step["tokens_masked"] for step in counted) / tokens,
        violations=count_violations(folder, max_lag, steps),
        reward=fmean(step["reward_mean"] for step in steps[-LAST_STEPS:]),
    )


def count_violations(folder: Path, max_lag: int, steps: list[dict[str, Any]]) -> int:
    """Counts steps whose masked tokens differ from those computed from worker log and ledger."""
    seen = {
        line["trajectory_id"]: Counter({int(k): n for k, n in line["tokens"].items()})
        for line in read_lines(folder / "seen.jsonl")
    }
    masked = {step["step"]: step["tokens_masked"] for step in steps}
    entries = [e for e in read_ledger(folder / "ledger.jsonl") if isinstance(e, StepEntry)]
    violations = 0
    held_version = 0
    for entry in entries:
        too_old = sum(
            count
            for group in entry.groups
            for trajectory_id in group.trajectory_ids
            # A failed attempt has no entry: its reward was never requested, and it is not trained.
            for version, count in seen.get(trajectory_id, {}).items()
            if held_version - version > max_lag
        )
        violations += masked[entry.step] != too_old
        held_version = entry.weight_version
    return violations


def show(rounds: list[list[Cell]], console: Console) -> dict[str, dict[str, float]]:
    """Prints a table for each regime; returns `of_bound`, the median of ratios within a round."""
    shares: dict[str, dict[str, float]] = {}
    every = [cell for cells in rounds for cell in cells]
    for regime in dict.fromkeys(cell.regime for cell in every):
        syncs = [
            next(cell for cell in cells if (cell.regime, cell.max_lag) == (regime, 0))
            for cells in rounds
        ]
        step, wait = middle(syncs, "step_seconds"), middle(syncs, "wait_seconds")
        table = Table(
            title=f"{regime}: T_sync {step:.2f} s = generate {wait:.2f} + train {step - wait:.2f}; "
            f"upper bound of the speed-up {median(sync.speed_up for sync in syncs):.2f}"
        )
        for column in (
            "max_lag", "steps/hour", "speed-up", "of bound", "trainer idle", "engine idle",
            "mean lag", "masked", "violations",
        ):  # fmt: skip
            table.add_column(column, justify="right")
        shares[regime] = {}
        missed: list[str] = []
        for max_lag in dict.fromkeys(cell.max_lag for cell in every):
            same = [cell for cell in every if (cell.regime, cell.max_lag) == (regime, max_lag)]
            pairs = list(zip(same, syncs, strict=True))
            faster = median(sync.step_seconds / cell.step_seconds for cell, sync in pairs)
            share = median(sync.bound_seconds / cell.step_seconds for cell, sync in pairs)
            if max_lag:
                shares[regime][str(max_lag)] = round(share, 3)
            table.add_row(
                str(max_lag),
                f"{3600 / middle(same, 'step_seconds'):.0f}",
                f"{faster:.2f}",
                f"{share:.2f}" if max_lag else "",
                f"{middle(same, 'trainer_idle'):.0%}",
                f"{middle(same, 'engine_idle'):.0%}",
                f"{middle(same, 'lag_mean'):.2f}",
                f"{middle(same, 'masked'):.1%}",
                str(sum(cell.violations for cell in same)),
            )
            missed += [f"max_lag {max_lag}: {miss}" for miss in misses(max_lag, share, same)]
        console.print(table)
        for miss in missed:
            console.print(f"[red]missed[/] {miss}", highlight=False)
    return shares


def misses(max_lag: int, share: float, cells: list[Cell]) -> list[str]:
    """Describes the goals that the runs of one `max_lag` miss; `share` is of the bound."""
    found: list[str] = []
    lag = middle(cells, "lag_mean")
    violations = sum(cell.violations for cell in cells)
    if max_lag >= ASKED_FROM and share < ASKED_SHARE:
        found.append(f"{share:.3f} of the bound, goal {ASKED_SHARE}")
    if max_lag >= ASKED_FROM and lag > ASKED_LAG * max_lag:
        found.append(f"mean lag {lag:.2f}, goal at most {ASKED_LAG * max_lag:g}")
    if violations:
        found.append(f"{violations} steps masked other tokens than those older than max_lag")
    return found


def middle(cells: list[Cell], name: str) -> float:
    """Median of one figure over the cells."""
    return median(getattr(cell, name) for cell in cells)


def measure_speed(folder: Path, arguments: argparse.Namespace, console: Console) -> None:
    rounds: list[list[Cell]] = []
    for number in range(arguments.rounds):
        rounds.append([])
        for regime in arguments.regimes.split(","):
            for max_lag in lags_of(arguments):
                place = folder / f"{number}-{regime}-{max_lag}"
                cell = run_cell(place, regime, max_lag, arguments.steps, seed=1)
                rounds[-1].append(cell)
                console.print(f"[dim]{place.name}: {cell.step_seconds:.2f} s a step[/]")
    shares = show(rounds, console)
    violations = sum(cell.violations for cells in rounds for cell in cells)
    print(json.dumps({"of_bound": shares, "lag_violations": violations}))


def measure_reward(folder: Path, arguments: argparse.Namespace, console: Console) -> None:
    lags = lags_of(arguments)
    model = SMOLLM2 if arguments.smollm2 else taught_in(folder)
    steps = arguments.reward_steps
    found: dict[int, list[Cell]] = {lag: [] for lag in lags}
    # Interleaved, so that other load of the machine affects all of them alike.
    for seed in range(arguments.seeds):
        for lag in lags:
            name = f"reward-{lag}-{seed}"
            cell = run_cell(folder / name, "shared", lag, steps, seed, model)
            found[lag].append(cell)
            console.print(f"[dim]{name}: {cell.reward:.3f}, {cell.violations} violations[/]")
    table = Table(title=f"reward after {steps} steps, mean of the last {LAST_STEPS}")
    for column in ("max_lag", "mean", "deviation", "each seed", "mean lag", "violations"):
        table.add_column(column, justify="right")
    for lag, cells in found.items():
        rewards = [cell.reward for cell in cells]
        spread = stdev(rewards) if len(rewards) > 1 else 0.0
        each = "  ".join(f"{reward:.3f}" for reward in rewards)
        table.add_row(
            str(lag),
            f"{fmean(rewards):.3f}",
            f"{spread:.3f}",
            each,
            f"{fmean(cell.lag_mean for cell in cells):.2f}",
            str(sum(cell.violations for cell in cells)),
        )
    console.print(table)
    final = {str(lag): [cell.reward for cell in cells] for lag, cells in found.items()}
    print(json.dumps({"final_reward": final}))


def lags_of(arguments: argparse.Namespace) -> list[int]:
    return [int(lag) for lag in arguments.max_lags.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the speed of overlapped training.")
    parser.add_argument("--part", choices=("speed", "reward"), default="speed")
    parser.add_argument("--steps", type=int, default=36, help="steps of each run")
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds, each with every run of --part speed"
    )
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--max-lags", default="0,1,2,4,8", help="must include 0 for --part speed")
    parser.add_argument("--reward-steps", type=int, default=120)
    parser.add_argument(
        "--smollm2", action="store_true", help="for --part reward, which takes hours"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="keep the runs' folders here, and resume from them"
    )
    arguments = parser.parse_args()
    console = Console(width=110)
    measure = {"speed": measure_speed, "reward": measure_reward}[arguments.part]
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        measure(arguments.out, arguments, console)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), arguments, console)


if __name__ == "__main__":
    main()
