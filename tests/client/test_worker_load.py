"""Many waiting attempts in one worker: no thread for each, kilobytes for each, one call to renew
all leases.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.client import SamplingParams, Task, connect
from penstock.client.calls import Calls
from penstock.v1.task_service_pb2 import RenewLeaseResponse
from tests.support.harness import serve, until

WAITING = 300
LIMIT_BYTES = 24 * 1024


async def submit(client: Any, name: str, count: int) -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    tasks = [Task(f"{name}-{index}", f"{index:0100d}", sampling=sampling) for index in range(count)]
    await client.submit_tasks(tasks)


async def test_an_attempt_that_waits_costs_kilobytes_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("limits.groups_without_trainer=10000", "freshness=false")
    async with serve(tmp_path, *settings) as server, connect(server.address) as client:
        waiting = 0
        answers = asyncio.Event()

        async def agent(task: Task, trajectory: Any) -> float:
            nonlocal waiting
            await trajectory.turn()
            waiting += 1
            await answers.wait()
            turn = await trajectory.turn("it says", max_tokens=4)
            return float(len(turn.token_ids))

        # Warm up, so that one-time allocations are not measured.
        answers.set()
        await submit(client, "warm", 20)
        await client.work(agent, concurrency=20, attempts=20)
        answers.clear()
        waiting = 0
        await submit(client, "task", WAITING)
        renewals = watch_renewals(monkeypatch)
        threads = threading.active_count()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            working = asyncio.create_task(client.work(agent, concurrency=WAITING, attempts=WAITING))
            await until(lambda: waiting == WAITING, 120)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # This counts both the worker and the server, which share the process.
        assert (after - before) / WAITING < LIMIT_BYTES
        assert threading.active_count() <= threads
        del renewals[:]
        await until(lambda: bool(renewals), 30)
        assert renewals[0] == WAITING
        answers.set()
        statistics = await working
        assert (statistics.scored_count, statistics.reward_sum) == (WAITING, 4.0 * WAITING)


def watch_renewals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many leases each renewal call covers, from now on."""
    counts: list[int] = []
    ask = Calls.ask

    async def counted(calls: Calls, request: Any, response: Any, **options: Any) -> Any:
        if response is RenewLeaseResponse:
            counts.append(len(request.trajectory_ids))
        return await ask(calls, request, response, **options)

    monkeypatch.setattr(Calls, "ask", counted)
    return counts
