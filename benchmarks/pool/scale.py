"""Arithmetic of a deployment: messages, bytes, memory, syncs, and which resource is full first.

    python -m benchmarks.pool.scale [--engines 1024] [--tokens-per-second 20000] [--turn-tokens 1000] ...

It runs no servers. `Measured` has the costs of one hub on one core, measured with the commands listed in
docs/operations/sizing.md. `Deployment` is the planned system. Rates are per second, sizes in bytes.
Without options it computes the deployments of that page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import click
from rich.console import Console
from rich.table import Table

Command = Callable[..., Any]
GIB, MIB = 2**30, 2**20
BYTES_PER_TOKEN = 8
"""A token id and a log-probability, packed; for sampled tokens on each hop, and in the journal."""
BYTES_PER_ID = 4
"""A token id of the context, which is sent whole to an engine with each turn."""
JOURNAL_COPIES = 2
"""A finished group is in the journal as its turns and as the group, until the next compaction."""
RECORDS_PER_TURN, RECORDS_PER_TRAJECTORY, RECORDS_PER_GROUP = 2, 3, 3
"""Turn: start, end. Trajectory: opened, leased, closed. Group: accepted, finished, receipted."""
VERSIONS_HELD = 2
"""Full versions held by a hub: the active one, for engines that join, and the next one during a switch."""
CALLS_PER_TURN, CALLS_PER_TRAJECTORY, CALLS_PER_GROUP = 4, 4, 4
"""Messages per turn: request and answer on the agent's side and on the engine's. Messages per trajectory:
lease and completion. Messages per group: submission, delivery and receipt."""
WHOLE_TURN_SECONDS = 1.0
"""How often an engine sends the tokens of a turn that its agent reads as a whole."""
WHOLE_TURN_MESSAGES = 2_000
"""With more turns, the interval grows so that one hub receives this many messages a second."""


@dataclass(frozen=True)
class Measured:
    """Measured costs of one hub, one trainer and one disk."""

    turn_seconds: float = 0.0019
    """Processor time of a turn without its tokens."""
    token_seconds: float = 1.61e-6
    """Processor time of each token of a turn."""
    trajectory_seconds: float = 0.0054
    """Processor time of lease, outcome, gate and delivery of one attempt."""
    attempt_bytes: float = 7.3 * 1024
    """Memory of one open trajectory, without its tokens."""
    rest_bytes: float = 552 * MIB
    """Memory of an idle hub."""
    records_per_second: float = 7_003
    """Durable appends of one journal, with 64 concurrent callers."""
    syncs_per_second: float = 756
    """Durable appends of one journal with one caller, each with a separate sync."""
    stream_bytes_per_second: float = 0.79e9
    """Rate of an upload over TCP out of one process."""
    compare_bytes_per_second: float = 2.98e9
    """Rate of comparing two versions and coding the differences, on two cores."""
    decode_seconds: float = 2e-9
    """Time to decode a token from its message to numpy, at the trainer."""


@dataclass(frozen=True)
class Deployment:
    """The sizes and rates of a planned deployment."""

    name: str
    engines: int
    tokens_per_second: float
    """Tokens per second of one engine."""
    turns_per_engine: int
    """Turns in flight on one engine."""
    turn_tokens: int
    """Mean number of tokens sampled in a turn."""
    turns: int
    """Turns of a trajectory."""
    group_size: int
    tool_seconds: float
    """Time between two turns of a trajectory."""
    model_bytes: float
    """Size of a full version in the precision of sampling."""
    delta: float
    """Size of a delta, as a share of the full version."""
    step_seconds: float
    """Time between two versions."""
    link_bytes_per_second: float
    """Network rate of one host, in each direction."""
    branches: int = 2


@dataclass(frozen=True)
class Load:
    """The resulting load of all hubs and the trainer."""

    tokens: float
    turns: float
    trajectories: float
    messages: float
    hub_cores: float
    hubs: int
    """Number of hubs, each with one core that is used to seven tenths."""
    memory_bytes: float
    """Memory of one hub."""
    token_bytes: float
    """Token bytes into and out of all hubs, without the journal."""
    journal_bytes: float
    records: float
    """Journal records of one hub."""
    syncs: float
    """Syncs of one hub, at most: records that wait at the same time share one sync."""
    trainer_bytes: float
    trainer_cores: float
    version_bytes: float
    """Bytes out of one hub for one version: a delta to each host, or the full version to the first hosts of
    a tree, whichever is less."""
    uploaded_bytes: float
    """Bytes out of the trainer for one version: a delta to each hub."""
    version_seconds: float
    """Time from when the hub has a version to the last byte at the last host. Every link has the rate of a
    stream or its own, whichever is less."""
    fullest: dict[str, float]
    """Utilization by resource, as if there were one hub with one core. For the trainer, with as many hubs
    as needed."""


USED = 0.7
PIECE_BYTES = 4 * MIB


def tree(hosts: int, branches: int) -> tuple[int, int]:
    """Returns how many hosts one hub sends a version to, and the number of hops to the last host.

    `branches` is as in `pool.branches`: with 0 the hub sends it to each host, with 1 the hosts are a chain.
    """
    if branches == 0:
        return hosts, 1
    depth, reached, level = 0, 0, 1
    while reached < hosts:
        level *= branches
        reached += level
        depth += 1
    return min(branches, hosts), depth


def spread(hosts: int, d: Deployment, m: Measured) -> tuple[float, float, float]:
    """The work of one hub to send a version to `hosts` hosts.

    Returns the bytes out of the hub, the seconds of comparing it with the previous version, and the seconds
    until the last byte has arrived.
    """
    link = min(d.link_bytes_per_second, m.stream_bytes_per_second)
    difference = d.model_bytes * d.delta
    fan, depth = tree(hosts, d.branches)
    if difference * hosts < d.model_bytes * fan:
        compare = d.model_bytes / m.compare_bytes_per_second
        return difference * hosts, compare, difference * hosts / link + compare
    # A host forwards data while it still receives, so each level adds the delay of one piece.
    sent = d.model_bytes * fan
    return sent, 0.0, (sent + (depth - 1) * PIECE_BYTES) / link


def load(deployment: Deployment, measured: Measured) -> Load:
    """Computes the load of a deployment from the measured costs."""
    d, m = deployment, measured
    tokens = d.engines * d.tokens_per_second
    turns = tokens / d.turn_tokens
    trajectories = turns / d.turns
    groups = trajectories / d.group_size
    in_flight = d.engines * d.turns_per_engine
    cores = turns * m.turn_seconds + tokens * m.token_seconds + trajectories * m.trajectory_seconds
    hubs = max(1, math.ceil(cores / USED))
    messages = (
        turns * CALLS_PER_TURN + trajectories * CALLS_PER_TRAJECTORY + groups * CALLS_PER_GROUP
    )
    messages += min(in_flight / WHOLE_TURN_SECONDS, WHOLE_TURN_MESSAGES * hubs)
    # On average, an open trajectory has half of its final tokens.
    open_trajectories = in_flight + turns * d.tool_seconds
    open_bytes = m.attempt_bytes + BYTES_PER_TOKEN * d.turn_tokens * d.turns / 2
    fixed_bytes = m.rest_bytes + VERSIONS_HELD * d.model_bytes
    # Sampled tokens come in from engines and go out to agents and trainer. Each turn also sends the
    # trajectory's tokens so far to its engine: on average, those of half of its other turns.
    bytes_in = tokens * BYTES_PER_TOKEN
    bytes_out = 2 * tokens * BYTES_PER_TOKEN + tokens * BYTES_PER_ID * (d.turns - 1) / 2
    journal = tokens * BYTES_PER_TOKEN * JOURNAL_COPIES
    records = (
        turns * RECORDS_PER_TURN
        + trajectories * RECORDS_PER_TRAJECTORY
        + groups * RECORDS_PER_GROUP
    )
    link = min(d.link_bytes_per_second, m.stream_bytes_per_second)
    difference = d.model_bytes * d.delta
    version_bytes, _, version_seconds = spread(math.ceil(d.engines / hubs), d, m)
    alone_bytes, alone_compare, _ = spread(d.engines, d, m)
    return Load(
        tokens=tokens,
        turns=turns,
        trajectories=trajectories,
        messages=messages,
        hub_cores=cores,
        hubs=hubs,
        memory_bytes=fixed_bytes + open_trajectories * open_bytes / hubs,
        token_bytes=bytes_in + bytes_out,
        journal_bytes=journal,
        records=records / hubs,
        syncs=min(records / hubs, m.syncs_per_second),
        trainer_bytes=tokens * BYTES_PER_TOKEN,
        trainer_cores=tokens * m.decode_seconds,
        version_bytes=version_bytes,
        uploaded_bytes=difference * hubs,
        version_seconds=version_seconds,
        fullest={
            "core of one hub": cores,
            "syncs of one journal": records / m.records_per_second,
            "link of one hub, tokens": bytes_out / d.link_bytes_per_second,
            "link of one hub, weights": alone_bytes / link / d.step_seconds,
            "two cores of one hub, comparing versions": alone_compare / d.step_seconds,
            "link of the trainer, weights to each hub": difference * hubs / link / d.step_seconds,
            "core of the trainer, decoding": tokens * m.decode_seconds,
            "64 GiB of one hub": (fixed_bytes + open_trajectories * open_bytes) / (64 * GIB),
        },
    )


GIGABIT = 1e9 / 8
GPU = Deployment(
    name="",
    engines=1,
    tokens_per_second=10_000,
    turns_per_engine=128,
    turn_tokens=1_000,
    turns=8,
    group_size=8,
    tool_seconds=5.0,
    model_bytes=15e9,
    delta=1 / 52.8,
    step_seconds=60.0,
    link_bytes_per_second=100 * GIGABIT,
)
LAPTOP = Deployment(
    name="a laptop",
    engines=1,
    tokens_per_second=600,
    turns_per_engine=16,
    turn_tokens=64,
    turns=4,
    group_size=4,
    tool_seconds=1.0,
    model_bytes=269e6,
    delta=1.0,
    step_seconds=30.0,
    link_bytes_per_second=10 * GIGABIT,
)
DEPLOYMENTS = (
    LAPTOP,
    replace(GPU, name="8 engines", engines=8),
    replace(GPU, name="128 engines", engines=128),
    replace(GPU, name="1,024 engines", engines=1_024),
    replace(
        GPU,
        name="10,240, over the internet",
        engines=10_240,
        step_seconds=600.0,
        link_bytes_per_second=GIGABIT,
    ),
)


def size(count: float) -> str:
    """Formats bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1_000
    return f"{count:.3g} TB"


