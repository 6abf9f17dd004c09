"""The cost of one more attempt that waits for its tool, with thousands in flight in one worker.

    python -m benchmarks.serving.attempts [--attempts 5000] [--prompt-tokens 200] [--spread-seconds 60]
        [--streams 1000] [--rounds 5]

Runs a server with the fake engine and one worker, each in a separate process. Sampling takes no time.

1. Every attempt takes a turn and waits for its tool.
2. When all of them wait, the benchmark measures the memory of both processes. Then it measures their
   processor time while nothing happens except renewals of leases.
3. The tools answer, evenly over --spread-seconds. Each attempt takes its second turn (`Continue`), which is
   timed from the call to the turn's end.
4. Attempts are leased and closed without a turn: through one stream that works on --streams at a time, and
   through as many streams that work on one each, in turn. Of the server's processor time for an attempt,
   the result has the median of the rounds.

Memory per attempt is a process's growth since it finished its first hundred attempts, divided by the number
of attempts. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import grpc
import numpy as np
import psutil

WARM_ATTEMPTS = 100
TURN_TOKENS = 16
CLOSED = 4
"""Attempts for each that is held at once."""
SETTINGS = (
    "limits.open_trajectories=100000",
    "limits.caller.open_trajectories=100000",
    "limits.groups_without_trainer=1000000",
    "freshness=false",
)


@dataclass
class Cost:
    """Memory, threads and processor time of one process."""

    resident_bytes: int
    threads: int
    cpu_seconds: float


def cost_of(pid: int) -> Cost:
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return Cost(process.memory_info().rss, process.num_threads(), times.user + times.system)


@dataclass
class Tools:
    """The simulated tools that attempts wait for, and the times of the turns after them."""

    count: int
    spread_seconds: float
    waiting: int = 0
    all_wait: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    continues: list[float] = field(default_factory=list[float])

    async def agent(self, task: object, trajectory: object) -> float:
        await trajectory.turn()  # type: ignore[attr-defined]
        self.waiting += 1
        if self.waiting == self.count:
            self.all_wait.set()
        await self.answer.wait()
        await asyncio.sleep(random.uniform(0.0, self.spread_seconds))
        begun = time.perf_counter()
        await trajectory.turn(" the tool says so", max_tokens=TURN_TOKENS)  # type: ignore[attr-defined]
        self.continues.append(time.perf_counter() - begun)
        return 1.0


async def work(
    address: str,
    server_pid: int,
    count: int,
    prompt: int,
    spread: float,
    streams: int,
    rounds: int,
) -> dict[str, object]:
    """Runs in the worker's process and returns all figures."""
    from penstock.client import SamplingParams, Task, connect

    sampling = SamplingParams(max_tokens=TURN_TOKENS, ignore_eos=True)
    async with connect(address) as penstock:

        async def submit(name: str, number: int) -> None:
            tasks = [
                Task(f"{name}-{i}", f"{i:0{prompt}d}", sampling=sampling) for i in range(number)
            ]
            for at in range(0, number, 1000):
                await penstock.submit_tasks(tasks[at : at + 1000])

        warm = Tools(WARM_ATTEMPTS, 0.0)
        warm.answer.set()
        await submit("warm", WARM_ATTEMPTS)
        await penstock.work(warm.agent, concurrency=WARM_ATTEMPTS, attempts=WARM_ATTEMPTS)
        gc.collect()
        before = (cost_of(psutil.Process().pid), cost_of(server_pid))

        tools = Tools(count, spread)
        await submit("task", count)
        begun = time.perf_counter()
        working = asyncio.create_task(penstock.work(tools.agent, concurrency=count, attempts=count))
        await tools.all_wait.wait()
        opened = time.perf_counter() - begun
        gc.collect()
        own, server = cost_of(psutil.Process().pid), cost_of(server_pid)
        # Three renewals of every lease, and nothing else.
        await asyncio.sleep(9.0)
        idle = (cost_of(psutil.Process().pid), cost_of(server_pid))
        tools.answer.set()
        worked = await working
        assert worked.scored_count == count, worked
        done = (cost_of(psutil.Process().pid), cost_of(server_pid))
        costs: dict[int, list[float]] = {1: [], streams: []}
        for number in range(rounds):
            for each, found in costs.items():
                found.append(
                    await close_all(address, server_pid, f"{number}-{each}", each, streams)
                )
        return {
            "attempts": count,
            "prompt_tokens": prompt,
            "turn_tokens": TURN_TOKENS,
            "opened_per_second": round(count / opened),
            "worker_kib_per_attempt": per_attempt(before[0], own, count),
            "server_kib_per_attempt": per_attempt(before[1], server, count),
            "worker_threads": [before[0].threads, own.threads],
            "server_threads": [before[1].threads, server.threads],
            "worker_idle_cpu": round((idle[0].cpu_seconds - own.cpu_seconds) / 9.0, 4),
            "server_idle_cpu": round((idle[1].cpu_seconds - server.cpu_seconds) / 9.0, 4),
            "worker_cpu_ms_per_continue": cpu_ms(idle[0], done[0], count),
            "server_cpu_ms_per_continue": cpu_ms(idle[1], done[1], count),
            "continues_per_second": round(count / spread),
            "continue_p50_ms": percentile(tools.continues, 50),
            "continue_p99_ms": percentile(tools.continues, 99),
            "continue_max_ms": percentile(tools.continues, 100),
            **{
                f"server_cpu_ms_with_{each}_streams": round(statistics.median(found), 2)
                for each, found in costs.items()
            },
        }


