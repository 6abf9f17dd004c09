"""Builds the parts of a run and connects them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from penstock.trainer.config.server import ServerConfig
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.feeder import ServerTasks, TaskFeeder
from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.shards import Division
from penstock.trainer.data.submission import submit_tasks
from penstock.trainer.evaluation.evaluation import Evaluator
from penstock.trainer.evaluation.writer import EvaluationWriter, lines_from, show
from penstock.trainer.exchange.server_load import LoadMeter
from penstock.trainer.exchange.servers import Servers
from penstock.trainer.exchange.stream import Contract, Exchange, RunFacts
from penstock.trainer.gather.batch import Gatherer, settle_refused
from penstock.trainer.learner import Learner
from penstock.trainer.loop import TrainingLoop
from penstock.trainer.metrics.metrics import MetricsWriter
from penstock.trainer.metrics.reporting import TrackedScalars, Trackers
from penstock.trainer.resume import Start
from penstock.trainer.state.checkpoint import TrainerState, save_checkpoint
from penstock.trainer.state.run_id import remove_start_id
from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.probe import Probe
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.trainer.weights.transports import (
    CheckpointFolder,
    SharedMemory,
    Stream,
    Transport,
    VersionFolders,
)
from penstock.v1 import trainer_service_pb2, weights_pb2
from penstock.wire.security import CredentialsUnusable, Security, open_channel

LATE_POLICIES = {
    "mask": trainer_service_pb2.LATE_POLICY_MASK,
    "wait": trainer_service_pb2.LATE_POLICY_WAIT,
    "requeue": trainer_service_pb2.LATE_POLICY_REQUEUE,
    "drop": trainer_service_pb2.LATE_POLICY_DROP,
}
IN_FLIGHT = {
    "keep": weights_pb2.IN_FLIGHT_POLICY_KEEP,
    "recompute": weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE,
    "drain": weights_pb2.IN_FLIGHT_POLICY_DRAIN,
    "abort": weights_pb2.IN_FLIGHT_POLICY_ABORT,
}

# Batches of tasks to keep waiting at the server, beyond what the gate can admit at once.
SPARE_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Link:
    """The two connections to one server."""

    address: str
    channel: grpc.aio.Channel
    bulk: grpc.aio.Channel
    """Carries weights and nothing else."""


@asynccontextmanager
async def open_links(server: ServerConfig) -> AsyncGenerator[tuple[Link, ...]]:
    """Open a link to every server, in the configured order. Raises ConfigInvalid."""
    security = security_of(server)
    async with AsyncExitStack() as stack:
        links: list[Link] = []
        for address in server.addresses:
            channel = open_channel(address, security)
            await stack.enter_async_context(channel)
            bulk = open_channel(address, security, own_connection=True)
            await stack.enter_async_context(bulk)
            links.append(Link(address, channel, bulk))
        yield tuple(links)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run."""

    exchanges: Servers
    publisher: Publisher
    metrics: MetricsWriter
    loop: TrainingLoop


def wire(
    config: TrainerConfig,
    start: Start,
    compute: ComputeThread,
    links: Sequence[Link],
    console: Console,
    stopping: asyncio.Event,
    trackers: Trackers,
) -> Parts:
    division = Division(config.train.groups_per_step, len(links))
    exchanges = _make_exchanges(config, start, links, division, stopping)
    tasks = _make_feeder(config, start, links, exchanges)
    probe = Probe(
        start.policy.score,
        tokens=config.weights.probe.tokens,
        tolerance=config.weights.probe.tolerance,
        token_ids=start.state.probe,
    )
    publisher = make_publisher(config, compute, links, exchanges, probe, start.policy.adapter())
    settle_refused(tasks, start.ledger.refused)
    metrics, evaluations = _make_writers(config, start, links, console, trackers)
    gatherer = Gatherer(
        config,
        exchanges=exchanges,
        tasks=tasks,
        ledger=start.ledger,
        compute=compute,
        stopping=stopping,
        forgotten_step=start.passed_over,
    )
    loop = TrainingLoop(
        config,
        learner=_make_learner(config, start, compute, tasks, probe, stopping),
        gatherer=gatherer,
        exchanges=exchanges,
        publisher=publisher,
        metrics=metrics,
        evaluator=_make_evaluator(start, config.run.id, exchanges, links, evaluations, stopping),
    )
    return Parts(exchanges, publisher, metrics, loop)


def _make_learner(
    config: TrainerConfig,
    start: Start,
    compute: ComputeThread,
    tasks: TaskFeeder,
    probe: Probe,
    stopping: asyncio.Event,
) -> Learner:
    run, state = config.run, start.state

    def collect(
        step: int, weight_version: int, figures: Mapping[str, object]
    ) -> Callable[[], object]:
        reached = TrainerState(
            run.id,
            step,
            weight_version,
            tasks.next_index,
            tasks.outstanding,
            tasks.unasked,
            probe.token_ids,
            state.data,
            start.ledger.length_bytes,
            state.start_id,
            figures,
        )

        def save() -> None:
            keep = config.checkpoint.keep
            save_checkpoint(run.out / "checkpoints", reached, start.policy.save, keep=keep)
            # The run can resume from a checkpoint now, so the id of its start is no longer needed.
            remove_start_id(run.out)

        return save

    return Learner(
        config,
        policy=start.policy,
        compute=compute,
        ledger=start.ledger,
        probe=probe,
        collect=collect,
        stopping=stopping,
        step=state.step,
        share_prefixes=start.share_prefixes,
    )


