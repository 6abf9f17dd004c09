"""One run: starts server, worker and trainer in their order, and ends all three."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.demo import settings
from penstock.demo.activity import record_activity
from penstock.demo.processes import Command, Process, break_off, end, first_match, wait_for
from penstock.demo.tasks import write_printable, write_sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from penstock.demo.settings import Plan

SERVING = re.compile(r"^penstock serving .* on (\S+:\d+)")
"""The line a server prints once it serves, with its address; the engine prints addresses too."""


async def run_plan(plan: Plan, console: Console) -> float:
    """Runs it to its end; returns the seconds from the server's start to the trainer's end.

    Order: the trainer and the worker need the server's address, which is known once it serves;
    the last two start together, since each waits for the other's part by itself. They stop
    before the server, so that nobody speaks to one that is gone.

    Raises ProcessFailed where a process ends that should not, and KeyboardInterrupt where the run is
    interrupted; no process is left in either case.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    running: list[Process] = []
    started = time.monotonic()
    stop = break_off
    try:
        await _run(plan, console, running)
        stop = end
    except asyncio.CancelledError:
        say(console, "demo", "interrupted; stopping the processes")
        raise KeyboardInterrupt from None
    finally:
        seconds = time.monotonic() - started
        await stop(running)
    return seconds


async def _run(plan: Plan, console: Console, running: list[Process]) -> None:
    if plan.task == settings.SUMS:
        write_sums(plan.tasks_file)
    elif plan.task == settings.PRINTABLE:
        write_printable(plan.tasks_file)
    here = Path.cwd()
    model = plan.model.relative_to(here) if plan.model.is_relative_to(here) else plan.model
    say(console, "model", str(model))
    what = "an adapter" if plan.lora else "all weights"
    say(console, "task", f"{plan.task}, {plan.steps} steps of {what}, into {plan.out}")
    say(console, "server", "starting vLLM")
    lines: asyncio.Queue[str] = asyncio.Queue()
    server = Process.start(
        _command(plan, "server", settings.serve_command(plan), settings.SERVER_THREADS),
        lines.put_nowait,
    )
    running.append(server)
    address = await first_match(SERVING, lines, server)
    say(console, "server", f"serves at {address}")
    plan.trainer_config_file.write_text(settings.trainer_config(plan, address))
    worker = Process.start(_command(plan, "worker", settings.rollout_command(plan, address), 1))
    running.append(worker)
    trainer = Process.start(
        _command(plan, "trainer", settings.train_command(plan), settings.TRAINER_THREADS),
        _printer(console),
    )
    running.append(trainer)
    say(console, "trainer", "starting; the worker keeps the server busy meanwhile")
    activity = asyncio.create_task(record_activity(address, plan.out / "activity.jsonl"))
    try:
        await wait_for(trainer, [server, worker])
    finally:
        activity.cancel()


def _command(plan: Plan, name: str, arguments: tuple[str, ...], threads: int) -> Command:
    return Command(
        name,
        arguments,
        plan.out / f"{name}.log",
        settings.environment(threads),
        # The trainer draws a live table where it has a terminal.
        inherits_terminal=name == "trainer" and sys.stdout.isatty(),
    )


def _printer(console: Console) -> Callable[[str], None]:
    def show(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    return show


def say(console: Console, who: str, what: str) -> None:
    """One line of progress."""
    console.print(f"[dim]{who:8}[/] {what}", soft_wrap=True)
