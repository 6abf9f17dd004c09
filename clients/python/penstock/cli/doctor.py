"""The command `penstock doctor`: checks what a run on this machine needs, or why a server's run stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from penstock.cli.options import Address, security_options
from penstock.common.answers import Exit, show
from penstock.machine.examine import examine
from penstock.machine.findings import Finding, State

if TYPE_CHECKING:
    from google.protobuf import duration_pb2

    from penstock.v1 import rollout_service_pb2
    from penstock.wire.security import Security

MOST_LINES = 10
"""Places and workers that are printed; --json has up to a hundred of each."""


@click.command(
    "doctor",
    epilog="Exit status: 0 if nothing is missing, and nothing stands still; 1 if something is missing, so "
    "that no run of server, worker and trainer works here, if something stands still, or if the server "
    "does not answer; 2 if the command line is invalid.",
)
@click.argument("address", metavar="[HOST:PORT]", required=False, type=Address())
@security_options
def doctor(security: Security, address: str | None) -> None:
    """Check this machine, or with HOST:PORT say what the run of that server waits for.

    Without an address: packages, processor, GPUs, memory, disk, ports and models. Prints a line for each
    check: ok, warning or missing, what was found, and what to do. An agent's machine needs the base
    install only, so there the missing extras do not matter.

    With an address: the causes for which the run stands still or is slow, the most likely one first, each
    with advice; then what the server has under way.
    """
    if address is not None:
        sys.exit(_ask(address, security))
    findings = list(examine())
    missing = any(finding.state is State.MISSING for finding in findings)
    text = "\n".join(_line(finding) for finding in findings)
    show(text, {"ready": not missing, "findings": [asdict(finding) for finding in findings]})
    sys.exit(Exit.FAILED if missing else Exit.DONE)


def _line(finding: Finding) -> str:
    hint = f"; {finding.hint}" if finding.hint else ""
    return f"{finding.state:<9}{finding.name:<16}{finding.found}{hint}"


def _ask(address: str, security: Security) -> int:
    # What a machine's check does not need, and may lack.
    from google.protobuf import json_format

    from penstock.cli.asking import answered, server_info
    from penstock.wire.security import open_channel
    from penstock.wire.words import ORDINARY

    stands = False

    async def work() -> None:
        nonlocal stands
        async with open_channel(address, security) as channel:
            info = await server_info(channel, with_progress=True)
        stands = any(wait.cause not in ORDINARY for wait in info.waits)
        figures = json_format.MessageToDict(
            info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        text = "\n".join(_report(address, info))
        show(text, {key: figures.get(key) for key in ("waits", "progress")})

    status = answered("penstock doctor", address, work())
    return status or (Exit.FAILED if stands else Exit.DONE)


def _report(address: str, info: rollout_service_pb2.GetServerInfoResponse) -> Iterator[str]:
    progress = info.progress
    yield _row("server", f"{address}, {info.model}")
    for wait in info.waits:
        yield _row(wait.cause, f"for {_seconds(wait.duration)}: {wait.message}")
        yield _row("", f"> {wait.advice}")
    if not info.waits:
        yield _row("ok", "nothing waits")
    trainer = "none is connected"
    if progress.trainer_connected:
        trainer = (
            f"holds version {progress.trainer_weight_version}, waits for "
            f"{progress.demanded_group_count} groups"
        )
        if progress.demanded_evaluation_group_count:
            trainer += f" and {progress.demanded_evaluation_group_count} evaluation groups"
    yield _row("trainer", trainer)
    delivered = "never"
    if progress.HasField("since_delivery"):
        delivered = f"{_seconds(progress.since_delivery)} ago"
    yield _row("last delivery", delivered)
    token = f"{_seconds(progress.since_token)} ago" if progress.HasField("since_token") else "never"
    yield _row("last token", token)
    staged = ", ".join(map(str, info.staged_weight_versions))
    yield _row(
        "weights",
        f"version {info.active_weight_version} is active{f', {staged} staged' if staged else ''}; "
        f"the switch is {progress.switch_state} for {_seconds(progress.since_switch_state)}",
    )
    yield _row("tasks", f"{progress.pending_task_count} wait")
    if progress.drops:
        drops = ", ".join(f"{count} {reason}" for reason, count in sorted(progress.drops.items()))
        yield _row("dropped", f"{drops}, since a group was last trained")
    yield from _leases(progress)
    yield from _places(progress)


def _leases(progress: rollout_service_pb2.Progress) -> Iterator[str]:
    yield _row("workers", f"{progress.agent_count} connected")
    for agent in progress.agents[:MOST_LINES]:
        whole = ", whole groups only" if agent.whole_groups else ""
        yield _row("", f"{agent.agent_id}: {agent.leased_count} of {agent.concurrency}{whole}")
    for name, lease in (
        ("oldest lease", progress.oldest_lease),
        ("most silent", progress.most_silent_lease),
    ):
        if lease.trajectory_id:
            agent_id = lease.agent_id or "an agent whose stream was lost"
            yield _row(
                name,
                f"{lease.trajectory_id} of {agent_id}: leased {_seconds(lease.age)} ago, "
                f"silent for {_seconds(lease.silence)}",
            )


def _places(progress: rollout_service_pb2.Progress) -> Iterator[str]:
    yield _row(
        "places", f"{progress.place_count} groups, at most {progress.place_limit} for training"
    )
    for place in progress.places[:MOST_LINES]:
        size = place.waiting_count + place.leased_count + place.ended_count
        state = f"{place.ended_count} of {size} attempts ended, {place.leased_count} leased"
        if place.ended_count == size:
            state = "complete, waits for the trainer"
        begun = f", begun {_seconds(place.age)} ago" if place.HasField("age") else ""
        yield _row("", f"{place.group_id} {place.task_id}: {state}{begun}")
    if progress.place_count > MOST_LINES:
        yield _row("", f"... and {progress.place_count - MOST_LINES} more")


def _row(name: str, text: str) -> str:
    return f"{name:<20}{text}"


def _seconds(duration: duration_pb2.Duration) -> str:
    return f"{duration.ToNanoseconds() / 1e9:.0f} s"