def _make_writers(
    config: TrainerConfig,
    start: Start,
    links: Sequence[Link],
    console: Console,
    trackers: Trackers,
) -> tuple[MetricsWriter, EvaluationWriter]:
    """Create the writers, after showing and writing what the previous run left unwritten."""
    run = config.run
    state = start.state
    unwritten: Mapping[str, object] = state.record if start.written_step < state.step else {}
    # Evaluations before the first step have step zero.
    begins = state.step + 1 if state.step else 0
    tensorboard = SummaryWriter(str(run.out / "tensorboard"), purge_step=begins)
    for line in lines_from(run.out, begins):
        show(line, tensorboard)
    scalars = TrackedScalars(tensorboard, trackers)
    metrics = MetricsWriter(
        run.out,
        scalars,
        console,
        steps=run.steps,
        step=start.written_step if unwritten else state.step,
        every_steps=config.metrics.every_steps,
        trackers=trackers,
        load=LoadMeter([link.channel for link in links], config.metrics.load_every_seconds),
    )
    if unwritten:
        metrics.restore(state.step, unwritten)
    return metrics, EvaluationWriter(run.out, scalars, console)


def _make_evaluator(
    start: Start,
    run_id: str,
    exchanges: Servers,
    links: Sequence[Link],
    writer: EvaluationWriter,
    stopping: asyncio.Event,
) -> Evaluator:
    return Evaluator(
        start.evaluations,
        exchanges,
        run_id=run_id,
        submit=lambda server, asked: submit_tasks(
            links[server].channel, asked, run_id, _epoch_of(exchanges[server])
        ),
        write=writer.write,
        stopping=stopping,
    )


def make_publisher(
    config: TrainerConfig,
    compute: ComputeThread,
    links: Sequence[Link],
    exchanges: Servers,
    probe: Probe,
    adapter: weights_pb2.LoraAdapter | None = None,
) -> Publisher:
    """Create the publisher, with a sender for every server. Raises ConfigInvalid."""
    weights = config.weights
    copy = WeightCopy(compute, probe)
    folders = VersionFolders(compute, config.run.out / "weights", keep=weights.keep)
    senders = [
        Sender(
            link.bulk,
            copy,
            exchange,
            transports=_make_transports(config, link, folders),
            delta=weights.delta,
            anchor_every=weights.anchor_every,
            adapter=adapter,
        )
        for link, exchange in zip(links, exchanges, strict=True)
    ]
    return Publisher(copy, senders)


def _make_transports(config: TrainerConfig, link: Link, folders: VersionFolders) -> list[Transport]:
    weights = config.weights
    transports: list[Transport] = []
    if weights.transport in ("auto", "shared_memory"):
        transports.append(SharedMemory(link.bulk))
    if weights.transport in ("auto", "stream"):
        transports.append(Stream(link.bulk))
    if weights.transport == "checkpoint":
        transports.append(CheckpointFolder(link.bulk, folders))
    if weights.transport == "collective":
        from penstock.trainer.weights.collective.transport import (
            CollectiveSettings,
            CollectiveTransport,
        )

        settings = CollectiveSettings(**weights.collective.model_dump())
        security = security_of(config.server)
        transports.append(CollectiveTransport(link.address, settings, security))
    return transports


def security_of(server: ServerConfig, given: Security | None = None) -> Security:
    """Return how to authenticate to the servers. Options `given` on a command line override the file.

    Raises ConfigInvalid if the credentials are unusable.
    """
    own = Security(
        tls=server.tls,
        ca=server.ca,
        certificate=server.certificate,
        key=server.key,
        server_name=server.server_name,
        token_file=server.token_file,
    )
    security = (given.over(own) if given else own).with_environment()
    try:
        for address in server.addresses:
            security.check(address)
    except CredentialsUnusable as error:
        raise ConfigInvalid(f"server: {error}") from error
    return security


def _make_feeder(
    config: TrainerConfig, start: Start, links: Sequence[Link], exchanges: Servers
) -> TaskFeeder:
    batches = config.staleness.max_lag + 1 + SPARE_BATCHES
    state, division = start.state, exchanges.division
    return TaskFeeder(
        [
            ServerTasks(link.channel, batches * part, trainer_epoch=_epoch_of(exchange))
            for link, part, exchange in zip(links, division.parts, exchanges, strict=True)
        ],
        start.source,
        config.data,
        DataIndices(division, state.next_index, state.outstanding, state.unasked),
        run_id=config.run.id,
        division=division,
        attempts=config.groups.attempts,
    )


def _epoch_of(exchange: Exchange) -> Callable[[], int]:
    return lambda: exchange.trainer_epoch


def _make_exchanges(
    config: TrainerConfig,
    start: Start,
    links: Sequence[Link],
    division: Division,
    stopping: asyncio.Event,
) -> Servers:
    trained = {**start.ledger.trained, **{r.group_id: 0 for r in start.ledger.refused}}
    facts = RunFacts(
        config.run.id,
        Contract(
            max_lag=config.staleness.max_lag,
            late_policy=LATE_POLICIES[config.staleness.applied_policy],
        ),
        IN_FLIGHT[config.weights.in_flight],
        weight_version=start.state.weight_version,
        step=start.state.step,
        trained=trained,
        start_id=start.state.start_id,
    )
    return Servers(
        [(link.address, link.channel) for link in links],
        division,
        facts,
        give_up_after_seconds=config.server.give_up_after_seconds,
        stopping=stopping,
    )
