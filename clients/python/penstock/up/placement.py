"""Where processes run: the seam between who keeps them running (`supervisor`) and what starts them.

    LocalPlacement    processes of this machine
    RayPlacement      processes of the nodes of a Ray cluster, each in an actor: `ray_placement`

The same commands run in either.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from penstock.up.processes import THIS_HOST, Command, Process, Running

DEVICES = "CUDA_VISIBLE_DEVICES"


class PlacementFailed(Exception):
    """There is no place for the processes; the message says what is missing."""


class Placement(Protocol):
    """Starts processes somewhere."""

    async def start(self, command: Command, on_line: Callable[[str], None] | None) -> Running:
        """Starts one; `on_line` is given what it prints on its standard output, line by line.

        A process that could not be started is one that has ended."""
        ...


class LocalPlacement:
    """On this machine."""

    def __init__(self, environments: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """`environments` are added to the commands' own, by the commands' names."""
        self._environments = environments or {}

    async def start(self, command: Command, on_line: Callable[[str], None] | None) -> Running:
        """Starts one."""
        added = self._environments.get(command.name, {})
        environment = {**command.environment, **added}
        try:
            return Process.start(replace(command, environment=environment), on_line)
        except OSError as error:
            return NeverStarted(command, error)


class NeverStarted:
    """What could not be started: has ended."""

    pid = 0
    host = THIS_HOST

    def __init__(self, command: Command, error: OSError) -> None:
        self.command = command
        self._error = error

    async def wait(self) -> int:
        """Not zero."""
        return 1

    def signal(self, number: signal.Signals) -> None:
        """Nobody is there."""

    async def stop(self, patience: float) -> None:
        """Nobody is there."""

    def kill(self) -> None:
        """Nobody is there."""

    def ending(self, status: int) -> str:
        """Why."""
        return f"could not be started: {self._error}"

    async def write(self, files: Mapping[Path, str]) -> None:
        """What has ended gets none."""


def share_devices(
    wanted: Mapping[str, float], visible: Sequence[str] | None
) -> dict[str, dict[str, str]]:
    """What each process is told of the GPUs that are its own, as Ray tells an actor.

    `wanted` are GPUs by process, whole ones or a part of one; `visible` their names, or None for those of
    the machine by number. Where nobody wants any, nobody is told anything. Raises PlacementFailed.
    """
    if not any(wanted.values()):
        return {}
    used, told = 0.0, dict[str, dict[str, str]]()
    for name, count in wanted.items():
        if count >= 1 or used % 1 + count > 1:
            used = math.ceil(used)
        devices = range(int(used), int(used) + math.ceil(count))
        used += count
        if visible is not None and devices.stop > len(visible):
            raise PlacementFailed(
                f"GPUs: {sum(wanted.values()):g} are asked for, {DEVICES} names {len(visible)}"
            )
        names = [str(device) if visible is None else visible[device] for device in devices]
        told[name] = {DEVICES: ",".join(names)}
    return told
