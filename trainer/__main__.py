"""`penstock train`: wires the parts, runs them in order, and turns what stops them into an exit
code.

Order of shutdown: the loop ends after its step, the last checkpoint included; the stream is
half-closed and read to its end; metrics, payload and channels are closed; the model is written;
trackers are waited for, `trackers.CLOSE_SECONDS` at most; then the compute thread ends.

The first SIGTERM or SIGINT begins it. Where the server is away, or lost before it is over, nobody
waits for the server: there is no stream to close, and stderr says at which step the run stopped
without it. The exit code is 0 all the same: a stop on request.

On several ranks all of this is rank 0's; the others run `_follow`. See `ranks`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.trainer.config import ServerConfig, TrainerConfig, load_config, render_config
from penstock.trainer.errors import CheckpointUnusable, ConfigInvalid, TrainerError

if TYPE_CHECKING:
    import grpc
    from rich.console import Console

    from penstock.trainer.checkpoint import TrainerState
    from penstock.trainer.compute import ComputeThread
    from penstock.trainer.evaluation import EvaluationSet, Evaluator
    from penstock.trainer.evaluation_writer import EvaluationWriter
    from penstock.trainer.exchange import Exchange
    from penstock.trainer.ledger import Ledger
    from penstock.trainer.loop import TrainingLoop
    from penstock.trainer.metrics import MetricsWriter
    from penstock.trainer.probe import Probe
    from penstock.trainer.publisher import Publisher
    from penstock.trainer.ranked_policy import RankPolicy
    from penstock.trainer.ranks import Leader, LocalRanks, Place
    from penstock.trainer.sources.problem import Source
    from penstock.trainer.tasks import TaskFeeder
    from penstock.trainer.trackers import Trackers
    from penstock.v1 import weights_pb2
    from penstock.wire.security import Security

# Not __name__, which is "__main__" where this module is run.
log = logging.getLogger("penstock.trainer")

EXIT_OK, EXIT_STOPPED, EXIT_CONFIG = 0, 1, 2
# Batches' worth of tasks that wait at the server beyond what the gate may admit at once.
SPARE_BATCHES = 2


def train(
    config_path: Path, overrides: list[str], resume: bool, dry_run: bool, ranks: int = 1
) -> int:
    """Runs a training to its end; returns the process's exit code.

    0: done, or stopped on request. 1: stopped by a TrainerError, which stderr names. 2: the
    configuration cannot be used. `dry_run` prints the whole configuration as TOML and does no more.
    `ranks` processes of this host compute, unless torchrun has started this one and says how many.
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
        if place.size == 1:
            _train(config, resume)
        else:
            _lead(config, resume, place, local)
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
        sys.stderr.write(f"penstock train: stopped: {errors[0]}\n")
        return EXIT_STOPPED
    return EXIT_OK


def _take_place(
    config: TrainerConfig, config_path: Path, overrides: list[str], ranks: int
) -> tuple[Place, LocalRanks | None]:
    """Where this process is among the run's, and those that it has started."""
    from penstock.trainer.ranks import LocalRanks, find_place

    place = find_place(os.environ)
    if ranks > 1 and place.size not in (1, ranks):
        raise ConfigInvalid(f"--ranks {ranks}: WORLD_SIZE says {place.size}")
    _check_ranks(config, max(ranks, place.size))
    if place.size == ranks or ranks == 1:
        return place, None
    settings = [part for override in overrides for part in ("--set", override)]
    command = ("-m", "penstock.client", "train", str(config_path), *settings)
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


def _lead(config: TrainerConfig, resume: bool, place: Place, local: LocalRanks | None) -> None:
    """The run on rank 0."""
    from penstock.trainer.ranks import join_group, lead, leave_group

    join_group(place, local)
    leader = lead(place.size)
    if local is not None:
        local.joined()
    status = EXIT_STOPPED
    try:
        _train(config, resume, leader)
        status = EXIT_OK
    finally:
        leader.end(status)
        if local is not None:
            local.wait()
        if status == EXIT_OK:
            leave_group()


def _follow(config: TrainerConfig, place: Place) -> int:
    """What every other rank does; returns its exit code. Its own errors are rank 0's to tell."""
    from penstock.trainer.ranks import end_with_parent, follow, join_group, leave_group

    end_with_parent()
    join_group(place, None)
    follower = follow(place.rank)
    # What there is to say rank 0 says.
    logging.getLogger("penstock.trainer").setLevel(logging.ERROR)
    try:
        with follower.reporting():
            import torch

            from penstock.trainer.ranked_policy import obey

            if config.model.threads:
                torch.set_num_threads(config.model.threads)
            obey(follower, _make_policy(config))
    except TrainerError:
        return EXIT_STOPPED
    leave_group()
    return EXIT_OK


