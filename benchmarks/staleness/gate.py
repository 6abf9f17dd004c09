"""Costs and savings of the staleness gate and its freshness controller, on a virtual clock.

    python -m benchmarks.staleness.gate [--steps 300] [--seeds 3]

A step of 16 groups of 8 siblings takes the trainer 60 s. Weights are switched 1 s later. There are as many
agents as admitted groups. The loads differ in how long a group takes:

- reference: log-normal, median 54 s, 99 % within 560 s. The other siblings take 30 to 100 % of the longest,
  because a hard prompt is long for all of them.
- pareto: the same median and 99 % point, with a power law's tail, cut at an hour.
- two kinds: 85 % of the groups take 20 to 60 s; the others, such as agents with tools, 240 to 560 s.
- independent: each of the 8 siblings is independently log-normal as above. The group is complete with the
  longest, which takes 206 s in the median and 1,000 s at 99 %.
- fast: 18 to 30 s, less than half of a step. Two batches are enough, one of them in training.

It prints figures per load and `max_lag`, under MASK, without the controller (outstanding groups fixed at
their bound) and with it:

- the share of its time that the trainer waited for groups;
- the share of the delivered tokens that were too old to train;
- the mean lag of the trained tokens. "unavoidable" is the lag that those tokens had when their group
  finished.

The first 50 steps are left out, while the pipeline fills and the controller finds its target.

The last line is the reference load at `max_lag` 8 with the controller, the load that the stated goals are
about. "two kinds" and "independent" have a larger lag, which is mostly unavoidable, and the same idle time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean

from benchmarks.staleness.simulation import Attempt, Load, Simulation, Tally

from penstock.server.groups.staleness_gate import LatePolicy, StalenessContract

GROUPS_PER_STEP = 16
SIBLINGS = 8
WARMUP_STEPS = 50
MAX_LAGS = (1, 2, 4, 8)
MEDIAN_SECONDS = 54.0
P99_SECONDS = 560.0
LOG_SIGMA = math.log(P99_SECONDS / MEDIAN_SECONDS) / NormalDist().inv_cdf(0.99)
PARETO_SHAPE = math.log(0.5 / 0.01) / math.log(P99_SECONDS / MEDIAN_SECONDS)
PARETO_SCALE = MEDIAN_SECONDS / 2 ** (1 / PARETO_SHAPE)


def log_normal_seconds(rng: random.Random) -> float:
    """One draw with the reference's median and 99 % point."""
    return rng.lognormvariate(math.log(MEDIAN_SECONDS), LOG_SIGMA)


def group_of(longest: float, rng: random.Random) -> Attempt:
    """Siblings that take 30 to 100 % of the longest."""
    others = [(0.0, longest * rng.uniform(0.3, 1.0)) for _ in range(SIBLINGS - 1)]
    return Attempt((*others, (0.0, longest)), longest)


def reference(rng: random.Random) -> Attempt:
    """A group whose length is log-normal."""
    return group_of(log_normal_seconds(rng), rng)


def pareto(rng: random.Random) -> Attempt:
    """A group whose length has a power law's tail."""
    return group_of(min(PARETO_SCALE * rng.paretovariate(PARETO_SHAPE), 3600.0), rng)


def two_kinds(rng: random.Random) -> Attempt:
    """A short group, or a long one."""
    seconds = rng.uniform(20.0, 60.0) if rng.random() < 0.85 else rng.uniform(240.0, 560.0)
    return group_of(seconds, rng)


def independent(rng: random.Random) -> Attempt:
    """A group of siblings with independent lengths."""
    lengths = [log_normal_seconds(rng) for _ in range(SIBLINGS)]
    return Attempt(tuple((0.0, length) for length in lengths), max(lengths))


def fast(rng: random.Random) -> Attempt:
    """A group that takes less than half as long as a step."""
    return group_of(rng.uniform(18.0, 30.0), rng)


