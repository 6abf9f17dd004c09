"""Finished groups from producer to consumer, through the durable buffer and through Ray actor queues.

    python -m benchmarks.buffer.delivery [--groups 64] [--rounds 7] [--window 16] [--folder DIR]

A group is 8 trajectories of 8,192 sampled tokens: token ids and log-probabilities, 512 KiB. Each system
runs three processes on this machine and ends with numpy arrays in the consumer. After the clock has
stopped, the benchmark compares each array with the samples.

**Penstock**: agent -> server -> trainer, over gRPC. As always, the tokens are in the server, which sampled
them. A group's clock starts when its agent sends the last outcome (`CompleteTrajectory`), which finishes
the group. Then the server does everything it always does:

    assemble the group -> write it to the journal in a folder on disk, with fdatasync -> answer ->
    select it at the gate -> deliver it on `Exchange` -> arrays

It also writes receipts and checkpoint notices, and compacts the journal. Only the engine is fake; it wrote
the turns before the clock started. The other seven outcomes were sent before it too, because agents send
each one when it is ready. `penstock, 8 outcomes` includes them in the time: eight calls for each group.

The trainer is on the server's host. `Exchange` sends it the location of the group in the journal, and it
reads the group there. `penstock, over a socket` measures a trainer on another host, which is sent the
group.

**Ray**: producer -> queue (an actor) -> consumer. The producer already has the group in the form that it
puts, and the clock starts when it puts it. Nothing is durable. The form makes all the difference;
`buffer_ray` has four. The fully asynchronous trainers of rllm (`pickled lists`) and verl (`pickled
tensors`) use a Ray actor queue *with cloudpickle*: they pickle a group themselves and pass the bytes
through an actor. `vs_ray_queue` compares with rllm's, because its items are the same: groups of token ids
and log-probabilities. `vs_ray_arrays` compares with the best that Ray's queue can do, for a program that
keeps numpy arrays all the way. Those never enter a pickle.

So a group crosses one process boundary with Penstock and two with Ray. That follows from the design, in
which the server owns the tokens.

Each producer has `window` groups in flight at a time, enough to stay busy, so a group's time is that of one
among many. Rounds are interleaved in random order, and ratios are taken within a round, because machines
are shared and noisy. CPU is the time of all processes of a system, including Ray's own, per group.

The last line is one JSON object: groups per second relative to a Ray actor queue with cloudpickle, and to
one with numpy arrays, and the 99th percentile of a group's time in milliseconds: {"vs_ray_queue": ..,
"vs_ray_arrays": .., "p99_ms": ..}. Without Ray, which `make bench-buffer` installs into .venv, the first
two are null.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

# No forked child uses gRPC here. Without this setting, gRPC would log a warning at each fork.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from benchmarks.buffer.groups import GROUP_BYTES, SIBLINGS
from benchmarks.buffer.penstock_side import Agent, Trainer, penstock
from benchmarks.buffer.ray_side import ARRAYS, FORMS, PICKLED, Hand, ray_queue
from benchmarks.support.processes import ROOT

PENSTOCK = "penstock"
SYNCS = 50


@dataclass
class Round:
    """Times of one system for a number of groups."""

    seconds: float
    latencies: list[float]
    """Time of each group, in seconds."""
    cpu_seconds: float


Run = Callable[[Sequence[int]], Awaitable[Round]]


@dataclass
class Figures:
    """All rounds of one system."""

    seconds_per_group: list[float] = field(default_factory=list[float])
    latencies: list[float] = field(default_factory=list[float])
    cpu_seconds_per_group: list[float] = field(default_factory=list[float])
    ratios: list[float] = field(default_factory=list[float])
    """Penstock's groups per second divided by this system's, in the same round."""

    def percentile(self, percent: int) -> float:
        """Percentile of a group's time, in milliseconds."""
        return statistics.quantiles(self.latencies, n=100)[percent - 1] * 1e3


def through_penstock(
    agent: Agent, trainer: Trainer, window: int, closed: int, *, by_place: bool = True
) -> Run:
    async def run(groups: Sequence[int]) -> Round:
        await agent.prepare(groups, closed)
        before = cpu_seconds(penstock_way=True)
        taking = asyncio.ensure_future(trainer.take(len(groups), by_place=by_place))
        start, began = await agent.hand_over(groups, closed, window)
        arrived = await taking
        return _round(start, began, arrived, cpu_seconds(penstock_way=True) - before)

    return run


def through_ray(hand_over: Hand, window: int, form: str) -> Run:
    async def run(groups: Sequence[int]) -> Round:
        items = [(group, FORMS[form].make(group)) for group in groups]
        before = cpu_seconds(penstock_way=False)
        found = await hand_over(form, items, window)
        return _round(*found, cpu_seconds(penstock_way=False) - before)

    return run


def cpu_seconds(*, penstock_way: bool) -> float:
    """Processor time of this process and of one system's children.

    Penstock's children are the ones that run modules of this benchmark.
    """
    total = sum(psutil.Process().cpu_times()[:2])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("benchmarks.buffer." in part for part in child.cmdline()) == penstock_way:
                total += sum(child.cpu_times()[:2])
    return total


