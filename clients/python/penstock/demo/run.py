"""One run of the demo: keeps server, worker and trainer running until the trainer is done."""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.demo import settings
from penstock.demo.activity import record_activity
from penstock.demo.tasks import write_printable, write_sums
from penstock.up.processes import Command, break_off, end
from penstock.up.supervisor import Cast, Listens, Restarts, Supervisor
from penstock.up.telling import cancel_on_signals, log_events, say, show

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.demo.settings import Plan


async def run_plan(plan: Plan, console: Console) -> float:
    """Runs the plan to its end; returns the seconds from the server's start to the trainer's end.

    A server or a worker that dies is restarted (`supervisor`). At the end, the trainer and the worker
    stop before the server, so that neither calls a server that is gone.

    Raises ProcessFailed if a process fails and is not restarted, and KeyboardInterrupt if the run is
    interrupted. No process is left running in either case.
    """
    cancel_on_signals()
    started = time.monotonic()
    _announce(plan, console)
    activity: list[asyncio.Task[None]] = []

    def serving(address: str) -> None:
        plan.trainer_config_file.write_text(settings.trainer_config(plan, address))
        sampling = record_activity(address, plan.out / "activity.jsonl")
        activity.append(asyncio.create_task(sampling))

    supervisor = Supervisor(
        _cast(plan),
        Restarts(),
        log_events(plan.out / "events.log", partial(say, console)),
        on_serving=serving,
        on_trainer_line=partial(show, console),
    )
    stop = break_off
    try:
        await supervisor.run()
        stop = end
    except asyncio.CancelledError:
        say(console, "demo", "interrupted; stopping the processes")
        raise KeyboardInterrupt from None
    finally:
        seconds = time.monotonic() - started
        for task in activity:
            task.cancel()
        trainer, workers, server, _ = supervisor.started
        await stop([*server, *workers, *trainer])
    return seconds


def _announce(plan: Plan, console: Console) -> None:
    if plan.task == settings.SUMS:
        write_sums(plan.tasks_file)
    elif plan.task == settings.PRINTABLE:
        write_printable(plan.tasks_file)
    here = Path.cwd()
    model = plan.model.relative_to(here) if plan.model.is_relative_to(here) else plan.model
    say(console, "model", str(model))
    what = "an adapter" if plan.lora else "all weights"
    say(console, "task", f"{plan.task}, {plan.steps} steps of {what}, into {plan.out}")


def _cast(plan: Plan) -> Cast:
    """The demo keeps no checkpoints, so a trainer that dies ends the run."""

    def server(listens: Listens | None) -> Command:
        arguments = settings.serve_command(plan, listens)
        return _command(plan, "server", arguments, settings.SERVER_THREADS)

    def worker(address: str) -> Command:
        return _command(plan, "worker", settings.rollout_command(plan, address), 1)

    def trainer(address: str, resume: bool) -> Command:
        arguments = settings.train_command(plan)
        return _command(plan, "trainer", arguments, settings.TRAINER_THREADS)

    return Cast(server, {"worker": worker}, trainer)


def _command(plan: Plan, name: str, arguments: tuple[str, ...], threads: int) -> Command:
    return Command(
        name,
        arguments,
        plan.out / f"{name}.log",
        settings.environment(threads),
        # The trainer draws a live table if it has a terminal.
        inherits_terminal=name == "trainer" and sys.stdout.isatty(),
    )
