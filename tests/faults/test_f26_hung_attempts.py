"""F26: attempts that never end on their own. Each is over with its time limit, and no step is lost.

In `make faults`, runs of 2,000 steps at `max_lag` 0, 1 and 4, in which one attempt in a hundred hangs:
in a coroutine, or in the thread of a plain function.
"""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Failed, Task, WorkerSettings, connect
from penstock.client.blocking import run_in_thread
from tests.faults.report import Report
from tests.support.harness import Harness, hello, serve
from tests.support.harness import upload as wire_upload

LAGS = (0, 1, 4)
STEPS, QUICK_STEPS = 2_000, 12
GROUPS, ATTEMPTS = 4, 4
SHARE = 0.01
CONCURRENCY = 64
AHEAD = 64
"""Tasks that wait for the worker."""
RULES = ("leases.attempt_seconds=0.4", "leases.grace_seconds=5", "limits.pending_tasks=1000")
EPOCH = 7


class Agents:
    """A worker's function, of whose attempts some hang."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self._rng, self._share = rng, share
        self.hung = 0
        self.end = threading.Event()

    async def __call__(self, task: Any, trajectory: Any) -> float | Failed:
        if self._rng.random() < self._share:
            self.hung += 1
            if self.hung % 2:
                await asyncio.Event().wait()
            await run_in_thread(self.end.wait)
        await trajectory.turn()
        return self._rng.random()


async def run(harness: Harness, steps: int, max_lag: int) -> list[int]:
    """Train that many steps by hand; return the failures in each."""
    async with connect(harness.address) as client:
        trainer = await hello(harness.wire, EPOCH, max_lag=max_lag, groups_per_step=GROUPS)
        submitted, failures = 0, list[int]()
        for step in range(1, steps + 1):
            count = AHEAD + GROUPS * step - submitted
            tasks = [
                Task(f"t{n}", prompt=[1, 2, 3], group_size=ATTEMPTS, index=n)
                for n in range(submitted, submitted + count)
            ]
            await client.submit_tasks(tasks)
            submitted += count
            trainer.send(demand={"group_count": GROUPS})
            groups = [await trainer.receive("delivery", 120.0) for _ in range(GROUPS)]
            outcomes = [t.outcome for delivery in groups for t in delivery.group.trajectories]
            failures.append(sum(outcome.HasField("failure") for outcome in outcomes))
            await wire_upload(harness.wire, step, staged=True, trainer_epoch=EPOCH)
            trainer.send(switch_weights={"weight_version": step})
            ids = [delivery.delivery_id for delivery in groups]
            trainer.send(receipt={"delivery_ids": ids, "step": step})
            trainer.send(checkpoint={"step": step})
            receipt = await trainer.receive("weight_receipt", 120.0)
            assert receipt.active_weight_version == step
        trainer.half_close()
        return failures


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("max_lag", LAGS)
async def test_a_run_in_which_attempts_hang_loses_no_step(
    tmp_path: Path, report: Report, max_lag: int
) -> None:
    quick = report.count is None
    steps, share = (QUICK_STEPS, 10 * SHARE) if quick else (STEPS, SHARE)
    agents = Agents(random.Random(f"{report.seed} {max_lag}"), share)
    async with serve(tmp_path, *RULES) as harness, connect(harness.address) as client:
        worker = client.worker(WorkerSettings(concurrency=CONCURRENCY), agents, None)
        working = asyncio.create_task(worker.run())
        failures = await run(harness, steps, max_lag)
        assert len(failures) == steps
        # Each of them was ended, and made again. On a busy machine others are too slow as well.
        ended = harness.serving.closing.failures
        assert ended["ATTEMPT_TIMEOUT"] > 0
        assert agents.hung - ended["ATTEMPT_TIMEOUT"] <= CONCURRENCY, "the last ones still hang"
        assert sum(failures) <= ended.total() // 3, "an attempt fails for good the third time"
        agents.end.set()
        worker.stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    report.survived("F26 fake", f"hung attempts, max_lag {max_lag}", agents.hung, "attempts")
