"""Real runs of a hub with its engines, and the time of each part. The simulator is compared with them.

Hub and engines are separate processes: `penstock serve --engines` in front of
`tests.support.fake_serve`, or of `penstock serve` with vLLM. The fake engine sleeps for each step, longer
with more turns. Agents and trainer are in this process and use the protocol. Agents lease attempts and take
the turns of the workload. The trainer works like `trainer.loop`: it demands, receives groups, sleeps for
its step, uploads, switches and sends receipts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.simulation.setup import Tally, Workload
from benchmarks.support.processes import ROOT
from safetensors.numpy import load_file
from tests.support.harness import (
    Demand,
    Exchange,
    GroupReceipt,
    InlineSource,
    SubmitTasksRequest,
    SwitchWeights,
    Wire,
    header,
    hello,
    messages,
    payload_of,
)

from penstock.client import SamplingParams, Task, connect
from penstock.client.tasks import write_task
from penstock.server.groups.staleness_gate import StalenessContract
from penstock.up.processes import Command, FirstMatch, Process
from penstock.up.supervisor import SERVING
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.security import open_channel
from penstock.wire.staleness import lag

ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
TASKS = 1_000
"""Tasks submitted for a run, more than it uses."""
WORDS = 256
"""Token ids below this are in the vocabulary."""


@dataclass(frozen=True)
class Engines:
    """How the engine servers are started."""

    model: Path
    count: int = 1
    vllm: bool = False
    step_seconds: float = 0.0
    """Step time of the sleeping engine. It is passed only to the engine's process."""
    turn_seconds: float = 0.0
    context: int = 2048

    def command(self, number: int) -> tuple[str, ...]:
        """Command line of one engine server."""
        listen = ("--listen", "127.0.0.1:0", "--http-listen", "")
        model = ("--model", str(self.model), "--max-model-len", str(self.context))
        if self.vllm:
            # Uploads have this precision.
            return ("-m", "penstock.client", "serve", *model, "--dtype", "float32", *listen)
        pace = ("--step-seconds", str(self.step_seconds), "--turn-seconds", str(self.turn_seconds))
        return ("-m", "tests.support.fake_serve", *model, *pace, *listen)


