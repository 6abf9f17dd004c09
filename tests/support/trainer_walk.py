"""The trainer's training loop in this process, around a policy that computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from rich.console import Console

from penstock.trainer.assembly import Link, make_publisher
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.data.feeder import ServerTasks, TaskFeeder
from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.shards import Division
from penstock.trainer.data.sources.problem import Problem
from penstock.trainer.data.submission import submit_tasks
from penstock.trainer.evaluation.evaluation import Evaluator
from penstock.trainer.evaluation.sets import EvaluationSet
from penstock.trainer.evaluation.writer import EvaluationWriter, last_steps
from penstock.trainer.exchange.servers import Servers
from penstock.trainer.exchange.stream import Exchange, RunFacts
from penstock.trainer.gather.batch import Gatherer
from penstock.trainer.learner import Learner
from penstock.trainer.loop import TrainingLoop
from penstock.trainer.metrics.metrics import MetricsWriter
from penstock.trainer.policy.protocol import StepResult
from penstock.trainer.session import connected
from penstock.trainer.state.ledger import Ledger
from penstock.trainer.weights.probe import Probe
from penstock.trainer.weights.publisher import Publisher
from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from penstock.wire.messages import (
    GroupDelivery,
    Outcome,
    Segment,
    Trajectory,
    TrajectoryGroup,
    Welcome,
)
from penstock.wire.messages import StalenessContract as Contract
from tests.support.scripted_trainer_server import Progress, Session


class Scalars:
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Numbers:
    def problem(self, index: int) -> Problem:
        return Problem((("user", str(index)),), {}, "numbers")


class StillPolicy:
    """Counts its steps; each ends when `may_end` is set."""

    data_ranks = 1

    def __init__(self) -> None:
        self.steps = 0
        self.copies = 0
        self.computing, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def step(self, plan: Any) -> StepResult:
        self.computing.set()
        assert self.may_end.wait(20)
        self.steps += 1
        return StepResult(applied=True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.copies += 1
        yield "a.weight", torch.full((3,), float(self.steps))

    def adapter(self) -> None:
        """None: all weights are trained."""

    def score(self, tensors: Any, token_ids: Sequence[int]) -> Any:
        return np.full(len(token_ids) - 1, -float(tensors["a.weight"][0]), np.float32)

    def save_model(self, folder: Path) -> None: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@dataclass
class Run:
    """A training loop in progress, and its results."""

    policy: StillPolicy
    exchange: Exchange
    publisher: Publisher
    probe: Probe
    tasks: TaskFeeder
    ledger: Ledger
    loop: TrainingLoop
    stopping: asyncio.Event
    walk: asyncio.Task[None]
    folder: Path
    saved: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """For each checkpoint: step, weight version, and the steps that the policy had done by then."""

    async def ends(self, seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            await self.walk

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    address: str,
    *,
    step: int = 0,
    next_index: int = 0,
    outstanding: Sequence[int] = (),
    steps: int = 100,
    probe: Sequence[int] = (),
    policy: StillPolicy | None = None,
    weights: dict[str, object] | None = None,
    groups: dict[str, object] | None = None,
    evaluation: Sequence[dict[str, object]] = (),
    max_lag: int = 4,
    data: dict[str, object] | None = None,
    drive: Callable[[TrainingLoop], Awaitable[None]] | None = None,
) -> AsyncGenerator[Run]:
    config = TrainerConfig.model_validate(
        {
            "run": {"steps": steps, "out": str(folder)},
            "model": {"path": "none"},
            "metrics": {"sample_every_steps": 0},
            "data": {"group_size": 2, "reasoning_gym": {"name": "chain_sum"}, **(data or {})},
            "groups": groups or {},
            "train": {"groups_per_step": 1},
            "weights": {"transport": "stream", **(weights or {})},
            "staleness": {"max_lag": max_lag},
            "checkpoint": {"every_steps": 50},
            "evaluation": list(evaluation),
        }
    )
    compute, stopping = ComputeThread(1), asyncio.Event()
    policy = policy or StillPolicy()
    saved: list[tuple[int, int, int]] = []
    ledger = Ledger(folder)
    console = Console(file=io.StringIO())
    metrics = MetricsWriter(folder, Scalars(), console, steps=100)
    measured = EvaluationWriter(folder, Scalars(), console)
    options, own = client_options(), client_options(own_connection=True)
    async with (
        grpc.aio.insecure_channel(address, options=options) as channel,
        grpc.aio.insecure_channel(address, options=own) as bulk,
    ):
        chosen = Probe(
            policy.score,
            tokens=config.weights.probe.tokens,
            tolerance=config.weights.probe.tolerance,
            token_ids=probe,
        )
        facts = RunFacts(
            run_id="r",
            contract=Contract(max_lag=max_lag),
            in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP,
            weight_version=step,
            step=step,
        )
        exchanges = Servers(
            [(address, channel)],
            Division(1),
            facts,
            give_up_after_seconds=60.0,
            stopping=stopping,
        )
        links = [Link(address, channel, bulk)]
        publisher = make_publisher(config, compute, links, exchanges, chosen)
        tasks = TaskFeeder(
            [ServerTasks(channel, 4)],
            Numbers(),
            config.data,
            DataIndices(Division(1), next_index, outstanding),
            run_id="r",
        )
        last = last_steps(folder)
        evaluator = Evaluator(
            [EvaluationSet(one, config.data, last.get(one.name)) for one in config.evaluation],
            exchanges,
            run_id="r",
            submit=lambda _, asked: submit_tasks(channel, asked),
            write=measured.write,
            stopping=stopping,
        )
        gatherer = Gatherer(
            config,
            exchanges=exchanges,
            tasks=tasks,
            ledger=ledger,
            compute=compute,
            stopping=stopping,
        )
        learner = Learner(
            config,
            policy=policy,
            compute=compute,
            ledger=ledger,
            probe=chosen,
            collect=lambda step, version, *_: lambda: saved.append((step, version, policy.steps)),
            stopping=stopping,
            saved_step=step,
            share_prefixes=False,
        )
        loop = TrainingLoop(
            config,
            learner=learner,
            gatherer=gatherer,
            exchanges=exchanges,
            publisher=publisher,
            metrics=metrics,
            evaluator=evaluator,
        )

        async def walking() -> None:
            async with connected(loop, stopping) as ready:
                if ready is not None:
                    await (drive(ready) if drive else ready.run())

        walk = asyncio.create_task(walking())
        try:
            yield Run(
                policy,
                exchanges[0],
                publisher,
                chosen,
                tasks,
                ledger,
                loop,
                stopping,
                walk,
                folder,
                saved,
            )
        finally:
            policy.may_end.set()
            walk.cancel()
            await asyncio.wait((walk,))
            publisher.close()
            metrics.close()
            compute.close()
            ledger.close()


def delivery(number: int) -> Any:
    """The group of one task, sampled by the first weights."""

    def trajectory(sibling: int) -> Any:
        prompt = Segment(
            author=trajectory_pb2.AUTHOR_CONTEXT,
            token_ids=codec.array_bytes(np.array([1, 2], np.int32)),
        )
        answer = Segment(
            author=trajectory_pb2.AUTHOR_POLICY,
            token_ids=codec.array_bytes(np.array([3 + sibling], np.int32)),
            logprobs=codec.array_bytes(np.array([-1.0], np.float32), codec.LOGPROB),
            temperature=1.0,
        )
        return Trajectory(
            trajectory_id=f"{number}-{sibling}",
            segments=[prompt, answer],
            outcome=Outcome(reward=float(sibling)),
        )

    group = TrajectoryGroup(
        group_id=f"g{number}", task_id=f"r/{number}", trajectories=[trajectory(0), trajectory(1)]
    )
    return GroupDelivery(delivery_id=number + 1, group=group)


async def greet(session: Session, active: int = 0) -> None:
    await session.receive("hello")
    await session.send(welcome=Welcome(active_weight_version=active))


async def stage(requests: AsyncIterator[Any], context: Any) -> None:
    version = (await anext(requests)).header.weight_version
    await context.write(Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_READY))
    async for _ in requests:
        pass
    await context.write(Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_STAGED))
