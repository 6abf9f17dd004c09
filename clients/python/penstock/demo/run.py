"""One run of the demo: keeps server, worker and trainer running until the trainer is done."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.client import PenstockError
from penstock.demo import settings
from penstock.demo.activity import record_activity
from penstock.demo.answers import Answers, ask
from penstock.demo.tasks import held_out, write_printable, write_sums
from penstock.machine.gpus import DEVICES
from penstock.up.placement import LocalPlacement
from penstock.up.processes import Command, break_off, end
from penstock.up.supervisor import Cast, Listens, Restarts, Supervisor
from penstock.up.telling import cancel_on_signals, log_events, say, show

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.demo.settings import Plan

REPORT_SECONDS = 15.0
EXPECTED = {
    ("server", "starting"): "; vLLM takes 20 to 60 s to load",
    (
        "trainer",
        "starting",
    ): "; it loads the model, and the first step takes longer than the others",
}
"""What follows an event of a process, added to the console's line."""


@dataclass(frozen=True)
class Ended:
    """How a run went, besides what it wrote into its folder."""

    seconds: float
    """From the server's start to the trainer's end."""
    before: Answers | None
    """Of the first weights to the prompts of `held_out`; None if the server did not answer."""
    after: Answers | None
    """Of the last weights."""


async def run_plan(plan: Plan, console: Console) -> Ended:
    """Runs the plan to its end.

    A server or a worker that dies is restarted (`supervisor`). At the end, the trainer and the worker
    stop before the server, so that neither calls a server that is gone.

    Raises ProcessFailed if a process fails and is not restarted, and KeyboardInterrupt if the run is
    interrupted. No process is left running in either case.
    """
    cancel_on_signals()
    started = time.monotonic()
    _announce(plan, console)
    loading = asyncio.create_task(_report_loading(console))
    beside: list[asyncio.Task[None]] = []
    first: list[asyncio.Task[Answers | None]] = []
    served: list[str] = []

    def serving(address: str) -> None:
        loading.cancel()
        served.append(address)
        plan.trainer_config_file.write_text(settings.trainer_config(plan, address))
        sampling = record_activity(address, plan.out / "activity.jsonl")
        beside.append(asyncio.create_task(sampling))
        first.append(asyncio.create_task(_ask(plan, address, console)))

    visible = os.environ.get(DEVICES)
    supervisor = Supervisor(
        _cast(plan),
        Restarts(),
        log_events(plan.out / "events.log", partial(_explain, console, started)),
        placement=LocalPlacement(settings.devices(plan, visible.split(",") if visible else None)),
        on_serving=serving,
        on_trainer_line=partial(show, console),
    )
    stop = break_off
    try:
        await supervisor.run()
        seconds = time.monotonic() - started
        trainer, workers, _, _ = supervisor.started
        await end([*workers, *trainer])
        answers = await first[0], await _ask(plan, served[0], console)
        stop = end
    except asyncio.CancelledError:
        say(console, "demo", "interrupted; stopping the processes")
        raise KeyboardInterrupt from None
    finally:
        for task in (loading, *beside, *first):
            task.cancel()
        trainer, workers, server, _ = supervisor.started
        await stop([*server, *workers, *trainer])
    return Ended(seconds, *answers)


async def _ask(plan: Plan, address: str, console: Console) -> Answers | None:
    try:
        return await ask(address, held_out(plan.task), plan.scale.max_tokens)
    except PenstockError as error:
        say(console, "server", f"does not answer the held-out prompts: {error}")
        return None


async def _report_loading(console: Console) -> None:
    begun = time.monotonic()
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        say(console, "server", f"vLLM is loading, {time.monotonic() - begun:.0f} s so far")


def _explain(console: Console, started: float, who: str, what: str) -> None:
    """Says an event, and what to expect of it."""
    seconds = f" after {time.monotonic() - started:.0f} s" if what.startswith("serves at") else ""
    say(console, who, what + seconds + EXPECTED.get((who, what), ""))


def _announce(plan: Plan, console: Console) -> None:
    if plan.task == settings.SUMS:
        write_sums(plan.tasks_file)
    elif plan.task == settings.PRINTABLE:
        write_printable(plan.tasks_file)
    say(console, "model", str(near(plan.model)))
    what = "an adapter" if plan.lora else "all weights"
    steps = f"{plan.steps} steps of {what}"
    if plan.target is not None:
        steps = f"ends when the mean reward is {plan.target:g}, after at most {steps}"
    say(console, "task", f"{plan.task}, {steps}, into {near(plan.out)}")


def near(path: Path) -> Path:
    """The path relative to the current folder, if it is in there."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


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
