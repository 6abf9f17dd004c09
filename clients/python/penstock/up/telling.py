"""What a run of several processes tells: on the console and in a file. And how it is interrupted."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.up.processes import going_on

if TYPE_CHECKING:
    from rich.console import Console

NAME_WIDTH = 8

Tell = Callable[[str, str], None]
"""Takes one event: who, and what became of it."""


def cancel_on_signals() -> asyncio.Task[object]:
    """Has SIGINT and SIGTERM cancel the current task, which is returned."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return task


def say(console: Console, who: str, what: str) -> None:
    """Prints one line of progress."""
    console.print(f"[dim]{who:{NAME_WIDTH}}[/] {what}", soft_wrap=True)


def show(console: Console, line: str) -> None:
    """Prints a line of a process as it is."""
    console.print(line, markup=False, soft_wrap=True)


def log_events(path: Path, tell: Tell) -> Tell:
    """Tells, and appends each event to a file; a failed write is logged and ignored."""

    def append(who: str, what: str) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with path.open("a") as file:
            file.write(f"{moment} {who}: {what}\n")

    acts = (going_on(append, str(path)), going_on(tell, "the console"))

    def log(who: str, what: str) -> None:
        for act in acts:
            act(who, what)

    return log
