"""Engines, server, workers and trainer kept running: who is started when, and what the end of one does.

    engines and server started ──► server serves: its address is known ──► workers and trainer started

States of each process (`State`), once it has begun its work:

    running ──ends──► backing off ──► running                 while restarts are left
                 └──► everything is stopped, and says why     where none is left, or none would help
                 └──► everything is stopped                   the trainer, which is done

- A **server** comes back on the address it had. `ServerCommand` is told so, and has it wait for the weights
  of the run's trainer: a server that has just started holds the base model, which nobody wants to sample
  from in the middle of a run. Workers and trainer are left alone: they reconnect by themselves.
- An **engine server**, where the server is a hub, comes back on any address. The hub reads the addresses of
  those that serve from a file, which is written where the hub runs, and gives each the run's weights.
- A **worker** comes back with nothing; what it worked on is leased again.
- A **server** that comes back elsewhere, on another host of a cluster, ends the run: workers and trainer
  know the address it had, and its journal may be on the host that is gone.
- A **trainer** comes back only where it keeps checkpoints, and resumes from the last one; also where it was
  asked to stop by somebody else, such as a machine that shuts down, for then it is not done.
- A server that exits before it has ever served is not started again: what keeps it from serving, such as a
  port in use or a model that is not there, would keep it from it again. Nor is anything whose exit status
  says that its configuration cannot be used. One that was killed before it served, or whose node was lost,
  is: that says nothing of the next start.

Each start after the first waits twice as long as the one before it, and there are only so many within a
time (`Restarts`): a process that cannot live must not hide behind being restarted for ever.

A disk that is full ends no process that runs: what is told of them is left out while there is no room for
it, and the hub's file is written as soon as there is. A process that cannot be started for it has ended.

Where and how a process is started is the `Placement`'s business. Nothing here stops processes: whoever runs
a `Supervisor` ends what it `started`, in the order that suits.
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
"""The line a server prints once it serves, with its address; the engine prints addresses too."""

ENDPOINTS = re.compile(r"^penstock endpoints on https?://\S+:(\d+)")
"""The line after it, where the server has HTTP endpoints, with their port."""

BAD_CONFIGURATION = 2
"""Exit status of every `penstock` command that cannot use what it was told."""

WRITE_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Restarts:
    """How often a process is started again, and how soon."""

    most: int = 5
    """Restarts of one process within `within_seconds`; one more end stops everything."""
    within_seconds: float = 600.0
    """Older restarts are forgotten."""
    first_seconds: float = 0.5
    """Wait before the first restart; it doubles with each that is not forgotten."""
    longest_seconds: float = 30.0
    """Longest wait."""


class RestartBudget:
    """The restarts of one process. Pure but for the clock it is given."""

    def __init__(self, restarts: Restarts, clock: Callable[[], float] = time.monotonic) -> None:
        self._restarts = restarts
        self._clock = clock
        self._recent: deque[float] = deque()

    @property
    def count(self) -> int:
        """Restarts that are not forgotten, the one that was just granted among them."""
        return len(self._recent)

    def wait(self) -> float | None:
        """Seconds to wait before the next start; None where it is not to be started again."""
        now, restarts = self._clock(), self._restarts
        while self._recent and now - self._recent[0] > restarts.within_seconds:
            self._recent.popleft()
        if len(self._recent) >= restarts.most:
            return None
        seconds = min(restarts.first_seconds * 2 ** len(self._recent), restarts.longest_seconds)
        self._recent.append(now)
        return seconds


EVERY_ADDRESS = ("0.0.0.0", "[::]")
"""Hosts that are listened on and cannot be called."""


@dataclass(frozen=True)
class Listens:
    """Where a server listens."""

    address: str
    """HOST:PORT, as it says."""
    http_port: int | None = None
    """Of its HTTP endpoints; None where it has none."""

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


ServerCommand = Callable[[Listens | None], Command]
"""The server's command: for its first start, or for a later one on the addresses it had."""

EngineCommand = Callable[[], Command]
"""An engine server's command."""

WorkerCommand = Callable[[str], Command]
"""A worker's command, for a server's address."""

TrainerCommand = Callable[[str, bool], Command]
"""The trainer's command, for a server's address, and whether it resumes."""


