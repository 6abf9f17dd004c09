"""`penstock train`: wires the parts, runs them in order, and turns what stops them into an exit
code.

Order of shutdown: the loop ends after its step, the last checkpoint included; the stream is
half-closed and read to its end; metrics, payload and channels are closed; the model is written;
trackers are waited for, `trackers.CLOSE_SECONDS` at most; then the compute thread ends.

The first SIGTERM or SIGINT begins it. Where the server is away, or lost before it is over, nobody
waits for the server: there is no stream to close, and stderr says at which step the run stopped
without it. The exit code is that of a stop on request all the same. It is not that of a run that is
done: what starts trainers again, such as a job of Kubernetes whose node is drained, would take it for that.

On several ranks all of this is rank 0's; the others run `_follow`. See `ranks`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.trainer.config.trainer import TrainerConfig, as_shown, load_config, render_config
from penstock.trainer.core.errors import ConfigInvalid, TrainerError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.trainer.assembly import Parts
    from penstock.trainer.core.compute import ComputeThread
    from penstock.trainer.metrics.trackers import Trackers
    from penstock.trainer.policy.ranks import Leader, LocalRanks, Place
    from penstock.trainer.resume import Start
    from penstock.trainer.state.ledger import Ledger

# Not __name__, which is "__main__" where this module is run.
log = logging.getLogger("penstock.trainer")

EXIT_OK, EXIT_STOPPED, EXIT_CONFIG, EXIT_ASKED = 0, 1, 2, 3


def train(
    config_path: Path, overrides: list[str], resume: bool, dry_run: bool, ranks: int = 1
) -> int:
    """Runs a training to its end; returns the process's exit code.

    0: done. 1: stopped by a TrainerError, which stderr names. 2: the configuration cannot be used.
    3: stopped on request, before it was done. `dry_run` prints the whole configuration as TOML and does
    no more. `ranks` processes of this host compute, unless torchrun has started this one and says how many.
    """
    try:
        config = load_config(config_path, overrides)
        if dry_run:
            sys.stdout.write(render_config(config))
            return EXIT_OK
        # Before torch is loaded, which reads it. Threads that spin while they wait for each other starve
        # a sampler on the same cores, and where one of them is not scheduled, all the others.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        place, local = _take_place(config, config_path, overrides, ranks)
        if not place.leads:
            return _follow(config, place)
        alone = place.size == 1
        done = _train(config, resume) if alone else _lead(config, resume, place, local)
    except ConfigInvalid as error:
        sys.stderr.write(f"penstock train: {error}\n")
        return EXIT_CONFIG
    except TrainerError as error:
        sys.stderr.write(f"penstock train: stopped: {error}\n")
        return EXIT_STOPPED
    except BaseExceptionGroup as group:
        # The first that failed took the others with it.
        errors = list(_leaves(group))
        if not all(isinstance(error, TrainerError) for error in errors):
            raise
        if isinstance(errors[0], ConfigInvalid):
            sys.stderr.write(f"penstock train: {errors[0]}\n")
            return EXIT_CONFIG
        sys.stderr.write(f"penstock train: stopped: {errors[0]}\n")
        return EXIT_STOPPED
    return EXIT_OK if done else EXIT_ASKED


def _take_place(
    config: TrainerConfig, config_path: Path, overrides: list[str], ranks: int
) -> tuple[Place, LocalRanks | None]:
    """Where this process is among the run's, and those that it has started."""
    from penstock.trainer.policy.ranks import LocalRanks, find_place

    place = find_place(os.environ)
    if ranks > 1 and place.size not in (1, ranks):
        raise ConfigInvalid(f"--ranks {ranks}: WORLD_SIZE says {place.size}")
    _check_ranks(config, max(ranks, place.size))
    if place.size == ranks or ranks == 1:
        return place, None
    settings = [part for override in overrides for part in ("--set", override)]
    command = ("-m", "penstock.cli", "train", str(config_path), *settings)
    local = LocalRanks(ranks, (sys.executable, *command))
    return find_place(os.environ), local


def _check_ranks(config: TrainerConfig, ranks: int) -> None:
    """Raises ConfigInvalid where a run cannot have so many."""
    shares = ranks > 1 or config.model.cpu_offload
    if shares and config.model.lora is not None and config.weights.probe.tokens:
        with_what = f"{ranks} ranks" if ranks > 1 else "model.cpu_offload"
        raise ConfigInvalid(
            f"weights.probe.tokens: with model.lora and {with_what} nobody holds the whole model that the "
            f"probe is scored with; got {config.weights.probe.tokens}, set it to 0"
        )


