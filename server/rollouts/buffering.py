"""Completed groups, on their way into the buffer.

A group is assembled when its last attempt is settled, and recorded with that close in one append. Once the
append is durable it is buffered, unless its run was replaced meanwhile. `groups.buffer` has its whole
life.

A group too large for one message is dropped; the server keeps only its count and an event for the trainer.
It takes many long siblings, because `complete` bounds what an agent adds to a trajectory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.common.failpoints import hit
from penstock.server.core.memory_budget import MemoryBudget
from penstock.server.groups.admission import Admission
from penstock.server.groups.attempts import Group
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Appended, Journal, Record, Stored
from penstock.server.journal.records import group_dropped
from penstock.server.turns import encoding
from penstock.server.turns.store import TrajectoryStore
from penstock.server.turns.trajectory import TrajectoryRecord
from penstock.v1 import trainer_service_pb2, trajectory_pb2
from penstock.wire.channel import MAX_MESSAGE_BYTES
from penstock.wire.messages import Notice

logger = logging.getLogger(__name__)

# A delivery consists of the group, two integers, and the tags and lengths of the two messages around them.
MAX_GROUP_BYTES = MAX_MESSAGE_BYTES - 64
GROUP_TOO_LARGE = "GROUP_TOO_LARGE"


@dataclass(eq=False)
class CompletedGroups:
    store: TrajectoryStore
    queue: TaskQueue
    buffer: GroupBuffer
    admission: Admission
    journal: Journal
    budget: MemoryBudget
    _unbuffered: set[str] = field(default_factory=set[str])
    _dropping: dict[str, trainer_service_pb2.Notice] = field(
        default_factory=dict[str, trainer_service_pb2.Notice]
    )
    """Notices of groups whose drop is being written, by group."""

    @property
    def drops_under_way(self) -> Iterable[trainer_service_pb2.Notice]:
        """For a snapshot that is taken between a drop's record and its notice."""
        return self._dropping.values()

    def complete(self, group: Group, records: list[Record]) -> Coroutine[Any, Any, None]:
        """Begin to record a group whose last attempt is settled, after these records of its close. The
        returned coroutine waits for the append, and buffers or drops the group."""
        encoded, completed = self._assemble(group)
        self._unbuffered.add(completed.group_id)
        hit("closing.before_append")
        if completed.byte_count > MAX_GROUP_BYTES:
            notice = self._dropping[completed.group_id] = _too_large(completed)
            appending = self.journal.append([*records, group_dropped(notice)])
            return self._drop_too_large(completed, notice, appending)
        appended: list[Appended] = [*records]
        if self.journal.on_disk:
            appended.append(
                encoding.group_finished(
                    encoded,
                    completed.task,
                    completed.admitted_version,
                    has_policy_tokens=completed.oldest_version is not None,
                )
            )
        appending = self.journal.append(appended, hold_last=True)
        return self._buffer_durable(completed, encoded, appending)

    async def _buffer_durable(
        self,
        completed: BufferedGroup,
        encoded: encoding.EncodedGroup,
        appending: Awaitable[list[Stored]],
    ) -> None:
        """Buffer a group once it is durable, unless its run was replaced meanwhile."""
        stored = await appending
        hit("closing.before_offer")
        if self._is_wanted(completed):
            if stored:
                completed.stored, completed.encoded = stored[-1], None
                if self.budget.may_keep(encoded.byte_count):
                    self.buffer.kept.keep(stored[-1], encoded)
            if completed.training:
                self.admission.complete(completed.group_id, completed.oldest_version)
            self.buffer.add(completed)
        elif stored:
            self.journal.release(stored[-1])
            # This record comes after the group's, even after a compaction: held records are copied.
            notice = Notice(group_id=completed.group_id, reason="RUN_REPLACED")
            self.journal.append([group_dropped(notice)])
        self.queue.release(completed.group_id)

    def _is_wanted(self, completed: BufferedGroup) -> bool:
        wanted = completed.group_id in self._unbuffered
        self._unbuffered.discard(completed.group_id)
        return wanted

    def drop_unbuffered(self) -> list[str]:
        """Drop the groups that are not buffered yet, because their run was replaced. Return their ids."""
        dropped = list(self._unbuffered)
        self._unbuffered.clear()
        return dropped

    def _assemble(self, group: Group) -> tuple[encoding.EncodedGroup, BufferedGroup]:
        records: list[TrajectoryRecord] = []
        versions: list[int] = []
        for attempt in group.attempts:
            record = self.store.find(attempt.trajectory_id)
            if record is None:
                # Never opened: a sibling in a group the caller formed itself ran out of time.
                continue
            for member in record.with_branches():
                records.append(member)
                versions += member.policy_versions()
                self.store.forget(member.trajectory_id)
        task_id = group.task.task_id if group.task is not None else ""
        span = range(min(versions, default=0), max(versions, default=0) + 1)
        encoded = encoding.encode_group(group.group_id, task_id, group.purpose, records, span)
        completed = BufferedGroup(
            group.group_id,
            task_id,
            group.purpose,
            None,
            tuple(record.trajectory_id for record in records),
            group.task,
            group.admitted_version,
            min(versions, default=None),
            encoded.byte_count,
            encoded,
        )
        return encoded, completed

    async def _drop_too_large(
        self,
        completed: BufferedGroup,
        notice: trainer_service_pb2.Notice,
        appending: Awaitable[list[Stored]],
    ) -> None:
        try:
            await appending
        finally:
            del self._dropping[completed.group_id]
        if self._is_wanted(completed):
            logger.error("%s: dropped", notice.message)
            self.admission.release(completed.group_id)
            self.queue.pending.known.leave(completed.task_id)
            self.buffer.drop_unbuffered(notice)
        self.queue.release(completed.group_id)

    async def find_trajectory(self, trajectory_id: str) -> trajectory_pb2.Trajectory | None:
        """Return a closed trajectory of a completed group, as long as the buffer holds the group."""
        mark = self.store.closed_mark(trajectory_id)
        held = self.buffer.find(mark.group_id) if mark is not None and mark.group_id else None
        if held is None or trajectory_id not in held.trajectory_ids:
            return None
        group = encoding.decode_group(await self.buffer.read(held))
        return next(t for t in group.trajectories if t.trajectory_id == trajectory_id)


def _too_large(completed: BufferedGroup) -> trainer_service_pb2.Notice:
    return Notice(
        reason=GROUP_TOO_LARGE,
        message=f"group {completed.group_id} of task {completed.task_id!r} has "
        f"{completed.byte_count} bytes; a message holds {MAX_GROUP_BYTES} of a group",
        group_id=completed.group_id,
        task_id=completed.task_id,
    )