@dataclass(frozen=True)
class Cast:
    """Who runs."""

    server: ServerCommand
    workers: Mapping[str, WorkerCommand] = field(default_factory=dict[str, WorkerCommand])
    """By name."""
    trainer: TrainerCommand | None = None
    """None where it runs elsewhere."""
    trainer_keeps_checkpoints: bool = False
    """Whether a trainer that died can resume."""
    trainer_resumes: bool = False
    """Whether its first start does already."""
    engines: Mapping[str, EngineCommand] = field(default_factory=dict[str, EngineCommand])
    """By name; where there are any, the server is a hub."""
    engines_file: Path = Path("engines")
    """Where the hub looks for their addresses."""
    server_name: str = "server"


class State(StrEnum):
    """Of a role."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SERVING = "serving"
    BACKING_OFF = "backing off"
    DONE = "done"
    ENDED = "ended"


_TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.STARTING, State.ENDED}),
    # A process is told to start, and then has started.
    State.STARTING: frozenset({State.STARTING, State.RUNNING, State.SERVING, State.ENDED}),
    State.RUNNING: frozenset({State.DONE, State.ENDED}),
    State.SERVING: frozenset({State.ENDED}),
    State.ENDED: frozenset({State.BACKING_OFF, State.ENDED}),
    State.BACKING_OFF: frozenset({State.STARTING, State.ENDED}),
    State.DONE: frozenset(),
}


@dataclass(eq=False)
class Role:
    """One process over all its starts."""

    name: str
    command: Callable[[int], Command]
    """Of its n-th start, from zero."""
    serves: bool = False
    """Whether it is a server, whose address others wait for."""
    ends_run: bool = False
    """Whether the run is over when it ends well."""
    restarted: bool = True
    on_line: Callable[[str], None] | None = None
    process: Running | None = None
    """The newest, once it was started."""
    state: State = State.WAITING
    since: float = field(default_factory=time.time)
    """When that began, in seconds of the epoch."""
    starts: int = 0
    address: str = ""
    """Where others reach it, while it serves."""
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
        """Without a placement processes run on this machine. `on_serving` is called once, with the server's
        address, before workers and trainer are started; `on_trainer_line` with each line the trainer
        prints, unless that has the terminal to itself; `on_change` whenever the state of a role did."""
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
        """All there are by now, in the order of their starts."""
        trainer = [self._trainer] if self._trainer else []
        return [*self._engines, self._server, *self._workers, *trainer]

    @property
    def started(self) -> tuple[list[Running], list[Running], list[Running], list[Running]]:
        """The newest process of the trainer, of each worker, of the server and of each engine, as far as
        there are any."""
        trainer = [self._trainer] if self._trainer else []
        stages = (trainer, self._workers, [self._server], self._engines)
        trainers, workers, servers, engines = map(_processes, stages)
        return trainers, workers, servers, engines

    async def run(self) -> None:
        """Returns when the trainer is done; without one, never.

        Raises ProcessFailed for the first process that ended and is not to be started again.
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
        """What a hub reads."""
        if not self._cast.engines:
            return {}
        lines = [f"{engine.address}\n" for engine in self._engines if engine.address]
        return {self._cast.engines_file: "".join(lines)}

    async def _keep_engines_file(self) -> None:
        """Consumes changes of the engines' addresses; produces the file that the hub reads. On its own:
        where there is no room for it, the end of an engine is answered all the same."""
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
                    self._tell(self._server.name, f"is not told of its engines yet: {error}")
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
        """Consumes the ends of one process; waits for the next; produces new starts."""
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
        """One start, to its end."""
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
            # An engine may have come or gone since the command was made.
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
        """From when it serves. Raises ProcessFailed where nobody would find it."""
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
                f"the {role.name} is back at {role.address}, and all others know it at {known}; --resume "
                "goes on where its journal is"
            )

    def ended(self) -> None:
        """All it started has been stopped."""
        for role in self.roles:
            if role.state is not State.DONE:
                self._set(role, State.ENDED)

    def _set(self, role: Role, state: State) -> None:
        assert state in _TRANSITIONS[role.state], f"{role.name}: {role.state} to {state}"
        role.state, role.since = state, time.time()
        if self._on_change is not None:
            self._on_change(self.roles)


def reachable(listens: str, host: str) -> str:
    """Where others call a server that listens there, on a host that is reached as `host`."""
    listened, _, port = listens.rpartition(":")
    return f"{host}:{port}" if listened in EVERY_ADDRESS else listens


def _processes(roles: Sequence[Role]) -> list[Running]:
    return [role.process for role in roles if role.process is not None]


def _last_words(process: Running, status: int) -> str:
    """What it said last, where it ended by itself: most often that is why."""
    lines = last_lines(process, 1) if status >= 0 and process.pid else []
    return f" ({lines[0].strip()})" if lines else ""