ROWS: dict[str, Callable[[Load], str]] = {
    "tokens a second": lambda one: f"{one.tokens:,.0f}",
    "turns a second": lambda one: f"{one.turns:,.1f}",
    "trajectories an hour": lambda one: f"{3_600 * one.trajectories:,.0f}",
    "messages a second": lambda one: f"{one.messages:,.0f}",
    "cores of hubs": lambda one: f"{one.hub_cores:.2f}",
    "hubs of a core, seven tenths full": lambda one: f"{one.hubs:,}",
    "memory of one hub": lambda one: size(one.memory_bytes),
    "token bytes a second, in and out of hubs": lambda one: size(one.token_bytes),
    "journal bytes a second": lambda one: size(one.journal_bytes),
    "journal records a second, one hub": lambda one: f"{one.records:,.1f}",
    "fsyncs a second, one hub, at most": lambda one: f"{one.syncs:,.1f}",
    "into the trainer, bytes a second": lambda one: size(one.trainer_bytes),
    "cores of the trainer, decoding": lambda one: f"{one.trainer_cores:.4f}",
    "out of the trainer, one version": lambda one: size(one.uploaded_bytes),
    "out of one hub, one version": lambda one: size(one.version_bytes),
    "seconds until the last host has it": lambda one: f"{one.version_seconds:.2f}",
}


