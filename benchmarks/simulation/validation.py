"""Validation of the simulator: measures the times of one pool, then compares real and simulated runs.

It measures through the hub, with as many engines as are simulated:

    steps        a number of callers per engine take turns of 3 to 10 tokens in a loop. The time of a step
    is
                 that of a turn divided by its steps in flight; the median over the turns
    first token  turns of one token on an idle engine. If the fastest takes less than half a step, tokens
                 appear at the start of a step. The remaining time is that of the hub and the network
    prefill      single turns with fresh prompts of 8 to 1,200 tokens: the slope over the prompt's length
    hub          its processor time divided by the turns of a short run with another seed
    the rest     trainer, upload, switch, pause and the close of an attempt: means of that run, without the
                 first upload and switch. The time of a lease is not measured

Then it runs each setting for real and simulated, over the same number of steps, with the same attempts. It
leaves out the same first steps of both. Each round has its own seeds and includes every setting.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from benchmarks.simulation.engine import EngineTimes
from benchmarks.simulation.real_run import (
    Engines,
    Observed,
    Run,
    run,
    running_pool,
    warmup_of,
    words,
)
from benchmarks.simulation.setup import Setup, Tally, TrainerTimes, Workload
from benchmarks.simulation.virtual_run import simulate

from penstock.client import connect
from penstock.server.groups.staleness_gate import StalenessContract

SHORTEST, LONGEST = 3, 10
PROMPTS = (8, 400, 800, 1_200)
REST_SECONDS = 0.2
SETTLING_SECONDS = 0.5


@dataclass(frozen=True)
class Plan:
    """The settings to validate."""

    workload: Workload
    groups_per_step: int = 4
    agents: int = 32
    step_seconds: float = 1.5
    max_lags: tuple[int, ...] = (0, 1, 4)
    seconds: float = 60.0
    """Length of a run."""
    callers: tuple[int, ...] = (1, 8, 16, 24, 32)
    """Numbers of callers per engine for which steps are measured."""
    calling_seconds: float = 9.0
    calibration_seconds: float = 30.0


@dataclass(frozen=True)
class Calibration:
    """The measured times of one pool, which the simulator uses."""

    engines: int
    times: EngineTimes
    trainer: TrainerTimes
    hub_seconds: float
    attempt_seconds: float
    switch_seconds: float

    def line(self) -> str:
        """Describes the calibration in one line."""
        steps = ", ".join(f"{count}: {seconds * 1e3:.1f}" for count, seconds in self.times.steps)
        return (
            f"{self.engines} engine(s): ms of a step by turns in flight {{{steps}}}, first token after "
            f"{self.times.first_token_steps} step(s), prefill {self.times.prefill_seconds * 1e6:.0f} us a "
            f"token, turn {self.times.turn_seconds * 1e3:.1f} ms, "
            f"hub {self.hub_seconds * 1e3:.1f} ms a turn, "
            f"attempt {self.attempt_seconds * 1e3:.1f} ms, pause {self.times.pause_seconds * 1e3:.1f} ms, "
            f"switch {self.switch_seconds * 1e3:.0f} ms, train {self.trainer.step_seconds:.3f} s, publish "
            f"{self.trainer.publish_seconds * 1e3:.0f} ms"
        )


@dataclass(frozen=True)
class Pair:
    """The real and the simulated run of one setting in one round."""

    engines: int
    max_lag: int
    real: Tally
    simulated: Tally

    @property
    def rate_ratio(self) -> float:
        """Trajectories per hour, simulated divided by real."""
        return self.simulated.per_hour / self.real.per_hour

    @property
    def lag_ratio(self) -> float:
        """Mean lag, simulated divided by real; 1 if both are zero."""
        if not self.real.mean_lag:
            return 1.0 if not self.simulated.mean_lag else float("inf")
        return self.simulated.mean_lag / self.real.mean_lag


async def calibrate(folder: Path, engines: Engines, plan: Plan) -> Calibration:
    """Measures the times of one pool."""
    async with running_pool(folder / "turns", engines) as (address, _):
        first, quickest, prefill = await _measure_rest(address)
        found = {
            callers: await _measure_turns(address, callers * engines.count, plan.calling_seconds)
            for callers in plan.callers
        }
    pace = min(_step_seconds(turns, 0) for turns in found.values())
    first_token_steps = 0 if quickest < pace / 2 else 1
    steps = tuple(
        (callers, _step_seconds(turns, first_token_steps)) for callers, turns in found.items()
    )
    contract = StalenessContract(max(plan.max_lags), plan.groups_per_step)
    short = Run(
        contract,
        plan.workload,
        plan.agents,
        plan.step_seconds,
        plan.calibration_seconds,
        seed=10_000,
    )
    seen = await run(folder / "run", engines, short)
    # A pool switches in two parts, but a single engine switches as one.
    parts = min(2, engines.count)
    return Calibration(
        engines.count,
        EngineTimes(
            steps,
            prefill_seconds=prefill,
            first_token_steps=first_token_steps,
            turn_seconds=max(0.0, first - first_token_steps * steps[0][1]),
            pause_seconds=fmean(seen.pausing[1:]),
        ),
        TrainerTimes(fmean(seen.computing), publish_seconds=fmean(seen.publishing[1:])),
        seen.hub_seconds / len(seen.turns),
        attempt_seconds=fmean(seen.closing),
        switch_seconds=fmean(seen.switching[1:]) / parts,
    )


async def _measure_turns(address: str, callers: int, seconds: float) -> list[tuple[int, float]]:
    """Returns (tokens, seconds) of turns while `callers` callers each have one in flight."""
    found: list[tuple[int, float]] = []
    begin = time.monotonic() + SETTLING_SECONDS
    end = begin + seconds

    async def call(client: Any, key: str) -> None:
        rng = random.Random(key)
        number = 0
        while (began := time.monotonic()) < end:
            number += 1
            count = rng.randint(SHORTEST, LONGEST)
            trajectory = client.trajectory(f"{key}-{number}")
            await trajectory.turn(words(8, f"{key} {number}"), max_tokens=count, ignore_eos=True)
            if began > begin and (now := time.monotonic()) < end:
                found.append((count, now - began))
            await trajectory.complete(0.0)

    async with connect(address) as client, asyncio.TaskGroup() as calling:
        for number in range(callers):
            calling.create_task(call(client, f"steps-{callers}-{number}-{time.time_ns()}"))
    return found


def _step_seconds(turns: Sequence[tuple[int, float]], first_token_steps: int) -> float:
    """Returns the time of a step, as the median over turns.

    A turn that follows another waits for the next step. Then it is in flight for one step per token,
    counted from its first token if tokens appear at the start of a step. The median is used because other
    load of the machine sometimes delays all turns at once.
    """
    return median(seconds / (count + first_token_steps) for count, seconds in turns)


async def _measure_rest(address: str) -> tuple[float, float, float]:
    """Measures turns of one token on an idle engine.

    Returns the seconds of a turn, those of the fastest turn, and the additional seconds for each context
    token.
    """
    found: dict[int, list[float]] = {length: [] for length in PROMPTS}
    async with connect(address) as client:
        for number in range(10 * len(PROMPTS)):
            length = PROMPTS[number % len(PROMPTS)]
            key = f"rest-{number}-{time.time_ns()}"
            trajectory = client.trajectory(key)
            began = time.monotonic()
            await trajectory.turn(words(length, key), max_tokens=1, ignore_eos=True)
            found[length].append(time.monotonic() - began)
            await trajectory.complete(0.0)
            await asyncio.sleep(REST_SECONDS)
    middles = [median(found[length]) for length in PROMPTS]
    slope = float(np.polyfit(PROMPTS, middles, 1)[0])
    first = max(0.0, middles[0] - max(0.0, slope) * PROMPTS[0])
    return first, min(found[PROMPTS[0]]), max(0.0, slope)


async def compare(
    folder: Path, engines: Engines, calibration: Calibration, plan: Plan, max_lag: int, seed: int
) -> tuple[Pair, Observed]:
    """Runs one setting for real and simulated."""
    contract = StalenessContract(max_lag, plan.groups_per_step)
    asked = Run(contract, plan.workload, plan.agents, plan.step_seconds, plan.seconds, seed)
    observed = await run(folder, engines, asked)
    counted = observed.tally.steps
    steps = counted
    while steps - warmup_of(steps) < counted:
        steps += 1
    setup = Setup(
        contract,
        plan.workload,
        calibration.times,
        calibration.trainer,
        engines.count,
        plan.agents,
        calibration.hub_seconds,
        calibration.attempt_seconds,
        calibration.switch_seconds,
    )
    # In a thread, because a simulation runs its own event loop.
    simulated = await asyncio.to_thread(simulate, setup, seed, counted, warmup_of(steps))
    return Pair(engines.count, max_lag, observed.tally, simulated), observed


def validate(
    folder: Path, engines: Engines, counts: Sequence[int], plan: Plan, rounds: int
) -> list[Pair]:
    """Runs every setting in every round, and prints each result."""
    pairs: list[Pair] = []
    print(
        f"{'engines':>7}{'max_lag':>8}{'round':>6}{'steps':>6}{'trajectories/h':>24}{'ratio':>7}",
        end="",
    )
    print(f"{'mean lag':>18}{'ratio':>7}{'masked':>16}{'idle':>14}{'turn, s':>16}   tokens by lag")
    calibrations: dict[int, Calibration] = {}
    for number in range(rounds):
        for count in counts:
            pool = replace(engines, count=count)
            place = folder / f"{number}-{count}"
            if count not in calibrations:
                calibrations[count] = asyncio.run(calibrate(place / "calibration", pool, plan))
                print(calibrations[count].line(), flush=True)
            for max_lag in plan.max_lags:
                pair, observed = asyncio.run(
                    compare(
                        place / f"{max_lag}", pool, calibrations[count], plan, max_lag, number + 1
                    )
                )
                assert not observed.failures, f"{observed.failures} turns did not go as planned"
                pairs.append(pair)
                print(describe(pair, number), flush=True)
    return pairs


def describe(pair: Pair, number: int) -> str:
    """Formats one row of the table."""
    real, simulated = pair.real, pair.simulated
    return (
        f"{pair.engines:>7}{pair.max_lag:>8}{number + 1:>6}{real.steps:>6}"
        f"{real.per_hour:>11.0f} ->{simulated.per_hour:>10.0f}{pair.rate_ratio:>7.3f}"
        f"{real.mean_lag:>8.3f} ->{simulated.mean_lag:>7.3f}{pair.lag_ratio:>7.3f}"
        f"{real.masked:>7.1%} ->{simulated.masked:>6.1%}{real.idle:>6.0%} ->{simulated.idle:>5.0%}"
        f"{real.turn:>7.3f} ->{simulated.turn:>6.3f}"
        f"   {shares(real)} | {shares(simulated)}"
    )


def shares(tally: Tally) -> str:
    """Formats the percentages of delivered tokens by lag, from 0 on."""
    total = sum(tally.tokens_by_lag.values())
    top = max(tally.tokens_by_lag)
    return " ".join(f"{100 * tally.tokens_by_lag.get(n, 0) / total:.0f}" for n in range(top + 1))


def errors(pairs: Sequence[Pair], engines: int) -> tuple[float, float]:
    """Returns the errors of trajectories per hour and of mean lag.

    Each is the median over the rounds, and the worst of those over the settings.
    """
    worst = [0.0, 0.0]
    for max_lag in sorted({pair.max_lag for pair in pairs}):
        same = [p for p in pairs if (p.engines, p.max_lag) == (engines, max_lag)]
        rate = abs(median(pair.rate_ratio for pair in same) - 1.0)
        lag = abs(median(pair.lag_ratio for pair in same) - 1.0)
        print(f"{engines} engine(s), max_lag {max_lag}: off by {rate:.1%}, lag by {lag:.1%}")
        worst = [max(worst[0], rate), max(worst[1], lag)]
    return worst[0], worst[1]
