"""The agents of `benchmarks/pool/hub.py`: concurrent conversations of a few turns.

    python -m benchmarks.pool.agents

The process reads a line of JSON (`Work`) and answers with a line of JSON (`Done`), until standard input
ends. Each agent requests whole turns, like `trajectory.turn()`, and closes each conversation. It continues
until the time is over and its turn has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import numpy as np

from penstock.wire import codec, messages
from penstock.wire.channel import client_options

PROMPT = messages.TokenSequence(token_ids=codec.array_bytes(np.full(64, 98, np.int32)))
OBSERVATION = messages.TokenSequence(token_ids=codec.array_bytes(np.full(16, 99, np.int32)))
WHOLE = messages.StreamOptions(final_only=True)
# Makes the agents' names unique over all runs.
names = itertools.count()


@dataclass(frozen=True)
class Work:
    """The work of one run."""

    addresses: list[str]
    """Servers. Agents are spread over them evenly, and each stays with its server."""
    agents: int
    """Concurrent conversations."""
    tokens: int
    """Tokens of a turn."""
    seconds: float
    turns: int = 4
    """Turns of a conversation."""
    connections: int = 1
    """Connections to each address."""
    ramp_seconds: float = 0.0
    """Period over which the agents start."""
    leave: bool = False
    """Whether to abandon turns in flight at the end instead of waiting for them."""


@dataclass
class Done:
    """The results of one run."""

    turns: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    """Sum of the agents' rates, each over the agent's own time."""
    turns_per_second: float = 0.0
    """Rate of turns that ended between the start of the last agent and the end."""
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list[float])
    """Median and 99th percentile of a turn, in seconds."""


class Server:
    """Calls over one connection, as bytes; responses are not parsed."""

    def __init__(self, address: str) -> None:
        # A connection that is not shared within this process.
        self.channel = grpc.aio.insecure_channel(
            address, options=client_options(own_connection=True)
        )
        rollouts, tasks = "/penstock.v1.RolloutService", "/penstock.v1.TaskService"
        self.generate = self.channel.unary_stream(f"{rollouts}/Generate", codec.encode)
        self.continue_ = self.channel.unary_stream(f"{rollouts}/Continue", codec.encode)
        self.complete = self.channel.unary_unary(f"{tasks}/CompleteTrajectory", codec.encode)


async def work(work: Work) -> Done:
    """Runs the agents and returns the results."""
    servers = [Server(a) for _ in range(work.connections) for a in work.addresses]
    begun_cpu, begun = time.process_time(), time.perf_counter()
    deadline = begun + work.ramp_seconds + work.seconds
    done, run, latencies = Done(), next(names), list[float]()

    async def agent(number: int) -> None:
        server = servers[number % len(servers)]
        await asyncio.sleep(work.ramp_seconds * number / work.agents)
        # The first turns have different lengths, so that agents do not return all at the same time.
        first = random.randrange(1, work.tokens + 1)
        begun, tokens = time.perf_counter(), 0
        while time.perf_counter() < deadline:
            name = f"{run}-{number}-{done.turns}"
            for index in range(work.turns):
                count = first if tokens == 0 else work.tokens
                await turn(server, name, index, count)
                tokens += count
                if time.perf_counter() > deadline:
                    break
            await close(server, name)
        done.tokens += tokens
        done.tokens_per_second += tokens / (time.perf_counter() - begun)

    async def turn(server: Server, name: str, index: int, tokens: int) -> None:
        sampling = messages.SamplingParams(max_tokens=tokens, ignore_eos=True)
        given: Any = {
            "trajectory_id": name,
            "stream_options": WHOLE,
            "sampling_params": sampling,
        }
        request = (
            messages.ContinueRequest(tokens=OBSERVATION, **given)
            if index
            else messages.GenerateRequest(tokens=PROMPT, **given)
        )
        began, answers = time.perf_counter(), 0
        async for _ in server.continue_(request) if index else server.generate(request):
            answers += 1
        assert answers >= 3, "a turn must start, have tokens and end"
        ended = time.perf_counter()
        done.turns += 1
        if begun + work.ramp_seconds <= ended <= deadline:
            latencies.append(ended - began)

    async def close(server: Server, name: str) -> None:
        request = messages.CompleteTrajectoryRequest(
            trajectory_id=name, outcome=messages.Outcome(reward=1.0)
        )
        await server.complete(request)

    async with asyncio.TaskGroup() as group:
        working = [group.create_task(agent(number)) for number in range(work.agents)]
        if work.leave:
            await asyncio.wait(working, timeout=deadline - time.perf_counter())
            for task in working:
                task.cancel()
    done.turns_per_second = len(latencies) / work.seconds
    done.cpu_seconds = time.process_time() - begun_cpu
    done.seconds = time.perf_counter() - begun
    done.latencies = [float(np.percentile(latencies, at)) for at in (50, 99)] if latencies else []
    await asyncio.gather(*(server.channel.close() for server in servers))
    return done


async def main() -> None:
    """Reads and runs work until standard input ends."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        done = await work(Work(**json.loads(line)))
        print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
