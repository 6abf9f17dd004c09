"""Closes trajectories: records outcomes, requeues retries, and completes groups with the last sibling.

Order of events of a close: checked -> closed in memory -> its attempt settled -> (last sibling:
group completed) -> one append begun -> append durable -> group buffered -> answered.
A repeated close with the same outcome gets the same answer; a different outcome is refused. Expired
leases close the same way, with one append for all that are due in a group.

Nothing is awaited between the first change in memory and the beginning of the append. So a
compaction or the next close always finds a group in exactly one place. After a restart the server
finds either the whole close or nothing that was answered. Turns still in flight, such as those of a
lost race or those without a listener, are aborted concurrently. Their trajectories are already
forgotten, or keep what the policy had written by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.server.core.aio import OwnTasks
from penstock.server.core.errors import MAX_ID_LENGTH, DomainError, FieldInvalid
from penstock.server.core.memory_budget import MemoryBudget
from penstock.server.core.reason_counts import ReasonCounts
from penstock.server.groups.attempts import Attempt, Group, Settled, group_changed
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal, Record
from penstock.server.journal.records import (
    leases_expired,
    trajectories_forgotten,
    trajectory_closed,
)
from penstock.server.rollouts.buffering import CompletedGroups
from penstock.server.rollouts.unleased import STOOD_STILL_SECONDS, OwnTrajectories
from penstock.server.turns.encoding import (
    encode_early,
)
from penstock.server.turns.records import trajectory_opened
from penstock.server.turns.requests import check_depth
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore, outcome_digest
from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord
from penstock.server.turns.turn import TurnSampling
from penstock.v1 import trajectory_pb2
from penstock.wire.codec import LOGPROB, TOKEN, twin
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

Outcome = twin(trajectory_pb2.Outcome)
Failure = twin(trajectory_pb2.Failure)

BYTES_PER_TOKEN = TOKEN.itemsize + LOGPROB.itemsize
# Per trajectory in the journal, in addition to its tokens and its outcome.
RECORD_BYTES = 4096
MAX_OUTCOME_BYTES = 1 << 20
_Expired = tuple[Attempt, list[str], Settled]


@dataclass(frozen=True, slots=True)
class Closed:
    group_completed: bool = False
    retried: bool = False
    """Whether the attempt failed and will be made again."""


class Closing:
    def __init__(
        self,
        store: TrajectoryStore,
        queue: TaskQueue,
        completed: CompletedGroups,
        turns: TurnRunner,
        journal: Journal,
        budget: MemoryBudget,
        own: OwnTrajectories,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._queue = queue
        self._completed = completed
        self._turns = turns
        self._journal = journal
        self._budget = budget
        self._own = own
        self._clock = clock
        self.failures = ReasonCounts()
        """Failed attempts by reason, including retried ones."""
        self.left_out = 0
        """Trajectories left out of their completed groups."""
        self._tasks = OwnTasks()

    async def complete(self, trajectory_id: str, outcome: trajectory_pb2.Outcome) -> Closed:
        """Raises TRAJECTORY_UNKNOWN, LEASE_EXPIRED, TURN_IN_FLIGHT, OUTCOME_DIFFERS, MESSAGE_TOO_LARGE."""
        check_outcome(outcome)
        attempt = self._queue.attempt_of(trajectory_id)
        mark = self._store.closed_mark(trajectory_id)
        if mark is not None:
            if mark.outcome_digest != outcome_digest(outcome):
                raise DomainError(
                    Reason.OUTCOME_DIFFERS,
                    f"trajectory {trajectory_id} was closed with another outcome",
                    {"trajectory_id": trajectory_id},
                )
            # A repeated close may have to wait for the first one's append.
            await self._journal.append(())
            return Closed(mark.group_completed, mark.retried)
        record = self._store.find(trajectory_id)
        if record is None:
            if attempt is None:
                self._store.get(trajectory_id)
            # Leased but never opened: the agent failed or reported a reward before the first turn.
            record = TrajectoryRecord(
                trajectory_id,
                PromptKind.TOKENS,
                TurnSampling(),
                group_id=attempt.group.group_id if attempt else "",
                sample_index=attempt.sample_index if attempt else 0,
            )
            self._store.add(record, bounded=False)
        closing = [*reversed(record.open_branches()), record]
        for member in closing:
            if member.turn is not None and member.turn.in_flight:
                raise DomainError(
                    Reason.TURN_IN_FLIGHT,
                    f"a turn of {member.trajectory_id} is in flight",
                    {"trajectory_id": member.trajectory_id},
                )
        return await self._close(closing, attempt, outcome)

    async def _close(
        self,
        closing: list[TrajectoryRecord],
        attempt: Attempt | None,
        outcome: trajectory_pb2.Outcome,
    ) -> Closed:
        record = closing[-1]
        self._check_room(record, attempt, outcome)
        failed = outcome.HasField("failure")
        if failed:
            self.failures.count(outcome.failure.reason)
        for member in closing:
            self._store.close(member, outcome)
        if attempt is None:
            forgotten: list[Record] = []
            if not record.parent_trajectory_id:
                pushed_out = self._own.closed(record)
                forgotten = [trajectories_forgotten(pushed_out)] if pushed_out else []
            await self._journal.append([*_outcomes(closing, outcome), *forgotten])
            return Closed()
        settled = self._queue.settle(attempt, failed=failed)
        # Branches that were closed earlier are forgotten with it.
        gone = [] if settled.final else record.with_branches()
        for member in gone:
            self._store.forget(member.trajectory_id)
        closed = Closed(settled.completed is not None, retried=not settled.final)
        self._store.note_settled(
            record, group_completed=closed.group_completed, retried=closed.retried
        )
        records = _outcomes(closing, outcome, closed)
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
        self,
        record: TrajectoryRecord,
        attempt: Attempt | None,
        outcome: trajectory_pb2.Outcome,
    ) -> None:
        """Checks the room for the outcome, and for the group in the journal in case this is its last
        attempt."""
        members = [record]
        if attempt is not None:
            found = (self._store.find(a.trajectory_id) for a in attempt.group.attempts)
            members += [member for member in found if member is not None]
        branches = [branch for member in members for branch in member.with_branches()]
        tokens = sum(branch.token_count - branch.parent_token_count for branch in branches)
        outcome_bytes = outcome.ByteSize()
        self._budget.check(outcome_bytes)
        self._journal.check_room(
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
                records += self._leave_out(one)
        completed = settled[-1].completed
        if completed is None:
            return _written(self._journal.begin_append([*records, group_changed(group)]))
        return self._completed.complete(completed, records)

    def _leave_out(self, settled: Settled) -> list[Record]:
        forgotten = self._forget_attempts(settled.left_out)
        self.left_out += len(settled.left_out)
        return [
            leases_expired(settled.taken_back, retried=False),
            trajectories_forgotten(forgotten),
        ]

    def _abort_soon(self, record: TrajectoryRecord) -> None:
        if record.turn is not None and record.turn.in_flight:
            self._turns.abort_soon(record.turn)

    def _forget_attempts(self, trajectory_ids: Iterable[str]) -> list[str]:
        """Also forgets branches and aborts turns. Returns the ids forgotten."""
        found = (self._store.find(trajectory_id) for trajectory_id in trajectory_ids)
        members = [
            member for record in found if record is not None for member in record.with_branches()
        ]
        for member in members:
            self._abort_soon(member)
            self._store.forget(member.trajectory_id)
        return [member.trajectory_id for member in members]

    async def wait_durable(self) -> None:
        await self._tasks.wait()

    async def expire_leases(self) -> None:
        """Runs as long as the server. The attempt of an expired lease returns to the queue, or fails if no
        retry is left."""
        deadline: float | None = None
        while True:
            if deadline is not None and self._clock() - deadline > STOOD_STILL_SECONDS:
                self._queue.leases.forgive(self._queue.groups)
            expired: dict[str, list[_Expired]] = {}
            for attempt, lost, settled in self._queue.expire():
                expired.setdefault(attempt.group.group_id, []).append((attempt, lost, settled))
            # When a worker dies, thousands of leases expire together. Their groups share the wait
            # for the journal.
            for settling in [self._settle_expired(group) for group in expired.values()]:
                await asyncio.shield(settling)
            deadline = self._queue.next_deadline()
            timeout = None if deadline is None else max(0.0, deadline - self._clock())
            # Not in a separate task: it would start waiting later and miss a deadline set before that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._queue.deadline_sooner.wait()

    def _settle_expired(self, expired: Sequence[_Expired]) -> asyncio.Task[None]:
        """In order; the last attempt may complete the group."""
        group = expired[0][0].group
        records = [record for one in expired for record in self._expired(*one)]
        settling = self._settle(group, [settled for _, _, settled in expired], records)
        return self._tasks.start(settling, f"expiry in {group.group_id}")

    def _expired(self, attempt: Attempt, lost: Sequence[str], settled: Settled) -> list[Record]:
        """`lost` holds the ids of the trajectory and its branches. It is empty if the trajectory was
        never opened."""
        trajectory_id = lost[0] if lost else ""
        logger.warning(
            "lease of %s expired; %s",
            trajectory_id or f"a sibling of {attempt.group.group_id}",
            "the attempt failed" if settled.final else "the attempt returns to the queue",
        )
        self.failures[Reason.LEASE_EXPIRED] += 1
        record = self._store.find(trajectory_id)
        if record is not None:
            # A detached turn may still be running without a listener.
            for member in record.with_branches():
                self._abort_soon(member)
        records: list[Record] = []
        if settled.final:
            records = self._close_expired(attempt, trajectory_id, record)
        else:
            self._forget_attempts([trajectory_id])
        return [*records, leases_expired(lost, retried=not settled.final)]

    def _close_expired(
        self,
        attempt: Attempt,
        trajectory_id: str,
        record: TrajectoryRecord | None,
    ) -> list[Record]:
        outcome = Outcome(
            failure=Failure(
                reason=Reason.LEASE_EXPIRED, message="no call reached the trajectory in time"
            )
        )
        if record is None:
            # The trajectory was never opened: make up an id that cannot be in use.
            unopened = f"{attempt.group.group_id}-{attempt.sample_index}-{uuid.uuid4().hex}"
            attempt.trajectory_id = trajectory_id or unopened
            record = TrajectoryRecord(
                attempt.trajectory_id,
                PromptKind.TOKENS,
                TurnSampling(),
                group_id=attempt.group.group_id,
                sample_index=attempt.sample_index,
            )
            self._store.add(record, bounded=False)
        closing = [*reversed(record.open_branches()), record]
        for member in closing:
            self._store.close(member, outcome)
        return _outcomes(closing, outcome)


async def _written(appending: Awaitable[object]) -> None:
    await appending


def _outcomes(
    closing: Sequence[TrajectoryRecord],
    outcome: trajectory_pb2.Outcome,
    closed: Closed | None = None,
) -> list[Record]:
    """`closed` is the result for the last trajectory; the others branch from it."""
    records: list[Record] = []
    for member in closing:
        if member.turn is None:
            # It was opened only to be closed.
            records.append(trajectory_opened(member))
        own = closed if closed is not None and member is closing[-1] else Closed()
        records.append(
            trajectory_closed(
                member.trajectory_id,
                outcome,
                member.group_id,
                group_completed=own.group_completed,
                retried=own.retried,
            )
        )
    return records


def check_outcome(outcome: trajectory_pb2.Outcome) -> None:
    """Raises FIELD_INVALID if it has no result or a number is not finite, and MESSAGE_TOO_LARGE if it
    would leave too little of a message to its group."""
    if (size := outcome.ByteSize()) > MAX_OUTCOME_BYTES:
        raise DomainError(
            Reason.MESSAGE_TOO_LARGE,
            f"the outcome has {size} bytes, {outcome.metadata.ByteSize()} of them metadata; "
            f"at most {MAX_OUTCOME_BYTES} are allowed",
            {
                "byte_count": size,
                "metadata_byte_count": outcome.metadata.ByteSize(),
                "limit": MAX_OUTCOME_BYTES,
            },
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
