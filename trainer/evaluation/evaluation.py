"""Evaluation while training runs: sets of prompts, measured beside the loop by the same server and agents.

    version active -> due? -> prompts asked, `concurrency` at a time -> groups, on a demand of their own
                                -> measured, received -> all are: the record

An evaluation begins when the server samples the version it is due for. **Pinned**: until it has ended
the loop does not switch. The trainer computes its next step and uploads it, staged, and then waits.
**On the fly**: nothing waits; groups may be of several versions, which the record says.

The prompts of a set are spread over the run's servers by their place in it, so that of few, too, each has
its share. The groups never meet training: they have a demand of their own, pass the staleness gate, are
received as soon as they are read, and stand in no ledger. So an evaluation that did not end is nothing that
is to be resumed: it is begun anew.

What a failure does:

    an attempt fails            the server has it made again, up to its bound; then it is a failure, in no
                                  figure, and counted by reason
    a group fits no message     the server drops it and says so: its samples are failures, GROUP_TOO_LARGE
    all of them do              a record without figures, and a warning; training goes on
    a server is lost            its prompts are submitted again, under the same ids, once it is back; what
                                  comes twice is measured once. A pinned set does not take tokens that
                                  another version sampled meanwhile, and asks again
    and what it samples, too    where the trainer cannot give it that again, for it made the next version,
                                  pinned evaluations end with what they have: the switch, which waits for
                                  them, is what the server waits for
    nothing comes               after `patience_seconds` with the server there it ends with what it has;
                                  what comes later is refused
    a server is full            it is asked for room again; after `patience_seconds` of that the evaluation
                                  ends with what it has
    the run is asked to stop    the evaluation is left, without a record, and the switch waits no longer
    the trainer dies            the same. The one that resumes reads in `metrics.jsonl` what has a record:
                                  what was due since and has none begins on the weights it resumes with,
                                  under ids of its own; groups of the one before are refused. Records of
                                  steps that it does again stay, for they come out as they did: at the
                                  first that does not, those of it and of later ones go, and are due again
    the one before still runs   the set is passed over this time, which the next record counts; but the last
                                  weights are measured, after it
    catching up with a server   nothing begins until the server samples what the trainer holds
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from penstock.trainer.config.data import DataConfig
from penstock.trainer.config.evaluation import EvaluationConfig, PinnedConfig
from penstock.trainer.core.errors import ServerFull
from penstock.trainer.core.stopping import unless
from penstock.trainer.core.together import together
from penstock.trainer.data.feeder import describe_problem
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Finite, Problem, Source
from penstock.trainer.evaluation.prompts import SEED, Asked, Prompts, Schedule, Verdict
from penstock.trainer.evaluation.record import (
    EvaluationRecord,
    MeasuredPrompt,
    make_record,
    read_measured,
)
from penstock.trainer.exchange.evaluation_stream import EvaluationStream
from penstock.trainer.exchange.stored_groups import Delivered
from penstock.trainer.weights.handover import keep_trying
from penstock.v1 import task_service_pb2, trajectory_pb2

log = logging.getLogger(__name__)

OVER = "EVALUATION_OVER"
OTHER_VERSION = "OTHER_VERSION"

Submit = Callable[[int, Sequence[task_service_pb2.Task]], Awaitable[int]]
"""Gives tasks to a server. Raises ServerFull and ServerLost."""


class Exchanges(Protocol):
    """What an evaluation needs of the trainer's streams."""

    @property
    def evaluations(self) -> Sequence[EvaluationStream]: ...
    @property
    def trainer_epoch(self) -> int: ...
    @property
    def held_version(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Measurement:
    """One evaluation under way."""

    prompts: Prompts
    step: int
    weight_version: int
    skipped: int
    time_start: float
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """A group came."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Nobody will sample its version any more."""
    data_sources: dict[str, str] = field(default_factory=dict[str, str])
    """By task id."""
    hold_start: float | None = None
    """When the switch began to wait for it."""


class EvaluationSet:
    """One `[[evaluation]]`: its prompts, when it is due, and what of it is under way."""

    def __init__(
        self, config: EvaluationConfig, data: DataConfig, last_step: int | None = None
    ) -> None:
        """`data` is how training asks; `last_step` that of the last evaluation with a record. Raises
        ConfigInvalid where its data cannot be read."""
        self.config = config
        self.source: Source = open_source(config, SEED, f"evaluation.{config.name}")
        size = self.source.size if isinstance(self.source, Finite) else config.prompts
        self.prompt_count = min(config.prompts, size)
        self.sampling = config.sampling_over(data)
        self.system_prompt = config.system_prompt_over(data)
        self.schedule = Schedule(
            every=config.every_versions,
            at_start=config.at_start,
            at_end=config.at_end,
            last_step=last_step,
        )
        self.current: _Measurement | None = None
        self.task: asyncio.Task[None] | None = None
        self.seconds: float | None = None
        """How long the last one took; None before one has ended."""

    def build_task(self, asked: Asked, problem: Problem) -> task_service_pb2.Task:
        """The task of a prompt, which asks for this problem."""
        task = describe_problem(problem, self.system_prompt, self.sampling)
        task.task_id, task.index = asked.task_id, asked.index
        task.purpose = trajectory_pb2.PURPOSE_EVAL
        task.group_size = self.config.samples_per_prompt
        return task


class Evaluator:
    """Every set of one run."""

    def __init__(
        self,
        sets: Sequence[EvaluationSet],
        exchanges: Exchanges,
        *,
        run_id: str,
        submit: Submit,
        write: Callable[[EvaluationRecord], None],
        stopping: asyncio.Event,
    ) -> None:
        self._sets = sets
        self._exchanges = exchanges
        self._streams = exchanges.evaluations
        self._run_id = run_id
        self._submit_tasks = submit
        self._write = write
        self._stopping = stopping
        self._group: asyncio.TaskGroup | None = None

    def open(self, group: asyncio.TaskGroup) -> None:
        """What begins from now on runs in this group."""
        self._group = group
        for stream in self._streams:
            stream.on_delivery = partial(self._take, stream)

    def version_active(self, step: int, weight_version: int) -> None:
        """The server samples these weights: begins what is due."""
        for one in self._sets:
            if self._stopping.is_set() or not one.schedule.due(step):
                continue
            if one.current is not None:
                one.schedule.skip(step)
                log.warning(
                    "evaluation %s is due at version %d, and that of version %d still runs: skipped",
                    one.config.name,
                    weight_version,
                    one.current.weight_version,
                )
                continue
            self._begin(one, step, weight_version)

    async def may_switch(self) -> float:
        """Waits until no pinned evaluation runs, or the run is to stop; returns the seconds it took."""
        begun = time.time()
        holding = [one for one in self._sets if one.config.pinned and one.current is not None]
        for one in holding:
            assert one.current is not None
            one.current.hold_start = begun
        await self._ended(holding)
        return time.time() - begun if holding else 0.0

    def version_gone(self) -> None:
        """A server has lost the version that it sampled and is not given it again: what is pinned ends."""
        for one in self._sets:
            if one.config.pinned and one.current is not None:
                one.current.gone.set()

    def forget(self, step: int) -> None:
        """This step came out otherwise than it did for the trainer before, whose records of it and of later
        ones are gone: what was due then is due again."""
        for one in self._sets:
            if one.schedule.forget(step):
                log.warning(
                    "evaluation %s: step %d came out otherwise than before; what was measured of it and "
                    "later ones is dropped, and measured again when it is due",
                    one.config.name,
                    step,
                )

    async def finish(self, step: int, weight_version: int) -> None:
        """Measures the last weights, and returns when everything has ended, or the run is to stop."""
        await self._ended(self._sets)
        for one in self._sets:
            if not self._stopping.is_set() and one.schedule.due_at_end(step):
                self._begin(one, step, weight_version)
        await self._ended(self._sets)

    def seconds_after(self, step: int) -> float | None:
        """What measuring the weights of the last step takes, which this one is, by what each set took
        before: they run side by side. None where one of them has not been measured yet."""
        found = [one.seconds for one in self._sets if one.schedule.ends_with(step)]
        known = [seconds for seconds in found if seconds is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    async def submit_again(self, server: int) -> None:
        """Submits what is asked of a server that may have lost it; where it is full, as soon as there is
        room. Raises ServerLost."""
        for one in self._sets:
            if one.current is None or one.current.gone.is_set():
                continue
            assert self._group is not None, "open comes first"
            try:
                await self._submit_asked(one, one.current, server)
            except ServerFull:
                # The stream goes on meanwhile: what makes room may be the trainer, which takes groups.
                later = keep_trying(
                    self._streams[server].ready,
                    lambda one=one, current=one.current: self._submit_asked(one, current, server),
                )
                self._group.create_task(unless(self._stopping, later))

    async def _submit_asked(self, one: EvaluationSet, current: _Measurement, server: int) -> None:
        """All that an evaluation has asked and that has not come, unless it has ended."""
        if one.current is current:
            await self._submit(one, current, server, current.prompts.asked.values())

    async def _ended(self, sets: Sequence[EvaluationSet]) -> None:
        running = [one.task for one in sets if one.task is not None]
        if running:
            await unless(self._stopping, asyncio.wait(running))

    def _begin(self, one: EvaluationSet, step: int, weight_version: int) -> None:
        assert self._group is not None, "open comes first"
        config, mode = one.config, one.config.mode
        # The epoch is no other start's of the trainer: an id of theirs is never met again.
        prefix = f"{self._run_id}/~{config.name}/{step}-{self._exchanges.trainer_epoch}"
        pinned = mode if isinstance(mode, PinnedConfig) else None
        prompts = Prompts(
            prefix,
            one.prompt_count,
            concurrency=config.concurrency,
            pinned_version=weight_version if pinned else None,
            max_other_version=pinned.max_other_version if pinned else 0,
        )
        one.current = _Measurement(
            prompts, step, weight_version, one.schedule.begin(step), time.time()
        )
        log.info(
            "evaluation %s begins at version %d: %d prompts, %d samples each, %s",
            config.name,
            weight_version,
            one.prompt_count,
            config.samples_per_prompt,
            mode.kind,
        )
        running = self._measure(one, one.current)
        one.task = self._group.create_task(running, name=f"evaluation {config.name}")

    async def _measure(self, one: EvaluationSet, current: _Measurement) -> None:
        """Consumes groups; waits for those of the prompts it has asked; produces a record."""
        try:
            asked = unless(current.gone, self._ask_all(one, current))
            ended = await unless(self._stopping, asked)
            if ended is None and current.gone.is_set():
                _warn(one, current, "a server lost that version, and the next one is ready")
            elif ended is None:
                log.warning(
                    "evaluation %s of version %d is left: the run is to stop",
                    one.config.name,
                    current.weight_version,
                )
                return
            record = self._record(one, current)
            one.seconds = record.seconds
            self._write(record)
        finally:
            one.current = one.task = None

    async def _ask_all(self, one: EvaluationSet, current: _Measurement) -> bool:
        """Whether everything came."""
        prompts = current.prompts
        while not prompts.done:
            fresh = prompts.next()
            if fresh and not await self._submit_all(one, current, fresh):
                why = "a server was full"
            elif not await self._comes(one, current):
                why = "nothing came. Is there a worker that takes evaluations?"
            else:
                continue
            _warn(one, current, f"for {one.config.patience_seconds:g} s {why}")
            return False
        return True

    async def _comes(self, one: EvaluationSet, current: _Measurement) -> bool:
        """Waits for a group; False where none came in time, in which all servers were there."""
        begun = asyncio.get_running_loop().time()
        while True:
            since = max(begun, *(stream.since for stream in self._streams))
            try:
                async with asyncio.timeout_at(since + one.config.patience_seconds):
                    await current.changed.wait()
            except TimeoutError:
                there = all(stream.is_ready for stream in self._streams)
                if there and all(stream.since <= since for stream in self._streams):
                    return False
                for stream in self._streams:
                    await stream.ready()
                continue
            current.changed.clear()
            return True

    async def _submit_all(
        self, one: EvaluationSet, current: _Measurement, asked: Sequence[Asked]
    ) -> bool:
        """Each prompt to its server, and the demand for its group as soon as that has it; False where one
        stays full for too long."""

        async def submit(server: int) -> None:
            await keep_trying(
                self._streams[server].ready,
                lambda: self._submit(one, current, server, asked),
                full_seconds=one.config.patience_seconds,
            )
            self._demand()

        try:
            await together(submit(server) for server in range(len(self._streams)))
        except ServerFull:
            return False
        return True

    async def _submit(
        self, one: EvaluationSet, current: _Measurement, server: int, asked: Iterable[Asked]
    ) -> None:
        """Submits those of some prompts that are this server's."""
        tasks: list[task_service_pb2.Task] = []
        # A copy: groups may come meanwhile.
        for prompt in list(asked):
            if self._server_of(prompt) == server:
                problem = one.source.problem(prompt.index)
                current.data_sources[prompt.task_id] = problem.counted_under
                tasks.append(one.build_task(prompt, problem))
                # It may take its time to be computed, and streams and uploads go on.
                await asyncio.sleep(0)
        # Nor are they asked for any more where it has ended meanwhile.
        if tasks and one.current is current and not current.gone.is_set():
            await self._submit_tasks(server, tasks)

    def _server_of(self, prompt: Asked) -> int:
        return prompt.index % len(self._streams)

    def _demand(self) -> None:
        """As much credit as prompts are asked of each server; what an evaluation left unused counts."""
        running = [one.current for one in self._sets if one.current is not None]
        asked = Counter(
            self._server_of(prompt)
            for current in running
            for prompt in current.prompts.asked.values()
        )
        for server, stream in enumerate(self._streams):
            missing = asked[server] - stream.owed
            if missing > 0:
                stream.demand(missing)

    def _take(self, stream: EvaluationStream, delivery: Delivered) -> None:
        """A group came: it is one prompt's of one evaluation, or nobody's."""
        group, verdict = delivery.group, Verdict.UNKNOWN
        for one in self._sets:
            current = one.current
            if current is None or group.task_id not in current.data_sources:
                continue
            measured = read_measured(group, current.data_sources[group.task_id])
            verdict = current.prompts.take(group.task_id, measured)
            current.changed.set()
            break
        if verdict is Verdict.MEASURED:
            # The step that the trainer is at: zero would be a refusal.
            stream.measured(delivery, self._exchanges.held_version + 1)
        elif verdict is Verdict.AGAIN:
            message = f"another version than the one measured sampled {group.group_id}"
            stream.refuse(delivery, OTHER_VERSION, message)
        else:
            message = f"task {group.task_id} is of no evaluation under way"
            stream.refuse(delivery, OVER, message)
        self._demand()

    def dropped(self, task_id: str, reason: str) -> bool:
        """Whether a task that the server has given up was one of an evaluation: then it is measured, as
        failed."""
        for one in self._sets:
            current = one.current
            if current is None or task_id not in current.data_sources:
                continue
            failures = (reason,) * one.config.samples_per_prompt
            failed = MeasuredPrompt(current.data_sources[task_id], (), (), 0, failures)
            current.prompts.take(task_id, failed)
            current.changed.set()
            return True
        return False

    def _record(self, one: EvaluationSet, current: _Measurement) -> EvaluationRecord:
        config, prompts = one.config, current.prompts
        record = make_record(
            prompts.measured,
            name=config.name,
            step=current.step,
            weight_version=current.weight_version,
            mode=config.mode.kind,
            samples_per_prompt=config.samples_per_prompt,
            passes_from=config.passes_from,
            prompts_asked=prompts.count,
        )
        oldest = record.oldest_weight_version
        measured = current.weight_version if oldest is None else oldest
        record.lag = max(0, self._exchanges.held_version - measured)
        record.asked_again, record.skipped = prompts.asked_again, current.skipped
        record.time_start, record.time = current.time_start, time.time()
        record.seconds = record.time - record.time_start
        if current.hold_start is not None:
            record.seconds_held = record.time - current.hold_start
        if not record.figures.samples:
            counted = ", ".join(f"{r} {n}" for r, n in sorted(record.failure_reasons.items()))
            log.warning(
                "evaluation %s of version %d has no result: %s",
                config.name,
                current.weight_version,
                f"every trajectory failed: {counted}" if counted else "nothing came",
            )
        return record


def _warn(one: EvaluationSet, current: _Measurement, why: str) -> None:
    log.warning(
        "evaluation %s of version %d ends with %d of %d prompts: %s",
        one.config.name,
        current.weight_version,
        len(current.prompts.measured),
        current.prompts.count,
        why,
    )
