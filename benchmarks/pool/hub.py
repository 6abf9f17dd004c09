"""The cost of a hub: throughput compared with direct calls, processor time, and a pool of 1,024 engines.

    python -m benchmarks.pool.hub [--part throughput] [--part cost] [--part fleet]
        [--rounds 3] [--seconds 5]

Every part runs the real `penstock serve --engines` in a separate process. Engines and agents are fake
(`pool_engines`, `pool_agents`).

- **throughput**: 1, 2 and 4 engine servers, each a process, that sample 20,000 tokens a second over 32
  turns. Each has 32 agents with conversations of four turns. The agents call through the hub, and directly
  with an even spread over the same engine servers, in interleaved rounds.
- **cost**: the hub's processor time for the same work with short turns and with long ones. From it follow
  the time of a turn and the time of a token.
- **fleet**: 1,024 addresses with no engine behind them. It measures the hub at rest; with weight versions
  one after the other, as fast as possible; with 10 engines a second that restart and receive their weights;
  and with 10,000 agents. An *update* is the transfer of one version to one engine, from the header to the
  engine's response that the version is active.

The last line is one JSON object. `hub_of_direct` is the smallest of the three medians. `us_per_turn` is for
a turn without its tokens. `core_share_at_10_updates_per_second` is everything the hub uses with 10 restarts
a second, including its polls of the other engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from benchmarks.pool import fleet
from benchmarks.pool.agents import Done, Work
from benchmarks.pool.processes import agents, engines, hub, work
from benchmarks.support.processes import Process
from rich.console import Console
from rich.table import Table

PARTS = ("throughput", "cost", "fleet")
AGENTS_PER_ENGINE = 32
COUNTS = (1, 2, 4)
TURN_TOKENS = 512
SHORT, LONG = 64, 2048


@dataclass(frozen=True)
class Run:
    """One run of the agents, and the cores that the processes used during it."""

    done: Done
    hub: float
    agents: float
    engines: float


async def measured(
    agent: Process, wanted: Work, hub_process: Process | None, engine_processes: Sequence[Process]
) -> Run:
    """Runs the agents and measures the processes."""

    def used() -> list[float]:
        hub_seconds = hub_process.cpu_seconds if hub_process is not None else 0.0
        return [hub_seconds, sum(process.cpu_seconds for process in engine_processes)]

    before = used()
    done = await work(agent, wanted)
    spent = [after - first for after, first in zip(used(), before, strict=True)]
    return Run(
        done, spent[0] / done.seconds, done.cpu_seconds / done.seconds, spent[1] / done.seconds
    )


async def throughput(folder: Path, tokenizer: Path, rounds: int, seconds: float) -> float:
    """Prints the table; returns the smallest of the median ratios of hub to direct."""
    table = Table(title="tokens per second, hub and direct")
    for name in ("engines", "direct", "hub", "ratio", "ratios", "p50 direct", "p50 hub"):
        table.add_column(name)
    for name in ("hub", "agents", "engines"):
        table.add_column(f"cores: {name}")
    table.add_column("hub MiB")
    least = float("inf")
    for count in COUNTS:
        async with contextlib.AsyncExitStack() as stack:
            made = [await stack.enter_async_context(engines("served")) for _ in range(count)]
            addresses = [address for _, found in made for address in found]
            own = await stack.enter_async_context(hub(folder, tokenizer, addresses))
            agent = await stack.enter_async_context(agents())
            wanted = [
                Work(where, AGENTS_PER_ENGINE * count, TURN_TOKENS, length)
                for length in (seconds, 1.0)
                for where in (addresses, [own.address])
            ]
            for warm in wanted[2:]:
                await work(agent, warm)
            runs: list[tuple[Run, Run]] = []
            for number in range(rounds):
                pair: dict[int, Run] = {}
                for which in (0, 1) if number % 2 else (1, 0):
                    processes = [process for process, _ in made]
                    pair[which] = await measured(agent, wanted[which], own.process, processes)
                runs.append((pair[0], pair[1]))
            memory = own.process.resident_bytes / (1 << 20)
        ratios = [h.done.tokens_per_second / d.done.tokens_per_second for d, h in runs]
        least = min(least, statistics.median(ratios))
        direct, through = [[pair[at] for pair in runs] for at in (0, 1)]
        table.add_row(
            str(count),
            *(f"{median([r.done.tokens_per_second for r in of]):,.0f}" for of in (direct, through)),
            f"{statistics.median(ratios):.3f}",
            " ".join(f"{ratio:.3f}" for ratio in ratios),
            *(f"{median([r.done.latencies[0] for r in of]):.3f} s" for of in (direct, through)),
            *(
                f"{median([getattr(r, name) for r in through]):.2f}"
                for name in ("hub", "agents", "engines")
            ),
            f"{memory:.0f}",
        )
    Console(width=150).print(table)
    return least


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


async def cost(folder: Path, tokenizer: Path, rounds: int, seconds: float) -> tuple[float, float]:
    """Prints the table; returns the hub's median microseconds for a turn and for a token."""
    table = Table(title="the hub's processor time, two engines")
    for name in ("tokens of a turn", "turns/s", "hub cores", "ms per turn, with its tokens"):
        table.add_column(name)
    fits: list[tuple[float, float]] = []
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(engines("served")) for _ in range(2)]
        addresses = [address for _, found in made for address in found]
        own = await stack.enter_async_context(hub(folder, tokenizer, addresses))
        agent = await stack.enter_async_context(agents())
        await work(agent, Work([own.address], 2 * AGENTS_PER_ENGINE, SHORT, 1.0))
        for _ in range(rounds):
            points: list[tuple[float, float]] = []
            for tokens in (SHORT, LONG):
                wanted = Work([own.address], 2 * AGENTS_PER_ENGINE, tokens, seconds)
                run = await measured(agent, wanted, own.process, [])
                used = run.hub * run.done.seconds
                points.append((run.done.tokens / run.done.turns, used / run.done.turns))
                table.add_row(
                    str(tokens),
                    f"{run.done.turns / run.done.seconds:.0f}",
                    f"{run.hub:.2f}",
                    f"{used / run.done.turns * 1e3:.2f}",
                )
            (few, short), (many, long) = points
            per_token = (long - short) / (many - few)
            fits.append(((short - per_token * few) * 1e6, per_token * 1e6))
    Console(width=150).print(table)
    per_turn, per_token = (median([fit[at] for fit in fits]) for at in (0, 1))
    print(f"{per_turn:.0f} us per turn and {per_token:.3f} us per token")
    return per_turn, per_token