def _make_policy(config: TrainerConfig) -> RankPolicy:
    """This rank's part of the policy. Raises ConfigInvalid."""
    if config.model.backend.kind == "megatron":
        from penstock.trainer.megatron_hook import install

        install()
        from penstock.trainer.megatron_policy import MegatronPolicy as ChosenPolicy
    else:
        from penstock.trainer.fsdp_policy import FsdpPolicy as ChosenPolicy

    return ChosenPolicy(
        config.model,
        config.train,
        algorithm=config.algorithm,
        total_steps=config.run.steps,
        seed=config.run.seed,
    )


def _train(config: TrainerConfig, resume: bool, leader: Leader | None = None) -> None:
    from penstock.trainer.compute import ComputeThread
    from penstock.wire import telemetry

    telemetry.configure("penstock-trainer")
    compute = ComputeThread(config.model.threads)
    try:
        asyncio.run(_run(config, compute, resume, leader))
    finally:
        compute.close()
        telemetry.shutdown()


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a run begins."""

    policy: RankPolicy
    state: TrainerState
    source: Source
    evaluations: tuple[EvaluationSet, ...]
    ledger: Ledger
    share_prefixes: bool
    passed_over: int
    """Step of a newer checkpoint that is broken; zero where none is."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a run is made of."""

    exchange: Exchange
    publisher: Publisher
    metrics: MetricsWriter
    loop: TrainingLoop
    evaluations: EvaluationWriter | None = None


async def _run(
    config: TrainerConfig, compute: ComputeThread, resume: bool, leader: Leader | None
) -> None:
    """Owns the run's folder, its channels and its tasks."""
    from penstock.trainer.ledger import Ledger

    console = _log_to_console()
    stopping = _stop_on_signal()
    ledger = Ledger(config.run.out)
    try:
        await _run_locked(config, compute, resume, leader, ledger, console, stopping)
    finally:
        ledger.close()


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
    from penstock.trainer.trackers import make_trackers

    trackers = make_trackers(config.metrics.trackers, config.run.steps)
    try:
        start = await compute.run(_load, config, resume, leader, ledger)
        told = config.model_dump(mode="json", exclude={"metrics": {"trackers"}})
        trackers.begin(config.run.out, config.run.id, told, resumes=resume)
        await _run_loaded(config, compute, start, trackers, console, stopping)
    finally:
        trackers.close()


async def _run_loaded(
    config: TrainerConfig,
    compute: ComputeThread,
    start: _Start,
    trackers: Trackers,
    console: Console,
    stopping: asyncio.Event,
) -> None:
    """From the first call of the server to the model being written."""
    from penstock.trainer.checkpoint import replace_folder
    from penstock.wire.security import open_channel

    security = _security(config.server)
    address = config.server.address
    async with (
        open_channel(address, security) as channel,
        open_channel(address, security, own_connection=True) as bulk,
    ):
        parts = _wire(config, start, compute, channel, bulk, console, stopping, trackers)
        try:
            async with parts.metrics.measuring():
                await _walk(parts, stopping)
        finally:
            if parts.evaluations is not None:
                parts.evaluations.close()
            parts.metrics.close()
            parts.publisher.close()
    if parts.exchange.left.is_set():
        # After the live display, which would draw over it.
        step = parts.loop.step
        sys.stderr.write(f"penstock train: stopped at step {step} while its server was away\n")
    if config.run.save_model:
        folder = config.run.out / "model"
        await compute.run(replace_folder, folder, start.policy.save_model)
        what = "model" if start.policy.adapter() is None else "adapter, as PEFT writes it,"
        log.info("the %s after step %d is in %s", what, parts.loop.step, folder)


async def _walk(parts: _Parts, stopping: asyncio.Event) -> None:
    """Connects, trains, disconnects."""
    if stopping.is_set():
        return  # Asked while the model was loaded: whether there is a server is not known.
    welcome = await parts.exchange.open()
    if welcome is None:
        return
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.exchange.run(parts.loop.restore), name="exchange")
        await parts.loop.begin(welcome)
        await parts.loop.run()
        await parts.exchange.close()


