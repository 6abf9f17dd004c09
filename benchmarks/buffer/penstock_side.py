"""Penstock's side of `buffer.delivery`: an agent's calls, and a trainer in a separate process.

    python -m benchmarks.buffer.penstock_side ADDRESS

That command runs the trainer. It reads one line of JSON and answers with one line of JSON, repeatedly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from benchmarks.buffer.groups import SIBLINGS, TOKENS, sample_number, sample_of
from benchmarks.support.processes import Process, started

from penstock.common import allocator
from penstock.trainer.exchange.stored_groups import StoredGroups
from penstock.v1 import (
    rollout_service_pb2,
    task_service_pb2,
    trainer_service_pb2,
    trajectory_pb2,
)
from penstock.wire import codec, methods
from penstock.wire.channel import client_options

T = codec.twin
GenerateRequest = T(rollout_service_pb2.GenerateRequest)
SamplingParams = T(rollout_service_pb2.SamplingParams)
StreamOptions = T(rollout_service_pb2.StreamOptions)
TokenSequence = T(trajectory_pb2.TokenSequence)
Outcome = T(trajectory_pb2.Outcome)
CompleteTrajectoryRequest = T(task_service_pb2.CompleteTrajectoryRequest)
ExchangeRequest = T(trainer_service_pb2.ExchangeRequest)
STEP_GROUPS = 8
"""Groups in a step. After each step the trainer sends their receipts and a checkpoint notice."""
PREPARING = 32
"""Concurrent turns while groups are prepared, before the clock starts."""


class Agent:
    """Opens trajectories, takes their turns and closes them."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=client_options())
        self._generate = methods.streaming(self._channel, rollout_service_pb2.GenerateResponse)
        self._complete = methods.unary(self._channel, task_service_pb2.CompleteTrajectoryResponse)

    async def open(self, group: int, sibling: int) -> None:
        """Opens a trajectory with one turn of TOKENS tokens."""
        prompt = np.asarray([sample_number(group, sibling)], np.int32)
        request = GenerateRequest(
            trajectory_id=f"{group}-{sibling}",
            group_id=str(group),
            group_size=SIBLINGS,
            sample_index=sibling,
            tokens=TokenSequence(token_ids=codec.array_bytes(prompt)),
            sampling_params=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
            stream_options=StreamOptions(final_only=True),
        )
        async for _ in self._generate(request):
            pass

    async def close_trajectory(self, group: int, sibling: int) -> bool:
        """Closes a trajectory; returns whether its group is complete."""
        answer = await self._complete(
            CompleteTrajectoryRequest(
                trajectory_id=f"{group}-{sibling}", outcome=Outcome(reward=0.5)
            )
        )
        return bool(answer.group_completed)

    async def prepare(self, groups: Sequence[int], closed: int) -> None:
        """Opens all siblings of the groups, and closes the first `closed` ones of each group."""
        await self._channel.channel_ready()
        places = [(group, sibling) for group in groups for sibling in range(SIBLINGS)]
        await at_a_time(PREPARING, [self.open(*place) for place in places])
        await at_a_time(
            PREPARING, [self.close_trajectory(*place) for place in places if place[1] < closed]
        )

    async def hand_over(
        self, groups: Sequence[int], closed: int, window: int
    ) -> tuple[float, dict[int, float]]:
        """Closes the remaining siblings, `window` groups at a time.

        Returns the time of the start, and that of the start of each group.
        """
        began: dict[int, float] = {}

        async def one(group: int) -> None:
            began[group] = time.monotonic()
            answers = await asyncio.gather(
                *(self.close_trajectory(group, sibling) for sibling in range(closed, SIBLINGS))
            )
            assert any(answers), f"group {group} is not complete"

        start = time.monotonic()
        await at_a_time(window, [one(group) for group in groups])
        return start, began

    async def close(self) -> None:
        await self._channel.close()


