"""A run in this process, from its folder to its model, and its steps for a caller that makes them itself.

    async with open_session(config, Console()) as session:
        async for batch in session.batches():
            figures = await session.train(batch)

A caller may look at a batch, leave out groups and trajectories, and change rewards. All groups of the
batch count as trained: they are in the ledger and get receipts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.trainer.config.trainer import TrainerConfig, as_shown
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.core.errors import ServerGone
from penstock.trainer.core.figures import as_json
from penstock.trainer.gather import batch as gathered
from penstock.trainer.loop import Step, TrainingLoop
from penstock.trainer.state.checkpoint import replace_folder
from penstock.trainer.state.ledger import Ledger
from penstock.v1 import trajectory_pb2
from penstock.wire import codec, staleness

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.trainer.batching.batching import Sample, TrainingGroup
    from penstock.trainer.gather.sample import Decode
    from penstock.trainer.policy.ranks import Leader
    from penstock.trainer.resume import Start

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_loop(
    config: TrainerConfig,
    compute: ComputeThread,
    console: Console,
    stopping: asyncio.Event,
    resume: bool = False,
    leader: Leader | None = None,
) -> AsyncGenerator[TrainingLoop | None]:
    """Owns the run's folder, its channels and its tasks, and writes the model at the end.

    None if the run is asked to stop, or its server is lost, before the first step.
    """
    from penstock.trainer.assembly import Wiring, open_links
    from penstock.trainer.gather.group_policies import load_filter
    from penstock.trainer.metrics.reporting import make_trackers

    # While it is open, no other trainer can write to the run's folder.
    with closing(Ledger(config.run.out)) as ledger:
        # Report errors in filters and trackers before the model is loaded.
        load_filter(config)
        with closing(make_trackers(config.metrics.trackers, config.run.steps)) as trackers:
            start = await compute.run(_load, config, resume, leader, ledger)
            told = as_shown(config.model_dump(mode="json", exclude={"metrics": {"trackers"}}))
            trackers.begin(config.run.out, config.run.id, told, resumes=start.resumes)
            async with open_links(config.server) as links:
                wiring = Wiring(config, start, compute, links, console, stopping, trackers)
                loop = wiring.loop()
                with closing(loop.publisher), closing(loop.metrics):
                    async with loop.metrics.measuring(), connected(loop, stopping) as ready:
                        yield ready
            if loop.exchanges.left.is_set():
                # After the live display, which would overwrite it.
                said = f"stopped at step {loop.step} while its server was away"
                sys.stderr.write(f"penstock train: {said}\n")
            if config.run.save_model:
                await _save_model(config, start, compute, loop.step)


def _load(config: TrainerConfig, resume: bool, leader: Leader | None, ledger: Ledger) -> Start:
    """Runs in the compute thread, so that signals are handled while torch and the model load."""
    from penstock.trainer.resume import start_run

    return start_run(config, resume, leader, ledger)


async def _save_model(
    config: TrainerConfig, start: Start, compute: ComputeThread, step: int
) -> None:
    folder = config.run.out / "model"
    await compute.run(replace_folder, folder, start.policy.save_model)
    what = "model" if start.policy.adapter() is None else "adapter, as PEFT writes it,"
    log.info("the %s after step %d is in %s", what, step, folder)


@asynccontextmanager
async def open_session(config: TrainerConfig, console: Console) -> AsyncGenerator[Session]:
    """A new run, whose steps the caller makes. Raises TrainerError, alone or in groups."""
    from penstock.trainer.policy.loading import load_decoder

    compute, stopping = ComputeThread(config.model.threads), asyncio.Event()
    try:
        decode = await compute.run(load_decoder, config.model.path)
        async with open_loop(config, compute, console, stopping) as loop:
            if loop is None:
                raise ServerGone("the server was lost before the first step")
            async with loop.running():
                yield Session(loop, decode)
    finally:
        compute.close()


@asynccontextmanager
async def connected(
    loop: TrainingLoop, stopping: asyncio.Event
) -> AsyncGenerator[TrainingLoop | None]:
    """Connects the loop to its servers, which then have its weights and tasks. None as in `open_loop`."""
    # A run may be asked to stop while the model is loading; the server is then never contacted.
    if stopping.is_set() or not await loop.exchanges.open():
        yield None
        return
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.exchanges.run(loop.restore), name="exchanges")
        await loop.begin()
        yield loop
        await loop.exchanges.close()


@dataclass(eq=False)
class TrainedTrajectory:
    """One attempt of a group, as the optimizer sees it."""

    trajectory_id: str
    prompt: str
    """The context before the policy's first token, with special tokens, as the policy saw it."""
    text: str
    """What the policy wrote from its first token on, with special tokens. Between turns, also their
    context."""
    reward: float
    """May be changed. It includes the penalty for an overlong answer."""
    metrics: Mapping[str, float]
    """What the reward reported beside the reward."""
    token_ids: NDArray[np.int32]
    """All tokens, shape [n]."""
    trained: NDArray[np.bool_]
    """Which of them carry a gradient, shape [n]."""
    lag: int
    """Versions between the oldest of the policy's tokens and the trainer."""


