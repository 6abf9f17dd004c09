"""Groups that leave without being trained, and the notices that tell the trainer why."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.server.core.errors import DomainError
from penstock.server.groups.admission import Admission
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.recovery import MAX_NOTICES
from penstock.server.groups.staleness_gate import LatePolicy
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Record
from penstock.server.journal.records import group_dropped, run_replaced, task_accepted
from penstock.server.rpc.trainer.session import Session
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.v1 import trainer_service_pb2
from penstock.wire.messages import ExchangeResponse, Notice

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Drops:
    """Counts each drop by its reason. Methods return the records for the journal."""

    admission: Admission
    queue: TaskQueue
    buffer: GroupBuffer
    store: TrajectoryStore
    turns: TurnRunner
    drop_completed: Callable[[], list[str]]
    """Drops complete groups that are not in the buffer yet, and returns their ids."""
    _notices: deque[trainer_service_pb2.Notice] = field(
        default_factory=lambda: deque(maxlen=MAX_NOTICES)
    )
    """Notices that no stream has taken yet. If a stream is lost, they go to the next."""

    def late(self, group_id: str) -> list[Record]:
        group = self.buffer.drop(group_id)
        contract = self.admission.contract
        assert contract is not None
        requeued = contract.late_policy is LatePolicy.REQUEUE and group.task is not None
        message = (
            f"group {group_id} has tokens of version {group.oldest_version}; "
            f"the trainer is at version {self.admission.trainer_version}"
        )
        reason = "GROUP_REQUEUED" if requeued else "GROUP_DROPPED"
        return self._drop(group, reason, message, requeue=requeued)

    def unreadable(self, group: BufferedGroup, error: DomainError) -> list[Record]:
        """Drop a group that cannot be read back, and queue its task again."""
        logger.error("dropping unreadable group %s: %s", group.group_id, error.message)
        self.buffer.drop(group.group_id)
        # Frees its slot in the batch for another group.
        self.admission.release(group.group_id)
        return self._drop(group, error.reason, error.message, requeue=True)

    def _drop(
        self, group: BufferedGroup, reason: str, message: str, *, requeue: bool
    ) -> list[Record]:
        self.buffer.drops[reason] += 1
        notice = self._note(reason, message, group.group_id, group.task_id)
        records = [group_dropped(notice)]
        if requeue and group.task is not None:
            self.queue.pending.resubmit(group.task)
            records.append(task_accepted(group.task, first=True))
        return records

    def run(self, run_id: str, what: str) -> list[Record]:
        """Drop what the previous run left: another run begins, or the same one starts from scratch."""
        reason = "RUN_REPLACED"
        buffered = self.buffer.drop_all()
        # Last, because it forgets the ids of all tasks, including those of the buffered groups.
        tasks, groups = self.queue.drop_all()
        dropped = [group.group_id for group in (*groups, *buffered)]
        dropped += self.drop_completed()
        for group_id in dropped:
            self.admission.release(group_id)
            self.buffer.drops[reason] += 1
        # From now on, calls on open trajectories of those groups get LEASE_EXPIRED. Abort their turns,
        # because their tokens would not be read.
        gone = set(dropped)
        for record in self.store.records():
            if record.group_id in gone:
                if record.turn is not None and record.turn.in_flight:
                    self.turns.abort_soon(record.turn)
                self.store.forget(record.trajectory_id)
        # Older notices are about groups that are gone.
        self._notices.clear()
        self._note(reason, f"run {run_id} {what}: {tasks} tasks, {len(dropped)} groups dropped")
        return [run_replaced(run_id)]

    def _note(
        self, reason: str, message: str, group_id: str = "", task_id: str = ""
    ) -> trainer_service_pb2.Notice:
        notice = Notice(reason=reason, message=message, group_id=group_id, task_id=task_id)
        self._notices.append(notice)
        return notice

    @property
    def notices(self) -> list[trainer_service_pb2.Notice]:
        """Those of groups that no stream has taken yet."""
        return [*self._notices, *self.buffer.unread_drops]

    def restore(self, notices: Iterable[trainer_service_pb2.Notice]) -> None:
        """Take over the notices of a previous server. It may have sent some of them: a trainer ignores
        those of tasks that it does not wait for."""
        self._notices.extend(notices)

    async def tell(self, session: Session) -> bool:
        """Send the notices that wait. Return whether there were any."""
        # The buffer drops groups that no message can carry.
        self._notices.extend(self.buffer.read_drops())
        if not self._notices:
            return False
        while self._notices:
            notice = self._notices[0]
            await session.send(ExchangeResponse(notice=notice))
            # Another stream may have begun meanwhile and sent it.
            if self._notices and self._notices[0] is notice:
                self._notices.popleft()
        return True
