"""Closing trajectories: outcomes, retries, and groups put together when their last sibling is final.

Order of events of a close: checked -> closed in memory -> its attempt settled -> (last sibling: group
put together) -> appended to the journal -> the group offered to the trainer -> answered. The same outcome
again is answered like the first; another one is refused.

Of a group that no message can carry only the count is left, and a line for the trainer. It takes many long
siblings to make one: what an agent adds to a trajectory is bounded here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.server.admission import Admission
from penstock.server.attempts import Attempt, Group, Settled
from penstock.server.errors import DomainError, FieldInvalid
from penstock.server.group_buffer import BufferedGroup, DroppedGroup, GroupBuffer
from penstock.server.journal import (
    GroupDropped,
    GroupFinished,
    Journal,
    OutcomeRecorded,
    Record,
)
from penstock.server.task_queue import TaskQueue
from penstock.server.trajectory_store import (
    PromptKind,
    TrajectoryRecord,
    TrajectoryStore,
    outcome_bytes,
)
from penstock.server.turns import TurnRunner, TurnSampling
from penstock.v1 import trajectory_pb2
from penstock.wire.channel import MAX_MESSAGE_BYTES
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

TrajectoryGroup = twin(trajectory_pb2.TrajectoryGroup)
Outcome = twin(trajectory_pb2.Outcome)
Failure = twin(trajectory_pb2.Failure)

KEPT_UNGROUPED = 1_000
MAX_OUTCOME_BYTES = 1 << 20
# A delivery is the group, two integers and the tags and lengths of two messages around them.
MAX_GROUP_BYTES = MAX_MESSAGE_BYTES - 64
GROUP_TOO_LARGE = "GROUP_TOO_LARGE"


@dataclass(frozen=True, slots=True)
class Closed:
    """What a close came to."""

    group_completed: bool = False
    """Whether it was the group's last."""
    retried: bool = False
    """Whether the attempt failed and will be made again."""


