"""Finished groups from producer to consumer, through the durable buffer and through Ray actor queues.

    python benchmarks/buffer.py [--groups 64] [--rounds 7] [--window 16] [--folder DIR]

A group is 8 trajectories of 8,192 sampled tokens: token ids and log-probabilities, 512 KiB. Both ways have
three processes on this machine, and both end with numpy arrays in the consumer, each of which is compared
with what was sampled once the clock has stopped.

Penstock: agent -> server -> trainer, over gRPC. The tokens are in the server, which sampled them, as they
always are; the clock of a group begins when its agent sends the last outcome (`CompleteTrajectory`), which
makes it a finished group. Then everything a server does: the group put together -> written to the journal
and made durable with fdatasync, in a folder on a disk -> answered -> selected by the gate -> delivered on
`Exchange` -> arrays -> receipts and checkpoint notices, which are written as well, and compaction. The
engine alone is a fake, which wrote the turns before the clock began; so were the outcomes of the other
seven sent, as their agents do when each is done. `penstock, 8 outcomes` has those within the clock, too:
eight calls for each group.

The trainer is on the server's host, and does what it does there: `Exchange` tells it where in the journal a
group lies, and it reads it there. `penstock, over a socket` is what a trainer of another host has, to which
the group itself is sent.

Ray: producer -> queue (an actor) -> consumer. The producer has the group in the form that it puts, and the
clock begins when it does. Nothing is durable. What that form is makes all the difference; `buffer_ray` has
four. A Ray actor queue *with cloudpickle* is what the fully asynchronous trainers of rllm (`pickled lists`)
and verl (`pickled tensors`) have: they pickle a group themselves and pass the bytes through an actor.
rllm's is the one that `vs_ray_queue` compares with: its items are what is moved here, groups of token ids
and log-probabilities. `vs_ray_arrays` is against the best that Ray's own queue can do, for whoever keeps
numpy arrays all the way: those never enter a pickle.

So a group crosses one process boundary here and two there: that the server owns the tokens is the design.
Each way has `window` groups at a time in the hands of its producer, enough that it is busy and not waiting;
so a group's time is that of one among many. Rounds are interleaved in random order, and ratios are taken
within a round, because machines are shared and noisy. CPU is the time of all processes of a way, Ray's own
included, per group.

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
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
# The parts run as modules of the checkout, in processes of their own.
sys.path.insert(0, str(ROOT))
# Nothing here is forked to go on with gRPC, which would say so each time.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from benchmarks.buffer_groups import GROUP_BYTES, SIBLINGS  # noqa: E402
from benchmarks.buffer_penstock import Agent, Trainer, penstock  # noqa: E402
from benchmarks.buffer_ray import ARRAYS, FORMS, PICKLED, Hand, ray_queue  # noqa: E402

PENSTOCK = "penstock"
SYNCS = 50


@dataclass
class Round:
    """What one way took for a number of groups."""

    seconds: float
    latencies: list[float]
    """Of each group, in seconds."""
    cpu_seconds: float


Run = Callable[[Sequence[int]], Awaitable[Round]]


@dataclass
class Figures:
    """All rounds of one way."""

    seconds_per_group: list[float] = field(default_factory=list[float])
    latencies: list[float] = field(default_factory=list[float])
    cpu_seconds_per_group: list[float] = field(default_factory=list[float])
    ratios: list[float] = field(default_factory=list[float])
    """Penstock's groups per second to its own, in the same round."""

    def percentile(self, percent: int) -> float:
        """Of a group's time, in milliseconds."""
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
    """Of this process and of its children, of which Penstock's are modules of this benchmark."""
    total = sum(psutil.Process().cpu_times()[:2])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("benchmarks.buffer_" in part for part in child.cmdline()) == penstock_way:
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
    """Medians need rounds in which every way met the same machine."""
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
    """A folder of its own, and how long a group takes there to be durable."""
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
            f"{parent}: a group is written and made durable in "
            f"{statistics.median(seconds) * 1e3:.2f} ms in the median"
        )
        yield Path(name) / "journal"


async def compare(groups: int, rounds: int, window: int, folder: Path | None, log: Console) -> str:
    """The last line."""
    async with contextlib.AsyncExitStack() as stack:
        journal = stack.enter_context(disk_folder(folder, log))
        theirs: dict[str, Run] = {}
        if importlib.util.find_spec("ray") is None:
            log.print("Ray is not installed (`make bench-buffer` does it): there is no comparison")
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
@click.option("--window", default=16, show_default=True, help="Groups in the producer's hands.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder on the disk to measure. Default: runs of this checkout.",
)
def main(groups: int, rounds: int, window: int, folder: Path | None) -> None:
    """Compares the durable buffer with Ray actor queues."""
    os.chdir(ROOT)
    log = Console(width=110)
    print(asyncio.run(compare(groups, rounds, window, folder, log)))


if __name__ == "__main__":
    main()
