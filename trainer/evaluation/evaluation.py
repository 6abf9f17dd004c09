"""Evaluation during training: measures sets of prompts on the servers and agents of the run.

    version active -> due? -> prompts submitted, `concurrency` at a time -> groups, on separate demand
                                -> measured, acknowledged -> once all have arrived: the record

docs/guides/evaluation.md describes the two modes, and what each failure does.

Prompts are spread over the run's servers by their index in the set, so that even a small set is shared
evenly. Evaluation groups never mix with training. They have separate demand, pass the staleness gate, get
a receipt as soon as they are read, and appear in no ledger. An unfinished evaluation therefore leaves
nothing to resume. It starts again under new ids, and groups of the previous trainer are refused.

A server that lost its version may not get it again, because the trainer has made the next one. It then
waits for the switch, which waits for pinned evaluations, so these end with what they have. While the
trainer catches up with a server, nothing begins until the server samples what the trainer holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.trainer.config.evaluation import PinnedConfig
from penstock.trainer.core.aio import together, unless
from penstock.trainer.core.errors import ServerFull
from penstock.trainer.evaluation.prompts import OTHER_VERSION, Asked, Prompts, Verdict
from penstock.trainer.evaluation.record import (
    EvaluationRecord,
    MeasuredPrompt,
    make_record,
    read_measured,
)
from penstock.trainer.evaluation.sets import EvaluationSet, Measurement
from penstock.trainer.exchange.evaluation_stream import EvaluationStream
from penstock.trainer.exchange.retrying import keep_trying
from penstock.trainer.exchange.servers import Servers
from penstock.trainer.exchange.stored_groups import Delivered
from penstock.v1 import task_service_pb2

log = logging.getLogger(__name__)

OVER = "EVALUATION_OVER"

Submit = Callable[[int, Sequence[task_service_pb2.Task]], Awaitable[int]]
"""Submits tasks to a server. Raises ServerFull and ServerLost."""


@dataclass(eq=False, repr=False)
class Evaluator:
    """Runs every evaluation set of one run."""

    sets: Sequence[EvaluationSet]
    exchanges: Servers
    run_id: str
    submit: Submit
    write: Callable[[EvaluationRecord], None]
    stopping: asyncio.Event

    def __post_init__(self) -> None:
        self._streams = self.exchanges.evaluations
        self._group: asyncio.TaskGroup | None = None

    def open(self, group: asyncio.TaskGroup) -> None:
        """Runs evaluations that begin from now on in this task group."""
        self._group = group
        for stream in self._streams:
            stream.deliver = partial(self._take, stream)

    def version_active(self, step: int, weight_version: int) -> None:
        """Begins every evaluation that is due, now that the server samples these weights."""
        for one in self.sets:
            if self.stopping.is_set() or not one.schedule.due(step):
                continue
            if one.current is not None:
                one.schedule.skip(step)
                log.warning(
                    "evaluation %s is due at version %d, but its evaluation of version %d is still "
                    "running: skipped",
                    one.config.name,
                    weight_version,
                    one.current.weight_version,
                )
                continue
            self._begin(one, step, weight_version)

    async def may_switch(self) -> float:
        """Returns the seconds waited until no pinned evaluation runs or the run is asked to stop."""
        begun = time.time()
        holding = [one for one in self.sets if one.config.pinned and one.current is not None]
        for one in holding:
            assert one.current is not None
            one.current.hold_start = begun
        await self._ended(holding)
        return time.time() - begun if holding else 0.0

    def version_gone(self) -> None:
        """Ends pinned evaluations. A server lost the version it sampled and will not get it again."""
        for one in self.sets:
            if one.config.pinned and one.current is not None:
                one.current.gone.set()

    def forget(self, step: int) -> None:
        """Makes evaluations from this step on due again. The step came out differently than under
        the previous trainer, so its records and later ones were removed."""
        for one in self.sets:
            if one.schedule.forget(step):
                log.warning(
                    "evaluation %s: step %d came out differently than before; its measurements and "
                    "later ones are dropped and will be repeated when due",
                    one.config.name,
                    step,
                )

    async def finish(self, step: int, weight_version: int) -> None:
        """Measures the final weights. Returns once every evaluation ended or the run is asked to stop."""
        await self._ended(self.sets)
        for one in self.sets:
            if not self.stopping.is_set() and one.schedule.due_at_end(step):
                self._begin(one, step, weight_version)
        await self._ended(self.sets)

    def seconds_after(self, step: int) -> float | None:
        """Estimates how long measuring the weights of the last step, `step`, will take: the longest of the
        previous durations, because sets run in parallel. None if one of them has not been measured yet."""
        found = [one.seconds for one in self.sets if one.schedule.ends_with(step)]
        known = [seconds for seconds in found if seconds is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    async def submit_again(self, server: int) -> None:
        """Resubmits open prompts to a server that may have lost them. If it is full, retries in the
        background. Raises ServerLost."""
        for one in self.sets:
            # Taken now: the evaluation may end while its prompts are sent.
            current = one.current
            if current is None or current.gone.is_set():
                continue
            assert self._group is not None, "open comes first"
            try:
                await self._submit_asked(one, current, server)
            except ServerFull:
                # The stream must continue meanwhile: room may open only when the trainer takes groups.
                later = keep_trying(
                    self._streams[server].ready,
                    lambda one=one, current=current: self._submit_asked(one, current, server),
                )
                self._group.create_task(unless(self.stopping, later))

    async def _submit_asked(self, one: EvaluationSet, current: Measurement, server: int) -> None:
        """Submits all prompts of an evaluation that are still open, unless it has ended."""
        if one.current is current:
            await self._submit(one, current, server, current.prompts.asked.values())

    async def _ended(self, sets: Sequence[EvaluationSet]) -> None:
        running = [one.task for one in sets if one.task is not None]
        if running:
            await unless(self.stopping, asyncio.wait(running))

    def _begin(self, one: EvaluationSet, step: int, weight_version: int) -> None:
        assert self._group is not None, "open comes first"
        config, mode = one.config, one.config.mode
        # The epoch is unique to this start of the trainer, so no two starts share an id.
        prefix = f"{self.run_id}/~{config.name}/{step}-{self.exchanges.trainer_epoch}"
        pinned = mode if isinstance(mode, PinnedConfig) else None
        prompts = Prompts(
            prefix,
            one.prompt_count,
            concurrency=config.concurrency,
            pinned_version=weight_version if pinned else None,
            max_other_version=pinned.max_other_version if pinned else 0,
        )
        one.current = Measurement(
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

    async def _measure(self, one: EvaluationSet, current: Measurement) -> None:
        """Consumes groups; waits for those of the prompts it submitted; produces a record."""
        try:
            asked = unless(current.gone, self._ask_all(one, current))
            ended = await unless(self.stopping, asked)
            if ended is None and current.gone.is_set():
                _warn(one, current, "a server lost that version, and the next one is ready")
            elif ended is None:
                log.warning(
                    "evaluation %s of version %d is abandoned: the run is asked to stop",
                    one.config.name,
                    current.weight_version,
                )
                return
            record = self._record(one, current)
            one.seconds = record.seconds
            self.write(record)
        finally:
            one.current = one.task = None

    async def _ask_all(self, one: EvaluationSet, current: Measurement) -> bool:
        """Submits prompts as capacity allows. Returns whether every group arrived."""
        prompts = current.prompts
        while not prompts.done:
            fresh = prompts.next()
            if fresh and not await self._submit_all(one, current, fresh):
                why = "a server was full"
            elif not await self._comes(one, current):
                why = "nothing arrived. Is there a worker that takes evaluations?"
            else:
                continue
            _warn(one, current, f"for {one.config.patience_seconds:g} s {why}")
            return False
        return True

    async def _comes(self, one: EvaluationSet, current: Measurement) -> bool:
        """Waits for a group. Returns False if none arrived in time while all servers were connected."""
        begun = asyncio.get_running_loop().time()
        while True:
            since = max(begun, *(stream.since for stream in self._streams))
            try:
                async with asyncio.timeout_at(since + one.config.patience_seconds):
                    await current.changed.wait()
            except TimeoutError:
                there = all(stream.ready.is_set() for stream in self._streams)
                if there and all(stream.since <= since for stream in self._streams):
                    return False
                for stream in self._streams:
                    await stream.ready.wait()
                continue
            current.changed.clear()
            return True

    async def _submit_all(
        self, one: EvaluationSet, current: Measurement, asked: Sequence[Asked]
    ) -> bool:
        """Submits each prompt to its server, then demands its group. Returns False if a server
        stayed full for too long."""

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
        self, one: EvaluationSet, current: Measurement, server: int, asked: Iterable[Asked]
    ) -> None:
        """Submits those of the prompts that belong to this server."""
        tasks: list[task_service_pb2.Task] = []
        # A copy, because groups may arrive meanwhile.
        for prompt in list(asked):
            if self._server_of(prompt) == server:
                problem = one.source.problem(prompt.index)
                current.data_sources[prompt.task_id] = problem.counted_under
                tasks.append(one.build_task(prompt, problem))
                # Computing a problem may take long. Streams and uploads must not stall meanwhile.
                await asyncio.sleep(0)
        # The evaluation may have ended meanwhile.
        if tasks and one.current is current and not current.gone.is_set():
            await self.submit(server, tasks)

    def _server_of(self, prompt: Asked) -> int:
        return prompt.index % len(self._streams)

    def _demand(self) -> None:
        """Raises each server's credit, which may be left from before, to its number of open prompts."""
        asked = Counter(
            self._server_of(prompt)
            for one in self.sets
            if one.current is not None
            for prompt in one.current.prompts.asked.values()
        )
        for server, stream in enumerate(self._streams):
            missing = asked[server] - stream.owed
            if missing > 0:
                stream.demand(missing)

    def _take(self, stream: EvaluationStream, delivery: Delivered) -> None:
        """Measures a group that belongs to an open prompt, and refuses any other."""
        group, verdict = delivery.group, Verdict.UNKNOWN
        for one in self.sets:
            current = one.current
            if current is None or group.task_id not in current.data_sources:
                continue
            measured = read_measured(group, current.data_sources[group.task_id])
            verdict = current.prompts.take(group.task_id, measured)
            current.changed.set()
            break
        if verdict is Verdict.MEASURED:
            # The step the trainer is at, because zero would mean a refusal.
            stream.measured(delivery, self.exchanges.held_version + 1)
        elif verdict is Verdict.AGAIN:
            message = f"another version than the one measured sampled {group.group_id}"
            stream.refuse(delivery, OTHER_VERSION, message)
        else:
            message = f"task {group.task_id} belongs to no evaluation under way"
            stream.refuse(delivery, OVER, message)
        self._demand()

    def dropped(self, task_id: str, reason: str) -> bool:
        """Records as failed a task that the server gave up, for example because its group exceeds a
        message. Returns whether it belongs to an evaluation."""
        for one in self.sets:
            current = one.current
            if current is None or task_id not in current.data_sources:
                continue
            failures = (reason,) * one.config.samples_per_prompt
            failed = MeasuredPrompt(current.data_sources[task_id], (), (), 0, failures)
            current.prompts.take(task_id, failed)
            current.changed.set()
            return True
        return False

    def _record(self, one: EvaluationSet, current: Measurement) -> EvaluationRecord:
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
        record.lag = max(0, self.exchanges.held_version - measured)
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
                f"every trajectory failed: {counted}" if counted else "nothing arrived",
            )
        return record


def _warn(one: EvaluationSet, current: Measurement, why: str) -> None:
    log.warning(
        "evaluation %s of version %d ends with %d of %d prompts: %s",
        one.config.name,
        current.weight_version,
        len(current.prompts.measured),
        current.prompts.count,
        why,
    )
