"""The supervisor: which processes are restarted, how soon, how often, and what ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.up.processes import Command, Process, ProcessFailed, break_off
from penstock.up.supervisor import (
    Cast,
    RestartBudget,
    Restarts,
    Role,
    Supervisor,
)
from penstock.up.telling import log_events

SERVE = "echo 'penstock serving x on 127.0.0.1:77 (weight version 0)'; exec sleep 60"
AT_ONCE = Restarts(most=3, first_seconds=0.01)


def test_restarts_wait_longer_each_time_and_are_bounded_within_a_time() -> None:
    now = 0.0
    budget = RestartBudget(Restarts(4, 100.0, 0.5, 3.0), lambda: now)
    assert [budget.wait() for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert budget.wait() is None
    now = 101.0
    # Expired restarts neither count nor lengthen the wait.
    assert budget.wait() == 0.5
    assert budget.count == 1


@dataclass
class Stage:
    """Supervised shell scripts, and the events that the supervisor reported."""

    folder: Path
    supervisor: Supervisor
    running: asyncio.Task[None]
    events: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def told(self, who: str, text: str, count: int = 1) -> None:
        """Return once an event has been reported `count` times."""

        def there() -> bool:
            found = [what for name, what in self.events if name == who and text in what]
            return len(found) >= count or self.running.done()

        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(there)

    def pid(self, index: int) -> int:
        """The process id of role `index`: trainer, worker or server."""
        return self.supervisor.started[index][-1].pid


@contextlib.asynccontextmanager
async def stage(
    folder: Path,
    *,
    serve: str = SERVE,
    work: str = "exec sleep 60",
    train: str = "exec sleep 60",
    keeps_checkpoints: bool = False,
    restarts: Restarts = AT_ONCE,
    engines: Mapping[str, str] | None = None,
    on_change: Callable[[Sequence[Role]], None] | None = None,
    on_trainer_line: Callable[[str], None] | None = None,
) -> AsyncGenerator[Stage]:
    """Run the three roles. Each script receives its configuration as arguments."""
    started: Stage

    def command(name: str, script: str, *arguments: str) -> Command:
        return Command(name, ("/bin/sh", "-c", script, name, *arguments), folder / f"{name}.log")

    notices: list[asyncio.Future[None]] = []

    def tell(who: str, what: str) -> None:
        started.events.append((who, what))
        notices.append(asyncio.ensure_future(notify()))

    async def notify() -> None:
        async with started.changed:
            started.changed.notify_all()

    cast = Cast(
        lambda listens: command(
            "server",
            serve,
            listens.address if listens else "first",
            str(listens.http_port) if listens else "",
        ),
        {"worker": lambda address: command("worker", work, address)},
        lambda address, resume: command("trainer", train, address, "resume" if resume else ""),
        trainer_keeps_checkpoints=keeps_checkpoints,
        engines={
            name: lambda name=name, script=script: command(name, script)
            for name, script in (engines or {}).items()
        },
        engines_file=folder / "engines",
    )
    supervisor = Supervisor(
        cast, restarts, tell, on_change=on_change, on_trainer_line=on_trainer_line
    )
    started = Stage(folder, supervisor, asyncio.create_task(supervisor.run()))
    started.running.add_done_callback(lambda _: notices.append(asyncio.ensure_future(notify())))
    try:
        yield started
    finally:
        started.running.cancel()
        await asyncio.wait([started.running])
        await break_off([process for stage in supervisor.started for process in stage])


async def test_the_run_is_over_when_the_trainer_has_ended_well(tmp_path: Path) -> None:
    async with stage(tmp_path, train="exit 0") as run:
        await run.running
        assert run.events[0] == ("server", "starting")
        assert run.events[1] == ("server", "serves at 127.0.0.1:77")
        assert run.events[-1] == ("trainer", "done")


async def test_a_full_disk_ends_no_run(tmp_path: Path) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with stage(
        tmp_path, train="echo a line; exit 0", on_change=full, on_trainer_line=full
    ) as run:
        await run.running
        assert run.events[-1] == ("trainer", "done")
        run.supervisor.ended()


def test_events_are_told_where_they_cannot_be_written() -> None:
    told: list[tuple[str, str]] = []
    tell = log_events(Path("/dev/full"), lambda who, what: told.append((who, what)))
    tell("up", "stopping")
    assert told == [("up", "stopping")]


def test_events_are_written_where_they_cannot_be_told(tmp_path: Path) -> None:
    def full(who: str, what: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log_events(tmp_path / "events.log", full)("up", "stopping")
    assert (tmp_path / "events.log").read_text().endswith(" up: stopping\n")


async def test_a_hub_is_told_of_its_engines_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.up.supervisor.WRITE_AGAIN_SECONDS", 0.01)
    write, full = Process.write, True

    async def written(process: Process, files: Mapping[Path, str]) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        await write(process, files)

    monkeypatch.setattr(Process, "write", written)
    async with stage(tmp_path, engines={"engine": SERVE}) as run:
        await run.told("server", "cannot write its engines file, retrying: [Errno 28]")
        # Meanwhile the end of an engine is answered.
        await run.told("engine", "serves at")
        os.kill(run.pid(3), signal.SIGKILL)
        await run.told("engine", "serves at", 2)
        assert not run.running.done()
        full = False
        async with asyncio.timeout(20):
            while (tmp_path / "engines").read_text() != "127.0.0.1:77\n":
                await asyncio.sleep(0.01)


async def test_a_server_that_dies_comes_back_on_its_address(tmp_path: Path) -> None:
    # Printed first, so that the line exists before the server is killed.
    endpoints = "echo penstock endpoints on http://127.0.0.1:78/v1"
    async with stage(tmp_path, serve=f"echo told $1 $2; {endpoints}; {SERVE}") as run:
        await run.told("trainer", "starting")
        os.kill(run.pid(2), signal.SIGKILL)
        await run.told("server", "serves at", 2)
        assert ("server", "was ended by SIGKILL; starting again in 0.01 s (1 of 3 restarts)") in (
            run.events
        )
        assert [
            line
            for line in (tmp_path / "server.log").read_text().splitlines()
            if line.startswith("told")
        ] == ["told first", "told 127.0.0.1:77 78"]
        # No other process was restarted.
        assert [who for who, what in run.events if what.startswith("starting")].count("worker") == 1


async def test_a_server_that_comes_back_elsewhere_ends_the_run(tmp_path: Path) -> None:
    port = "if [ $1 = first ]; then P=77; else P=78; fi"
    serve = f"{port}; echo penstock serving x on 127.0.0.1:$P; exec sleep 60"
    async with stage(tmp_path, serve=serve) as run:
        await run.told("trainer", "starting")
        os.kill(run.pid(2), signal.SIGKILL)
        with pytest.raises(
            ProcessFailed,
            match=r"is back at 127\.0\.0\.1:78, but all others know it at 127\.0\.0\.1:77",
        ):
            await run.running


async def test_what_a_full_disk_keeps_from_starting_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = Process.start, 0

    def starting(command: Command, on_line: Callable[[str], None] | None) -> Process:
        nonlocal refused
        if command.name == "worker" and refused < 2:
            refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return start(command, on_line)

    monkeypatch.setattr(Process, "start", starting)
    async with stage(tmp_path, work="echo out of luck; exit 1") as run:
        await run.told(
            "worker", "could not be started: [Errno 28] No space left on device; start", 2
        )
        await run.told("worker", "exited 1 (out of luck); starting again")


async def test_a_worker_that_ends_is_started_again_and_says_why_it_ended(tmp_path: Path) -> None:
    async with stage(tmp_path, work="echo out of luck; exit 1") as run:
        await run.told("worker", "exited 1 (out of luck); starting again")


async def test_a_process_that_cannot_live_stops_everything_and_says_why(tmp_path: Path) -> None:
    async with stage(tmp_path, work="echo out of luck; kill -9 $$") as run:
        with pytest.raises(ProcessFailed) as caught:
            await run.running
        assert "the worker ended 4 times within 600 s; the last time" in str(caught.value)
        assert "was ended by SIGKILL" in str(caught.value)
        assert str(caught.value).count("| out of luck") == 4


@pytest.mark.parametrize(
    ("scripts", "explained"),
    [
        ({"serve": "echo the port is taken; exit 1"}, "server exited 1"),
        ({"work": "echo no such function; exit 2"}, "worker exited 2"),
        ({"train": "echo no such file; exit 2", "keeps_checkpoints": True}, "trainer exited 2"),
        ({"train": "echo out of memory; kill -9 $$"}, "trainer was ended by SIGKILL"),
    ],
)
async def test_what_starting_again_would_not_help_stops_everything_at_once(
    tmp_path: Path, scripts, explained: str
) -> None:
    async with stage(tmp_path, **scripts) as run:
        with pytest.raises(ProcessFailed, match=f"the {explained}; the end of"):
            await run.running
        assert not any("again" in what for _, what in run.events)


@pytest.mark.parametrize("who", ["server", "engine"])
async def test_one_that_is_killed_before_it_ever_served_is_started_again(
    tmp_path: Path, who: str
) -> None:
    once = f"test -e begun || {{ touch begun; kill -9 $$; }}; {SERVE}"
    scripts = {"server": SERVE, "engine": SERVE, who: f"cd '{tmp_path}'; {once}"}
    engines = {"engine": scripts["engine"]}
    async with stage(tmp_path, serve=scripts["server"], engines=engines) as run:
        await run.told(who, "was ended by SIGKILL; starting again")
        await run.told(who, "serves at 127.0.0.1:77")
        await run.told("trainer", "starting")
        assert not run.running.done()


@pytest.mark.parametrize("status", [1, 3])
async def test_a_trainer_that_keeps_checkpoints_resumes(tmp_path: Path, status: int) -> None:
    dies_once = f'if [ "$2" = resume ]; then exit 0; else exit {status}; fi'
    async with stage(tmp_path, train=dies_once, keeps_checkpoints=True) as run:
        await run.running
        assert [what for who, what in run.events if who == "trainer"] == [
            "starting",
            f"exited {status}; starting again in 0.01 s (1 of 3 restarts)",
            "starting again",
            "done",
        ]
