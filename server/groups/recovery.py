"""Rebuilds a server's state from its journal, and turns a server's state into records for a snapshot.

Every record describes the new state of one thing. So after all records have been read, the state is that
of the last server: everything it had acknowledged, and at most a little more. Compaction may have removed
the thing that a record is about; such a record is ignored. After a start:

    a waiting task             waits
    a group under way          continues; the holders of its leases must call within the grace period
    an open trajectory         is open up to its last record; a turn that was cut off is ABORTED
    a completed group          waits, is delivered again, or is kept until its step is final
    an outcome                 gets the same answer when it is repeated
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.server.groups.attempts import Attempt, Group, group_changed, recorded_state
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal import records
from penstock.server.journal.protocol import (
    Deferred,
    Journal,
    JournalUnreadable,
    Record,
    SnapshotItem,
    Stored,
)
from penstock.server.turns.records import (
    apply_turn,
    open_record,
    trajectory_closed,
    trajectory_opened,
    whole_turn,
)
from penstock.server.turns.store import ClosedMark, TrajectoryStore, outcome_digest
from penstock.server.turns.trajectory import TrajectoryRecord
from penstock.v1 import journal_pb2, task_service_pb2, trainer_service_pb2
from penstock.wire.messages import Notice

MAX_NOTICES = 1_000


@dataclass(eq=False)
class Recovered:
    starts: int = 0
    """Number of servers that have written to the journal."""
    run_id: str = ""
    trainer_epoch: int = 0
    start_id: str = ""
    weight_version: int = 0
    """The last active version, even if only its effects were recorded and not the switch itself."""
    tasks: dict[str, task_service_pb2.Task] = field(
        default_factory=dict[str, task_service_pb2.Task]
    )
    """Waiting tasks and the tasks of groups under way, by id."""
    pending: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    """In order."""
    notices: deque[trainer_service_pb2.Notice] = field(
        default_factory=lambda: deque[trainer_service_pb2.Notice](maxlen=MAX_NOTICES)
    )
    """Of dropped groups, for the trainer. Some may have been sent."""
    known: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    """Tasks that must not be accepted again, in the order in which they ended."""
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    """Groups under way, by id."""
    finished: dict[str, BufferedGroup] = field(default_factory=dict[str, BufferedGroup])
    """Completed groups that the journal still holds, by id; its records say *finished*."""
    trajectories: dict[str, TrajectoryRecord] = field(default_factory=dict[str, TrajectoryRecord])
    """Open ones, and closed ones whose group is not complete."""
    closed: OrderedDict[str, ClosedMark] = field(default_factory=OrderedDict[str, ClosedMark])
    expired: dict[str, bool] = field(default_factory=dict[str, bool])
    """Trajectories whose lease expired, and whether their attempt is made again."""
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    """Ids of groups that are no longer under way."""

    def apply(self, record: Record, stored: Stored) -> None:
        """Raises ValueError if the record contradicts earlier ones."""
        kind = record.WhichOneof("record")
        if kind == "server_started":
            self.starts = record.server_started.start
        elif kind == "session_began":
            self._session(record.session_began)
        elif kind == "weights_activated":
            self.weight_version = record.weights_activated.weight_version
        elif kind == "task_accepted":
            self._task(record.task_accepted)
        elif kind == "tasks_known":
            self.known.update(dict.fromkeys(record.tasks_known.task_ids))
        elif kind == "groups_ended":
            self.ended.update(dict.fromkeys(record.groups_ended.group_ids))
        elif kind == "group_changed":
            self._group(record.group_changed)
        elif kind == "trajectory_opened":
            opened = record.trajectory_opened
            if opened.trajectory_id not in self.trajectories:
                parent = self.trajectories.get(opened.parent_trajectory_id)
                # A branch whose parent is gone lacks the shared prefix, and is gone as well.
                if parent is not None or not opened.parent_token_count:
                    self.trajectories[opened.trajectory_id] = open_record(opened, parent)
        elif kind == "turn_changed":
            changed = record.turn_changed
            self._saw(*(segment.weight_version for segment in changed.segments))
            if (found := self.trajectories.get(changed.trajectory_id)) is not None:
                apply_turn(found, changed, stored)
        elif kind == "trajectory_closed":
            self._closed(record.trajectory_closed)
        elif kind == "trajectories_forgotten":
            for trajectory_id in record.trajectories_forgotten.trajectory_ids:
                self.trajectories.pop(trajectory_id, None)
        elif kind == "leases_expired":
            self._expired(record.leases_expired)
        elif kind == "group_finished":
            finished = record.group_finished
            self._finished(finished, stored, finished.group.ByteSize())
        elif kind == "group_referred":
            self._referred(record.group_referred, stored)
        elif kind == "group_dropped":
            self._forget(record.group_dropped.group_id)
            self._note(record.group_dropped)
        elif kind == "groups_receipted":
            self._receipted(record.groups_receipted)
        elif kind == "step_final":
            step = record.step_final.step
            for group in [g for g in self.finished.values() if 0 < g.step <= step]:
                self._forget(group.group_id)
        elif kind == "run_replaced":
            self._run_replaced()
        else:
            raise ValueError(f"a record of a kind that this server does not know: {kind}")

    def _saw(self, *weight_versions: int) -> None:
        # A version samples before its switch is recorded, because its weights are saved in between.
        self.weight_version = max((self.weight_version, *weight_versions))

    def _session(self, began: journal_pb2.SessionBegan) -> None:
        self.run_id = began.run_id
        self.trainer_epoch, self.start_id = began.trainer_epoch, began.start_id
        for group in self.finished.values():
            if group.step > began.resume_step:
                group.step = 0

    def _task(self, accepted: journal_pb2.TaskAccepted) -> None:
        task = accepted.task
        self.known[task.task_id] = None
        if task.task_id not in self.tasks:
            self.tasks[task.task_id] = task
        self.pending[task.task_id] = None
        if accepted.first:
            self.pending.move_to_end(task.task_id, last=False)

    def _group(self, changed: journal_pb2.GroupChanged) -> None:
        group_id = changed.group_id
        if group_id in self.ended or (changed.task_id and changed.task_id not in self.tasks):
            # The group was complete when the journal was compacted.
            return
        self._saw(changed.admitted_weight_version)
        self.pending.pop(changed.task_id, None)
        group = Group(
            group_id,
            changed.group_size,
            self.tasks[changed.task_id] if changed.task_id else None,
            changed.purpose,
            changed.admitted_weight_version,
            whole=changed.whole,
        )
        group.attempts = [
            Attempt(group, index, one.retry_count, one.trajectory_id, state=recorded_state(one))
            for index, one in enumerate(changed.attempts)
        ]
        self.groups[group_id] = group

    def _closed(self, closed: journal_pb2.TrajectoryClosed) -> None:
        trajectory_id = closed.trajectory_id
        digest = closed.outcome_sha256 or outcome_digest(closed.outcome)
        self.closed[trajectory_id] = ClosedMark(
            digest, closed.group_id, closed.group_completed, closed.retried
        )
        found = self.trajectories.get(trajectory_id)
        if found is not None and closed.HasField("outcome"):
            found.outcome = closed.outcome

    def _expired(self, expired: journal_pb2.LeasesExpired) -> None:
        for trajectory_id in expired.trajectory_ids:
            self.expired[trajectory_id] = expired.retried
            if expired.retried:
                self.trajectories.pop(trajectory_id, None)

    def _referred(self, referred: journal_pb2.GroupReferred, stored: Stored) -> None:
        turns: list[Stored] = []
        trajectories = referred.finished.group.trajectories
        for place in referred.segments:
            name = trajectories[place.trajectory].trajectory_id
            found = self.trajectories.get(name)
            position, count = place.token_position, place.token_count
            turn = None if found is None else found.recorded_at(position, count)
            if turn is None:
                raise ValueError(f"no turn of {name} holds the {count} tokens at {position}")
            turns.append(turn)
        stored.turns = tuple(turns)
        self._finished(referred.finished, stored, referred.group_byte_count)

    def _finished(
        self, finished: journal_pb2.GroupFinished, stored: Stored, byte_count: int
    ) -> None:
        group = finished.group
        group_id = group.group_id
        self._end(group_id, group.task_id)
        # Copied, so that the record with all its tokens is not kept in memory.
        task = type(finished.task).FromString(finished.task.SerializeToString())
        ids = tuple(trajectory.trajectory_id for trajectory in group.trajectories)
        for trajectory_id in ids:
            self.trajectories.pop(trajectory_id, None)
        self.finished[group_id] = BufferedGroup(
            group_id,
            group.task_id,
            group.purpose,
            stored,
            ids,
            task if finished.HasField("task") else None,
            finished.admitted_weight_version,
            group.oldest_weight_version if finished.has_policy_tokens else None,
            byte_count,
        )

    def _end(self, group_id: str, task_id: str) -> None:
        self.pending.pop(task_id, None)
        self.tasks.pop(task_id, None)
        self.groups.pop(group_id, None)
        self.ended[group_id] = None

    def _note(self, dropped: journal_pb2.GroupDropped) -> None:
        if dropped.task_id:
            self.notices.append(
                Notice(
                    reason=dropped.reason,
                    message=dropped.message,
                    group_id=dropped.group_id,
                    task_id=dropped.task_id,
                )
            )

    def _forget(self, group_id: str) -> None:
        group = self.groups.get(group_id)
        finished = self.finished.pop(group_id, None)
        task_id = ""
        if finished is not None:
            task_id = finished.task_id
        elif group is not None and group.task is not None:
            task_id = group.task.task_id
        if task_id in self.known:
            self.known.move_to_end(task_id)
        if group is not None:
            for record in [r for r in self.trajectories.values() if r.group_id == group_id]:
                del self.trajectories[record.trajectory_id]
        self._end(group_id, task_id)

    def _receipted(self, receipted: journal_pb2.GroupsReceipted) -> None:
        for group_id in receipted.group_ids:
            if not receipted.step:
                self._forget(group_id)
            elif (group := self.finished.get(group_id)) is not None:
                group.step = receipted.step

    def undo_unanswered(self) -> None:
        """Undo closes whose last record, the fate of their attempt, is missing.

        A close is one append of several records. The caller is answered only once all of them are durable,
        so an incomplete close was never acknowledged.
        """
        leased = {
            attempt.trajectory_id
            for group in self.groups.values()
            for attempt in group.attempts
            if attempt.state.leased
        }
        for root in leased & self.closed.keys():
            digest = self.closed[root].outcome_digest
            members = [r for r in self.trajectories.values() if self._root(r) == root]
            for trajectory_id in (root, *(member.trajectory_id for member in members)):
                mark = self.closed.get(trajectory_id)
                # Reopen only the branches that were closed together with the root: they share its outcome.
                if mark is not None and mark.outcome_digest == digest:
                    del self.closed[trajectory_id]
                    self.expired.pop(trajectory_id, None)
            for member in members:
                if member.trajectory_id not in self.closed:
                    member.outcome = None

    def _root(self, record: TrajectoryRecord) -> str:
        while record.parent_trajectory_id in self.trajectories:
            record = self.trajectories[record.parent_trajectory_id]
        return record.trajectory_id

    def _run_replaced(self) -> None:
        attempts = [a for group in self.groups.values() for a in group.attempts if a.state.leased]
        leased = {attempt.trajectory_id for attempt in attempts}
        self.expired.update(dict.fromkeys(leased, False))
        for record in list(self.trajectories.values()):
            if self._root(record) in leased:
                self.expired[record.trajectory_id] = False
        gone = {*self.groups, *self.finished}
        for record in list(self.trajectories.values()):
            if record.group_id in gone:
                del self.trajectories[record.trajectory_id]
        for collection in (self.tasks, self.pending, self.known, self.groups):
            collection.clear()
        self.finished.clear()
        self.ended.clear()
        self.notices.clear()


def recover(found: Iterable[tuple[Record, Stored]]) -> Recovered:
    state = Recovered()
    for record, stored in found:
        _apply(state, record, stored)
    state.undo_unanswered()
    return state


async def recover_from(journal: Journal) -> Recovered:
    state = Recovered()
    async for record, stored in journal.replay():
        _apply(state, record, stored)
    state.undo_unanswered()
    return state


def _apply(state: Recovered, record: Record, stored: Stored) -> None:
    try:
        state.apply(record, stored)
    except ValueError as error:
        where = f"record at {stored.offset} of segment {stored.segment}"
        raise JournalUnreadable(f"the journal is inconsistent: {where}: {error}") from error


def snapshot(
    starts: int,
    run: tuple[str, int, str],
    weight_version: int,
    queue: TaskQueue,
    store: TrajectoryStore,
    buffer: GroupBuffer,
    notices: Iterable[trainer_service_pb2.Notice],
) -> Iterator[SnapshotItem]:
    """Yield records from which `Recovered` rebuilds the state. `run` is the trainer's: its id, its epoch
    and the id of its start. `notices` are those that it has not been sent."""
    yield records.server_started(starts)
    run_id, trainer_epoch, start_id = run
    if run_id:
        # Before any group, because replaying it would make all groups wait again.
        yield records.session_began(run_id, trainer_epoch, start_id, 0)
    if weight_version:
        yield records.weights_activated(weight_version)
    known, ended = list(queue.pending.known), list(queue.ended_groups)
    # Before any group, so that ended groups are not put under way again.
    yield Deferred(lambda: (records.tasks_known(known), records.groups_ended(ended)))
    for notice in notices:
        yield records.group_dropped(notice)
    for completed in buffer.groups:
        assert completed.stored is not None
        yield completed.stored
        if completed.step:
            yield records.groups_receipted([completed.group_id], completed.step)
    for group in queue.groups:
        if group.task is not None:
            yield records.task_accepted(group.task)
        yield group_changed(group)
    for trajectory in store.records():
        if trajectory.single_turn:
            continue
        # What it says is set once.
        yield Deferred(lambda opened=trajectory: (trajectory_opened(opened),))
        if trajectory.turn is not None:
            yield whole_turn(trajectory)
    gone: list[tuple[str, ClosedMark]] = []
    for trajectory_id, mark in store.closed:
        record = store.find(trajectory_id)
        if record is None or record.outcome is None:
            gone.append((trajectory_id, mark))
        else:
            yield trajectory_closed(trajectory_id, mark, record.outcome)
    # Deferred, because there are many of them and nothing that is still open needs them.
    yield Deferred(lambda: (trajectory_closed(name, mark, None) for name, mark in gone))
    for retried in (False, True):
        ids = [name for name, made_again in queue.leases.expired if made_again == retried]
        if ids:
            yield records.leases_expired(ids, retried=retried)
    # There may be a hundred thousand, whose records take a second to make.
    pending = queue.pending.copy()
    yield Deferred(lambda: map(records.task_accepted, pending()))