def _load(config: TrainerConfig, resume: bool, leader: Leader | None, ledger: Ledger) -> _Start:
    """The policy, from the newest whole checkpoint where the run resumes. In the compute thread."""
    from penstock.trainer.checkpoint import TrainerState, has_checkpoints, restore
    from penstock.trainer.ranked_policy import LeadingPolicy
    from penstock.trainer.sources.opening import open_source

    run, folder = config.run, config.run.out / "checkpoints"
    if not resume and has_checkpoints(folder):
        raise ConfigInvalid(
            f"run.out: {folder} holds checkpoints of an earlier start: "
            "go on from them with --resume, or choose another folder"
        )
    checkpoint = restore(folder) if resume else None
    source = open_source(config.data, run.seed)
    data = source.identity
    state = TrainerState(run.id, 0, 0, next_index=0, outstanding=(), data=data)
    policy = _make_policy(config)
    if leader is not None:
        policy = LeadingPolicy(policy, leader)
    if checkpoint is not None:
        state = checkpoint.state
        _check_same_run(checkpoint.folder, state, run.id, data)
        policy.load(checkpoint.folder)
        ledger.resume(state.step, state.ledger_bytes)
        log.info("resuming after step %d from %s", state.step, checkpoint.folder)
    elif resume and config.checkpoint.every_steps:
        # Nothing is final before the first checkpoint: the server still has what it was trained on.
        ledger.resume(0)
        log.warning("nothing to resume from in %s; beginning at step 1", folder)
    else:
        ledger.begin()
        if resume:
            log.warning("nothing to resume from in %s; beginning at step 1", folder)
    share_prefixes = config.train.share_prefixes and policy.supports_trees()
    if config.train.share_prefixes and not share_prefixes:
        log.warning("this model cannot share prefixes: its attention ignores the mask it is given")
    passed_over = checkpoint.passed_over if checkpoint is not None else 0
    evaluations = _open_evaluations(config, state.step)
    return _Start(policy, state, source, evaluations, ledger, share_prefixes, passed_over)


def _open_evaluations(config: TrainerConfig, step: int) -> tuple[EvaluationSet, ...]:
    """The sets to measure, each with what a run that resumes has measured of it."""
    from penstock.trainer.evaluation import EvaluationSet
    from penstock.trainer.evaluation_writer import last_steps
    from penstock.trainer.metrics import keep_until

    keep_until(config.run.out, step)
    last = last_steps(config.run.out)
    return tuple(EvaluationSet(e, config.data, last.get(e.name)) for e in config.evaluation)


def _check_same_run(folder: Path, state: TrainerState, run_id: str, data: str) -> None:
    """Raises CheckpointUnusable where the configuration is of another run, or its data are others."""
    if state.run_id != run_id:
        raise CheckpointUnusable(f"{folder}: run {state.run_id!r}, not {run_id!r}")
    if state.data != data:
        raise CheckpointUnusable(
            f"{folder}: its place in the data is one in {state.data!r}; the configuration now "
            f"names {data!r}"
        )


def _wire(
    config: TrainerConfig,
    start: _Start,
    compute: ComputeThread,
    channel: grpc.aio.Channel,
    bulk: grpc.aio.Channel,
    console: Console,
    stopping: asyncio.Event,
    trackers: Trackers,
) -> _Parts:
    from torch.utils.tensorboard import SummaryWriter

    from penstock.trainer.checkpoint import TrainerState, save_checkpoint
    from penstock.trainer.evaluation_writer import EvaluationWriter
    from penstock.trainer.gathering import settle_refused
    from penstock.trainer.loop import TrainingLoop
    from penstock.trainer.metrics import MetricsWriter, keep_until
    from penstock.trainer.probe import Probe
    from penstock.trainer.server_load import LoadMeter
    from penstock.trainer.trackers import TrackedScalars

    run, state = config.run, start.state
    tasks = _make_feeder(config, start, channel)
    exchange = _make_exchange(config, start, channel, stopping)
    probe = Probe(
        start.policy.score,
        tokens=config.weights.probe.tokens,
        tolerance=config.weights.probe.tolerance,
        token_ids=state.probe,
    )
    publisher = _make_publisher(config, compute, bulk, probe, start.policy.adapter())
    settle_refused(tasks, start.ledger.refused)
    # Before the file is opened, for this replaces it.
    written_step = keep_until(run.out, state.step)
    unwritten: Mapping[str, object] = state.record if written_step < state.step else {}
    tensorboard = SummaryWriter(str(run.out / "tensorboard"), purge_step=state.step + 1)
    scalars = TrackedScalars(tensorboard, trackers)
    metrics = MetricsWriter(
        run.out,
        scalars,
        console,
        steps=run.steps,
        step=written_step if unwritten else state.step,
        every_steps=config.metrics.every_steps,
        trackers=trackers,
        load=LoadMeter(channel, config.metrics.load_every_seconds),
    )
    if unwritten:
        metrics.restore(state.step, unwritten)
    evaluations = EvaluationWriter(run.out, scalars, console)

    def checkpoint(
        step: int, weight_version: int, figures: Mapping[str, object]
    ) -> Callable[[], object]:
        reached = TrainerState(
            run.id,
            step,
            weight_version,
            tasks.next_index,
            tasks.outstanding,
            probe.token_ids,
            state.data,
            start.ledger.length_bytes,
            figures,
        )
        folder, keep = run.out / "checkpoints", config.checkpoint.keep
        return lambda: save_checkpoint(folder, reached, start.policy.save, keep=keep)

    loop = TrainingLoop(
        config,
        policy=start.policy,
        compute=compute,
        exchange=exchange,
        publisher=publisher,
        tasks=tasks,
        metrics=metrics,
        probe=probe,
        ledger=start.ledger,
        checkpoint=checkpoint,
        stopping=stopping,
        step=state.step,
        share_prefixes=start.share_prefixes,
        forgotten_step=start.passed_over,
        evaluator=_make_evaluator(start, run.id, exchange, channel, evaluations, stopping),
        data_ranks=start.policy.data_ranks,
    )
    return _Parts(exchange, publisher, metrics, loop, evaluations)


