"""Ray's side of `benchmarks/buffer.py`: a producer, `ray.util.queue.Queue`, and a consumer, each a process.

Ray serializes with its cloudpickle, protocol 5: numpy arrays go beside the pickle into shared memory, and
the consumer gets views of that, which is as good as it gets. Lists of numbers are what the same samples are
where nobody thought of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from benchmarks.buffer_groups import SIBLINGS, sample_number, sample_of

Item = dict[str, Any]


class Hand(Protocol):
    """One way to hand groups over."""

    async def __call__(
        self, items: Sequence[Item], window: int
    ) -> tuple[float, dict[int, float], dict[int, float]]:
        """When it began, when each group was put, and when it was there as numpy arrays."""
        ...


def item(group: int, *, lists: bool) -> Item:
    """A group as a sampler has it."""
    samples = [sample_of(sample_number(group, sibling)) for sibling in range(SIBLINGS)]
    return {
        "group_id": group,
        "trajectories": [
            {
                "trajectory_id": f"{group}-{sibling}",
                "token_ids": sample.token_ids.tolist() if lists else sample.token_ids,
                "logprobs": sample.logprobs.tolist() if lists else sample.logprobs,
                "weight_version": 0,
                "reward": 0.5,
            }
            for sibling, sample in enumerate(samples)
        ],
    }


class Consumer:
    """Takes groups, several calls at a time; a Ray actor."""

    async def take(self, queue: Any, count: int, window: int) -> dict[int, float]:
        """When each was there as numpy arrays, all of which are checked afterwards."""
        arrived: dict[int, float] = {}
        kept: list[tuple[int, list[tuple[Any, Any]]]] = []
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                found = await queue.get_async()
                arrays = [
                    (np.asarray(t["token_ids"], np.int32), np.asarray(t["logprobs"], np.float32))
                    for t in found["trajectories"]
                ]
                arrived[found["group_id"]] = time.monotonic()
                kept.append((found["group_id"], arrays))

        await asyncio.gather(*(worker() for _ in range(window)))
        for group, arrays in kept:
            for sibling, (ids, logprobs) in enumerate(arrays):
                assert sample_of(sample_number(group, sibling)).equals(ids, logprobs)
        return arrived


@contextlib.asynccontextmanager
async def ray_queue(depth: int) -> AsyncIterator[Hand]:
    """A queue of `depth` groups, its consumer, and this process as the producer."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray
    from ray.util.queue import Queue

    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=1 << 30,
        # So that the workers find this module.
        runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}},
    )
    queue = Queue(maxsize=depth)
    consumer = ray.remote(num_cpus=0, max_concurrency=8)(Consumer).remote()

    async def hand_over(
        items: Sequence[Item], window: int
    ) -> tuple[float, dict[int, float], dict[int, float]]:
        taking = consumer.take.remote(queue, len(items), window)
        began: dict[int, float] = {}
        left = iter(items)

        async def worker() -> None:
            for one in left:
                began[one["group_id"]] = time.monotonic()
                await queue.put_async(one)

        start = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(window)))
        return start, began, await taking

    try:
        yield hand_over
    finally:
        queue.shutdown(force=True)
        ray.shutdown()
