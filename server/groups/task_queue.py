"""Tasks, attempts, leases and retries. `attempts` has the states of an attempt.

- A task becomes a group when the staleness gate admits it and an agent asks for work. The group's
  attempts are leased in order of `sample_index`, retries first.
- An agent that wants whole groups skips those that it cannot hold at once, and races; other tasks begin
  before them. If it is lost, no agent gets its groups until all their attempts are back, and then any.
- The attempt of an expired lease is leased again under a new trajectory id, and calls on the old id are
  refused with LEASE_EXPIRED. An attempt whose leases expired `max_attempts` times becomes a failure, as if
  its agent had reported one. The same holds for an attempt whose time limit is over.
- A caller's own group (opened by Generate without a lease) takes a slot at the gate with its first
  sibling. It is never leased. Siblings that no call touches for the length of a lease become failures.
- When the last attempt is settled, the group is completed and its id is not used again.
- A task with a `finish_count` is a race: that many attempts with a reward complete its group. Waiting
  attempts are then never leased, and leased ones are taken back (LEASE_EXPIRED, without a retry). Neither
  these nor the failed ones are part of the group. If too many fail for that, the group completes like any
  other, failures included.
- Evaluation groups bypass the gate. The bound on them is the number begun and not delivered; beyond it
  their tasks wait. A lease request that takes any task gets evaluation tasks first. Training may have more
  groups admitted than all agents together work on, and an evaluation queued behind them would wait
  forever.

Pure except for the clock; nothing here awaits.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator

from penstock.server.config.limits import LeasesSection
from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.groups.admission import Admission
from penstock.server.groups.attempts import (
    Attempt,
    AttemptState,
    Expired,
    Group,
    Holder,
    Lease,
    Settled,
)
from penstock.server.groups.lease_clock import LeaseClock
from penstock.server.groups.offers import Offers
from penstock.server.groups.pending_tasks import PendingTasks
from penstock.v1 import task_service_pb2, trajectory_pb2
from penstock.wire.reasons import Reason

MAX_REMEMBERED_GROUPS = 100_000


class TaskQueue:
    def __init__(
        self,
        changed: Broadcast,
        admission: Admission,
        rules: LeasesSection,
        clock: Callable[[], float],
        *,
        max_pending: int = 100_000,
        max_evaluation_groups: int = 256,
        has_memory: Callable[[], bool] = lambda: True,
        buffered_evaluations: Callable[[], int] = lambda: 0,
    ) -> None:
        """`has_memory` returns whether the memory budget allows another group. `buffered_evaluations`
        counts the evaluation groups that are buffered and not delivered."""
        self._admission = admission
        self.leases = LeaseClock(rules, clock)
        self.max_evaluation_groups = max_evaluation_groups
        self.pending = PendingTasks(changed, max_pending)
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Oldest first; bounded."""
        self._evaluations: set[str] = set()
        """Evaluation groups begun, and neither buffered nor dropped."""
        self.offers = Offers()
        self.holders: set[Holder] = set()
        """Every lease stream that is open."""
        self._attempts: dict[str, Attempt] = {}
        self._changed = changed
        self._begun_bytes = 0
        """Memory of the tasks of groups under way."""
        self._has_memory = has_memory
        self._buffered_evaluations = buffered_evaluations

    @property
    def byte_count(self) -> int:
        """Memory that tasks use, including those of groups under way."""
        return self.pending.byte_count + self._begun_bytes

    @property
    def groups(self) -> Collection[Group]:
        """Groups begun and not completed."""
        return self._groups.values()

    @property
    def ended_groups(self) -> Iterable[str]:
        """Oldest first."""
        return self._ended

    def restore(
        self,
        pending: Iterable[task_service_pb2.Task],
        groups: Iterable[Group],
        ended: Iterable[str],
    ) -> None:
        """Every lease stream was lost with the restart, so holders have to renew their leases by calls."""
        self.pending.restore(pending)
        for group in groups:
            self._register(group)
            # The journal has no times, so each limit starts again.
            self.leases.begin(group.attempts)
            if group.task is None:
                self.leases.touch(group.attempts[0])
            for attempt in group.attempts:
                if attempt.state.leased:
                    attempt.leased_at = attempt.called_at = self.leases.now()
                    self._attempts[attempt.trajectory_id] = attempt
                    self.leases.touch(attempt)
                    if group.task is not None:
                        self.leases.orphan(attempt)
                elif not attempt.state.final and group.task is not None:
                    group.waiting.append(attempt)
            self.offers.place(group)
        for group_id in ended:
            self._remember_ended(group_id)

    def lease(self, holder: Holder, active_version: int) -> Lease | None:
        """Returns None if there is no attempt for the holder now."""
        if holder.full:
            return None
        group = self.offers.next(holder) or self._begin_group(holder, active_version)
        if group is None:
            return None
        assert group.task is not None
        attempt = group.waiting.popleft()
        attempt.trajectory_id = f"{group.group_id}-{attempt.sample_index}-{attempt.retry_count}"
        attempt.to(AttemptState.LEASED)
        attempt.leased_at = attempt.called_at = self.leases.now()
        attempt.holder = holder
        holder.held.add(attempt.trajectory_id)
        self._attempts[attempt.trajectory_id] = attempt
        self.leases.touch(attempt)
        if holder.whole_groups:
            group.whole, group.holder = True, holder
        self.leases.begin(_leased(group) if group.whole else [attempt])
        self.offers.place(group)
        return Lease(group, attempt.trajectory_id, attempt.sample_index, attempt.retry_count)

    def give_back(self, lease: Lease) -> bool:
        """Take back a lease that its agent never received. Returns False if it is settled already."""
        attempt = self._attempts.get(lease.trajectory_id)
        if attempt is None:
            return False
        self._let_go(attempt)
        attempt.holder, attempt.trajectory_id = None, ""
        attempt.to(AttemptState.WAITING)
        attempt.group.waiting.appendleft(attempt)
        self.offers.place(attempt.group, first=True)
        self._changed.notify()
        return True

    def _begin_group(self, holder: Holder, active_version: int) -> Group | None:
        for purpose, first in self.pending.first(holder.takes):
            if holder.wants(purpose) and self.may_begin(purpose, active_version):
                task = self.pending.begin(purpose, first)
                name, size = uuid.uuid4().hex[:16], max(1, task.group_size)
                group = self._begin(Group(name, size, task, purpose, active_version))
                group.waiting.extend(group.attempts)
                # The siblings are available to other holders, and a different task is next.
                self._changed.notify()
                return group
        return None

    def may_begin(self, purpose: trajectory_pb2.Purpose.ValueType, active_version: int) -> bool:
        if not self._has_memory():
            return False
        if purpose == trajectory_pb2.PURPOSE_TRAIN:
            return self._admission.may_begin(active_version)
        undelivered = len(self._evaluations) + self._buffered_evaluations()
        return undelivered < self.max_evaluation_groups

    def _begin(self, group: Group) -> Group:
        self._register(group)
        group.attempts = [Attempt(group, index) for index in range(group.size)]
        return group

    def _register(self, group: Group) -> None:
        if group.purpose == trajectory_pb2.PURPOSE_TRAIN:
            self._admission.admit(group.group_id, group.admitted_version)
        else:
            self._evaluations.add(group.group_id)
        group.begun_at = self.leases.now()
        self._groups[group.group_id] = group
        self._begun_bytes += _task_bytes(group)

    def join(
        self,
        group_id: str,
        size: int,
        sample_index: int,
        trajectory_id: str,
        active_version: int,
    ) -> None:
        """Add a trajectory opened without a lease to its caller's own group.

        Raises FIELD_INVALID if it disagrees with its siblings or the group is complete, and QUEUE_FULL if
        the gate has no free slot.
        """
        if group_id in self._ended:
            raise FieldInvalid("group_id", "is of a group that is complete", group_id)
        group = self._groups.get(group_id)
        if group is None:
            if not self._admission.may_admit(active_version):
                raise DomainError(
                    Reason.QUEUE_FULL,
                    f"{self._admission.outstanding} groups are outstanding, no more may begin now",
                    {"outstanding": self._admission.outstanding, "group_id": group_id},
                )
            train = trajectory_pb2.PURPOSE_TRAIN
            group = self._begin(Group(group_id, size, None, train, active_version))
            self.leases.begin(group.attempts)
        if group.task is not None:
            raise FieldInvalid(
                "trajectory_id", "is not the one leased for its group", trajectory_id
            )
        if group.size != size:
            raise FieldInvalid("group_size", f"differs from the group's {group.size}", size)
        attempt = group.attempts[sample_index]
        if not _waits(attempt):
            raise FieldInvalid("sample_index", "is taken in this group", sample_index)
        attempt.to(AttemptState.LEASED)
        attempt.leased_at = attempt.called_at = self.leases.now()
        attempt.trajectory_id = trajectory_id
        self._attempts[trajectory_id] = attempt
        self.leases.touch(attempt)

    def attempt_of(self, trajectory_id: str) -> Attempt | None:
        """None for an unleased trajectory. Raises LEASE_EXPIRED."""
        self.leases.refuse_expired(trajectory_id)
        return self._attempts.get(trajectory_id)

    def held(self, trajectory_id: str) -> Attempt | None:
        """Like `attempt_of`, but does not check for expired leases."""
        return self._attempts.get(trajectory_id)

    def renew(self, trajectory_id: str) -> bool:
        """Returns False if the lease has expired or never existed."""
        attempt = self._attempts.get(trajectory_id)
        if attempt is None:
            return False
        self.leases.renew(attempt)
        return True

    def leased_of(self, group_id: str) -> list[str]:
        group = self._groups.get(group_id)
        return [] if group is None else [a.trajectory_id for a in group.attempts if a.state.leased]

    def holder_lost(self, holder: Holder) -> None:
        """The stream's leases expire after the grace period unless renewed."""
        self.holders.discard(holder)
        for trajectory_id in list(holder.held):
            self.leases.orphan(self._attempts[trajectory_id])
        holder.held.clear()
        self.offers.holder_lost(holder)
        for group in self._groups.values():
            if group.holder is holder:
                group.holder = None
                self.offers.place(group, first=True)
        self._changed.notify()

    def untaken(self) -> Iterator[tuple[task_service_pb2.Task, int]]:
        """Tasks that none of the open streams takes, one of each kind, and how many there are. Includes
        those of begun groups with attempts to lease."""
        for purpose, task, count in self.pending.kinds():
            if not any(h.wants(purpose) and h.takes(task) for h in self.holders):
                yield task, count
        for group in self.offers.offered():
            if not any(self.offers.suits(group, holder) for holder in self.holders):
                assert group.task is not None
                yield group.task, 1

    def next_deadline(self) -> float | None:
        """When to call `expire` next; None while no lease can expire."""
        return self.leases.next_deadline(self._groups.values())

    def expire(self) -> list[Expired]:
        """Take back expired leases, and attempts whose time is over."""
        expired: list[Expired] = []
        for attempt in self.leases.due(self._groups.values()):
            timed_out, lost = self.leases.timed_out(attempt), _ids(attempt)
            settled = self.settle(attempt, failed=True)
            self.leases.remember_expired(lost, retried=not settled.final)
            expired.append(Expired(attempt, tuple(lost), settled, timed_out))
        return expired

    def settle(self, attempt: Attempt, *, failed: bool) -> Settled:
        """The attempt becomes final, or returns to the queue if it failed with retries left."""
        group = attempt.group
        self._let_go(attempt)
        attempt.holder, attempt.open_calls = None, 0
        attempt.branches.clear()
        discarded: list[str] = []
        retries_left = attempt.retry_count + 1 < self.leases.rules.max_attempts
        if failed and group.task is not None and retries_left:
            self._make_again(attempt)
        else:
            attempt.to(AttemptState.FAILED if failed else AttemptState.SUCCEEDED)
        if group.whole and group.holder is None and any(_waits(a) for a in group.attempts):
            # The holder that judged the siblings together is gone, so they are all sampled again.
            for sibling in group.attempts:
                if sibling.state.final:
                    discarded.append(sibling.trajectory_id)
                    self._make_again(sibling)
        completed = None
        left_out: list[str] = []
        taken_back: list[str] = []
        if group.complete:
            if group.race_over:
                left_out, taken_back = self._end_race(group)
            completed = self._groups.pop(group.group_id)
            self._begun_bytes -= _task_bytes(group)
            self._remember_ended(group.group_id)
            self.offers.place(group)
        elif not attempt.state.final or discarded:
            self.offers.place(group, first=True)
        self._changed.notify()
        return Settled(
            attempt.state.final, completed, tuple(discarded), tuple(left_out), tuple(taken_back)
        )

    def _end_race(self, group: Group) -> tuple[list[str], list[str]]:
        """Reduce a group to its attempts with a reward. Returns the trajectory ids of all others, and
        those of them that were leased."""
        left_out: list[str] = []
        taken_back: list[str] = []
        succeeded = group.succeeded
        for other in group.attempts:
            if other in succeeded:
                continue
            ids = _ids(other)
            left_out += ids
            if other.state.leased:
                taken_back += ids
                self._let_go(other)
        self.leases.remember_expired(taken_back, retried=False)
        group.waiting.clear()
        group.attempts = succeeded
        return left_out, taken_back

    def _let_go(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt.trajectory_id, None)
        if attempt.holder is not None:
            attempt.holder.held.discard(attempt.trajectory_id)
            attempt.holder.freed.notify()

    def _remember_ended(self, group_id: str) -> None:
        self._ended[group_id] = None
        while len(self._ended) > MAX_REMEMBERED_GROUPS:
            self._ended.popitem(last=False)

    def release(self, group_id: str) -> None:
        """Stop counting a completed group here: the buffer counts it, or it was dropped."""
        self._evaluations.discard(group_id)
        self._changed.notify()

    def _make_again(self, attempt: Attempt) -> None:
        attempt.retry_count += 1
        attempt.trajectory_id = ""
        attempt.to(AttemptState.WAITING)
        attempt.group.waiting.appendleft(attempt)

    def drop_all(self) -> tuple[int, list[Group]]:
        """Returns the number of waiting tasks and the open groups."""
        groups = list(self._groups.values())
        dropped = self.pending.drop_all()
        self._begun_bytes = 0
        self.offers.clear()
        for group in groups:
            group.waiting.clear()
            if group.holder is not None:
                group.holder.owed.clear()
            for attempt in group.attempts:
                if attempt.state.leased:
                    self.leases.remember_expired(_ids(attempt), retried=False)
                    self._let_go(attempt)
        self._groups.clear()
        # Group ids are unique within a run only.
        self._ended.clear()
        self._evaluations.clear()
        self._changed.notify()
        return dropped, groups


def _leased(group: Group) -> list[Attempt]:
    return [attempt for attempt in group.attempts if attempt.state.leased]


def _waits(attempt: Attempt) -> bool:
    return attempt.state is AttemptState.WAITING


def _task_bytes(group: Group) -> int:
    return group.task.ByteSize() if group.task is not None else 0


def _ids(attempt: Attempt) -> list[str]:
    """Trajectory ids that calls on an attempt may name; empty if it was never opened."""
    return [attempt.trajectory_id, *attempt.branches] if attempt.trajectory_id else []