async def run(
    parts: Sequence[str], rounds: int, seconds: float, count: int, agent_count: int
) -> None:
    """Runs the parts and prints their results."""
    from tests.support.tiny_model import make_byte_tokenizer

    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), Path(name) / "tokenizer"
        make_byte_tokenizer().save_pretrained(tokenizer)
        began = time.monotonic()
        if "throughput" in parts:
            ratio = await throughput(folder, tokenizer, rounds, seconds)
            result["hub_of_direct"] = round(ratio, 3)
        if "cost" in parts:
            per_turn, per_token = await cost(folder, tokenizer, rounds, seconds)
            result |= {"us_per_turn": round(per_turn), "us_per_token": round(per_token, 3)}
        if "fleet" in parts:
            result["engines"] = count
            share = await fleet.measure(folder, tokenizer, count, agent_count)
            result["core_share_at_10_updates_per_second"] = round(share, 3)
        print(f"{time.monotonic() - began:.0f} s in total")
    print(json.dumps(result))


@click.command()
@click.option(
    "--part", "parts", type=click.Choice(PARTS), multiple=True, help="Default: all parts."
)
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=5.0, show_default=True)
@click.option("--engines", "count", default=1024, show_default=True, help="Engines of the fleet.")
@click.option(
    "--agents", "agent_count", default=10_000, show_default=True, help="Agents of the fleet."
)
def main(parts: tuple[str, ...], rounds: int, seconds: float, count: int, agent_count: int) -> None:
    """Measure the cost of a hub."""
    asyncio.run(run(parts or PARTS, rounds, seconds, count, agent_count))


if __name__ == "__main__":
    main()
