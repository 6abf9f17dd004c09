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
from penstock.trainer.exchange.stream import Exchange, RunFacts
from penstock.trainer.gather.batch import Gatherer, settle_refused
from penstock.trainer.learner import Learner
from penstock.trainer.loop import TrainingLoop
from penstock.trainer.metrics.metrics import MetricsWriter
from penstock.trainer.metrics.reporting import TrackedScalars, Trackers
from penstock.trainer.resume import Start
from penstock.trainer.state.checkpoint import TrainerState, save_checkpoint
from penstock.trainer.state.ending import Ending
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
from penstock.wire.messages import StalenessContract
from penstock.wire.security import CredentialsUnusable, Security, open_channel

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
            channel = await stack.enter_async_context(open_channel(address, security))
            bulk = open_channel(address, security, own_connection=True)
            await stack.enter_async_context(bulk)
            links.append(Link(address, channel, bulk))
        yield tuple(links)


@dataclass(frozen=True, slots=True, repr=False)
class Wiring:
    """What the parts of a run are built from."""

    config: TrainerConfig
    start: Start
    compute: ComputeThread
    links: Sequence[Link]
    console: Console
    stopping: asyncio.Event
    trackers: Trackers

    def loop(self) -> TrainingLoop:
        """Build the parts of the run, and connect them. Raises ConfigInvalid."""
        config, start, compute = self.config, self.start, self.compute
        exchanges = self._exchanges()
        tasks = self._feeder(exchanges)
        probe = Probe(
            start.policy.score,
            tokens=config.weights.probe.tokens,
            tolerance=config.weights.probe.tolerance,
            token_ids=start.state.probe,
        )
        adapter = start.policy.adapter()
        publisher = make_publisher(config, compute, self.links, exchanges, probe, adapter)
        settle_refused(tasks, start.ledger.refused)
        metrics, evaluations = self._writers()
        gatherer = Gatherer(
            config,
            exchanges=exchanges,
            tasks=tasks,
            ledger=start.ledger,
            compute=compute,
            stopping=self.stopping,
            forgotten_step=start.passed_over,
        )
        learner = self._learner(tasks, probe)
        evaluator = Evaluator(
            start.evaluations,
            exchanges,
            run_id=config.run.id,
            submit=lambda server, asked: submit_tasks(
                *(self.links[server].channel, asked, config.run.id, _epoch_of(exchanges[server]))
            ),
            write=evaluations.write,
            stopping=self.stopping,
        )
        return TrainingLoop(config, learner, gatherer, exchanges, publisher, metrics, evaluator)

    def _learner(self, tasks: TaskFeeder, probe: Probe) -> Learner:
        start, run = self.start, self.config.run

        def collect(
            step: int, weight_version: int, figures: Mapping[str, object], ending: Ending
        ) -> Callable[[], object]:
            reached = TrainerState(
                run.id,
                step,
                weight_version,
                tasks.indices.next_index,
                tasks.indices.outstanding,
                tasks.indices.unasked,
                probe.token_ids,
                start.state.data,
                start.ledger.length_bytes,
                start.state.start_id,
                figures,
                ending,
            )

            def save() -> None:
                keep = self.config.checkpoint.keep
                save_checkpoint(run.out / "checkpoints", reached, start.policy.save, keep=keep)
                # The run can resume from a checkpoint now, so the id of its start is no longer needed.
                remove_start_id(run.out)

            return save

        return Learner(
            self.config,
            start.policy,
            self.compute,
            start.ledger,
            probe,
            collect,
            self.stopping,
            saved_step=start.state.step,
            share_prefixes=start.share_prefixes,
            ending=start.state.ending,
        )

    def _writers(self) -> tuple[MetricsWriter, EvaluationWriter]:
        """Create the writers, after showing and writing what the previous run left unwritten."""
        run, start, state = self.config.run, self.start, self.start.state
        unwritten: Mapping[str, object] = state.record if start.written_step < state.step else {}
        # Evaluations before the first step have step zero.
        begins = state.step + 1 if state.step else 0
        tensorboard = SummaryWriter(str(run.out / "tensorboard"), purge_step=begins)
        for line in lines_from(run.out, begins):
            show(line, tensorboard)
        scalars = TrackedScalars(tensorboard, self.trackers)
        channels = [link.channel for link in self.links]
        metrics = MetricsWriter(
            run.out,
            scalars,
            self.console,
            steps=run.steps,
            step=start.written_step if unwritten else state.step,
            every_steps=self.config.metrics.every_steps,
            trackers=self.trackers,
            load=LoadMeter(channels, self.config.metrics.load_every_seconds),
        )
        if unwritten:
            metrics.restore(state.step, unwritten)
        return metrics, EvaluationWriter(run.out, scalars, self.console)

    def _feeder(self, exchanges: Servers) -> TaskFeeder:
        config, state, division = self.config, self.start.state, exchanges.division
        batches = config.staleness.max_lag + 1 + SPARE_BATCHES
        return TaskFeeder(
            [
                ServerTasks(link.channel, batches * part, trainer_epoch=_epoch_of(exchange))
                for link, part, exchange in zip(self.links, division.parts, exchanges, strict=True)
            ],
            self.start.source,
            config.data,
            DataIndices(division, state.next_index, state.outstanding, state.unasked),
            run_id=config.run.id,
            attempts=config.groups.attempts,
        )

    def _exchanges(self) -> Servers:
        config, state, ledger = self.config, self.start.state, self.start.ledger
        late_policy, in_flight = config.staleness.applied_policy, config.weights.in_flight
        late = trainer_service_pb2.LatePolicy.Value(f"LATE_POLICY_{late_policy.upper()}")
        facts = RunFacts(
            config.run.id,
            StalenessContract(max_lag=config.staleness.max_lag, late_policy=late),
            weights_pb2.InFlightPolicy.Value(f"IN_FLIGHT_POLICY_{in_flight.upper()}"),
            weight_version=state.weight_version,
            step=state.step,
            trained={**ledger.trained, **{r.group_id: 0 for r in ledger.refused}},
            start_id=state.start_id,
        )
        return Servers(
            [(link.address, link.channel) for link in self.links],
            Division(config.train.groups_per_step, len(self.links)),
            facts,
            give_up_after_seconds=config.server.give_up_after_seconds,
            stopping=self.stopping,
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
        from penstock.trainer.weights.collective.transport import CollectiveTransport

        security = security_of(config.server)
        transports.append(CollectiveTransport(link.address, weights.collective, security))
    return transports


def security_of(server: ServerConfig, given: Security | None = None) -> Security:
    """Return how to authenticate to the servers. Options `given` on a command line override the file.

    Raises ConfigInvalid if the credentials are unusable.
    """
    own = Security(**server.model_dump(exclude={"address", "give_up_after_seconds"}))
    security = (given.over(own) if given else own).with_environment()
    try:
        for address in server.addresses:
            security.check(address)
    except CredentialsUnusable as error:
        raise ConfigInvalid(f"server: {error}") from error
    return security


def _epoch_of(exchange: Exchange) -> Callable[[], int]:
    return lambda: exchange.trainer_epoch
