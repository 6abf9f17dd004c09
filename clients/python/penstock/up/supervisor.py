"""Keeps engines, server, workers and trainer running: start order, restarts, and how a run ends.

    start engines and server ──► server serves, its address is known ──► start workers and trainer

States of each process (`State`) once it works:

    running ──ends──► backing off ──► running       while restarts are left
                 └──► all stop, with an error       if no restarts are left, or a restart could not help
                 └──► all stop                      if it was the trainer, and it is done

- A **server** restarts on the same address and waits for the weights of the run's trainer
  (`Listens.options`): a freshly started server holds the base model, which must not be sampled mid-run.
  Workers and trainer keep running; they reconnect on their own.
- A **server** that comes back on another host of a cluster ends the run. Workers and trainer know the old
  address, and its journal may be on the host that is gone.
- An **engine server** behind a hub may come back on any address. The supervisor writes the addresses of
  the engines that serve to a file on the hub's host. The hub reads it and gives each engine the run's
  weights.
- A **worker** restarts without state; its tasks are leased again.
- A **trainer** restarts only if it keeps checkpoints, and resumes from the last one. This includes a
  trainer that something else asked to stop, such as a machine shutting down: it is not done.
- A server that exits before it has ever served is not restarted. Its cause, such as a port in use or a
  missing model, would only recur. The same holds for any process whose exit status reports an unusable
  configuration. A process that was killed before it served, or whose node was lost, is restarted.

The wait before a restart doubles each time, and restarts within a time window are limited (`Restarts`).
Otherwise endless restarts would hide a process that cannot run.

A full disk ends no running process. Output is dropped while there is no room for it, and the hub's file is
written once there is. A process that cannot be started for lack of room counts as ended.

The `Placement` decides where and how a process starts. The supervisor stops nothing itself: its caller
stops the `started` processes, in the order that suits.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from penstock.common.answers import Exit
from penstock.up.placement import LocalPlacement, Placement
from penstock.up.processes import (
    Command,
    FirstMatch,
    ProcessFailed,
    Running,
    explain,
    going_on,
    last_lines,
)
from penstock.up.telling import Tell

SERVING = re.compile(r"^penstock serving .* on (\S+:\d+)")
"""The line that a server prints once it serves, with its address. Its engine prints addresses too."""

ENDPOINTS = re.compile(r"^penstock endpoints on https?://\S+:(\d+)")
"""The line that follows if the server has HTTP endpoints, with their port."""

BAD_CONFIGURATION = Exit.MISUSED
"""Exit status of every `penstock` command for an unusable configuration."""

WRITE_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Restarts:
    """How often a process is restarted, and how soon."""

    most: int = 5
    """Restarts of one process within `within_seconds`; one more failure stops everything."""
    within_seconds: float = 600.0
    """Older restarts are forgotten."""
    first_seconds: float = 0.5
    """Wait before the first restart; doubles with each restart within the window."""
    longest_seconds: float = 30.0


class RestartBudget:
    """Counts the restarts of one process. Its only side effect is to read the clock."""

    def __init__(self, restarts: Restarts, clock: Callable[[], float] = time.monotonic) -> None:
        self._restarts = restarts
        self._clock = clock
        self._recent: deque[float] = deque()

    @property
    def count(self) -> int:
        """Restarts within the window, including the one just granted."""
        return len(self._recent)

    def wait(self) -> float | None:
        """Seconds to wait before the next start; None if no restarts are left."""
        now, restarts = self._clock(), self._restarts
        while self._recent and now - self._recent[0] > restarts.within_seconds:
            self._recent.popleft()
        if len(self._recent) >= restarts.most:
            return None
        seconds = min(restarts.first_seconds * 2 ** len(self._recent), restarts.longest_seconds)
        self._recent.append(now)
        return seconds


EVERY_ADDRESS = ("0.0.0.0", "[::]")
"""Wildcard hosts: a server can listen on them, but a client cannot call them."""


@dataclass(frozen=True)
class Listens:
    address: str
    """HOST:PORT, as the server prints it."""
    http_port: int | None = None
    """Port of its HTTP endpoints; None if it has none."""

    def options(self, http_listen: str | None = None) -> tuple[str, ...]:
        """Options of `penstock serve` with which a server that is started again listens there, and serves
        nothing before the trainer has given it the run's weights.

        `http_listen` is where its endpoints were asked to be, if not on the host of `address`.
        """
        again = ("--listen", self.address, "--set", "weights.await_trainer=true")
        if self.http_port is None:
            return again
        host = (http_listen or self.address).rpartition(":")[0]
        return (*again, "--http-listen", f"{host}:{self.http_port}")


@dataclass(frozen=True)
class Cast:
    """The processes of a run: how the command of each is made."""

    server: Callable[[Listens | None], Command]
    """For its first start (None), or for a restart on its previous addresses."""
    workers: Mapping[str, Callable[[str], Command]] = field(
        default_factory=dict[str, Callable[[str], Command]]
    )
    """By name; each takes the server's address."""
    trainer: Callable[[str, bool], Command] | None = None
    """Takes the server's address, and whether to resume. None if the trainer runs elsewhere."""
    trainer_keeps_checkpoints: bool = False
    """Whether a trainer that died can resume."""
    trainer_resumes: bool = False
    """Whether its first start resumes too."""
    engines: Mapping[str, Callable[[], Command]] = field(
        default_factory=dict[str, Callable[[], Command]]
    )
    """By name. If there are any, the server is a hub."""
    engines_file: Path = Path("engines")
    """File from which the hub reads its engines' addresses."""
    server_name: str = "server"