def _round(
    start: float, began: Mapping[int, float], arrived: Mapping[int, float], cpu: float
) -> Round:
    assert began.keys() == arrived.keys()
    latencies = [arrived[group] - began[group] for group in began]
    return Round(max(arrived.values()) - start, latencies, cpu)


async def measure(
    runs: Mapping[str, Run], count: int, rounds: int, log: Console
) -> dict[str, Figures]:
    """Runs all systems in interleaved rounds, so that each meets the same load of the machine."""
    figures = {name: Figures() for name in runs}
    first = 0

    def next_groups() -> range:
        nonlocal first
        first += count
        return range(first - count, first)

    for run in runs.values():
        await run(next_groups())
    for number in range(rounds):
        speeds: dict[str, float] = {}
        for name in random.sample(list(runs), len(runs)):
            found = await runs[name](next_groups())
            speeds[name] = count / found.seconds
            figures[name].seconds_per_group.append(found.seconds / count)
            figures[name].cpu_seconds_per_group.append(found.cpu_seconds / count)
            figures[name].latencies += found.latencies
        for name, speed in speeds.items():
            figures[name].ratios.append(speeds[PENSTOCK] / speed)
        shown = ", ".join(f"{name} {1e3 / speed:.2f}" for name, speed in speeds.items())
        log.print(f"round {number + 1} of {rounds}, ms per group: {shown}")
    return figures


def show(figures: Mapping[str, Figures], log: Console) -> None:
    table = Table(title=f"groups of {SIBLINGS} trajectories, {GROUP_BYTES >> 10} KiB each")
    for name in ("", "groups/s", "MB/s", "penstock to it", "p50 ms", "p99 ms", "CPU ms"):
        table.add_column(name, justify="right" if name else "left")
    for name, found in figures.items():
        seconds = statistics.median(found.seconds_per_group)
        table.add_row(
            name,
            f"{1 / seconds:.0f}",
            f"{GROUP_BYTES / seconds / 1e6:.0f}",
            f"{statistics.median(found.ratios):.2f}",
            f"{found.percentile(50):.1f}",
            f"{found.percentile(99):.1f}",
            f"{statistics.median(found.cpu_seconds_per_group) * 1e3:.2f}",
        )
    log.print(table)


@contextlib.contextmanager
def disk_folder(given: Path | None, log: Console) -> Iterator[Path]:
    """Creates a temporary folder, and prints how long a group takes to become durable there."""
    parent = given or ROOT / "runs"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-buffer-") as name:
        path = Path(name) / "probe"
        data = os.urandom(GROUP_BYTES)
        seconds: list[float] = []
        with path.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, SYNCS * GROUP_BYTES)
            for _ in range(SYNCS):
                began = time.perf_counter()
                file.write(data)
                os.fdatasync(file.fileno())
                seconds.append(time.perf_counter() - began)
        path.unlink()
        log.print(
            f"{parent}: writing a group and making it durable takes "
            f"{statistics.median(seconds) * 1e3:.2f} ms (median)"
        )
        yield Path(name) / "journal"


async def compare(groups: int, rounds: int, window: int, folder: Path | None, log: Console) -> str:
    """Runs the comparison and returns the last line to print."""
    async with contextlib.AsyncExitStack() as stack:
        journal = stack.enter_context(disk_folder(folder, log))
        theirs: dict[str, Run] = {}
        if importlib.util.find_spec("ray") is None:
            log.print("Ray is not installed (`make bench-buffer` installs it): no comparison")
        else:
            hand_over = await stack.enter_async_context(ray_queue(2 * window))
            theirs = {form: through_ray(hand_over, window, form) for form in FORMS}
        agent, trainer = await stack.enter_async_context(penstock(journal))
        runs = {
            PENSTOCK: through_penstock(agent, trainer, window, SIBLINGS - 1),
            "penstock, over a socket": through_penstock(
                agent, trainer, window, SIBLINGS - 1, by_place=False
            ),
            "penstock, 8 outcomes": through_penstock(agent, trainer, window, 0),
            **theirs,
        }
        figures = await measure(runs, groups, rounds, log)
    show(figures, log)

    def ratio(name: str) -> float | None:
        return round(statistics.median(figures[name].ratios), 2) if name in figures else None

    last: dict[str, float | None] = {
        "vs_ray_queue": ratio(PICKLED),
        "vs_ray_arrays": ratio(ARRAYS),
        "p99_ms": round(figures[PENSTOCK].percentile(99), 2),
    }
    return json.dumps(last)


@click.command()
@click.option("--groups", default=64, show_default=True, help="Groups in a round.")
@click.option("--rounds", default=7, show_default=True, help="Rounds to take medians over.")
@click.option("--window", default=16, show_default=True, help="Groups in flight at a time.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder on the disk to measure. Default: `runs` in this checkout.",
)
def main(groups: int, rounds: int, window: int, folder: Path | None) -> None:
    """Compare the durable buffer with Ray actor queues."""
    os.chdir(ROOT)
    log = Console(width=110)
    print(asyncio.run(compare(groups, rounds, window, folder, log)))


if __name__ == "__main__":
    main()