LOADS: dict[str, Callable[[random.Random], Attempt]] = {
    "reference": reference,
    "pareto": pareto,
    "two kinds": two_kinds,
    "independent": independent,
    "fast": fast,
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Means of the figures over the seeds."""

    idle: float
    masked: float
    mean_lag: float
    ripe_lag: float
    outstanding: float
    discarded: float


def measure(
    attempt: Callable[[random.Random], Attempt],
    max_lag: int,
    steps: int,
    seeds: int,
    *,
    policy: LatePolicy = LatePolicy.MASK,
    freshness: bool = True,
) -> Figures:
    """Runs one setup once per seed."""
    contract = StalenessContract(max_lag, GROUPS_PER_STEP, policy)

    def tally(seed: int) -> Tally:
        simulation = Simulation(
            contract, Load(attempt), seed, freshness=freshness, warmup_steps=WARMUP_STEPS
        )
        return simulation.run(steps)

    tallies = [tally(seed) for seed in range(seeds)]
    groups = (steps + WARMUP_STEPS) * GROUPS_PER_STEP
    return Figures(
        idle=fmean(tally.idle for tally in tallies),
        masked=fmean(tally.masked for tally in tallies),
        mean_lag=fmean(tally.mean_lag for tally in tallies),
        ripe_lag=fmean(tally.ripe_lag for tally in tallies),
        outstanding=fmean(tally.outstanding for tally in tallies),
        discarded=fmean(tally.discarded / (tally.discarded + groups) for tally in tallies),
    )


def columns(figures: Figures) -> str:
    """Formats the figures that both halves of a row show."""
    return (
        f"{figures.idle:>8.1%}{figures.masked:>8.1%}{figures.mean_lag:>6.2f}"
        f"{figures.outstanding:>8.0f}"
    )


def print_controller(steps: int, seeds: int) -> Figures:
    """Prints the table of loads; returns the figures of the last line."""
    head = f"{'idle':>8}{'masked':>8}{'lag':>6}{'groups':>8}"
    print(f"{'':20}{'fixed at the bound':^30}  {'with the controller':^30}")
    print(f"{'load':12}{'max_lag':>8}{head}  {head}{'unavoidable lag':>17}")
    accepted: Figures | None = None
    for name, attempt in LOADS.items():
        for max_lag in MAX_LAGS:
            fixed = measure(attempt, max_lag, steps, seeds, freshness=False)
            steered = measure(attempt, max_lag, steps, seeds)
            print(
                f"{name:12}{max_lag:>8}{columns(fixed)}  {columns(steered)}{steered.ripe_lag:>17.2f}"
            )
            if attempt is reference and max_lag == MAX_LAGS[-1]:
                accepted = steered
    assert accepted is not None
    return accepted


def print_policies(steps: int, seeds: int) -> None:
    """Prints the costs of each late policy under the reference load, with the controller."""
    print("\nlate policies, reference load, with the controller")
    print(f"{'policy':12}{'max_lag':>8}{'time':>8}{'masked':>8}{'lost':>8}{'lag':>6}")
    for policy in (LatePolicy.MASK, LatePolicy.WAIT, LatePolicy.REQUEUE):
        for max_lag in MAX_LAGS:
            figures = measure(reference, max_lag, steps, seeds, policy=policy)
            print(
                f"{policy.name:12}{max_lag:>8}{1 / (1 - figures.idle):>7.2f}x"
                f"{figures.masked:>8.1%}{figures.discarded:>8.1%}{figures.mean_lag:>6.2f}"
            )
    print("time: of a step, in steps without waiting; lost: share of finished groups discarded")


def main() -> None:
    """Runs the command and prints its tables."""
    parser = argparse.ArgumentParser(description="Simulates the staleness gate under long tails.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps measured per run")
    parser.add_argument("--seeds", type=int, default=3, help="runs per row")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.seeds < 1:
        parser.error(
            f"steps and seeds must be at least 1, got {arguments.steps} and {arguments.seeds}"
        )
    began = time.monotonic()
    accepted = print_controller(arguments.steps, arguments.seeds)
    print_policies(arguments.steps, arguments.seeds)
    print(f"\n{arguments.seeds} runs of {arguments.steps} steps per row, ", end="")
    print(f"{time.monotonic() - began:.0f} s; reference load, max_lag 8, with the controller:")
    print(
        json.dumps(
            {
                "idle": round(accepted.idle, 4),
                "masked": round(accepted.masked, 4),
                "mean_lag": round(accepted.mean_lag, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