@contextlib.asynccontextmanager
async def running_pool(
    folder: Path, engines: Engines
) -> AsyncGenerator[tuple[str, psutil.Process]]:
    """Starts a pool; yields the hub's address and process once all engines are in rotation."""
    folder.mkdir(parents=True)  # noqa: ASYNC240
    processes: list[Process] = []

    async def start(name: str, arguments: Sequence[str]) -> str:
        serves = FirstMatch(SERVING)
        command = Command(name, (sys.executable, *arguments), folder / f"{name}.log", ENVIRONMENT)
        process = Process.start(command, serves)
        processes.append(process)
        return await serves.wait(process)

    try:
        addresses = await asyncio.gather(
            *(start(f"engine-{n}", engines.command(n)) for n in range(engines.count))
        )
        hub = ("-m", "penstock.cli", "serve", "--engines", ",".join(addresses))
        hub += ("--model", str(engines.model), "--listen", "127.0.0.1:0", "--http-listen", "")
        address = await start("hub", hub)
        async with connect(address) as client, asyncio.timeout(60):
            # The hub sends no event when the last engine is in rotation.
            while any(replica.problem for replica in (await client.server_info()).replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield address, psutil.Process(processes[-1].pid)
    finally:
        for process in reversed(processes):
            await process.stop(10.0)


@dataclass
class Observed:
    """Times of a run in seconds, each measured where it occurred."""

    tally: Tally
    computing: list[float] = field(default_factory=list[float])
    publishing: list[float] = field(default_factory=list[float])
    switching: list[float] = field(default_factory=list[float])
    pausing: list[float] = field(default_factory=list[float])
    """Longest pause of any engine at each switch."""
    closing: list[float] = field(default_factory=list[float])
    """Time an agent takes to close an attempt."""
    hub_seconds: float = 0.0
    """Processor time of the hub."""
    turns: list[float] = field(default_factory=list[float])
    """Times of turns, measured by the agents."""
    failures: int = 0
    """Turns that did not go as planned."""


class Agents:
    """Agents that take the turns of the workload."""

    def __init__(self, address: str, workload: Workload, seed: int, observed: Observed) -> None:
        self._address = address
        self._workload = workload
        self._seed = seed
        self._observed = observed

    async def work(self, concurrency: int) -> None:
        """Works on `concurrency` attempts at a time until cancelled."""
        async with (
            connect(self._address) as client,
            asyncio.TaskGroup() as attempts,
            client.lease_tasks(concurrency=concurrency) as leases,
        ):
            async for attempt in leases:
                attempts.create_task(self._attempt(attempt))

    async def _attempt(self, attempt: Any) -> None:
        trajectory = attempt.trajectory
        plan = self._workload.plan(self._seed, attempt.task.index, attempt.sample_index)
        for number, turn in enumerate(plan):
            seen = words(turn.observation_tokens, trajectory.trajectory_id) if number else None
            began = time.monotonic()
            taken = await trajectory.turn(seen, max_tokens=turn.token_count, ignore_eos=True)
            self._observed.turns.append(time.monotonic() - began)
            self._observed.failures += len(taken.token_ids) != turn.token_count
            await asyncio.sleep(turn.tool_seconds)
        ended = time.monotonic()
        await trajectory.complete(0.0)
        self._observed.closing.append(time.monotonic() - ended)


class Trainer:
    """A trainer with steps of a fixed time and its own `Exchange` stream."""

    def __init__(
        self, wire: Any, contract: StalenessContract, workload: Workload, model: Path
    ) -> None:
        self._wire = wire
        self._contract = contract
        self._workload = workload
        self._tensors = {
            name: np.asarray(tensor, np.float32)
            for name, tensor in load_file(model / "model.safetensors").items()
        }
        self._deliveries: asyncio.Queue[Any] = asyncio.Queue()
        self._receipts: asyncio.Queue[Any] = asyncio.Queue()
        self._steps: list[tuple[float, float, int, Counter[int]]] = []
        """Of each step: its end, how long it waited, its trajectories, and its tokens by lag."""

    async def train(self, seconds: float, step_seconds: float, observed: Observed) -> None:
        """Makes steps until the time is over."""
        exchange = await hello(
            self._wire,
            max_lag=self._contract.max_lag,
            groups_per_step=self._contract.groups_per_step,
        )
        await self._submit()
        reading = asyncio.create_task(self._read(exchange))
        switched: asyncio.Task[None] | None = None
        end = time.monotonic() + seconds
        version = 0
        exchange.send(demand=Demand(group_count=self._contract.groups_per_step))
        try:
            while time.monotonic() < end:
                began = time.monotonic()
                batch = [
                    await self._deliveries.get() for _ in range(self._contract.groups_per_step)
                ]
                gathered = time.monotonic()
                await asyncio.sleep(step_seconds)
                computed = time.monotonic()
                observed.computing.append(computed - gathered)
                if switched is not None:
                    await switched
                publishing = time.monotonic()
                await self._upload(version + 1)
                self._note(batch, version, gathered - began)
                published = time.monotonic()
                observed.publishing.append(published - publishing)
                version += 1
                exchange.send(switch_weights=SwitchWeights(weight_version=version))
                ids = [delivery.delivery_id for delivery in batch]
                exchange.send(receipt=GroupReceipt(delivery_ids=ids, step=version))
                exchange.send(checkpoint={"step": version})
                exchange.send(demand=Demand(group_count=self._contract.groups_per_step))
                switched = asyncio.create_task(self._switched(published, observed))
            if switched is not None:
                await switched
        finally:
            reading.cancel()
            exchange.call.cancel()

    async def _submit(self) -> None:
        message = []
        for index in range(TASKS):
            task = Task(
                f"t{index}",
                words(self._workload.prompt_tokens, f"{index}"),
                group_size=self._workload.siblings,
                sampling=SamplingParams(ignore_eos=True),
                index=index,
            )
            message.append(write_task(task))
        await self._wire.SubmitTasks(SubmitTasksRequest(tasks=message))

    async def _read(self, exchange: Exchange) -> None:
        while True:
            response = await exchange.call.read()
            kind = response.WhichOneof("message")
            if kind == "delivery":
                self._deliveries.put_nowait(response.delivery)
            elif kind == "weight_receipt":
                assert not response.weight_receipt.HasField("rejection"), response
                self._receipts.put_nowait(response.weight_receipt)

    async def _switched(self, asked: float, observed: Observed) -> None:
        receipt = await self._receipts.get()
        observed.switching.append(time.monotonic() - asked)
        observed.pausing.append(receipt.pause.ToNanoseconds() / 1e9)

    async def _upload(self, version: int) -> None:
        # Every version differs from the previous one, like that of a real step.
        name = next(iter(self._tensors))
        self._tensors[name].flat[version % 8] += 1e-3
        data, specs = payload_of(self._tensors)
        head, _ = header(
            version, staged=True, tensors=specs, inline=InlineSource(length_bytes=len(data))
        )
        requests = messages(head, data, chunk_bytes=1 << 20)
        async for _ in self._wire.UpdateWeights(iter(requests)):
            pass

    def _note(self, batch: Sequence[Any], held: int, waited: float) -> None:
        lags: Counter[int] = Counter()
        count = 0
        for delivery in batch:
            for trajectory in delivery.group.trajectories:
                count += 1
                for segment in trajectory.segments:
                    if segment.author == trajectory_pb2.AUTHOR_POLICY:
                        behind = lag(held, segment.weight_version)
                        lags[behind] += len(codec.token_ids(segment))
        self._steps.append((time.monotonic(), waited, count, lags))

    def tally(self, warmup: int, engines: int) -> Tally:
        """Tally of the steps after the warm-up."""
        tally = Tally(self._contract.max_lag, engines)
        tally.seconds = self._steps[-1][0] - self._steps[warmup - 1][0]
        for _, waited, count, lags in self._steps[warmup:]:
            tally.steps += 1
            tally.idle_seconds += waited
            tally.trajectories += count
            tally.add(lags)
        return tally

    @property
    def step_count(self) -> int:
        """Number of steps so far."""
        return len(self._steps)


def words(count: int, key: str) -> list[int]:
    """Returns `count` tokens, the same ones for the same key."""
    rng = random.Random(key)
    return [rng.randrange(WORDS) for _ in range(count)]


@dataclass(frozen=True)
class Run:
    """The settings of one run."""

    contract: StalenessContract
    workload: Workload
    agents: int
    step_seconds: float
    seconds: float
    seed: int


async def run(folder: Path, engines: Engines, asked: Run) -> Observed:
    """Runs a pool from its start to the trainer's last step; returns what was observed."""
    observed = Observed(Tally(asked.contract.max_lag, engines.count))
    async with running_pool(folder, engines) as (address, hub):
        before = sum(hub.cpu_times()[:2])
        channel = open_channel(address)
        try:
            trainer = Trainer(Wire(channel), asked.contract, asked.workload, engines.model)
            agents = Agents(address, asked.workload, asked.seed, observed)
            working = asyncio.create_task(agents.work(asked.agents))
            training = asyncio.create_task(
                trainer.train(asked.seconds, asked.step_seconds, observed)
            )
            await asyncio.wait([working, training], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                training.cancel()
                working.result()
            await training
            observed.hub_seconds = sum(hub.cpu_times()[:2]) - before
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        finally:
            await channel.close()
    observed.tally = trainer.tally(warmup_of(trainer.step_count), engines.count)
    observed.tally.turns = len(observed.turns)
    observed.tally.waited_seconds = sum(observed.turns)
    return observed


def warmup_of(steps: int) -> int:
    """Number of warm-up steps, which are not counted.

    They end when the pipeline is full and the controller has found its bound.
    """
    return max(1, steps // 5)
