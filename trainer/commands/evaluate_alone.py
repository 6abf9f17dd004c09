"""Evaluation without a trainer: takes and scores turns in this process, on whatever a server samples.

    prompt -> unleased trajectories -> generate, reward -> measured -> the record

Up to `concurrency` prompts are open at a time, each with all its samples. No task is submitted and no
exchange is opened, so a trainer of the same server is not fenced off, and its run loses no groups and
never sees these. Only the engine is shared. If the trainer switches meanwhile, answers mix versions, and
the record counts how many.

If a function raises or a call is refused, the attempt is repeated, up to `attempts` in all. After that it
is a failure, which is counted by reason and enters no figure. If the server is lost, turns wait for it and
continue. After `Patience.reconnect_seconds` the evaluation ends with ServerUnavailable and without a
record. An interrupted one has no record either, and the server aborts its turns in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import cast

from penstock.client.calls import Calls
from penstock.client.conversation import Message, Role
from penstock.client.errors import PenstockError, ServerUnavailable
from penstock.client.outcome import Failed, Outcome
from penstock.client.sampling import SamplingParams
from penstock.client.scoring import Agent, as_failed, as_outcome, as_outcomes, call, to_log
from penstock.client.tasks import Purpose, Task
from penstock.client.trajectory import Place, Trajectory
from penstock.client.turns import FinishReason
from penstock.client.values import Json, from_struct, to_struct
from penstock.trainer.core.aio import together
from penstock.trainer.data.sources.problem import Problem, Source
from penstock.trainer.evaluation.record import EvaluationRecord, MeasuredPrompt, make_record

log = logging.getLogger("penstock.eval")


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions that make and score attempts, as for `penstock rollout`."""

    generate: Agent
    reward: Agent | None
    """None if `generate` returns the reward."""
    per_group: bool = False
    """Whether `reward` scores all samples of a prompt at once."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of an evaluation, and how it samples."""

    name: str
    prompts: int
    samples_per_prompt: int
    concurrency: int
    """Prompts open at a time."""
    attempts: int
    """Attempts per sample, including the first."""
    sampling: SamplingParams
    system_prompt: str = ""
    passes_from: float = 1.0


@dataclass(eq=False, repr=False)
class Measuring:
    """Measures one set of prompts."""

    calls: Calls
    source: Source
    functions: Functions
    extent: Extent
    on_prompt: Callable[[], None] = lambda: None
    """Called after each measured prompt."""

    def __post_init__(self) -> None:
        self._id = f"eval-{uuid.uuid4().hex[:12]}"
        self._measured: list[MeasuredPrompt] = []
        self._shown: set[str] = set()
        """Failure reasons that were already logged."""

    async def run(self) -> EvaluationRecord:
        """Raises PenstockError if the server refuses everything, ServerUnavailable if it is lost,
        and ConfigInvalid if the data cannot be read."""
        extent, begun = self.extent, time.time()
        version = (await self.calls.get_server_info()).active_weight_version
        indices = iter(range(extent.prompts))
        workers = min(extent.concurrency, extent.prompts)
        await together(self._work(indices) for _ in range(workers))
        record = make_record(
            self._measured,
            name=extent.name,
            step=version,
            weight_version=version,
            mode="alone",
            samples_per_prompt=extent.samples_per_prompt,
            passes_from=extent.passes_from,
            prompts_asked=extent.prompts,
        )
        active = (await self.calls.get_server_info()).active_weight_version
        oldest = record.oldest_weight_version
        record.lag = max(0, active - (version if oldest is None else oldest))
        record.time_start, record.time = begun, time.time()
        record.seconds = record.time - begun
        return record

    async def _work(self, indices: Iterator[int]) -> None:
        """Consumes data indices shared with other workers; produces measured prompts."""
        for index in indices:
            problem = self.source.problem(index)
            task = make_task(problem, f"{self._id}-{index}", index, self.extent)
            samples = range(self.extent.samples_per_prompt)
            parts = [samples] if self.functions.per_group else [[sample] for sample in samples]
            ended = await asyncio.gather(*(self._judge(task, part) for part in parts))
            self._measured.append(_measure(problem.counted_under, list(chain(*ended))))
            self.on_prompt()

    async def _judge(
        self, task: Task, samples: Iterable[int]
    ) -> list[tuple[Trajectory, Outcome | Failed]]:
        """Makes these samples of a prompt, and repeats them together while any fails, until the attempts
        are used up."""
        attempt = 0
        while True:
            opened = [self._open(task, sample, attempt) for sample in samples]
            ended = await asyncio.gather(*(self._attempt(task, one) for one in opened))
            there = [one for one, end in zip(opened, ended, strict=True) if end is None]
            scores = iter(await self._score_together(task, there) if there else ())
            both = [
                (one, next(scores) if end is None else end)
                for one, end in zip(opened, ended, strict=True)
            ]
            await asyncio.gather(*(self._close(one, outcome) for one, outcome in both))
            attempt += 1
            fine = not any(isinstance(outcome, Failed) for _, outcome in both)
            if fine or attempt == self.extent.attempts:
                return both

    def _open(self, task: Task, sample: int, attempt: int) -> Trajectory:
        """Opens a trajectory that behaves like a leased one. The server knows no task for it."""
        return Trajectory(
            self.calls,
            f"{task.task_id}-{sample}-{attempt}",
            task=task,
            place=Place(sample_index=sample),
            resume_aborted=True,
        )

    async def _attempt(self, task: Task, trajectory: Trajectory) -> Outcome | Failed | None:
        """Returns None if the trajectory is to be scored together with its siblings."""
        try:
            score = await call(self.functions.generate, task, trajectory)
            if isinstance(score, Failed):
                return score
            if self.functions.per_group:
                return None
            if trajectory.closed and trajectory.outcome is not None:
                # Closed by the function itself.
                return trajectory.outcome
            if self.functions.reward is not None:
                score = await call(self.functions.reward, task, trajectory)
            return as_outcome(score)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return self._failed(error, task)

    async def _score_together(
        self, task: Task, trajectories: list[Trajectory]
    ) -> list[Outcome | Failed]:
        assert self.functions.reward is not None
        try:
            scores = await call(self.functions.reward, task, trajectories)
            return as_outcomes(scores, len(trajectories))
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return [self._failed(error, task)] * len(trajectories)

    def _failed(self, error: BaseException, asked: Task) -> Failed:
        """Converts an exception to a failure. Raises ServerUnavailable, because no later attempt
        would succeed. Raises CancelledError if the evaluation itself is cancelled."""
        if isinstance(error, ServerUnavailable):
            raise error
        failed = as_failed(error, asked)
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise error
            failed = Failed("CANCELLED", "the function cancelled itself")
        if failed.reason not in self._shown:
            self._shown.add(failed.reason)
            log.warning(
                "an attempt failed with %s: %s (further failures with this reason are only counted)",
                failed.reason,
                failed.message,
                exc_info=to_log(error),
            )
        return failed

    async def _close(self, trajectory: Trajectory, outcome: Outcome | Failed) -> None:
        if trajectory.closed or not trajectory.turns:
            return
        # The trajectory was lost with the server, or its outcome is invalid. No one else depends on it.
        with contextlib.suppress(PenstockError, TypeError, ValueError):
            await trajectory.close(outcome)


