"""Server, workers and trainer kept running: who is started when, and what the end of one does.

    server started ──► serves: its address is known ──► workers and trainer started

States of each process, once it has begun its work:

    running ──ends──► backing off ──► running                 while restarts are left
                 └──► everything is stopped, and says why     where none is left, or none would help
                 └──► everything is stopped                   the trainer, which is done

- A **server** comes back on the address it had. `ServerCommand` is told so, and has it wait for the weights
  of the run's trainer: a server that has just started holds the base model, which nobody wants to sample
  from in the middle of a run. Workers and trainer are left alone: they reconnect by themselves.
- A **worker** comes back with nothing; what it worked on is leased again.
- A **trainer** comes back only where it keeps checkpoints, and resumes from the last one.
- A server that ends before it has ever served is not started again: what keeps it from serving, such as a
  port in use or a model that is not there, would keep it from it again. Nor is anything whose exit status
  says that its configuration cannot be used.

Each start after the first waits twice as long as the one before it, and there are only so many within a
time (`Restarts`): a process that cannot live must not hide behind being restarted for ever.

Nothing here stops processes: whoever runs a `Supervisor` ends what it `started`, in the order that suits.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.demo.processes import Command, FirstMatch, Process, ProcessFailed, ending

if TYPE_CHECKING:
    from pathlib import Path

SERVING = re.compile(r"^penstock serving .* on (\S+:\d+)")
"""The line a server prints once it serves, with its address; the engine prints addresses too."""

BAD_CONFIGURATION = 2
"""Exit status of every `penstock` command that cannot use what it was told."""

Tell = Callable[[str, str], None]
"""Takes one event: who, and what became of it."""


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


ServerCommand = Callable[[str | None], Command]
"""The server's command: for its first start, or for a later one on the address it had."""

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


@dataclass(eq=False)
class _Role:
    """One process over all its starts."""

    name: str
    command: Callable[[int], Command]
    """Of its n-th start, from zero."""
    is_server: bool = False
    ends_run: bool = False
    """Whether the run is over when it ends well."""
    restarted: bool = True
    on_line: Callable[[str], None] | None = None
    process: Process | None = None
    """The newest, once it was started."""


class Supervisor:
    """Runs a cast until its trainer is done."""

    def __init__(
        self,
        cast: Cast,
        restarts: Restarts,
        tell: Tell,
        *,
        on_serving: Callable[[str], None] | None = None,
        on_trainer_line: Callable[[str], None] | None = None,
    ) -> None:
        """`on_serving` is called once, with the server's address, before anything else is started;
        `on_trainer_line` with each line the trainer prints, unless that has the terminal to itself."""
        self._cast = cast
        self._restarts = restarts
        self._tell = tell
        self._on_serving = on_serving
        self._on_trainer_line = on_trainer_line
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._done = asyncio.Event()
        self._server = _Role("server", self._server_command, is_server=True)
        self._workers: list[_Role] = []
        self._trainer: _Role | None = None

    @property
    def started(self) -> tuple[list[Process], list[Process], list[Process]]:
        """The newest process of the trainer, of each worker, and of the server, as far as there are any."""
        trainer = [self._trainer] if self._trainer else []
        return _processes(trainer), _processes(self._workers), _processes([self._server])

    async def run(self) -> None:
        """Returns when the trainer is done; without one, never.

        Raises ProcessFailed for the first process that ended and is not to be started again.
        """
        try:
            async with asyncio.TaskGroup() as keeping:
                tasks = [keeping.create_task(self._keep(self._server))]
                address = await self._address
                if self._on_serving is not None:
                    self._on_serving(address)
                self._add_roles(address)
                others = [*self._workers, *([self._trainer] if self._trainer else [])]
                tasks += [keeping.create_task(self._keep(role)) for role in others]
                await self._done.wait()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _server_command(self, start: int) -> Command:
        return self._cast.server(self._address.result() if start else None)

    def _add_roles(self, address: str) -> None:
        for name, command in self._cast.workers.items():
            self._workers.append(_Role(name, lambda _, command=command: command(address)))
        train = self._cast.trainer
        if train is not None:
            self._trainer = _Role(
                "trainer",
                lambda start: train(address, bool(start) or self._cast.trainer_resumes),
                ends_run=True,
                restarted=self._cast.trainer_keeps_checkpoints,
                on_line=self._on_trainer_line,
            )

    async def _keep(self, role: _Role) -> None:
        """Consumes the ends of one process; waits for the next; produces new starts."""
        budget = RestartBudget(self._restarts)
        start = 0
        while True:
            self._tell(role.name, "starting" if not start else "starting again")
            process, status = await self._live(role, start)
            start += 1
            if role.ends_run and status == 0:
                self._tell(role.name, "done")
                self._done.set()
                return
            if not self._may_restart(role, status):
                raise ProcessFailed(process.explain(status))
            seconds = budget.wait()
            if seconds is None:
                raise ProcessFailed(
                    f"the {role.name} ended {budget.count + 1} times within "
                    f"{self._restarts.within_seconds:g} s; the last time, {process.explain(status)}"
                )
            self._tell(
                role.name,
                f"{ending(status)}{_last_words(process, status)}; starting again in {seconds:g} s "
                f"({budget.count} of {self._restarts.most} restarts)",
            )
            await asyncio.sleep(seconds)

    def _may_restart(self, role: _Role, status: int) -> bool:
        served = not role.is_server or self._address.done()
        return role.restarted and served and status != BAD_CONFIGURATION

    async def _live(self, role: _Role, start: int) -> tuple[Process, int]:
        """One start, to its end."""
        serves = FirstMatch(SERVING)
        process = Process.start(role.command(start), serves if role.is_server else role.on_line)
        role.process = process
        if role.is_server:
            try:
                address = await serves.wait(process)
            except ProcessFailed:
                return process, await process.wait()
            if not self._address.done():
                self._address.set_result(address)
            self._tell(role.name, f"serves at {address}")
        return process, await process.wait()


def _processes(roles: Sequence[_Role]) -> list[Process]:
    return [role.process for role in roles if role.process is not None]


def _last_words(process: Process, status: int) -> str:
    """What it said last, where it ended by itself: most often that is why."""
    lines = process.last_lines(1) if status >= 0 else []
    return f" ({lines[0].strip()})" if lines else ""


def log_events(path: Path, tell: Tell) -> Tell:
    """Tells, and appends each event to a file."""

    def log(who: str, what: str) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with path.open("a") as file:
            file.write(f"{moment} {who}: {what}\n")
        tell(who, what)

    return log
