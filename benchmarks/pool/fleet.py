"""The fleet part of `benchmarks/pool/hub.py`: 1,024 engines and 10,000 agents."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pool.agents import Work
from benchmarks.pool.processes import Hub, agents, engines, hub, work
from benchmarks.support.processes import Process
from tests.support.harness import header

from penstock.wire.upload import upload

MIB = 1 << 20
TURN_TOKENS = 256
TOKENS_PER_SECOND = 25.0
"""Pace of a turn, slow enough that all agents have a turn in flight most of the time."""
REST_SECONDS = 10.0
AGENT_SECONDS = 30.0
RAMP_SECONDS = 15.0
VERSIONS = 5
RESTARTS_PER_SECOND = 10.0
RESTART_SECONDS = 20.0
# One caller opens all trajectories here; the default limits are for one caller among many.
SETTINGS = (
    "limits.concurrent_calls=40000",
    "limits.open_trajectories=40000",
    "limits.caller.calls=40000",
    "limits.caller.turns_in_flight=40000",
    "limits.caller.open_trajectories=40000",
)


@dataclass(frozen=True)
class Spent:
    """Processor time and calls over a period."""

    seconds: float
    hub: float
    engines: float
    """Processor time in seconds."""
    asked: dict[str, int]
    """Number of calls to the engines, by kind."""

    @property
    def hub_cores(self) -> float:
        """Mean number of cores that the hub used."""
        return self.hub / self.seconds

    def rate(self, name: str) -> float:
        """Calls of a kind per second."""
        return self.asked.get(name, 0) / self.seconds


class Watch:
    """Measures what is spent from its creation on."""

    def __init__(self, hub_process: Process, engine: Process, asked: dict[str, int]) -> None:
        self._processes = hub_process, engine
        self._asked = asked
        self._began = time.perf_counter(), *(p.cpu_seconds for p in self._processes)

    @classmethod
    async def begin(cls, hub_process: Process, engine: Process) -> Watch:
        return cls(hub_process, engine, json.loads(await engine.ask("count")))

    async def end(self) -> Spent:
        """Returns what was spent until now."""
        now = time.perf_counter(), *(p.cpu_seconds for p in self._processes)
        asked = json.loads(await self._processes[1].ask("count"))
        seconds, own, engine = (
            after - first for after, first in zip(now, self._began, strict=True)
        )
        counts = {name: count - self._asked.get(name, 0) for name, count in asked.items()}
        return Spent(seconds, own, engine, counts)


async def measure(folder: Path, tokenizer: Path, count: int, agent_count: int) -> float:
    """Prints a line for each part; returns the hub's core share with 10 updates a second."""
    print(f"a hub with {count:,} engines")
    tell("", "a second", "hub cores", "of one", "hub MiB")
    options = ("--count", str(count), "--tokens-per-second", str(TOKENS_PER_SECOND))
    async with (
        engines("many", *options) as (engine, addresses),
        hub(folder, tokenizer, addresses, *SETTINGS) as own,
    ):
        rest = await at_rest(own, engine)
        await with_versions(own, engine, count)
        share = await with_restarts(own, engine, count, rest)
        # Last, because it leaves turns unfinished.
        await with_agents(own, engine, agent_count)
    return share


def tell(name: str, *cells: str) -> None:
    """Prints a line of the table as soon as its values are known."""
    print(f"{name:58}", *(f"{cell:>11}" for cell in cells), flush=True)


async def at_rest(own: Hub, engine: Process) -> Spent:
    """Measures the hub when it only polls its engines."""
    watch = await Watch.begin(own.process, engine)
    await asyncio.sleep(REST_SECONDS)
    spent = await watch.end()
    tell("at rest: polls", *row(spent, "looks", own))
    return spent


def row(spent: Spent, name: str, own: Hub, rest: float = 0.0) -> list[str]:
    """Cells of a row: rate, the hub's cores, and its time per call beyond what it spends at rest."""
    each = (spent.hub - rest * spent.seconds) / max(1, spent.asked.get(name, 0))
    memory = own.process.resident_bytes / MIB
    cells = [f"{spent.rate(name):,.1f}", f"{spent.hub_cores:.2f}", f"{each * 1e6:,.0f} us"]
    return [*cells, f"{memory:.0f}"]


async def with_agents(own: Hub, engine: Process, agent_count: int) -> None:
    """Measures the hub with agents."""
    async with agents() as agent:
        wanted = Work(
            [own.address],
            agent_count,
            TURN_TOKENS,
            AGENT_SECONDS,
            connections=8,
            ramp_seconds=RAMP_SECONDS,
            leave=True,
        )
        working = asyncio.create_task(work(agent, wanted))
        await asyncio.sleep(RAMP_SECONDS)
        watch = await Watch.begin(own.process, engine)
        await asyncio.sleep(AGENT_SECONDS)
        spent = await watch.end()
        cells = row(spent, "turns", own)
        done = await working
    tell(f"{agent_count:,} agents: turns", *cells)
    tell("  their segments", *row(spent, "segments", own))
    tell("  turns that ended", f"{done.turns_per_second:,.1f}")
    takes = TURN_TOKENS / TOKENS_PER_SECOND
    middle, last = done.latencies or (float("nan"), float("nan"))
    tell(f"  a turn, of {takes:.1f} s: p50 and p99", f"{middle:.1f} s", f"{last:.1f} s")
    used = spent.engines / spent.seconds, done.cpu_seconds / done.seconds
    tell("  cores: engines and agents", *(f"{cores:.2f}" for cores in used))


async def with_versions(own: Hub, engine: Process, count: int) -> None:
    """Measures weight versions one after the other, each to every engine."""
    watch = await Watch.begin(own.process, engine)
    for version in range(1, VERSIONS + 1):
        head, data = header(version)
        await upload(own.channel, head, (data,))
    spent = await watch.end()
    tell("one version after the other: updates", *row(spent, "updates", own))
    each = spent.hub / VERSIONS
    tell(
        "  versions, to every engine",
        f"{VERSIONS / spent.seconds:,.2f}",
        f"{spent.hub_cores:.2f}",
        f"{each * 1e3:,.0f} ms",
        "",
    )
    updated = spent.asked["updates"]
    assert updated >= VERSIONS * count, f"{updated} of {VERSIONS * count} updates"


async def with_restarts(own: Hub, engine: Process, count: int, rest: Spent) -> float:
    """Measures engines that restart and receive the version.

    Returns the hub's cores at a rate of RESTARTS_PER_SECOND.
    """
    await own.in_rotation(count)
    engine.write(f"restart {RESTARTS_PER_SECOND}")
    # The hub notices each restart at its next poll.
    await asyncio.sleep(max(5.0, count / 150))
    watch = await Watch.begin(own.process, engine)
    await asyncio.sleep(RESTART_SECONDS)
    spent = await watch.end()
    engine.write("restart 0")
    tell("engines that restart: updates", *row(spent, "updates", own, rest.hub_cores))
    await own.in_rotation(count)
    rate = spent.rate("updates")
    assert rate > RESTARTS_PER_SECOND / 2, f"only {rate:.1f} updates a second"
    return rest.hub_cores + (spent.hub_cores - rest.hub_cores) * RESTARTS_PER_SECOND / rate
