"""Where processes run: the interface between the `supervisor` and what starts processes.

    LocalPlacement    processes of this machine
    RayPlacement      processes on the nodes of a Ray cluster, each in an actor: `ray_placement`

Both run the same commands.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from penstock.machine.gpus import DEVICES
from penstock.up.processes import THIS_HOST, Command, Process, Running


class PlacementFailed(Exception):
    """The processes cannot be placed; the message says what is missing."""


class Placement(Protocol):
    """Starts processes on some host."""

    async def start(self, command: Command, on_line: Callable[[str], None] | None) -> Running:
        """Starts a process; `on_line` gets its standard output, line by line.

        If the process could not be started, the result is a process that has already ended.
        """
        ...


class LocalPlacement:
    """Starts processes on this machine."""

    def __init__(self, environments: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """`environments` holds variables to add, by the command's name."""
        self.environments = environments or {}

    async def start(self, command: Command, on_line: Callable[[str], None] | None) -> Running:
        added = self.environments.get(command.name, {})
        environment = {**command.environment, **added}
        try:
            return Process.start(replace(command, environment=environment), on_line)
        except OSError as error:
            return NeverStarted(command, error)


class NeverStarted:
    """A process that could not be started, and so has ended."""

    pid = 0
    host = THIS_HOST

    def __init__(self, command: Command, error: OSError) -> None:
        self.command = command
        self._error = error

    async def wait(self) -> int:
        return 1

    def signal(self, number: signal.Signals) -> None: ...

    async def stop(self, patience: float) -> None: ...

    def kill(self) -> None: ...

    def ending(self, status: int) -> str:
        return f"could not be started: {self._error}"

    async def write(self, files: Mapping[Path, str]) -> None: ...


def share_devices(
    wanted: Mapping[str, float], visible: Sequence[str] | None
) -> dict[str, dict[str, str]]:
    """Divides GPUs among processes: the environment variables of each, as Ray sets them for an actor.

    `wanted` is the number of GPUs by process name: a whole number, or a fraction below one. `visible` are
    the names of the GPUs; None means those of the machine, by number. If no process wants a GPU, no
    variables are set. Raises PlacementFailed if there are too few.
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
                f"GPUs: {sum(wanted.values()):g} are requested, {DEVICES} names {len(visible)}"
            )
        names = [str(device) if visible is None else visible[device] for device in devices]
        told[name] = {DEVICES: ",".join(names)}
    return told