def _lead(config: TrainerConfig, resume: bool, place: Place, local: LocalRanks | None) -> bool:
    """The run on rank 0; whether it is done."""
    from penstock.trainer.policy.ranks import join_group, lead, leave_group

    join_group(place, local)
    leader = lead(place.size)
    if local is not None:
        local.joined()
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
    """What every other rank does; returns its exit code. Its own errors are rank 0's to tell."""
    from penstock.trainer.policy.ranks import end_with_parent, follow, join_group, leave_group

    end_with_parent()
    join_group(place, None)
    follower = follow(place.rank)
    # What there is to say rank 0 says.
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
    """Whether it is done; otherwise it was asked to stop."""
    from penstock.common import allocator, telemetry
    from penstock.trainer.core.compute import ComputeThread

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
    """Owns the run's folder, its channels and its tasks."""
    from penstock.trainer.config.advice import advise
    from penstock.trainer.state.ledger import Ledger

    console = _log_to_console()
    for sentence in advise(config):
        log.warning("%s", sentence)
    stopping = _stop_on_signal()
    ledger = Ledger(config.run.out)
    try:
        await _run_locked(config, compute, resume, leader, ledger, console, stopping)
    finally:
        ledger.close()
    return not stopping.is_set()


async def _run_locked(
    config: TrainerConfig,
    compute: ComputeThread,
    resume: bool,
    leader: Leader | None,
    ledger: Ledger,
    console: Console,
    stopping: asyncio.Event,
) -> None:
    """No other trainer writes to the run's folder meanwhile."""
    from penstock.trainer.gather.group_policies import load_filter
    from penstock.trainer.metrics.trackers import make_trackers

    # What can be wrong with it is said before the model is loaded.
    load_filter(config)
    trackers = make_trackers(config.metrics.trackers, config.run.steps)
    try:
        start = await compute.run(_load, config, resume, leader, ledger)
        told = as_shown(config.model_dump(mode="json", exclude={"metrics": {"trackers"}}))
        trackers.begin(config.run.out, config.run.id, told, resumes=start.resumes)
        await _run_loaded(config, compute, start, trackers, console, stopping)
    finally:
        trackers.close()


async def _run_loaded(
    config: TrainerConfig,
    compute: ComputeThread,
    start: Start,
    trackers: Trackers,
    console: Console,
    stopping: asyncio.Event,
) -> None:
    """From the first call of the server to the model being written."""
    from penstock.trainer.assembly import open_links, wire
    from penstock.trainer.state.checkpoint import replace_folder

    async with open_links(config.server) as links:
        parts = wire(config, start, compute, links, console, stopping, trackers)
        try:
            async with parts.metrics.measuring():
                await _walk(parts, stopping)
        finally:
            with closing(parts.publisher):
                parts.metrics.close()
    if parts.exchanges.left.is_set():
        # After the live display, which would draw over it.
        step = parts.loop.step
        sys.stderr.write(f"penstock train: stopped at step {step} while its server was away\n")
    if config.run.save_model:
        folder = config.run.out / "model"
        await compute.run(replace_folder, folder, start.policy.save_model)
        what = "model" if start.policy.adapter() is None else "adapter, as PEFT writes it,"
        log.info("the %s after step %d is in %s", what, parts.loop.step, folder)


def _load(config: TrainerConfig, resume: bool, leader: Leader | None, ledger: Ledger) -> Start:
    """In the compute thread: torch and the model take seconds, in which a signal is heard."""
    from penstock.trainer.resume import start_run

    return start_run(config, resume, leader, ledger)


async def _walk(parts: Parts, stopping: asyncio.Event) -> None:
    """Connects, trains, disconnects."""
    if stopping.is_set():
        return  # Asked while the model was loaded: whether there is a server is not known.
    if not await parts.exchanges.open():
        return
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.exchanges.run(parts.loop.restore), name="exchanges")
        await parts.loop.begin()
        await parts.loop.run()
        await parts.exchanges.close()


def _log_to_console() -> Console:
    """Where figures and log go: above the live table in a terminal, plain lines otherwise."""
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
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once."""
    stopping = asyncio.Event()
    running = asyncio.get_running_loop()

    def stop(name: str) -> None:
        # Before it is said: whoever reads it may send the second one at once.
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

    # Not by an exception, which would wait for the step in the compute thread. A live display hides the
    # cursor.
    Console().show_cursor()
    os._exit(128 + number)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
