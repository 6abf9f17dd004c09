"""Ray's side of `buffer.delivery`: a producer, a queue in an actor, and a consumer, each a process.

There are four forms in which a group is put into the queue. Each ends with numpy arrays in the consumer:

    arrays            numpy arrays in `ray.util.queue.Queue`. Ray serializes with cloudpickle, protocol 5:
                      the arrays bypass the pickle and go into shared memory, and the consumer gets views
                      of it. This is the best case
    lists             the same with Python lists, the form of samples in a program not tuned for this
    pickled lists     rllm's fully asynchronous trainer. A group is a dataclass of trajectories of lists
                      (token ids, log-probabilities, mask). `ray.cloudpickle.dumps` serializes it, the bytes
                      go through methods of an actor, and `ray.cloudpickle.loads` reads them
    pickled tensors   verl's fully asynchronous policy: the same actor and the same two calls. The pickled
                      object has the padded tensors of a `DataProto` (ids, masks and positions of 64 bits),
                      which `torch.save` serializes first. verl's consolidated TensorDict costs more than
                      the plain dict used here

In both projects the queue is a deque in an actor, with a condition that consumers wait on. Their queues
drop the oldest group when full; this one makes the producer wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from benchmarks.buffer.groups import SIBLINGS, Sample, sample_number, sample_of

Arrays = list[tuple[Any, Any]]
"""Token ids and log-probabilities of each trajectory."""


class Hand(Protocol):
    """Moves groups from producer to consumer in one of the forms."""

    async def __call__(
        self, form: str, items: Sequence[tuple[int, Any]], window: int
    ) -> tuple[float, dict[int, float], dict[int, float]]:
        """Returns the start time, the time each group was put, and the time its arrays were available."""
        ...


# The objects that are put.


@dataclass
class Answer:
    """One answer, in rllm's form."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_logprobs: list[float]
    response_masks: list[int]
    start_version: int = 0
    end_version: int = 0


@dataclass
class Trajectory:
    """One trajectory, in rllm's form."""

    sequences: list[Answer]
    reward: float = 0.5
    metadata: dict[str, Any] | None = None


@dataclass
class TrajectoryGroup:
    """One group, in rllm's form."""

    group_id: int
    trajectories: list[Trajectory]


@dataclass
class Batch:
    """The tensors of a group, padded to one length, in verl's form."""

    tensors: Mapping[str, Any]

    def __getstate__(self) -> bytes:
        import torch

        buffer = io.BytesIO()
        torch.save(self.tensors, buffer)
        return buffer.getvalue()

    def __setstate__(self, data: bytes) -> None:
        import torch

        self.tensors = torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")


@dataclass
class RolloutSample:
    """One group, in verl's form."""

    full_batch: Batch
    sample_id: int
    epoch: int = 0
    rollout_status: dict[str, float] = field(default_factory=dict[str, float])


def _samples(group: int) -> list[Sample]:
    return [sample_of(sample_number(group, sibling)) for sibling in range(SIBLINGS)]


def _dicts(group: int, *, lists: bool) -> dict[str, Any]:
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
            for sibling, sample in enumerate(_samples(group))
        ],
    }


def _dataclasses(group: int) -> TrajectoryGroup:
    return TrajectoryGroup(
        group,
        [
            Trajectory(
                [
                    Answer(
                        [1],
                        sample.token_ids.tolist(),
                        sample.logprobs.tolist(),
                        [1] * len(sample.token_ids),
                    )
                ]
            )
            for sample in _samples(group)
        ],
    )


def _tensors(group: int) -> RolloutSample:
    import torch

    samples = _samples(group)
    responses = torch.from_numpy(np.stack([s.token_ids for s in samples])).long()
    logprobs = torch.from_numpy(np.stack([s.logprobs for s in samples]))
    prompts = torch.ones((SIBLINGS, 1), dtype=torch.long)
    input_ids = torch.cat((prompts, responses), 1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": torch.ones_like(responses),
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "position_ids": torch.arange(input_ids.shape[1]).repeat(SIBLINGS, 1),
        "rollout_log_probs": logprobs,
        "rm_scores": torch.zeros_like(logprobs),
    }
    return RolloutSample(Batch(tensors), group)


# How the consumer reads them.


def _read_dicts(found: dict[str, Any]) -> tuple[int, Arrays]:
    return found["group_id"], [
        (np.asarray(t["token_ids"], np.int32), np.asarray(t["logprobs"], np.float32))
        for t in found["trajectories"]
    ]