def make_task(problem: Problem, task_id: str, index: int, extent: Extent) -> Task:
    """Builds the task for a problem, with the same fields as a task that a trainer submits."""
    messages = [Message(cast("Role", role), text) for role, text in problem.messages]
    if extent.system_prompt:
        messages.insert(0, Message("system", extent.system_prompt))
    return Task(
        task_id,
        prompt=tuple(messages) or None,
        # Normalized like metadata that came over the wire.
        metadata=from_struct(to_struct(cast("Mapping[str, Json]", problem.for_agents))),
        group_size=extent.samples_per_prompt,
        purpose=Purpose.EVAL,
        data_source=problem.data_source,
        index=index,
        sampling=extent.sampling,
    )


def _measure(data_source: str, ended: list[tuple[Trajectory, Outcome | Failed]]) -> MeasuredPrompt:
    scored = [(one, end) for one, end in ended if isinstance(end, Outcome)]
    lengths = [sum(len(turn.token_ids) for turn in one.turns) for one, _ in scored]
    answered = [one for one, _ in scored if one.turns]
    failed = [one for one, end in ended if isinstance(end, Failed)]
    return MeasuredPrompt(
        data_source,
        rewards=tuple(end.reward for _, end in scored),
        tokens=tuple(lengths),
        truncated=sum(map(_is_cut, answered)),
        failure_reasons=tuple(end.reason for _, end in ended if isinstance(end, Failed)),
        versions=_versions(one for one, _ in scored),
        failed_versions=_versions(failed),
    )


def _is_cut(trajectory: Trajectory) -> bool:
    """Whether its last turn was cut off. Empty turns, which found the context full, are skipped."""
    written = (turn for turn in reversed(trajectory.turns) if len(turn.token_ids))
    return next(written, trajectory.last_turn).finish_reason is FinishReason.LENGTH


def _versions(trajectories: Iterable[Trajectory]) -> tuple[int, ...]:
    """Returns the versions that sampled a token, including in branches, each once."""
    found: set[int] = set()
    for one in trajectories:
        found.update(version for turn in one.turns for version in turn.weight_versions)
        found.update(_versions(one.branches))
    return tuple(sorted(found))