def show(deployments: Sequence[Deployment], measured: Measured, console: Console) -> None:
    """Prints the table of loads and the table of utilization."""
    loads = [load(one, measured) for one in deployments]
    table = Table(title="load")
    full = Table(title="utilization as if there were one hub with one core; 1 is the limit")
    for one in (table, full):
        one.add_column("")
        for deployment in deployments:
            one.add_column(deployment.name, justify="right")
    for name, text in ROWS.items():
        table.add_row(name, *(text(one) for one in loads))
    for name in loads[0].fullest:
        full.add_row(name, *(f"{one.fullest[name]:.3g}" for one in loads))
    console.print(table, full)


def as_options(*kinds: type[Deployment] | type[Measured]) -> Callable[[Command], Command]:
    """Adds an option for each numeric field."""

    def decorate(command: Command) -> Command:
        for kind in kinds:
            for field in fields(kind):
                if field.name != "name":
                    number = int if field.type == "int" else float
                    command = click.option(f"--{field.name.replace('_', '-')}", type=number)(
                        command
                    )
        return command

    return decorate


@click.command(help=__doc__.split("\n")[0])
@as_options(Deployment, Measured)
def main(**given: float | None) -> None:
    """Print the tables of docs/operations/sizing.md, or those of the deployment given by the options."""
    wanted = {name: value for name, value in given.items() if value is not None}
    of = {kind: {f.name for f in fields(kind)} for kind in (Deployment, Measured)}
    measured = Measured(**{n: v for n, v in wanted.items() if n in of[Measured]})
    asked = {n: v for n, v in wanted.items() if n in of[Deployment]}
    deployments = [replace(GPU, name="asked for", **asked)] if asked else DEPLOYMENTS
    show(deployments, measured, Console(width=140))


if __name__ == "__main__":
    main()