def _read_dataclasses(found: TrajectoryGroup) -> tuple[int, Arrays]:
    sequences = [trajectory.sequences[0] for trajectory in found.trajectories]
    return found.group_id, [
        (np.asarray(s.response_ids, np.int32), np.asarray(s.response_logprobs, np.float32))
        for s in sequences
    ]


def _read_tensors(found: RolloutSample) -> tuple[int, Arrays]:
    tensors = found.full_batch.tensors
    ids = tensors["responses"].numpy().astype(np.int32)
    return found.sample_id, list(zip(ids, tensors["rollout_log_probs"].numpy(), strict=True))


@dataclass(frozen=True)
class Form:
    """One way to put a group into a queue."""

    make: Callable[[int], Any]
    """Makes the group as a sampler would have it; runs before the clock starts."""
    read: Callable[[Any], tuple[int, Arrays]]
    pickled: bool
    """Whether it is sent as bytes through methods of an actor instead of Ray's queue."""


ARRAYS, PICKLED = "ray, arrays", "ray, pickled lists"
FORMS = {
    PICKLED: Form(_dataclasses, _read_dataclasses, pickled=True),
    "ray, pickled tensors": Form(_tensors, _read_tensors, pickled=True),
    "ray, lists": Form(lambda group: _dicts(group, lists=True), _read_dicts, pickled=False),
    ARRAYS: Form(lambda group: _dicts(group, lists=False), _read_dicts, pickled=False),
}


# The processes.


class MessageQueue:
    """A queue of bytes in a deque; runs as a Ray actor."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._queue: deque[bytes] = deque()
        self._changed = asyncio.Condition()

    async def put_sample(self, sample: bytes) -> bool:
        """Adds an item, and waits for room first."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._queue) < self._depth)
            self._queue.append(sample)
            self._changed.notify_all()
        return True

    async def get_sample(self) -> tuple[bytes, int]:
        """Returns the oldest item and the number of remaining ones."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._queue))
            sample = self._queue.popleft()
            self._changed.notify_all()
        return sample, len(self._queue)


class Consumer:
    """Takes groups with several concurrent calls; runs as a Ray actor."""

    def __init__(self, queue: Any, messages: Any) -> None:
        self._queue = queue
        self._messages = messages

    async def take(self, form: str, count: int, window: int) -> dict[int, float]:
        """Returns when each group was available as numpy arrays; checks the arrays afterwards."""
        from ray import cloudpickle

        arrived: dict[int, float] = {}
        kept: list[tuple[int, Arrays]] = []
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                if FORMS[form].pickled:
                    data, _ = await self._messages.get_sample.remote()
                    found = cloudpickle.loads(data)
                else:
                    found = await self._queue.get_async()
                group, arrays = FORMS[form].read(found)
                arrived[group] = time.monotonic()
                kept.append((group, arrays))

        await asyncio.gather(*(worker() for _ in range(window)))
        for group, arrays in kept:
            assert len(arrays) == SIBLINGS
            for sibling, (ids, logprobs) in enumerate(arrays):
                assert sample_of(sample_number(group, sibling)).equals(ids, logprobs)
        return arrived


@contextlib.asynccontextmanager
async def ray_queue(depth: int) -> AsyncIterator[Hand]:
    """Starts both queues, each with room for `depth` groups, and their consumer.

    This process is the producer.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray
    from ray import cloudpickle
    from ray.util.queue import Queue

    ray.init(
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=1 << 30,
        # The workers import this module.
        runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}},
    )
    queue = Queue(maxsize=depth)
    messages = ray.remote(num_cpus=0, max_concurrency=20)(MessageQueue).remote(depth)
    consumer = ray.remote(num_cpus=0, max_concurrency=8)(Consumer).remote(queue, messages)

    def put(form: Form, item: Any) -> Awaitable[Any]:
        if form.pickled:
            return messages.put_sample.remote(cloudpickle.dumps(item))
        return queue.put_async(item)

    async def hand_over(
        form: str, items: Sequence[tuple[int, Any]], window: int
    ) -> tuple[float, dict[int, float], dict[int, float]]:
        taking = consumer.take.remote(form, len(items), window)
        began: dict[int, float] = {}
        left = iter(items)

        async def worker() -> None:
            for group, item in left:
                began[group] = time.monotonic()
                await put(FORMS[form], item)

        start = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(window)))
        return start, began, await taking

    try:
        yield hand_over
    finally:
        queue.shutdown(force=True)
        ray.shutdown()
