"""`penstock train`: wires the parts, runs them in order, and maps the outcome to an exit code.

Order of shutdown: the loop ends after its step, including the last checkpoint; the stream is half-closed
and read to its end; metrics, payload and channels are closed; the model is written; trackers get up to
`reporting.CLOSE_SECONDS` to finish; the compute thread ends. The first SIGTERM or SIGINT starts it. If the
server is away, or lost before it is complete, the trainer does not wait, and stderr names the step.

A run stopped on request has its own exit code. A supervisor can therefore tell it from a finished run, as
a Kubernetes job must whose node is drained. On several ranks, rank 0 does all of this; the others run
`_follow`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.answers import Exit, complain, show_toml
from penstock.common.settings import read_with_origins
from penstock.trainer.config.paths import check_hub, check_paths
from penstock.trainer.config.trainer import TrainerConfig, load_config, render_config
from penstock.trainer.core.errors import ConfigInvalid, TrainerError, leaves

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.trainer.core.aio import ComputeThread
    from penstock.trainer.policy.process_group import LocalRanks, Place
    from penstock.trainer.policy.ranks import Leader

# Not __name__, which is "__main__" when this module is run.
log = logging.getLogger("penstock.trainer")

EXIT_OK, EXIT_STOPPED, EXIT_CONFIG, EXIT_ASKED = (
    Exit.DONE,
    Exit.FAILED,
    Exit.MISUSED,
    Exit.STOPPED,
)


def train(
    config_path: Path, overrides: list[str], resume: bool, dry_run: bool, ranks: int = 1
) -> int:
    """Runs a training to its end; returns the process's exit code.

    0: done. 1: stopped by a TrainerError, which stderr names. 2: the configuration cannot be used. 3:
    stopped on request, before it was done. `dry_run` only prints the whole configuration as TOML. `ranks`
    is the number of processes on this host, unless torchrun started this one and sets the number.
    """
    try:
        config = load_config(config_path, overrides)
        origins = read_with_origins(config_path, overrides)[1]
        check_paths(config, origins)
        if dry_run:
            show_toml(render_config(config))
            return EXIT_OK
        check_hub(config, origins)
        # Set before torch is loaded, which reads it. Threads that spin while waiting starve a sampler on
        # the same cores. If one of them is not scheduled, the spinning also delays all the others.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        place, local = _take_place(config, config_path, overrides, ranks)
        if not place.leads:
            return _follow(config, place)
        alone = place.size == 1
        done = _train(config, resume) if alone else _lead(config, resume, place, local)
    except (TrainerError, BaseExceptionGroup) as raised:
        # Of a group, the first error cancelled the other tasks.
        errors = list(leaves(raised))
        if not all(isinstance(error, TrainerError) for error in errors):
            raise
        if isinstance(errors[0], ConfigInvalid):
            return complain("penstock train", errors[0], EXIT_CONFIG)
        return complain("penstock train", f"stopped: {errors[0]}", EXIT_STOPPED)
    return EXIT_OK if done else EXIT_ASKED


def _take_place(
    config: TrainerConfig, config_path: Path, overrides: list[str], ranks: int
) -> tuple[Place, LocalRanks | None]:
    """Returns the place of this process among the ranks, and the local ranks that it started, if any."""
    from penstock.trainer.policy.process_group import LocalRanks, find_place

    place = find_place(os.environ)
    if ranks > 1 and place.size not in (1, ranks):
        raise ConfigInvalid(f"--ranks {ranks}: WORLD_SIZE is {place.size}")
    count, probed = max(ranks, place.size), config.weights.probe.tokens
    if config.model.lora is not None and probed and (count > 1 or config.model.cpu_offload):
        with_what = f"{count} ranks" if count > 1 else "model.cpu_offload"
        raise ConfigInvalid(
            f"weights.probe.tokens: with model.lora and {with_what} no rank holds the whole model, "
            f"which scoring the probe requires; got {probed}, set it to 0"
        )
    if place.size == ranks or ranks == 1:
        return place, None
    settings = [part for override in overrides for part in ("--set", override)]
    command = ("-m", "penstock.cli", "train", str(config_path), *settings)
    local = LocalRanks(ranks, (sys.executable, *command))
    return find_place(os.environ), local


def _lead(config: TrainerConfig, resume: bool, place: Place, local: LocalRanks | None) -> bool:
    """Runs the training as rank 0. Returns whether it is done."""
    from penstock.trainer.policy.process_group import join_group, leave_group
    from penstock.trainer.policy.ranks import lead

    join_group(place, local)
    leader = lead(place.size)
    if local is not None:
        local.joined.set()
    status = EXIT_STOPPED
    try:
        done = _train(config, resume, leader)
        status = EXIT_OK
    finally:
        leader.end(status)
        if local is not None:
            local.wait()
        if status == EXIT_OK:
            leave_group()
    return done


def _follow(config: TrainerConfig, place: Place) -> int:
    """Runs any other rank; returns its exit code. Rank 0 reports its errors."""
    from penstock.trainer.policy.process_group import end_with_parent, join_group, leave_group
    from penstock.trainer.policy.ranks import follow

    end_with_parent()
    join_group(place, None)
    follower = follow(place.rank)
    # Rank 0 logs for all ranks.
    logging.getLogger("penstock.trainer").setLevel(logging.ERROR)
    try:
        with follower.reporting():
            import torch

            from penstock.trainer.policy.ranked import obey
            from penstock.trainer.resume import make_policy

            if config.model.threads:
                torch.set_num_threads(config.model.threads)
            obey(follower, make_policy(config))
    except TrainerError:
        return EXIT_STOPPED
    leave_group()
    return EXIT_OK


def _train(config: TrainerConfig, resume: bool, leader: Leader | None = None) -> bool:
    """Returns True once training is done, False if it was asked to stop."""
    from penstock.common import allocator, telemetry
    from penstock.trainer.core.aio import ComputeThread

    allocator.keep_freed_memory(allocator.TRAINER_TRIM_BYTES, allocator.TRAINER_MAP_BYTES)
    telemetry.configure("penstock-trainer")
    compute = ComputeThread(config.model.threads)
    try:
        return asyncio.run(_run(config, compute, resume, leader))
    finally:
        compute.close()
        telemetry.shutdown()


async def _run(
    config: TrainerConfig, compute: ComputeThread, resume: bool, leader: Leader | None
) -> bool:
    """Returns as `_train`."""
    from penstock.trainer.config.advice import advise
    from penstock.trainer.session import open_loop

    console = _log_to_console()
    for sentence in advise(config):
        log.warning("%s", sentence)
    stopping = _stop_on_signal()
    async with open_loop(config, compute, console, stopping, resume, leader) as loop:
        if loop is not None:
            await loop.run()
    return not stopping.is_set()


def _log_to_console() -> Console:
    """Directs log and figures: above the live table in a terminal, plain lines otherwise."""
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console()
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False)
    handler.setFormatter(logging.Formatter("penstock train: %(message)s"))
    own = logging.getLogger("penstock.trainer")
    own.setLevel(logging.INFO)
    own.handlers = [handler]
    own.propagate = False
    return console


def _stop_on_signal() -> asyncio.Event:
    """Returns an event that the first SIGTERM or SIGINT sets; a second signal ends the process at once."""
    stopping = asyncio.Event()
    running = asyncio.get_running_loop()

    def stop(name: str) -> None:
        # Before logging: a reader of the log line may send the second signal at once.
        for number in (signal.SIGTERM, signal.SIGINT):
            running.remove_signal_handler(number)
            signal.signal(number, _end_at_once)
        log.warning("%s: stopping after the step under way", name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop, number.name)
    return stopping


def _end_at_once(number: int, _: object) -> None:
    from rich.console import Console

    # An exception would wait for the step in the compute thread. A live display hides the cursor.
    Console().show_cursor()
    os._exit(128 + number)
