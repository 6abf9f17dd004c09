"""The rollout worker: keeps a fixed number of attempts in flight, across training steps.

`_feed` waits for a free slot and a leased attempt, and starts a task per attempt. An attempt that
ends frees its slot.

Order of shutdown: stop leasing, so that no attempt starts; let running attempts finish, within the
drain bound; give back the rest; close the lease stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from opentelemetry import trace

from penstock.client.calls import Calls
from penstock.client.errors import InvalidRequest, Overloaded, PenstockError
from penstock.client.groups import GroupBook, ReadyGroup
from penstock.client.leases import Attempt, LeaseListener, Leases, default_agent_id
from penstock.client.outcome import Failed, Outcome
from penstock.client.scoring import (
    Agent,
    AttemptFailed,
    as_failed,
    as_outcome,
    as_outcomes,
    call,
    is_group_reward,
    to_log,
)
from penstock.client.statistics import STOPPED, Reporter, Statistics
from penstock.client.tasks import Purpose, Task
from penstock.wire.reasons import Reason

T = TypeVar("T")

logger = logging.getLogger("penstock.rollout")
tracer = trace.get_tracer("penstock.client")

# Time limit for giving back unfinished attempts when the worker stops.
_GIVE_BACK_SECONDS = 5.0


@dataclass(frozen=True)
class WorkerSettings:
    concurrency: int = 8
    agent_id: str = field(default_factory=default_agent_id)
    """Names this process, for metrics and traces."""
    purpose: Purpose | None = None
    """Only tasks of this purpose; None takes any."""
    group_reward: bool = False
    """Whether `reward` scores all siblings at once, even if not declared as a group reward."""
    attempts: int | None = None
    """Number of attempts after which `run` returns; None runs until stopped."""
    attempt_seconds: float | None = None
    """Bound on one attempt, reward included. Beyond it the attempt fails with ATTEMPT_TIMEOUT."""
    drain_seconds: float = 20.0
    """How long attempts in flight can continue after `stop`."""
    report_seconds: float = 10.0
    """Minimum time between two lines of statistics."""


class WorkerMisconfigured(Exception):
    """The worker's settings do not fit the tasks."""


class AttemptTimeout(AttemptFailed):
    """An attempt was not done within its time."""