def _make_evaluator(
    start: _Start,
    run_id: str,
    exchange: Exchange,
    channel: grpc.aio.Channel,
    writer: EvaluationWriter,
    stopping: asyncio.Event,
) -> Evaluator:
    from penstock.trainer.evaluation import Evaluator
    from penstock.trainer.tasks import submit_tasks

    return Evaluator(
        start.evaluations,
        exchange,
        run_id=run_id,
        submit=lambda asked: submit_tasks(channel, asked),
        write=writer.write,
        stopping=stopping,
    )


def _make_publisher(
    config: TrainerConfig,
    compute: ComputeThread,
    bulk: grpc.aio.Channel,
    probe: Probe,
    adapter: weights_pb2.LoraAdapter | None = None,
) -> Publisher:
    from penstock.trainer.publisher import Publisher
    from penstock.trainer.transports import CheckpointFolder, SharedMemory, Stream, Transport

    weights = config.weights
    transports: list[Transport] = []
    if weights.transport in ("auto", "shared_memory"):
        transports.append(SharedMemory(bulk))
    if weights.transport in ("auto", "stream"):
        transports.append(Stream(bulk))
    if weights.transport == "checkpoint":
        folder = config.run.out / "weights"
        transports.append(CheckpointFolder(bulk, compute, folder, keep=weights.keep))
    if weights.transport == "collective":
        from penstock.trainer.collective_transport import CollectiveSettings, CollectiveTransport

        settings = CollectiveSettings(**weights.collective.model_dump())
        security = _security(config.server)
        transports.append(CollectiveTransport(config.server.address, settings, security))
    return Publisher(
        bulk,
        compute,
        transports=transports,
        delta=weights.delta,
        anchor_every=weights.anchor_every,
        probe=probe,
        adapter=adapter,
    )


def _security(server: ServerConfig) -> Security:
    """How the server is called. Raises ConfigInvalid."""
    from penstock.wire.security import CredentialsUnusable, Security

    security = Security(
        tls=server.tls,
        ca=server.ca,
        certificate=server.certificate,
        key=server.key,
        server_name=server.server_name,
        token_file=server.token_file,
    ).with_environment()
    try:
        security.check(server.address)
    except CredentialsUnusable as error:
        raise ConfigInvalid(f"server: {error}") from error
    return security


def _make_feeder(config: TrainerConfig, start: _Start, channel: grpc.aio.Channel) -> TaskFeeder:
    from penstock.trainer.tasks import TaskFeeder

    batches = config.staleness.max_lag + 1 + SPARE_BATCHES
    return TaskFeeder(
        channel,
        start.source,
        config.data,
        run_id=config.run.id,
        pending_target=batches * config.train.groups_per_step,
        attempts=config.groups.attempts,
        next_index=start.state.next_index,
        outstanding=start.state.outstanding,
    )


def _make_exchange(
    config: TrainerConfig,
    start: _Start,
    channel: grpc.aio.Channel,
    stopping: asyncio.Event,
) -> Exchange:
    from penstock.trainer.exchange import Contract, Exchange
    from penstock.trainer.loop import IN_FLIGHT, LATE_POLICIES

    return Exchange(
        channel,
        run_id=config.run.id,
        contract=Contract(
            max_lag=config.staleness.max_lag,
            late_policy=LATE_POLICIES[config.staleness.late_policy],
            groups_per_step=config.train.groups_per_step,
        ),
        in_flight=IN_FLIGHT[config.weights.in_flight],
        weight_version=start.state.weight_version,
        step=start.state.step,
        give_up_after_seconds=config.server.give_up_after_seconds,
        stopping=stopping,
        trained={**start.ledger.trained, **{r.group_id: 0 for r in start.ledger.refused}},
    )


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
        log.warning("%s: stopping after the step under way", name)
        stopping.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            running.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop, number.name)
    return stopping


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