@dataclass(eq=False)
class TrainedGroup:
    """The attempts at one prompt."""

    group_id: str
    task_id: str
    trajectories: list[TrainedTrajectory]
    """Without those that failed. May be shortened."""


@dataclass(eq=False)
class Batch:
    """The groups of one step, before it is computed."""

    step: int
    groups: list[TrainedGroup]
    """May be shortened."""

    @property
    def reward(self) -> float:
        """Mean over all trajectories; nan if there is none."""
        rewards = [t.reward for group in self.groups for t in group.trajectories]
        return sum(rewards) / len(rewards) if rewards else math.nan


class Session:
    """The steps of a run, made one by one."""

    def __init__(self, loop: TrainingLoop, decode: Decode) -> None:
        """`decode` turns token ids into text."""
        self._loop, self._decode = loop, decode
        self._open: tuple[Batch, Step] | None = None

    async def batches(self) -> AsyncIterator[Batch]:
        """Each step's batch, until the run has its steps, or its target. Each is to be trained, or the
        last: a caller that leaves ends the run, which can be resumed."""
        while True:
            if self._open is not None:
                raise RuntimeError(
                    f"the batch of step {self._open[0].step} is not trained: await run.train(batch), "
                    "or break to end the run"
                )
            step = await self._loop.next_step()
            if step is None:
                return
            self._open = (self._view(step), step)
            yield self._open[0]

    async def train(self, batch: Batch) -> Mapping[str, object]:
        """Makes an optimizer step and publishes its weights. Returns the step's figures, as in
        `metrics.jsonl`, except those of the switch, which the servers have not answered yet.

        Raises ValueError if nothing is left to train, or a reward is no finite number.
        """
        if self._open is None or self._open[0] is not batch:
            raise RuntimeError(
                f"the batch of step {batch.step} is not the one that run.batches() gave"
            )
        step = self._open[1]
        left = _changed(batch, step.batch)
        self._open = None
        await self._loop.train(step, left)
        return {"step": step.record.step, **as_json(step.record.line())}

    def _view(self, step: Step) -> Batch:
        version = self._loop.exchanges.held_version
        pairs = zip(step.batch.deliveries, step.batch.groups, strict=True)
        groups = [
            TrainedGroup(
                delivery.group_id,
                delivery.task_id,
                [
                    self._view_trajectory(trajectories[sample.trajectory_id], sample, version)
                    for sample in group.samples
                ],
            )
            for delivery, group in pairs
            for trajectories in ({t.trajectory_id: t for t in delivery.trajectories},)
        ]
        return Batch(step.record.step, groups)

    def _view_trajectory(
        self, trajectory: trajectory_pb2.Trajectory, sample: Sample, version: int
    ) -> TrainedTrajectory:
        segments = list(trajectory.segments)
        own = [s for s in segments if s.author == trajectory_pb2.AUTHOR_POLICY]
        begins = segments.index(own[0]) if own else len(segments)
        prompt, text = (
            self._decode([token for s in part for token in codec.token_ids(s).tolist()])
            for part in (segments[:begins], segments[begins:])
        )
        return TrainedTrajectory(
            trajectory.trajectory_id,
            prompt,
            text,
            sample.reward,
            dict(trajectory.outcome.metrics),
            sample.token_ids,
            sample.trained,
            max((staleness.lag(version, s.weight_version) for s in own), default=0),
        )


def _changed(batch: Batch, before: gathered.Batch) -> gathered.Batch:
    """What the caller left of a batch, with the rewards that it gave. Raises ValueError."""
    left = {group.group_id: group for group in batch.groups if group.trajectories}
    if not left:
        raise ValueError(
            f"step {batch.step}: no trajectory is left to train; to skip a step, give all trajectories "
            "of a group the same reward"
        )
    pairs = [
        (delivery, _changed_group(left[delivery.group_id].trajectories, group))
        for delivery, group in zip(before.deliveries, before.groups, strict=True)
        if delivery.group_id in left
    ]
    return gathered.Batch([delivery for delivery, _ in pairs], [group for _, group in pairs])


def _changed_group(left: Sequence[TrainedTrajectory], group: TrainingGroup) -> TrainingGroup:
    rewards = {trajectory.trajectory_id: float(trajectory.reward) for trajectory in left}
    for name, reward in rewards.items():
        if not math.isfinite(reward):
            raise ValueError(f"trajectory {name}: a reward must be finite, not {reward}")
    kept = [
        (sample, own)
        for sample, own in zip(group.samples, group.rewards, strict=True)
        if sample.trajectory_id in rewards
    ]
    changed = [
        # As the agent gave it, before any penalty, unless the caller replaced it.
        (replace(sample, reward=new), own if new == sample.reward else new)
        for sample, own in kept
        for new in (rewards[sample.trajectory_id],)
    ]
    return replace(
        group,
        samples=tuple(sample for sample, _ in changed),
        rewards=tuple(own for _, own in changed),
    )