class State(StrEnum):
    """What a role does now."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SERVING = "serving"
    BACKING_OFF = "backing off"
    DONE = "done"
    ENDED = "ended"


_TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.STARTING, State.ENDED}),
    # First the order to start, then the start itself.
    State.STARTING: frozenset({State.STARTING, State.RUNNING, State.SERVING, State.ENDED}),
    State.RUNNING: frozenset({State.DONE, State.ENDED}),
    State.SERVING: frozenset({State.ENDED}),
    State.ENDED: frozenset({State.BACKING_OFF, State.ENDED}),
    State.BACKING_OFF: frozenset({State.STARTING, State.ENDED}),
    State.DONE: frozenset(),
}


@dataclass(eq=False)
class Role:
    """One process across all its starts."""

    name: str
    command: Callable[[int], Command]
    """Makes the command of its n-th start, from zero."""
    serves: bool = False
    """Whether it is a server, whose address others wait for."""
    ends_run: bool = False
    """Whether its exit with status 0 ends the run."""
    restarted: bool = True
    on_line: Callable[[str], None] | None = None
    process: Running | None = None
    """The process of the latest start."""
    state: State = State.WAITING
    since: float = field(default_factory=time.time)
    """When `state` was entered, in seconds since the epoch."""
    starts: int = 0
    address: str = ""
    """Address at which others reach it; empty unless it serves."""
    has_served: bool = False


class Supervisor:
    """Runs a cast until its trainer is done."""

    def __init__(
        self,
        cast: Cast,
        restarts: Restarts,
        tell: Tell,
        *,
        placement: Placement | None = None,
        on_serving: Callable[[str], None] | None = None,
        on_trainer_line: Callable[[str], None] | None = None,
        on_change: Callable[[Sequence[Role]], None] | None = None,
    ) -> None:
        """Without a placement, processes run on this machine.

        `on_serving` is called once with the server's address, before workers and trainer start.
        `on_trainer_line` gets each line that the trainer prints, unless the trainer inherits the
        terminal. `on_change` is called whenever the state of a role changes.
        """
        self._cast = cast
        self._restarts = restarts
        self._tell = tell
        self._placement = placement or LocalPlacement()
        self._on_serving = on_serving
        self._on_trainer_line = on_trainer_line and going_on(on_trainer_line, "the trainer's lines")
        self._on_change = on_change and going_on(on_change, "the state of the processes")
        self._listens: Listens | None = None
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engines_moved = asyncio.Event()
        self._done = asyncio.Event()
        self._engines = [
            Role(name, lambda _, command=command: command(), serves=True)
            for name, command in cast.engines.items()
        ]
        self._server = Role(cast.server_name, self._server_command, serves=True)
        self._workers: list[Role] = []
        self._trainer: Role | None = None

    @property
    def roles(self) -> list[Role]:
        """All roles so far, in the order of their starts."""
        trainer = [self._trainer] if self._trainer else []
        return [*self._engines, self._server, *self._workers, *trainer]

    @property
    def started(self) -> tuple[list[Running], list[Running], list[Running], list[Running]]:
        """The latest processes of the trainer, the workers, the server and the engines, in this order."""
        trainer = [self._trainer] if self._trainer else []
        stages = (trainer, self._workers, [self._server], self._engines)
        trainers, workers, servers, engines = map(_processes, stages)
        return trainers, workers, servers, engines

    async def run(self) -> None:
        """Returns when the trainer is done; without a trainer, runs until cancelled.

        Raises ProcessFailed for the first process that ended and is not restarted.
        """
        try:
            async with asyncio.TaskGroup() as keeping:
                first = [*self._engines, self._server]
                tasks = [keeping.create_task(self._keep(role)) for role in first]
                if self._engines:
                    tasks.append(keeping.create_task(self._keep_engines_file()))
                address = await asyncio.shield(self._address)
                if self._on_serving is not None:
                    self._on_serving(address)
                self._add_roles(address)
                others = self._workers + ([self._trainer] if self._trainer else [])
                tasks += [keeping.create_task(self._keep(role)) for role in others]
                await self._done.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _server_command(self, start: int) -> Command:
        command = self._cast.server(self._listens if start else None)
        return replace(command, files={**command.files, **self._engines_file()})

    def _engines_file(self) -> dict[Path, str]:
        """Content of the file from which a hub reads its engines' addresses."""
        if not self._cast.engines:
            return {}
        lines = [f"{engine.address}\n" for engine in self._engines if engine.address]
        return {self._cast.engines_file: "".join(lines)}

    async def _keep_engines_file(self) -> None:
        """Writes the hub's engines file whenever an engine's address changes.

        It runs as a separate task, so that a full disk does not delay the restart of an engine.
        """
        failed = False
        while True:
            await self._engines_moved.wait()
            self._engines_moved.clear()
            if self._server.process is None:
                continue
            try:
                await self._server.process.write(self._engines_file())
                failed = False
            except OSError as error:
                if not failed:
                    self._tell(
                        self._server.name, f"cannot write its engines file, retrying: {error}"
                    )
                failed = True
                self._engines_moved.set()
                await asyncio.sleep(WRITE_AGAIN_SECONDS)

    def _add_roles(self, address: str) -> None:
        for name, command in self._cast.workers.items():
            self._workers.append(Role(name, lambda _, command=command: command(address)))
        train = self._cast.trainer
        if train is not None:
            self._trainer = Role(
                "trainer",
                lambda start: train(address, bool(start) or self._cast.trainer_resumes),
                ends_run=True,
                restarted=self._cast.trainer_keeps_checkpoints,
                on_line=self._on_trainer_line,
            )

    async def _keep(self, role: Role) -> None:
        """Runs one process and restarts it when it ends, until the run is over."""
        budget = RestartBudget(self._restarts)
        while True:
            self._tell(role.name, "starting again" if role.starts else "starting")
            process, status = await self._live(role)
            if role.ends_run and status == 0:
                self._set(role, State.DONE)
                self._tell(role.name, "done")
                self._done.set()
                return
            self._set(role, State.ENDED)
            if not self._may_restart(role, status):
                raise ProcessFailed(explain(process, status))
            seconds = budget.wait()
            if seconds is None:
                raise ProcessFailed(
                    f"the {role.name} ended {budget.count + 1} times within "
                    f"{self._restarts.within_seconds:g} s; the last time, {explain(process, status)}"
                )
            self._tell(
                role.name,
                f"{process.ending(status)}{_last_words(process, status)}; starting again in {seconds:g} s "
                f"({budget.count} of {self._restarts.most} restarts)",
            )
            self._set(role, State.BACKING_OFF)
            await asyncio.sleep(seconds)

    def _may_restart(self, role: Role, status: int) -> bool:
        worked = not role.serves or role.has_served or status < 0
        return role.restarted and worked and status != BAD_CONFIGURATION

    async def _live(self, role: Role) -> tuple[Running, int]:
        """Starts the role's process once and waits for its end."""
        serves, endpoints = FirstMatch(SERVING), FirstMatch(ENDPOINTS)

        def on_line(line: str) -> None:
            serves(line)
            endpoints(line)

        command = role.command(role.starts)
        self._set(role, State.STARTING)
        process = await self._placement.start(command, on_line if role.serves else role.on_line)
        role.process = process
        role.starts += 1
        self._set(role, State.STARTING if role.serves else State.RUNNING)
        if not role.serves:
            return process, await process.wait()
        if role is self._server:
            # An engine's address may have changed since the command was made.
            self._engines_moved.set()
        try:
            listens = await serves.wait(process)
        except ProcessFailed:
            pass
        else:
            self._serve(role, process, listens)
        status = await process.wait()
        if role is self._server and self._listens is not None and endpoints.found is not None:
            self._listens = replace(self._listens, http_port=int(endpoints.found))
        role.address = ""
        self._engines_moved.set()
        return process, status

    def _serve(self, role: Role, process: Running, listens: str) -> None:
        """Records that the role serves. Raises ProcessFailed if the server's address has changed."""
        role.address, role.has_served = reachable(listens, process.host), True
        self._set(role, State.SERVING)
        self._tell(role.name, f"serves at {role.address}")
        if role is not self._server:
            self._engines_moved.set()
        elif self._listens is None:
            self._listens = Listens(listens)
            self._address.set_result(role.address)
        elif role.address != (known := self._address.result()):
            raise ProcessFailed(
                f"the {role.name} is back at {role.address}, but all others know it at {known}; --resume "
                "continues the run where its journal is"
            )

    def ended(self) -> None:
        """Marks all roles as ended, once the caller has stopped their processes."""
        for role in self.roles:
            if role.state is not State.DONE:
                self._set(role, State.ENDED)

    def _set(self, role: Role, state: State) -> None:
        assert state in _TRANSITIONS[role.state], f"{role.name}: {role.state} to {state}"
        role.state, role.since = state, time.time()
        if self._on_change is not None:
            self._on_change(self.roles)


def reachable(listens: str, host: str) -> str:
    """The address at which others call a server that listens at `listens` on `host`."""
    listened, _, port = listens.rpartition(":")
    return f"{host}:{port}" if listened in EVERY_ADDRESS else listens


def _processes(roles: Sequence[Role]) -> list[Running]:
    return [role.process for role in roles if role.process is not None]


def _last_words(process: Running, status: int) -> str:
    """The last line that a process printed before it exited on its own: usually the reason."""
    lines = last_lines(process, 1) if status >= 0 and process.pid else []
    return f" ({lines[0].strip()})" if lines else ""