async def close_all(address: str, server_pid: int, name: str, streams: int, together: int) -> float:
    """Lease and close CLOSED attempts for each of `together` that are held at once, through as many
    streams. Returns the server's processor time for each, in milliseconds."""
    from penstock.v1 import task_service_pb2 as messages
    from penstock.v1.task_service_pb2_grpc import TaskServiceStub
    from penstock.v1.trajectory_pb2 import Outcome

    count = CLOSED * together
    closed, all_closed = 0, asyncio.Event()
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = TaskServiceStub(channel)

        async def close(trajectory_id: str) -> None:
            nonlocal closed
            await stub.CompleteTrajectory(
                messages.CompleteTrajectoryRequest(
                    trajectory_id=trajectory_id, outcome=Outcome(reward=1.0)
                )
            )
            closed += 1
            if closed == count:
                all_closed.set()

        async def agent(number: int) -> None:
            asked = messages.LeaseTasksRequest(
                agent_id=f"{name}-{number}", concurrency=together // streams
            )
            async for lease in stub.LeaseTasks(asked):
                group.create_task(close(lease.trajectory_id))

        agents = [group.create_task(agent(number)) for number in range(streams)]
        # Until every stream waits.
        await asyncio.sleep(2.0)
        before = cost_of(server_pid)
        for at in range(0, count, 1000):
            numbers = range(at, min(at + 1000, count))
            tasks = [messages.Task(task_id=f"{name}-{n}", group_size=1) for n in numbers]
            for task in tasks:
                task.tokens.token_ids.append(1)
            await stub.SubmitTasks(messages.SubmitTasksRequest(tasks=tasks))
        await all_closed.wait()
        after = cost_of(server_pid)
        for one in agents:
            one.cancel()
    return (after.cpu_seconds - before.cpu_seconds) * 1000 / count


def per_attempt(before: Cost, after: Cost, count: int) -> float:
    """Growth in KiB per attempt."""
    return round((after.resident_bytes - before.resident_bytes) / 1024 / count, 2)


def cpu_ms(before: Cost, after: Cost, count: int) -> float:
    """Processor time in milliseconds for each second turn, including the attempt's close."""
    return round((after.cpu_seconds - before.cpu_seconds) * 1000 / count, 2)


def percentile(seconds: list[float], at: float) -> float:
    """Percentile `at` of the times, in milliseconds."""
    return round(float(np.percentile(seconds, at)) * 1000, 2)


@click.command()
@click.option("--attempts", default=5000, show_default=True)
@click.option("--prompt-tokens", default=200, show_default=True)
@click.option("--spread-seconds", default=60.0, show_default=True)
@click.option("--streams", default=1000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--worker", nargs=2, hidden=True, help="Address and process id of the server.")
def main(
    attempts: int,
    prompt_tokens: int,
    spread_seconds: float,
    streams: int,
    rounds: int,
    worker: tuple[str, str] | None,
) -> None:
    """Measure what attempts that wait for a tool cost their worker and server."""
    if worker is not None:
        address, pid = worker
        result = asyncio.run(
            work(address, int(pid), attempts, prompt_tokens, spread_seconds, streams, rounds)
        )
        print(json.dumps(result))
        return
    # Not in the worker, whose memory is measured.
    from benchmarks.support.processes import ROOT
    from tests.faults.fake_server import fake_server

    with (
        tempfile.TemporaryDirectory() as folder,
        fake_server(Path(folder), *SETTINGS) as server,
    ):
        command = [sys.executable, "-m", "benchmarks.serving.attempts", "--attempts", str(attempts)]
        command += ["--prompt-tokens", str(prompt_tokens), "--spread-seconds", str(spread_seconds)]
        command += ["--streams", str(streams), "--rounds", str(rounds)]
        command += ["--worker", server.address, str(server.process.pid)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        server.check_alive()
    result = json.loads(done.stdout.splitlines()[-1])
    for name, value in result.items():
        print(f"{name:24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
