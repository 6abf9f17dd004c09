"""Closes trajectories: records outcomes, requeues retries, and completes groups with the last sibling.

Order of events of a close: checked -> closed in memory -> its attempt settled -> (last sibling: group
completed) -> one append begun -> append durable -> group buffered -> answered. Leases that expire together
in a group close the same way, with one append. A repeated close with the same outcome gets the same
answer; a different outcome is refused.

Nothing is awaited between the first change in memory and the beginning of the append. So a compaction or
the next close always finds a group in exactly one place, and a restarted server finds either the whole
close or nothing that was answered. Turns still in flight, such as those of a lost race or those without a
listener, are aborted concurrently. Their trajectories are already forgotten, or keep what the policy had
written by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.server.core.aio import OwnTasks
from penstock.server.core.errors import MAX_ID_LENGTH, DomainError, FieldInvalid
from penstock.server.core.memory_budget import MemoryBudget
from penstock.server.core.telemetry import ReasonCounts
from penstock.server.groups.attempts import Attempt, Expired, Group, Lease, Settled, group_changed
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal, Record
from penstock.server.journal.records import leases_expired, trajectories_forgotten
from penstock.server.rollouts.buffering import CompletedGroups
from penstock.server.rollouts.start import check_idle
from penstock.server.rollouts.unleased import STOOD_STILL_SECONDS, OwnTrajectories
from penstock.server.turns.encoding import encode_early
from penstock.server.turns.records import trajectory_closed, trajectory_opened
from penstock.server.turns.requests import check_depth
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import ClosedMark, TrajectoryStore, outcome_digest
from penstock.server.turns.trajectory import BYTES_PER_TOKEN, PromptKind, TrajectoryRecord
from penstock.server.turns.turn import TurnSampling
from penstock.v1 import trajectory_pb2
from penstock.wire.messages import Failure, Outcome
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)


# Per trajectory in the journal, in addition to its tokens and its outcome.
RECORD_BYTES = 4096
MAX_OUTCOME_BYTES = 1 << 20
ATTEMPT_TIMEOUT = "ATTEMPT_TIMEOUT"
"""Failure of an attempt that reached its time limit; workers report it under the same name."""


@dataclass(eq=False)
class Closing:
    store: TrajectoryStore
    queue: TaskQueue
    completed: CompletedGroups
    turns: TurnRunner
    journal: Journal
    budget: MemoryBudget
    own: OwnTrajectories
    clock: Callable[[], float]
    failures: ReasonCounts = field(default_factory=ReasonCounts)
    """Failed attempts by reason, including retried ones."""
    left_out: int = 0
    """Trajectories left out of their completed groups."""
    _tasks: OwnTasks = field(default_factory=OwnTasks)

    async def complete(self, trajectory_id: str, outcome: trajectory_pb2.Outcome) -> ClosedMark:
        """Raises TRAJECTORY_UNKNOWN, LEASE_EXPIRED, TURN_IN_FLIGHT, OUTCOME_DIFFERS, MESSAGE_TOO_LARGE."""
        check_outcome(outcome)
        attempt = self.queue.attempt_of(trajectory_id)
        mark = self.store.closed_mark(trajectory_id)
        if mark is not None:
            if mark.outcome_digest != outcome_digest(outcome):
                raise DomainError(
                    Reason.OUTCOME_DIFFERS,
                    f"trajectory {trajectory_id} was closed with another outcome",
                    {"trajectory_id": trajectory_id},
                )
            # A repeated close may have to wait for the first one's append.
            await self.journal.append(())
            return mark
        if attempt is None:
            record = self.store.get(trajectory_id)
        else:
            # An agent may fail, or report a reward, before the first turn of its lease.
            record = self.store.find(trajectory_id) or _unopened(trajectory_id, attempt)
        closing = [*reversed(record.open_branches()), record]
        for member in closing:
            check_idle(member)
        self._check_room(record, attempt, outcome)
        if self.store.find(trajectory_id) is None:
            self.store.add(record, bounded=False)
        return await self._close(closing, attempt, outcome)

    async def _close(
        self,
        closing: list[TrajectoryRecord],
        attempt: Attempt | None,
        outcome: trajectory_pb2.Outcome,
    ) -> ClosedMark:
        record = closing[-1]
        failed = outcome.HasField("failure")
        if failed:
            self.failures.count(outcome.failure.reason)
        marks = [self.store.close(member, outcome) for member in closing]
        if attempt is None:
            forgotten: list[Record] = []
            if not record.parent_trajectory_id:
                pushed_out = self.own.closed(record)
                forgotten = [trajectories_forgotten(pushed_out)] if pushed_out else []
            await self.journal.append([*self._outcomes(closing), *forgotten])
            return marks[-1]
        settled = self.queue.settle(attempt, failed=failed)
        # Branches that were closed earlier are forgotten with it.
        gone = [] if settled.final else record.with_branches()
        for member in gone:
            self.store.forget(member.trajectory_id)
        closed = self.store.note_settled(
            record,
            group_completed=settled.completed is not None,
            retried=not settled.final,
        )
        records = self._outcomes(closing)
        if gone:
            records.append(trajectories_forgotten(member.trajectory_id for member in gone))
        settling = self._settle(attempt.group, [settled], records)
        if settled.final and not closed.group_completed:
            # Encode while the append is under way, so that closing the last sibling takes less time.
            for member in record.with_branches():
                encode_early(member)
        # If the caller disconnects, the group must still reach the buffer.
        await asyncio.shield(self._tasks.start(settling, f"closing of {record.trajectory_id}"))
        return closed

    def _check_room(
        self, record: TrajectoryRecord, attempt: Attempt | None, outcome: trajectory_pb2.Outcome
    ) -> None:
        """Checks the room for the outcome, and in the journal for the group: this may complete it."""
        members = [record]
        if attempt is not None:
            found = (self.store.find(a.trajectory_id) for a in attempt.group.attempts)
            members += filter(None, found)
        branches = [branch for member in members for branch in member.with_branches()]
        tokens = sum(branch.token_count - branch.parent_token_count for branch in branches)
        outcome_bytes = outcome.ByteSize()
        self.budget.check(outcome_bytes)
        self.journal.check_room(
            tokens * BYTES_PER_TOKEN + (outcome_bytes + RECORD_BYTES) * len(members)
        )

    def _settle(
        self, group: Group, settled: Sequence[Settled], records: list[Record]
    ) -> Coroutine[Any, Any, None]:
        """Begins to journal settled attempts of a group, in the order in which they were settled. The
        returned coroutine waits for the append, and buffers the group if the last attempt completed it."""
        for one in settled:
            if one.discarded:
                records.append(trajectories_forgotten(self._forget_attempts(one.discarded)))
            if one.left_out:
                self.left_out += len(one.left_out)
                forgotten = self._forget_attempts(one.left_out)
                records.append(leases_expired(one.taken_back, retried=False))
                records.append(trajectories_forgotten(forgotten))
        completed = settled[-1].completed
        if completed is None:
            return _written(self.journal.append([*records, group_changed(group)]))
        return self.completed.complete(completed, records)

    def _abort_soon(self, record: TrajectoryRecord) -> None:
        if record.turn is not None and record.turn.in_flight:
            self.turns.abort_soon(record.turn)

    def _forget_attempts(self, trajectory_ids: Iterable[str]) -> list[str]:
        """Also forgets branches and aborts turns. Returns the ids forgotten."""
        found = filter(None, map(self.store.find, trajectory_ids))
        members = [member for record in found for member in record.with_branches()]
        for member in members:
            self._abort_soon(member)
            self.store.forget(member.trajectory_id)
        return [member.trajectory_id for member in members]

    def give_back(self, lease: Lease) -> None:
        """Take back a lease that its agent never received, as if it had not been given."""
        if self.queue.give_back(lease):
            self._tasks.start(self._note(lease.group), f"giving back of {lease.trajectory_id}")

    async def _note(self, group: Group) -> None:
        await self.journal.append([group_changed(group)])

    async def wait_durable(self) -> None:
        await self._tasks.wait()

    async def expire_leases(self) -> None:
        """Runs as long as the server. An expired attempt returns to the queue, or fails for good."""
        deadline: float | None = None
        while True:
            if deadline is not None and self.clock() - deadline > STOOD_STILL_SECONDS:
                self.queue.leases.forgive(self.queue.groups)
            expired: dict[str, list[Expired]] = {}
            for one in self.queue.expire():
                expired.setdefault(one.attempt.group.group_id, []).append(one)
            # When a worker dies, thousands of leases expire. Their groups share the wait for the journal.
            for settling in [self._settle_expired(group) for group in expired.values()]:
                await asyncio.shield(settling)
            deadline = self.queue.next_deadline()
            timeout = None if deadline is None else max(0.0, deadline - self.clock())
            # Not in a separate task: it would start waiting later and miss a deadline set before that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self.queue.leases.sooner.wait()

    def _settle_expired(self, expired: Sequence[Expired]) -> asyncio.Task[None]:
        """In order; the last attempt may complete the group."""
        group = expired[0].attempt.group
        records = [record for one in expired for record in self._expired(one)]
        settling = self._settle(group, [one.settled for one in expired], records)
        return self._tasks.start(settling, f"expiry in {group.group_id}")

    def _expired(self, one: Expired) -> list[Record]:
        trajectory_id = one.trajectory_ids[0] if one.trajectory_ids else ""
        failure = self._failure(one)
        logger.warning(
            "attempt %s: %s; it %s",
            trajectory_id or f"at {one.attempt.group.group_id}, never opened",
            failure.message,
            "failed" if one.settled.final else "returns to the queue",
        )
        self.failures.count(failure.reason)
        record = self.store.find(trajectory_id)
        if record is not None:
            # A detached turn may still be running without a listener.
            for member in record.with_branches():
                self._abort_soon(member)
        records: list[Record] = []
        if one.settled.final:
            records = self._close_expired(one.attempt, trajectory_id, record, failure)
        else:
            self._forget_attempts([trajectory_id])
        return [*records, leases_expired(one.trajectory_ids, retried=not one.settled.final)]

    def _failure(self, one: Expired) -> trajectory_pb2.Failure:
        if one.timed_out:
            limit = self.queue.leases.rules.attempt_seconds
            return Failure(
                reason=ATTEMPT_TIMEOUT,
                message=f"not closed within leases.attempt_seconds, {limit:g} s",
            )
        return Failure(
            reason=Reason.LEASE_EXPIRED, message="no call reached the trajectory in time"
        )

    def _close_expired(
        self,
        attempt: Attempt,
        trajectory_id: str,
        record: TrajectoryRecord | None,
        failure: trajectory_pb2.Failure,
    ) -> list[Record]:
        outcome = Outcome(failure=failure)
        if record is None:
            # Make up an id that cannot be in use.
            made_up = f"{attempt.group.group_id}-{attempt.sample_index}-{uuid.uuid4().hex}"
            attempt.trajectory_id = trajectory_id or made_up
            record = _unopened(attempt.trajectory_id, attempt)
            self.store.add(record, bounded=False)
        closing = [*reversed(record.open_branches()), record]
        for member in closing:
            self.store.close(member, outcome)
        return self._outcomes(closing)

    def _outcomes(self, closing: Sequence[TrajectoryRecord]) -> list[Record]:
        """The records of trajectories that were just closed."""
        records: list[Record] = []
        for member in closing:
            if member.turn is None:
                # It was opened only to be closed.
                records.append(trajectory_opened(member))
            mark = self.store.closed_mark(member.trajectory_id)
            assert mark is not None
            records.append(trajectory_closed(member.trajectory_id, mark, member.outcome))
        return records


def _unopened(trajectory_id: str, attempt: Attempt) -> TrajectoryRecord:
    """A leased trajectory that was never opened, to be closed at once."""
    return TrajectoryRecord(
        trajectory_id,
        PromptKind.TOKENS,
        TurnSampling(),
        group_id=attempt.group.group_id,
        sample_index=attempt.sample_index,
    )


async def _written(appending: Awaitable[object]) -> None:
    await appending


def check_outcome(outcome: trajectory_pb2.Outcome) -> None:
    """Raises FIELD_INVALID if it has no result or a number is not finite, and MESSAGE_TOO_LARGE if it
    would leave too little of a message to its group."""
    if (size := outcome.ByteSize()) > MAX_OUTCOME_BYTES:
        metadata = outcome.metadata.ByteSize()
        raise DomainError(
            Reason.MESSAGE_TOO_LARGE,
            f"the outcome has {size} bytes, {metadata} of them metadata; "
            f"at most {MAX_OUTCOME_BYTES} are allowed",
            {"byte_count": size, "metadata_byte_count": metadata, "limit": MAX_OUTCOME_BYTES},
        )
    check_depth("outcome.metadata", outcome.metadata)
    kind = outcome.WhichOneof("result")
    if kind is None:
        raise FieldInvalid("outcome.result", "must be a reward or a failure")
    if kind == "reward" and not math.isfinite(outcome.reward):
        raise FieldInvalid("outcome.reward", "must be finite", outcome.reward)
    if kind == "failure" and not outcome.failure.reason:
        raise FieldInvalid("outcome.failure.reason", "must name a reason")
    if kind == "failure" and len(reason := outcome.failure.reason) > MAX_ID_LENGTH:
        raise FieldInvalid(
            "outcome.failure.reason", f"must have at most {MAX_ID_LENGTH} characters", reason
        )
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            raise FieldInvalid(f"outcome.metrics[{name}]", "must be finite", value)
    for index, value in enumerate(outcome.turn_rewards):
        if not math.isfinite(value):
            raise FieldInvalid(f"outcome.turn_rewards[{index}]", "must be finite", value)
