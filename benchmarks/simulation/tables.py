"""Throughput with many engines, on a virtual clock, with an option to validate the simulator first.

    python -m benchmarks.simulation.tables [--engines 1,2,4,8,16,32,64,128,256,512,1024]
        [--max-lags 0,1,2,4,8] [--scaling weak,strong] [--steps 6] [--warmup 4] [--hub-seconds 0]
    python -m benchmarks.simulation.tables --validate [--rounds 3] [--seconds 90] [--pools 1,2] [--vllm]
        [--no-tables]

The simulator (`virtual_run`) drives the server's own gate, freshness controller, placing, turn limits
and lag. docs/internals/simulation.md describes the rest of the model and what it leaves out.

`--validate` starts real pools on this machine and measures the times of their parts. It runs each setting
for real and simulated, and prints both (`validation`). The engines are processes that sleep for
each step, longer with more turns. With `--vllm` they are vLLM with a tiny model.

The tables use times that `--validate` measured here for an engine that sleeps for 40 ms a step and 2 ms for
each turn (`MEASURED`). The engine gets no more turns at a time than were measured. The setup is:

- Groups have 4 attempts of 2 turns. Lengths are log-normal with the shape of `staleness.gate` (median 54,
  99 % within 560, here in tokens of a turn), cut at 2,048. Siblings share half of the variance.
- A tool runs between the turns, log-normal, with a median of 1 s.
- A step takes the trainer 10 s, about the time one engine takes for 2 groups with 8 turns in flight.
- Weak scaling has 2 groups a step for each engine. The trainer grows too, so its step always takes the same
  time.
- Strong scaling has 64 groups a step for any number of engines.
- There are as many agents as attempts, late tokens are masked, and the freshness controller is on.
  Everything else has its default.
- The hub takes no time, unless --hub-seconds sets a time for each turn. The first steps are not counted.

The last line is one JSON object. `sync_of_async_at_1024` is trajectories per hour at `max_lag` 0 divided by
those at the largest `max_lag`, for weak scaling with 1,024 engines. It is null if that was not simulated.
The errors are fractions, the worst over the settings, each the median of its rounds. They are null without
`--validate`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from benchmarks.simulation.engine import EngineTimes
from benchmarks.simulation.setup import Setup, Tally, TrainerTimes, Workload
from benchmarks.simulation.virtual_run import simulate

from penstock.server.groups.staleness_gate import StalenessContract

ENGINES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_LAGS = (0, 1, 2, 4, 8)
GROUPS_PER_ENGINE = 2
GROUPS_IN_ALL = 64
WORKLOAD = Workload(
    siblings=4,
    turns=2,
    prompt_tokens=256,
    observation_tokens=64,
    median_tokens=54.0,
    sigma=math.log(560.0 / 54.0) / NormalDist().inv_cdf(0.99),
    most_tokens=2_048,
    tool_seconds=1.0,
    tool_sigma=1.0,
)
MEASURED = EngineTimes(
    (
        (1, 0.0439),
        (2, 0.0451),
        (4, 0.0521),
        (8, 0.0583),
        (16, 0.0750),
        (24, 0.0891),
        (32, 0.1123),
    ),
    first_token_steps=0,
    most_running=32,
    turn_seconds=0.0091,
    pause_seconds=0.0005,
)
TRAINER = TrainerTimes(step_seconds=10.0, publish_seconds=0.023)
ATTEMPT_SECONDS = 0.065
SWITCH_SECONDS = 0.053
VALIDATED = Workload(
    siblings=4,
    turns=2,
    median_tokens=6.0,
    sigma=0.6,
    most_tokens=30,
    tool_seconds=0.3,
    tool_sigma=0.7,
)
SCALING = {"weak": lambda engines: GROUPS_PER_ENGINE * engines, "strong": lambda _: GROUPS_IN_ALL}


@dataclass(frozen=True)
class Length:
    """Number of steps of a run, and the time the hub takes for each turn."""

    steps: int
    warmup: int
    hub_seconds: float


def measure(engines: int, max_lag: int, groups: int, length: Length) -> Tally:
    """Simulates one cell of a table."""
    setup = Setup(
        StalenessContract(max_lag, groups),
        WORKLOAD,
        MEASURED,
        TRAINER,
        engines,
        hub_seconds=length.hub_seconds,
        attempt_seconds=ATTEMPT_SECONDS,
        switch_seconds=SWITCH_SECONDS,
    )
    return simulate(setup, 1, length.steps, length.warmup)


def name_of(max_lag: int) -> str:
    """The usual name of a `max_lag`."""
    return {0: "synchronous", 1: "one step off"}.get(max_lag, f"max_lag {max_lag}")


def print_table(
    scaling: str, engines: Sequence[int], max_lags: Sequence[int], length: Length
) -> dict[tuple[int, int], Tally]:
    """Prints one way of scaling; returns its cells by (engines, max_lag)."""
    print(f"\n{scaling} scaling")
    print(
        f"{'engines':>7}  {'':14}{'groups':>7}{'trajectories/h':>15}{'of sync':>9}{'idle':>7}",
        end="",
    )
    print(f"{'lag':>6}{'max':>5}{'masked':>8}{'busy':>7}{'turns':>7}{'CPU s':>8}")
    cells: dict[tuple[int, int], Tally] = {}
    for count in engines:
        for max_lag in max_lags:
            began = time.process_time()
            groups = SCALING[scaling](count)
            tally = cells[count, max_lag] = measure(count, max_lag, groups, length)
            first = cells[count, max_lags[0]]
            print(
                f"{count:>7}  {name_of(max_lag):14}{groups:>7}{tally.per_hour:>15,.0f}"
                f"{tally.per_hour / first.per_hour:>8.2f}x{tally.idle:>7.0%}{tally.mean_lag:>6.2f}"
                f"{tally.oldest:>5}{tally.masked:>8.1%}{tally.busy:>7.0%}{tally.batch:>7.1f}"
                f"{time.process_time() - began:>8.1f}",
                flush=True,
            )
    print(
        "idle: of the trainer; lag: of trained tokens, mean and largest; busy: part of the time that an"
    )
    print("engine had a turn; turns: that it decoded at a time then; CPU: of the simulation")
    return cells


def run_validation(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Compares real runs with simulated ones; returns the errors."""
    from benchmarks.simulation.real_run import Engines
    from benchmarks.simulation.validation import Plan, errors, validate
    from tests.support.tiny_model import make_tiny_model

    pools = arguments.pools
    found: dict[str, float | None] = {}
    plan = Plan(VALIDATED, seconds=arguments.seconds, max_lags=arguments.validated_lags)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", layers=1)
        pace = arguments.step_seconds, arguments.turn_seconds
        engines = Engines(model, 1, arguments.vllm, *pace)
        pairs = validate(Path(folder), engines, pools, plan, arguments.rounds)
    for count in pools:
        rate, lag = errors(pairs, count)
        found[f"trajectories_per_hour_error_{count}"] = round(rate, 4)
        found[f"lag_error_{count}"] = round(lag, 4)
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Parses numbers such as 1,2,4, none of them negative."""
    found = tuple(int(number) for number in text.split(","))
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"negative: {text}")
    return found


def counts(text: str) -> tuple[int, ...]:
    """Parses numbers such as 1,2,4, each at least one."""
    if 0 in (found := numbers(text)):
        raise argparse.ArgumentTypeError(f"none of them may be 0: {text}")
    return found


def main() -> None:
    """Runs the command and prints its tables and figures."""
    parser = argparse.ArgumentParser(description="Simulates many engines behind one hub.")
    parser.add_argument("--engines", type=counts, default=ENGINES)
    parser.add_argument("--max-lags", type=numbers, default=MAX_LAGS)
    parser.add_argument("--scaling", default="weak,strong")
    parser.add_argument(
        "--steps", type=int, default=6, help="counted steps of each cell of a table"
    )
    parser.add_argument("--warmup", type=int, default=4, help="steps before the counted ones")
    parser.add_argument(
        "--hub-seconds", type=float, default=0.0, help="time that the hub is busy with each turn"
    )
    parser.add_argument("--no-tables", action="store_true")
    parser.add_argument("--validate", action="store_true", help="compare with real runs first")
    parser.add_argument("--pools", type=counts, default=(1, 2), help="engines of the real pools")
    parser.add_argument(
        "--validated-lags", type=numbers, default=(0, 1, 4), help="max_lag of the real runs"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="length of each real run")
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.15,
        help="time that the real engines sleep for a step",
    )
    parser.add_argument(
        "--turn-seconds",
        type=float,
        default=0.0075,
        help="additional sleep for each turn in flight",
    )
    parser.add_argument("--vllm", action="store_true", help="real engines, with a tiny model")
    arguments = parser.parse_args()
    figures: dict[str, float | None] = dict.fromkeys(
        f"{kind}_error_{count}" for kind in ("trajectories_per_hour", "lag") for count in (1, 2)
    )
    figures["sync_of_async_at_1024"] = None
    if arguments.validate:
        figures |= run_validation(arguments)
    if not arguments.no_tables:
        length = Length(arguments.steps, arguments.warmup, arguments.hub_seconds)
        engines, max_lags = arguments.engines, arguments.max_lags
        for scaling in arguments.scaling.split(","):
            cells = print_table(scaling, engines, max_lags, length)
            if scaling == "weak" and 1024 in engines and 0 in max_lags:
                sync, overlapped = cells[1024, 0], cells[1024, max(max_lags)]
                figures["sync_of_async_at_1024"] = round(sync.per_hour / overlapped.per_hour, 4)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