class Worker(LeaseListener):
    """Runs `generate` and `reward` on leased attempts. If a function raises, only its attempt fails."""

    def __init__(
        self, calls: Calls, generate: Agent, reward: Agent | None, settings: WorkerSettings
    ) -> None:
        self._calls = calls
        self._generate, self._reward = generate, reward
        self._settings = settings
        self._per_group = settings.group_reward or is_group_reward(reward)
        self._book = GroupBook(settings.concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._judged: set[str] = set()
        """Running attempts whose outcome is known and is being sent."""
        self._final: set[str] = set()
        """Under a group reward: attempts whose last lease expired, until the book has dropped them.
        The server counts them as failed."""
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._stopped = asyncio.Event()
        self._draining = False
        self._leases = Leases(
            calls,
            concurrency=settings.concurrency,
            agent_id=settings.agent_id,
            purpose=settings.purpose,
            whole_groups=self._per_group,
            resume_aborted=True,
            listener=self,
        )
        self._shown: set[str] = set()
        """Failure reasons that were already logged in full."""
        self._statistics = Statistics()
        self._reporter = Reporter(self._statistics, settings.report_seconds)

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Asks `run` to return. Attempts in flight are finished or given back. Idempotent."""
        self._stopped.set()

    async def run(self) -> Statistics:
        """Raises PenstockError if the server refuses to lease, and WorkerMisconfigured if a group is
        larger than the concurrency."""
        try:
            async with self._leases, asyncio.TaskGroup() as tasks:
                stopper = tasks.create_task(self._stop_when_told())
                await self._feed(tasks)
                while self._running:
                    await asyncio.wait(self._running.values())
                if self._stopped.is_set():
                    await stopper
                else:
                    # `attempts` is used up. Some attempts may wait for siblings that this worker
                    # will not take.
                    stopper.cancel()
                    await self._leases.stop_leasing()
                    await self._give_back_waiting()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._reporter.report(len(self._running), last=True)
        return self._statistics

    async def _feed(self, tasks: asyncio.TaskGroup) -> None:
        begun = 0
        while self._settings.attempts is None or begun < self._settings.attempts:
            await self._slots.acquire()
            attempt = await anext(self._leases, None)
            if attempt is None:
                return
            self._check_group(attempt)
            begun += 1
            if self._per_group:
                self._book.begin(attempt)
            trajectory_id = attempt.trajectory.trajectory_id
            task = tasks.create_task(self._attempt(attempt))
            self._running[trajectory_id] = task
            task.add_done_callback(lambda _, ended=trajectory_id: self._end(ended))

    def _end(self, trajectory_id: str) -> None:
        del self._running[trajectory_id]
        self._judged.discard(trajectory_id)
        self._slots.release()
        self._reporter.report(len(self._running))

    def _check_group(self, attempt: Attempt) -> None:
        size, concurrency = attempt.task.group_size, self._settings.concurrency
        if self._per_group and size > concurrency:
            raise WorkerMisconfigured(
                f"task {attempt.task.task_id} is a group of {size}, and a group reward needs all of its "
                f"attempts in flight at once: concurrency is {concurrency}, set it to at least {size}"
            )

    async def _stop_when_told(self) -> None:
        await self._stopped.wait()
        await self._leases.stop_leasing()
        logger.info("stopping: %d attempts in flight", len(self._running))
        await self._wait_running(self._settings.drain_seconds)
        self._draining = True
        self._cancel_unjudged()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_SECONDS):
                await self._give_back_waiting()
                await self._wait_running(None)
        for task in self._running.values():
            task.cancel()

    async def _give_back_waiting(self) -> None:
        """Fails the attempts that wait for siblings. The server makes their whole groups again."""
        stopped = Failed(STOPPED, "its siblings did not end in time")
        waiting = self._book.waiting()
        self._book.clear()
        await asyncio.gather(*(self._close(attempt, stopped) for attempt in waiting))

    def _cancel_unjudged(self) -> None:
        for trajectory_id, task in self._running.items():
            if trajectory_id not in self._judged:
                task.cancel()

    async def _wait_running(self, timeout: float | None) -> None:
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=timeout)

    async def _attempt(self, attempt: Attempt) -> None:
        with tracer.start_as_current_span("penstock.attempt") as span:
            span.set_attribute("penstock.task_id", attempt.task.task_id)
            span.set_attribute("penstock.group_id", attempt.group_id)
            span.set_attribute("gen_ai.conversation.id", attempt.trajectory.trajectory_id)
            ready = await self._end_attempt(attempt, span)
            if ready is not None:
                await self._close_group(ready)

    async def _end_attempt(self, attempt: Attempt, span: trace.Span) -> ReadyGroup | None:
        """Runs an attempt. Returns its group if this was the last attempt the group waited for."""
        trajectory_id = attempt.trajectory.trajectory_id
        if trajectory_id in self._final:
            # Its lease expired before this worker took it.
            return self._lose(attempt)
        try:
            outcome = await self._judge(self._run(attempt), attempt)
        except asyncio.CancelledError:
            # Its lease expired, its stream was lost, or the whole worker is cancelled.
            ready, task = self._lose(attempt), asyncio.current_task()
            # Continues only if this was the task's only cancellation.
            if ready is None or task is None or task.uncancel():
                raise
            self._judged.add(trajectory_id)
            return ready
        self._judged.add(trajectory_id)
        if trajectory_id in self._final:
            # Its function ignored the cancellation and finished.
            return self._lose(attempt)
        if isinstance(outcome, Failed):
            span.set_attribute("error.type", outcome.reason)
        if outcome is None:
            return self._book.end(attempt)
        return await self._close(attempt, outcome)

    async def _run(self, attempt: Attempt) -> Outcome | Failed | None:
        """Runs the functions on an attempt. Returns None if its siblings are scored with it."""
        score = await call(self._generate, attempt.task, attempt.trajectory)
        if isinstance(score, Failed):
            return score
        if attempt.trajectory.closed:
            # The function itself closed it.
            return attempt.trajectory.outcome
        if self._per_group:
            return None
        if self._reward is not None:
            score = await call(self._reward, attempt.task, attempt.trajectory)
        return as_outcome(score)

    async def _score(self, ready: ReadyGroup) -> list[Outcome | Failed]:
        assert self._reward is not None
        trajectories = [attempt.trajectory for attempt in ready.siblings]
        scores = await call(self._reward, ready.siblings[0].task, trajectories)
        return as_outcomes(scores, len(trajectories))

    async def _judge(self, work: Coroutine[Any, Any, T], attempt: Attempt) -> T | Failed:
        """Runs the caller's functions within the time limit. An exception becomes a failure."""
        own = self._settings.attempt_seconds
        seconds = min(math.inf if own is None else own, attempt.ends_at - time.monotonic())
        timeout = asyncio.timeout(None if seconds == math.inf else seconds)
        try:
            async with timeout:
                return await work
        except asyncio.CancelledError:
            if not _cancelled_from_outside():
                return Failed("CANCELLED", "the function cancelled itself")
            if not self._draining:
                raise
            return Failed(STOPPED, "the worker was stopped")
        except (Exception, SystemExit) as error:
            if timeout.expired():
                limit = (
                    "--attempt-timeout" if seconds == own else "the server's time for an attempt"
                )
                return self._failed(
                    AttemptTimeout(f"not done within {round(seconds, 2):g} s, {limit}")
                )
            return self._failed(error, attempt.task)

    async def _close_group(self, ready: ReadyGroup) -> None:
        try:
            # The siblings wait for each other: the newest lease decides.
            newest = max(ready.siblings, key=lambda attempt: attempt.ends_at)
            scored = await self._judge(self._score(ready), newest)
        except asyncio.CancelledError:
            for attempt in ready.unscored:
                self._lose(attempt)
            raise
        outcomes = [scored] * len(ready.siblings) if isinstance(scored, Failed) else scored
        closes = [
            self._close(attempt, outcome)
            for attempt, outcome in zip(ready.siblings, outcomes, strict=True)
            if attempt in ready.unscored
        ]
        await asyncio.gather(*closes)

    async def _close(
        self, attempt: Attempt, outcome: Outcome | Failed, *, own_sent: bool = False
    ) -> ReadyGroup | None:
        """Sends an outcome. Returns the group if this was the last attempt it waited for."""
        trajectory, own = attempt.trajectory, attempt.trajectory.outcome
        if trajectory.closed and own is not None:
            # The function closed it. Closing it again returns the server's first answer.
            outcome = own
        try:
            closed = await trajectory.close(outcome)
        except (PenstockError, ValueError) as error:
            # The outcome itself may be impossible to send, for example if its metadata is not JSON.
            refused = isinstance(error, InvalidRequest | ValueError)
            # A server that is just full names a retry delay; then the outcome is still valid.
            refused |= isinstance(error, Overloaded) and error.retry_after_seconds is None
            if refused and isinstance(outcome, Outcome):
                return await self._close(attempt, self._failed(error), own_sent=own_sent)
            differs = isinstance(error, PenstockError) and error.reason == Reason.OUTCOME_DIFFERS
            if own is not None and not own_sent and differs:
                # The function sent its own outcome but did not receive the answer.
                return await self._close(attempt, own, own_sent=True)
            logger.info("attempt %s is lost: %s", trajectory.trajectory_id, error)
            await self._let_run_out(attempt)
            return self._lose(attempt)
        self._statistics.add(outcome, _token_count(attempt))
        if closed.retried:
            self._book.lose(attempt)
            return None
        return self._book.close(attempt, failed=isinstance(outcome, Failed))

    async def _let_run_out(self, attempt: Attempt) -> None:
        """Waits until the lease of an attempt that cannot be closed has expired, if siblings wait."""
        if not self._book.holds(attempt):
            return
        trajectory_id = attempt.trajectory.trajectory_id
        if not await self._leases.run_out(trajectory_id):
            self._final.add(trajectory_id)

    def _lose(self, attempt: Attempt) -> ReadyGroup | None:
        """Drops an attempt. Returns the group if this was the last attempt it waited for."""
        trajectory_id = attempt.trajectory.trajectory_id
        self._statistics.add(None, _token_count(attempt))
        self._leases.release(trajectory_id)
        if trajectory_id not in self._final:
            self._book.lose(attempt)
            return None
        self._final.remove(trajectory_id)
        return self._book.close(attempt, failed=True)

    def _failed(self, error: BaseException, task: Task | None = None) -> Failed:
        """Logs the first failure of each reason with its traceback."""
        failed = as_failed(error, task)
        if failed.reason not in self._shown:
            self._shown.add(failed.reason)
            logger.warning(
                "an attempt failed with %s: %s (further ones are only counted)",
                failed.reason,
                failed.message,
                exc_info=to_log(error),
            )
        return failed

    def server_lost(self, error: PenstockError) -> None:
        """Logs the loss. Under a group reward, drops every open group, because a group belongs to
        its stream."""
        address = self._calls.address
        cause = str(error).removeprefix(f"no connection to {address}: ")
        logger.warning("the server at %s is unavailable: %s; retrying", address, cause)
        if not self._per_group:
            return
        for attempt in self._book.waiting():
            self._lose(attempt)
        self._book.clear()
        self._final.clear()
        self._leases.release_all()
        # Attempts whose outcome is known are closed as soon as the server is back.
        self._cancel_unjudged()

    def server_back(self, seconds: float) -> None:
        logger.warning("the server is back after %.1f s", seconds)

    def leases_expired(self, trajectory_ids: Sequence[str], retried_ids: Collection[str]) -> None:
        """Attempts being scored or closed find out when they close."""
        logger.warning("%d leases expired; giving up their attempts", len(trajectory_ids))
        expired = set(trajectory_ids)
        if self._per_group:
            self._final |= expired.difference(retried_ids)
        for trajectory_id in (expired & self._running.keys()) - self._judged:
            self._running[trajectory_id].cancel()
        for attempt in self._book.waiting():
            if attempt.trajectory.trajectory_id in expired:
                # Its group still waits for another attempt, so it cannot become ready now.
                self._lose(attempt)


def _token_count(attempt: Attempt) -> int:
    return sum(len(s.token_ids) for turn in attempt.trajectory.turns for s in turn.segments)


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