class Closing:
    """Closes what agents judged, and what leases gave back."""

    def __init__(
        self,
        store: TrajectoryStore,
        queue: TaskQueue,
        buffer: GroupBuffer,
        admission: Admission,
        turns: TurnRunner,
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._queue = queue
        self._buffer = buffer
        self._admission = admission
        self._turns = turns
        self._journal = journal
        self._clock = clock
        self._ungrouped: OrderedDict[str, None] = OrderedDict()
        self.failures: Counter[str] = Counter()
        """Failed attempts by reason, retried ones included."""
        # Records are taken from the store here, and waiting groups from the queue: both may ask for them.
        store.finished = self._find_finished
        queue.buffered_evaluations = lambda: buffer.waiting_evaluation_count

    async def complete(self, trajectory_id: str, outcome: trajectory_pb2.Outcome) -> Closed:
        """Closes a trajectory with its outcome.

        Raises TRAJECTORY_UNKNOWN, LEASE_EXPIRED, TURN_IN_FLIGHT, OUTCOME_DIFFERS, MESSAGE_TOO_LARGE.
        """
        check_outcome(outcome)
        attempt = self._queue.attempt_of(trajectory_id)
        mark = self._store.closed_mark(trajectory_id)
        if mark is not None:
            if mark.outcome != outcome_bytes(outcome):
                raise DomainError(
                    Reason.OUTCOME_DIFFERS,
                    f"trajectory {trajectory_id} was closed with another outcome",
                    {"trajectory_id": trajectory_id},
                )
            # Whoever repeats a close may have to wait for the first one's append.
            await self._journal.append([])
            return Closed(mark.group_completed, mark.retried)
        record = self._store.find(trajectory_id)
        if record is None:
            if attempt is None:
                self._store.get(trajectory_id)
            # Leased and never opened: the agent failed, or judged, before the first turn.
            record = TrajectoryRecord(
                trajectory_id,
                PromptKind.TOKENS,
                TurnSampling(),
                group_id=attempt.group.group_id if attempt else "",
                sample_index=attempt.sample_index if attempt else 0,
            )
            self._store.add(record, bounded=False)
        closing = [*record.open_branches(), record]
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
        failed = outcome.HasField("failure")
        if failed:
            self.failures[outcome.failure.reason] += 1
        for member in closing:
            self._store.close(member, outcome)
        records: list[Record] = [
            OutcomeRecorded(
                member.trajectory_id, member.group_id, member.message().SerializeToString()
            )
            for member in closing
        ]
        if attempt is None:
            if not record.parent_trajectory_id:
                self._keep_ungrouped(record)
            await self._journal.append(records)
            return Closed()
        settled = self._queue.settle(attempt, failed=failed)
        if not settled.final:
            for member in closing:
                self._store.forget(member.trajectory_id)
        completed = self._put_together(settled, records)
        closed = Closed(completed is not None, retried=not settled.final)
        self._store.remember(
            record,
            outcome,
            group_completed=closed.group_completed,
            retried=closed.retried,
        )
        await self._journal.append(records)
        if completed is not None:
            self._offer(completed)
        return closed

    def _put_together(self, settled: Settled, records: list[Record]) -> BufferedGroup | None:
        for trajectory_id in settled.discarded:
            self._forget_attempt(trajectory_id)
        group = settled.completed
        if group is None:
            return None
        buffered = self._assemble(group)
        if buffered.byte_count > MAX_GROUP_BYTES:
            records.append(GroupDropped(group.group_id, GROUP_TOO_LARGE))
        else:
            records.append(
                GroupFinished(
                    group.group_id, buffered.group.task_id, buffered.group.SerializeToString()
                )
            )
        return buffered

    def _assemble(self, group: Group) -> BufferedGroup:
        trajectories: list[trajectory_pb2.Trajectory] = []
        versions: list[int] = []
        for attempt in group.attempts:
            record = self._store.find(attempt.trajectory_id)
            if record is None:
                # Never opened: a caller's own group whose sibling ran out of time.
                continue
            for member in _with_branches(record):
                trajectories.append(member.message())
                versions += member.policy_versions()
                self._store.forget(member.trajectory_id)
        message = TrajectoryGroup(
            group_id=group.group_id,
            task_id=group.task.task_id if group.task is not None else "",
            trajectories=trajectories,
            purpose=group.purpose,
            oldest_weight_version=min(versions, default=0),
            newest_weight_version=max(versions, default=0),
        )
        return BufferedGroup(
            message,
            group.task,
            group.admitted_version,
            min(versions, default=None),
            message.ByteSize(),
        )

    def _offer(self, buffered: BufferedGroup) -> None:
        if buffered.byte_count > MAX_GROUP_BYTES:
            self._drop_too_large(buffered)
        else:
            if buffered.training:
                self._admission.finish(buffered.group_id, buffered.oldest_version)
            self._buffer.add(buffered)
        self._queue.handed_over(buffered.group_id)

    def _drop_too_large(self, buffered: BufferedGroup) -> None:
        message = (
            f"group {buffered.group_id} of task {buffered.group.task_id!r} has "
            f"{buffered.byte_count} bytes; a message holds {MAX_GROUP_BYTES} of a group"
        )
        logger.error("%s: dropped", message)
        self._admission.vacate(buffered.group_id)
        self._buffer.drop(DroppedGroup(buffered.group_id, GROUP_TOO_LARGE, message))

    def _find_finished(self, group_id: str, trajectory_id: str) -> trajectory_pb2.Trajectory | None:
        held = self._buffer.find(group_id)
        found = held.group.trajectories if held is not None else ()
        return next((t for t in found if t.trajectory_id == trajectory_id), None)

    def _forget_attempt(self, trajectory_id: str) -> None:
        record = self._store.find(trajectory_id)
        if record is not None:
            for member in _with_branches(record):
                self._store.forget(member.trajectory_id)

    def _keep_ungrouped(self, record: TrajectoryRecord) -> None:
        """A closed trajectory of its own stays readable until newer ones push it out."""
        self._ungrouped[record.trajectory_id] = None
        while len(self._ungrouped) > KEPT_UNGROUPED:
            self._forget_attempt(self._ungrouped.popitem(last=False)[0])

    async def give_back_expired(self) -> None:
        """Consumes leases that ran out; waits for the next deadline; produces waiting attempts, or
        failures where no retry is left. Runs for as long as the server does.
        """
        while True:
            for attempt, trajectory_id, settled in self._queue.expire():
                await self._expired(attempt, trajectory_id, settled)
            deadline = self._queue.next_deadline()
            sooner = asyncio.ensure_future(self._queue.deadline_sooner.wait())
            timeout = None if deadline is None else max(0.0, deadline - self._clock())
            try:
                await asyncio.wait([sooner], timeout=timeout)
            finally:
                sooner.cancel()

    async def _expired(self, attempt: Attempt, trajectory_id: str, settled: Settled) -> None:
        logger.warning(
            "lease of %s ran out; %s",
            trajectory_id or f"a sibling of {attempt.group.group_id}",
            "it failed" if settled.final else "its attempt goes back to the queue",
        )
        self.failures[Reason.LEASE_EXPIRED] += 1
        record = self._store.find(trajectory_id)
        if record is not None:
            # A detached turn may still be running for nobody.
            members = _with_branches(record)
            await self._turns.abort([m.turn for m in members if m.turn is not None])
        records: list[Record] = []
        if settled.final:
            self._close_expired(attempt, trajectory_id, record, records)
        else:
            self._forget_attempt(trajectory_id)
        completed = self._put_together(settled, records)
        if records:
            await self._journal.append(records)
        if completed is not None:
            self._offer(completed)

    def _close_expired(
        self,
        attempt: Attempt,
        trajectory_id: str,
        record: TrajectoryRecord | None,
        records: list[Record],
    ) -> None:
        outcome = Outcome(
            failure=Failure(
                reason=Reason.LEASE_EXPIRED, message="no call reached the trajectory in time"
            )
        )
        if record is None:
            attempt.trajectory_id = (
                trajectory_id or f"{attempt.group.group_id}-{attempt.sample_index}-unopened"
            )
            record = TrajectoryRecord(
                attempt.trajectory_id,
                PromptKind.TOKENS,
                TurnSampling(),
                group_id=attempt.group.group_id,
                sample_index=attempt.sample_index,
            )
            self._store.add(record, bounded=False)
        for member in (*record.open_branches(), record):
            self._store.close(member, outcome)
            records.append(
                OutcomeRecorded(
                    member.trajectory_id, member.group_id, member.message().SerializeToString()
                )
            )


def _with_branches(record: TrajectoryRecord) -> list[TrajectoryRecord]:
    members = [record]
    for child in record.children:
        members += _with_branches(child)
    return members


def check_outcome(outcome: trajectory_pb2.Outcome) -> None:
    """Raises FIELD_INVALID for an outcome without a result, or with numbers that are not finite,
    MESSAGE_TOO_LARGE for one that would crowd its group out of a message.
    """
    if (size := outcome.ByteSize()) > MAX_OUTCOME_BYTES:
        raise DomainError(
            Reason.MESSAGE_TOO_LARGE,
            f"the outcome has {size} bytes, its metadata {outcome.metadata.ByteSize()} of them; "
            f"{MAX_OUTCOME_BYTES} are the most",
            {
                "byte_count": size,
                "metadata_byte_count": outcome.metadata.ByteSize(),
                "limit": MAX_OUTCOME_BYTES,
            },
        )
    kind = outcome.WhichOneof("result")
    if kind is None:
        raise FieldInvalid("outcome.result", "must be a reward or a failure")
    if kind == "reward" and not math.isfinite(outcome.reward):
        raise FieldInvalid("outcome.reward", "must be finite", outcome.reward)
    if kind == "failure" and not outcome.failure.reason:
        raise FieldInvalid("outcome.failure.reason", "must name a reason")
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            raise FieldInvalid(f"outcome.metrics[{name}]", "must be finite", value)
    for index, value in enumerate(outcome.turn_rewards):
        if not math.isfinite(value):
            raise FieldInvalid(f"outcome.turn_rewards[{index}]", "must be finite", value)
