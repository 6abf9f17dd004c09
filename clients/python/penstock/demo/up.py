"""`penstock up`: server, workers and trainer from one file, kept running until the trainer is done.

Order: configuration read, and the trainer's and the workers' part checked, before a model is loaded ->
server -> workers and trainer (`supervisor`). Order of a stop on request: the trainer, which finishes its
step with the server's help and saves -> the workers, which give back what they hold -> the server.
Who asks twice does not want to wait: everything is killed.

Exit status: 0 the trainer is done, or everything stopped on request; 1 a process ended for good; 2 the
configuration cannot be used.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import tomli_w

from penstock.demo.processes import Command, ProcessFailed, end_in_turn
from penstock.demo.supervisor import BAD_CONFIGURATION, Cast, Restarts, Supervisor, log_events
from penstock.demo.up_config import (
    UpConfig,
    UpConfigInvalid,
    command_line,
    load,
)
from penstock.wire.settings import Table

if TYPE_CHECKING:
    from rich.console import Console

EVENTS = "events.log"
CHECK_SECONDS = 120.0
PENSTOCK = (sys.executable, "-m", "penstock.client")


@dataclass(frozen=True)
class Programs:
    """What is run: the beginning of each command line."""

    serve: tuple[str, ...] = (*PENSTOCK, "serve")
    rollout: tuple[str, ...] = (*PENSTOCK, "rollout")
    train: tuple[str, ...] = (*PENSTOCK, "train")


def up(
    path: Path,
    overrides: list[str],
    resume: bool,
    dry_run: bool,
    programs: Programs | None = None,
) -> int:
    """Runs what the file says; returns the exit status."""
    from rich.console import Console

    programs = programs or Programs()
    try:
        config = load(path, overrides)
        _check_workers(config)
        if dry_run:
            sys.stdout.write(tomli_w.dumps(_resolve(config, programs)))
            return 0
        _check_folder(config.up.out, resume)
        _check_trainer(config, programs)
    except UpConfigInvalid as error:
        sys.stderr.write(f"penstock up: {error}\n")
        return BAD_CONFIGURATION
    config.up.out.mkdir(parents=True, exist_ok=True)
    try:
        asyncio.run(_run(config, programs, resume, Console(highlight=False)))
    except ProcessFailed as error:
        sys.stderr.write(f"penstock up: {error}\n")
        return 1
    except asyncio.CancelledError:
        sys.stderr.write("penstock up: killed what had not ended yet\n")
        return 1
    return 0


async def _run(config: UpConfig, programs: Programs, resume: bool, console: Console) -> None:
    """Owns the processes; none is left when it returns or raises."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)

    def say(who: str, what: str) -> None:
        console.print(f"[dim]{who:8}[/] {what}", soft_wrap=True)

    def show(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    tell = log_events(config.up.out / EVENTS, say)
    restarts = Restarts(config.up.restarts, config.up.restart_window_seconds)
    cast_ = make_cast(config, programs, resume=resume)
    supervisor = Supervisor(cast_, restarts, tell, on_trainer_line=show)
    patience = config.up.stop_seconds
    try:
        await supervisor.run()
    except asyncio.CancelledError:
        tell("up", "stopping on request")
        task.uncancel()
    except ProcessFailed:
        tell("up", "stopping")
        raise
    finally:
        await end_in_turn(supervisor.started, patience)
        tell("up", "stopped")


def make_cast(config: UpConfig, programs: Programs, *, resume: bool) -> Cast:
    """Who runs, and how each is started."""
    out = config.up.out

    def server(address: str | None) -> Command:
        arguments = ["--config", _write(out / "serve.toml", config.serve)]
        if address is not None:
            arguments += ["--listen", address, "--set", "weights.await_trainer=true"]
        return _command("server", out, (*programs.serve, *arguments))

    def worker(name: str, address: str) -> Command:
        options = command_line({"server": address, **config.worker_options})
        return _command(name, out, (*programs.rollout, *options))

    def trainer(address: str, resuming: bool) -> Command:
        arguments = [_write(out / "trainer.toml", config.train_at(address))]
        arguments += ["--resume"] if resuming else []
        ranks = config.up.trainer_ranks
        arguments += ["--ranks", str(ranks)] if ranks > 1 else []
        return _command("trainer", out, (*programs.train, *arguments), terminal=sys.stdout.isatty())

    names = ["worker"] if config.worker_count == 1 else worker_names(config.worker_count)
    return Cast(
        server,
        {name: lambda address, name=name: worker(name, address) for name in names},
        None if config.train is None else trainer,
        trainer_keeps_checkpoints=config.trainer_keeps_checkpoints,
        trainer_resumes=resume,
    )


def worker_names(count: int) -> list[str]:
    """Names of several workers, and so of their logs."""
    return [f"worker-{index + 1}" for index in range(count)]


def _command(
    name: str, out: Path, arguments: tuple[str, ...], *, terminal: bool = False
) -> Command:
    environment = {
        "PYTHONUNBUFFERED": "1",
        # Threads that spin while they wait take the core that the other side needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Command(name, arguments, out / f"{name}.log", environment, inherits_terminal=terminal)


def _write(path: Path, table: Table) -> str:
    path.write_text(tomli_w.dumps(table), encoding="utf-8")
    return str(path)


def _check_folder(out: Path, resume: bool) -> None:
    if (out / EVENTS).exists() and not resume:
        raise UpConfigInvalid(
            f"up.out: {out} holds another run; give --resume to go on with it, or another folder"
        )


def _check_workers(config: UpConfig) -> None:
    """Has the command's own parser look at [rollout]."""
    from penstock.client.__main__ import rollout

    arguments = command_line({"server": "127.0.0.1:0", **config.worker_options})
    try:
        rollout.make_context("rollout", arguments)
    except click.UsageError as error:
        raise UpConfigInvalid(f"rollout: {error.format_message()}") from error


def _check_trainer(config: UpConfig, programs: Programs) -> None:
    if config.train is not None:
        _ask(programs.train, "train", config.train_at("127.0.0.1:0"))


def _resolve(config: UpConfig, programs: Programs) -> Table:
    """All of it, with what each command makes of its part."""
    listen = str(config.serve.get("listen", "127.0.0.1:50051"))
    resolved: Table = {
        "up": config.up.model_dump(mode="json"),
        "serve": _ask((*programs.serve, "--config"), "serve", config.serve),
        "rollout": {**config.worker_options, "count": config.worker_count},
    }
    if config.train is not None:
        resolved["train"] = _ask(programs.train, "train", config.train_at(listen))
    return resolved


def _ask(command: tuple[str, ...], section: str, table: Table) -> Table:
    """What a command makes of its configuration, by its own --dry-run. Raises UpConfigInvalid."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(tomli_w.dumps(table))
        file.flush()
        answer = subprocess.run(
            (*command, file.name, "--dry-run"),
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    if answer.returncode:
        lines = answer.stderr.replace(f"{file.name}: ", "").strip().splitlines()
        said = lines[-1] if lines else f"exit status {answer.returncode}"
        raise UpConfigInvalid(f"[{section}]: {said}")
    return cast("Table", tomllib.loads(answer.stdout))
