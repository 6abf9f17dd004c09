"""What a run is made of, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from penstock.trainer.checkpoint import TrainerState, save_checkpoint
from penstock.trainer.compute import ComputeThread
from penstock.trainer.config import ServerConfig, TrainerConfig
from penstock.trainer.errors import ConfigInvalid
from penstock.trainer.evaluation import Evaluator
from penstock.trainer.evaluation_writer import EvaluationWriter
from penstock.trainer.exchange import Contract, Exchange
from penstock.trainer.gathering import settle_refused
from penstock.trainer.loop import IN_FLIGHT, LATE_POLICIES, TrainingLoop
from penstock.trainer.metrics import MetricsWriter
from penstock.trainer.probe import Probe
from penstock.trainer.publisher import Publisher
from penstock.trainer.server_load import LoadMeter
from penstock.trainer.starting import Start
from penstock.trainer.tasks import TaskFeeder, submit_tasks
from penstock.trainer.trackers import TrackedScalars, Trackers
from penstock.trainer.transports import CheckpointFolder, SharedMemory, Stream, Transport
from penstock.v1 import weights_pb2
from penstock.wire.security import CredentialsUnusable, Security

# Batches' worth of tasks that wait at the server beyond what the gate may admit at once.
SPARE_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    exchange: Exchange
    publisher: Publisher
    metrics: MetricsWriter
    loop: TrainingLoop
    evaluations: EvaluationWriter | None = None


def wire(
    config: TrainerConfig,
    start: Start,
    compute: ComputeThread,
    channel: grpc.aio.Channel,
    bulk: grpc.aio.Channel,
    console: Console,
    stopping: asyncio.Event,
    trackers: Trackers,
) -> Parts:
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
    metrics, evaluations = _make_writers(config, start, channel, console, trackers)

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
    return Parts(exchange, publisher, metrics, loop, evaluations)


def _make_writers(
    config: TrainerConfig,
    start: Start,
    channel: grpc.aio.Channel,
    console: Console,
    trackers: Trackers,
) -> tuple[MetricsWriter, EvaluationWriter]:
    """What writes steps and evaluations, after what the run before left unwritten."""
    run = config.run
    state = start.state
    unwritten: Mapping[str, object] = state.record if start.written_step < state.step else {}
    tensorboard = SummaryWriter(str(run.out / "tensorboard"), purge_step=state.step + 1)
    scalars = TrackedScalars(tensorboard, trackers)
    metrics = MetricsWriter(
        run.out,
        scalars,
        console,
        steps=run.steps,
        step=start.written_step if unwritten else state.step,
        every_steps=config.metrics.every_steps,
        trackers=trackers,
        load=LoadMeter(channel, config.metrics.load_every_seconds),
    )
    if unwritten:
        metrics.restore(state.step, unwritten)
    return metrics, EvaluationWriter(run.out, scalars, console)


def _make_evaluator(
    start: Start,
    run_id: str,
    exchange: Exchange,
    channel: grpc.aio.Channel,
    writer: EvaluationWriter,
    stopping: asyncio.Event,
) -> Evaluator:
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
        security = security_of(config.server)
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


def security_of(server: ServerConfig) -> Security:
    """How the server is called. Raises ConfigInvalid."""
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


def _make_feeder(config: TrainerConfig, start: Start, channel: grpc.aio.Channel) -> TaskFeeder:
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
    start: Start,
    channel: grpc.aio.Channel,
    stopping: asyncio.Event,
) -> Exchange:
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