async def at_a_time(count: int, work: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Runs all coroutines in order, `count` at a time."""
    waiting = iter(work)

    async def worker() -> None:
        for item in waiting:
            await item

    await asyncio.gather(*(worker() for _ in range(count)))


# The trainer.


async def trainer(address: str) -> None:
    """Runs the trainer process.

    Each input line has the number of groups to take, and whether to read them from the journal's files.
    The answer has the time at which each group was available as numpy arrays.
    """
    # The same settings as in `penstock train`.
    allocator.keep_freed_memory(allocator.TRAINER_TRIM_BYTES, allocator.TRAINER_MAP_BYTES)
    channel = grpc.aio.insecure_channel(address, options=client_options())
    await channel.channel_ready()
    outgoing: asyncio.Queue[Any] = asyncio.Queue()

    async def requests() -> AsyncIterator[Any]:
        while True:
            yield await outgoing.get()

    call = channel.stream_stream(
        "/penstock.v1.TrainerService/Exchange",
        request_serializer=codec.encode,
        response_deserializer=codec.decoder(trainer_service_pb2.ExchangeResponse),
    )(requests())
    hello = ExchangeRequest()
    hello.hello.run_id, hello.hello.trainer_epoch = "bench", 1
    hello.hello.staleness.max_lag, hello.hello.staleness.groups_per_step = 8, 1_000
    outgoing.put_nowait(hello)
    stored = StoredGroups.find((await call.read()).welcome.group_folder)
    assert stored is not None, "cannot read the journal, although it is on this host"
    print("ready", flush=True)
    loop, step = asyncio.get_running_loop(), 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        count, by_place = json.loads(line)
        request = ExchangeRequest()
        request.demand.group_count, request.demand.by_place = count, by_place
        outgoing.put_nowait(request)
        arrived: dict[str, float] = {}
        kept: list[tuple[int, Any]] = []
        used: list[int] = []
        while len(arrived) < count:
            for delivery in delivered(await call.read()):
                assert delivery.HasField("stored") == by_place
                group = stored.read(delivery.stored) if by_place else delivery.group
                arrays = [
                    [(codec.token_ids(s), codec.logprobs(s)) for s in trajectory.segments]
                    for trajectory in group.trajectories
                ]
                arrived[group.group_id] = time.monotonic()
                kept.append((int(group.group_id), arrays))
                used.append(delivery.delivery_id)
                if len(used) == STEP_GROUPS or len(arrived) == count:
                    step += 1
                    for message in receipts(used, step):
                        outgoing.put_nowait(message)
                    used = []
        check(kept)
        print(json.dumps(arrived), flush=True)


def delivered(response: Any) -> Sequence[Any]:
    """Returns the deliveries of a response: one, or several by their locations."""
    if response.HasField("deliveries"):
        return response.deliveries.deliveries
    return [response.delivery]


def receipts(delivery_ids: list[int], step: int) -> list[Any]:
    """Returns the receipt of a step, and the notice that a durable checkpoint contains the step."""
    receipt, checkpoint = ExchangeRequest(), ExchangeRequest()
    receipt.receipt.delivery_ids.extend(delivery_ids)
    receipt.receipt.step = checkpoint.checkpoint.step = step
    return [receipt, checkpoint]


def check(groups: list[tuple[int, Any]]) -> None:
    """Checks, after the clock stopped, that all tokens and log-probabilities equal the samples."""
    for group, trajectories in groups:
        assert len(trajectories) == SIBLINGS
        for sibling, ((prompt, _), (ids, logprobs)) in enumerate(trajectories):
            number = sample_number(group, sibling)
            assert prompt.tolist() == [number]
            assert sample_of(number).equals(ids, logprobs), (
                f"group {group} differs from its samples"
            )


class Trainer:
    """A handle on the process that runs `trainer`."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def take(self, count: int, *, by_place: bool = True) -> dict[int, float]:
        """Takes the next groups; returns the arrival time of each."""
        arrived = json.loads(await self._process.ask(json.dumps([count, by_place])))
        return {int(group): when for group, when in arrived.items()}


@contextlib.asynccontextmanager
async def penstock(folder: Path, *settings: str) -> AsyncIterator[tuple[Agent, Trainer]]:
    """Starts a server with its journal in `folder`, an agent in this process, and a trainer process."""
    options = [argument for setting in settings for argument in ("--set", setting)]
    async with started("-m", "benchmarks.buffer.server", str(folder), *options) as server:
        serving, port = (await server.read()).split()
        assert serving == "serving", "the server did not start"
        address = f"127.0.0.1:{port}"
        async with started("-m", "benchmarks.buffer.penstock_side", address) as process:
            await process.ready()
            agent = Agent(address)
            try:
                yield agent, Trainer(process)
            finally:
                await agent.close()


if __name__ == "__main__":
    asyncio.run(trainer(sys.argv[1]))
