"""`penstock up`: runs engines, server, workers and trainer from one file until the trainer is done.

Start order: read the configuration and check every part of it, before a model is loaded -> reserve a place
for each process (`placement`) -> start engines and server -> start workers and trainer (`supervisor`).

Stop order on request: the trainer, which needs the server to finish its step, and saves -> the workers,
which give back their leases -> the server -> its engines -> the placement. A second request kills
everything at once.

Exit status: 0 if the trainer is done, or everything stopped on request; 1 if a process failed for good, or
the processes cannot be placed; 2 if the configuration is unusable.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from penstock.common.answers import Exit, complain, show_toml
from penstock.up.cast import Programs, local_placement, make_cast, shares
from penstock.up.checks import check, check_everything, check_folder, resolve
from penstock.up.config import UpConfig, UpConfigInvalid, load
from penstock.up.placement import Placement, PlacementFailed
from penstock.up.processes import ProcessFailed, end_in_turn
from penstock.up.ray_placement import open_ray
from penstock.up.state import EVENTS, FolderUnusable, locked, write_state
from penstock.up.supervisor import BAD_CONFIGURATION, Restarts, Supervisor
from penstock.up.telling import Tell, cancel_on_signals, log_events, say, show

if TYPE_CHECKING:
    from rich.console import Console

PROGRAM = "penstock up"


def up(
    path: Path,
    overrides: list[str],
    resume: bool,
    dry_run: bool,
    programs: Programs | None = None,
) -> int:
    """Runs what the file describes; returns the exit status."""
    from rich.console import Console

    programs = programs or Programs()
    try:
        config = load(path, overrides)
        if dry_run:
            check(config)
            show_toml(tomli_w.dumps(resolve(config, programs)))
            return Exit.DONE
        check_folder(config.up.out, resume)
        command = programs.check if config.up.check else ()
        for remark in check_everything(command, path, overrides):
            sys.stderr.write(f"penstock up: note: {remark}\n")
        with locked(config.up.out):
            asyncio.run(_run(config, programs, resume, Console(highlight=False)))
    except (UpConfigInvalid, FolderUnusable) as error:
        return complain(PROGRAM, error, BAD_CONFIGURATION)
    except (ProcessFailed, PlacementFailed) as error:
        return complain(PROGRAM, error, Exit.FAILED)
    except asyncio.CancelledError:
        return complain(PROGRAM, "killed the processes that were still running", Exit.FAILED)
    return Exit.DONE


async def _run(config: UpConfig, programs: Programs, resume: bool, console: Console) -> None:
    """Owns the processes; none is left when it returns or raises."""
    task = cancel_on_signals()
    tell = log_events(config.up.out / EVENTS, partial(say, console))
    runs = False
    try:
        async with _placement(config, tell) as placement:
            runs = True
            await _supervise(config, programs, resume, placement, tell, partial(show, console))
            runs = False
    except asyncio.CancelledError:
        if runs:
            raise
        # A stop on request, before the processes started or after they ended.
        task.uncancel()
    finally:
        tell("up", "stopped")


async def _supervise(
    config: UpConfig,
    programs: Programs,
    resume: bool,
    placement: Placement,
    tell: Tell,
    show: Callable[[str], None],
) -> None:
    task = asyncio.current_task()
    assert task is not None
    supervisor = Supervisor(
        make_cast(config, programs, resume=resume),
        Restarts(config.up.restarts, config.up.restart_window_seconds),
        tell,
        placement=placement,
        on_trainer_line=show,
        on_change=lambda roles: write_state(config.up.out, config.cluster.placement, roles),
    )
    try:
        await supervisor.run()
    except asyncio.CancelledError:
        tell("up", "stopping on request")
        task.uncancel()
    except ProcessFailed:
        tell("up", "stopping")
        raise
    finally:
        try:
            await end_in_turn(supervisor.started, config.up.stop_seconds)
        finally:
            supervisor.ended()


@contextlib.asynccontextmanager
async def _placement(config: UpConfig, tell: Tell) -> AsyncGenerator[Placement]:
    if config.cluster.placement == "processes":
        yield local_placement(config)
        return
    where = config.cluster.address or "a cluster of this machine"
    tell("ray", f"waiting for room on {where}")
    async with open_ray(config.cluster, shares(config), config.up.out.name) as placement:
        tell("ray", f"has room for {len(shares(config))} processes")
        yield placement
