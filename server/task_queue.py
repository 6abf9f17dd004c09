"""Tasks, attempts, leases and retries.

States of an attempt (one of a group's `group_size` places):

    waiting --lease--> leased --complete(reward)--------------------> final
       ^                 |  \\--complete(failure), retries left --> waiting
       |                 |  \\--complete(failure), none left ------> final (the failure is data)
       +--lease expires--+

- A task becomes a group when the staleness gate admits it and an agent asks for work; the group's
  attempts are leased in order of `sample_index`, retries first.
- A lease is renewed by every call on the trajectory; an open stream is a call that lasts. When the
  agent's LeaseTasks stream is lost its leases run out after a short grace, unless renewed.
- An expired lease gives the attempt back under a new trajectory id; calls on the old one are refused with
  LEASE_EXPIRED. A lease that expired `max_attempts` times becomes a failure, as if it had said so.
- A caller's own group (opened by Generate without a lease) takes its place at the gate with its first
  sibling. It is never leased: siblings that no call touches for a lease's length become failures.
- When the last attempt is final the group is complete; `on_complete` hands it over.

Pure but for the clock it is given; nothing here awaits.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.server.admission import Admission
from penstock.server.broadcast import Broadcast
from penstock.server.errors import DomainError, FieldInvalid
from penstock.v1 import task_service_pb2, trajectory_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

Task = twin(task_service_pb2.Task)
Outcome = twin(trajectory_pb2.Outcome)
Failure = twin(trajectory_pb2.Failure)


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """How long leases last and how often an attempt is made."""

    seconds: float = 60.0
    """Length of a lease without a call on the trajectory."""
    grace_seconds: float = 10.0
    """What is left of it when the agent's lease stream is lost."""
    max_attempts: int = 3
    """Times an attempt is made before its failure becomes part of the group."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not self.grace_seconds > 0:
            raise ValueError(f"leases must last, got {self.seconds} s, {self.grace_seconds} s")
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {self.max_attempts}")


@dataclass(slots=True, eq=False)
class Holder:
    """One LeaseTasks stream."""

    agent_id: str
    concurrency: int
    purpose: trajectory_pb2.Purpose.ValueType
    whole_groups: bool = False
    held: set[str] = field(default_factory=set[str])
    """Trajectory ids leased to it and not yet given back."""
    _noted_too_large: bool = False

    def note_too_large(self, task: task_service_pb2.Task) -> None:
        """Says, once, why an agent that wants whole groups gets none: it would wait in silence."""
        if not self._noted_too_large:
            self._noted_too_large = True
            logger.warning(
                "agent %s wants whole groups and works on %d attempts at a time; task %s has %d",
                self.agent_id,
                self.concurrency,
                task.task_id,
                task.group_size,
            )


@dataclass(slots=True, eq=False)
class Attempt:
    """One place of a group."""

    group: Group
    sample_index: int
    retry_count: int = 0
    trajectory_id: str = ""
    holder: Holder | None = None
    deadline: float = 0.0
    open_calls: int = 0
    orphaned: bool = False
    """Its lease stream was lost, and no call has reached it since."""
    leased: bool = False
    final: bool = False


@dataclass(slots=True, eq=False)
class Group:
    """A task's attempts, or a caller's own group."""

    group_id: str
    size: int
    task: task_service_pb2.Task | None
    purpose: trajectory_pb2.Purpose.ValueType
    admitted_version: int
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    whole: bool = False
    """Leased as a whole: siblings are judged against one another."""
    holder: Holder | None = None
    """The only stream a whole group is leased to, while that lives."""

    @property
    def complete(self) -> bool:
        """Whether every attempt is final."""
        return all(attempt.final for attempt in self.attempts)


@dataclass(frozen=True, slots=True)
class Lease:
    """What an agent is given."""

    task: task_service_pb2.Task
    group_id: str
    trajectory_id: str
    sample_index: int
    retry_count: int


@dataclass(frozen=True, slots=True)
class Settled:
    """What closing an attempt came to."""

    final: bool
    """False where the attempt will be made again."""
    completed: Group | None = None
    """The group, where this was its last attempt."""
    discarded: tuple[str, ...] = ()
    """Trajectories of the group that will be made again, because it was leased as a whole."""


class TaskQueue:
    """Tasks waiting, groups under way, and who holds what."""

    def __init__(
        self,
        changed: Broadcast,
        admission: Admission,
        rules: LeaseRules,
        clock: Callable[[], float],
        *,
        max_pending: int = 100_000,
    ) -> None:
        self._admission = admission
        self.rules = rules
        self._clock = clock
        self._max_pending = max_pending
        self._pending: dict[trajectory_pb2.Purpose.ValueType, deque[task_service_pb2.Task]] = {
            trajectory_pb2.PURPOSE_TRAIN: deque(),
            trajectory_pb2.PURPOSE_EVAL: deque(),
        }
        self._known_tasks: set[str] = set()
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._waiting: deque[Attempt] = deque()
        self._attempts: dict[str, Attempt] = {}
        self._expired: OrderedDict[str, bool] = OrderedDict()
        self._armed: float | None = None
        self._changed = changed
        self.deadline_sooner = Broadcast()
        """Notified when a lease runs out earlier than `next_deadline` last said."""

    @property
    def pending_count(self) -> int:
        """Tasks not yet begun."""
        return sum(len(tasks) for tasks in self._pending.values())

    @property
    def open_group_count(self) -> int:
        """Groups begun and not complete."""
        return len(self._groups)

    def submit(self, tasks: Iterable[task_service_pb2.Task]) -> tuple[int, int]:
        """Adds tasks, all or none; returns how many were new and how many known already.

        Raises QUEUE_FULL where they do not fit.
        """
        fresh: dict[str, task_service_pb2.Task] = {}
        duplicates = 0
        for task in tasks:
            if task.task_id in self._known_tasks or task.task_id in fresh:
                duplicates += 1
            else:
                fresh[task.task_id] = task
        if self.pending_count + len(fresh) > self._max_pending:
            raise DomainError(
                Reason.QUEUE_FULL,
                f"{self.pending_count} tasks are waiting, {len(fresh)} more do not fit",
                {"pending_count": self.pending_count, "limit": self._max_pending},
                retry_after_seconds=5.0,
            )
        self._known_tasks.update(fresh)
        for task in fresh.values():
            self._pending[_effective(task.purpose)].append(task)
        if fresh:
            self._changed.notify()
        return len(fresh), duplicates

    def lease(self, holder: Holder, active_version: int) -> Lease | None:
        """The next attempt for a holder, or None where there is none for it now."""
        if len(holder.held) >= holder.concurrency:
            return None
        attempt = self._next_waiting(holder)
        if attempt is None:
            group = self._begin_group(holder, active_version)
            if group is None:
                return None
            self._waiting.extend(group.attempts)
            # Its siblings are there for others, and another task is now the next.
            self._changed.notify()
            attempt = self._next_waiting(holder)
            assert attempt is not None
        self._waiting.remove(attempt)
        group = attempt.group
        assert group.task is not None
        attempt.trajectory_id = f"{group.group_id}-{attempt.sample_index}-{attempt.retry_count}"
        attempt.leased, attempt.holder = True, holder
        attempt.deadline = self._clock() + self.rules.seconds
        holder.held.add(attempt.trajectory_id)
        self._attempts[attempt.trajectory_id] = attempt
        self._arm(attempt.deadline)
        if holder.whole_groups:
            group.whole, group.holder = True, holder
        return Lease(
            group.task,
            group.group_id,
            attempt.trajectory_id,
            attempt.sample_index,
            attempt.retry_count,
        )

    def _next_waiting(self, holder: Holder) -> Attempt | None:
        for attempt in self._waiting:
            group = attempt.group
            if not _wanted(holder, group.purpose):
                continue
            if holder.whole_groups:
                untouched = group.holder is None and not any(
                    sibling.leased or sibling.final for sibling in group.attempts
                )
                if group.holder is not holder and not untouched:
                    continue
                if group.size > holder.concurrency:
                    continue
            elif group.whole:
                continue
            return attempt
        return None

    def _begin_group(self, holder: Holder, active_version: int) -> Group | None:
        for purpose, tasks in self._pending.items():
            if not tasks or not _wanted(holder, purpose):
                continue
            if holder.whole_groups and tasks[0].group_size > holder.concurrency:
                holder.note_too_large(tasks[0])
                continue
            if purpose == trajectory_pb2.PURPOSE_TRAIN and not self._admission.may_admit(
                active_version
            ):
                continue
            task = tasks.popleft()
            group = Group(
                uuid.uuid4().hex[:16], max(1, task.group_size), task, purpose, active_version
            )
            self._register(group)
            return group
        return None

    def _register(self, group: Group) -> None:
        group.attempts = [Attempt(group, index) for index in range(group.size)]
        self._groups[group.group_id] = group
        if group.purpose == trajectory_pb2.PURPOSE_TRAIN:
            self._admission.admit(group.group_id, group.admitted_version)

    def join(
        self,
        group_id: str,
        size: int,
        sample_index: int,
        trajectory_id: str,
        active_version: int,
    ) -> None:
        """Puts a trajectory opened without a lease into its caller's own group.

        Raises FIELD_INVALID where it disagrees with its siblings, QUEUE_FULL where the gate has no place.
        """
        group = self._groups.get(group_id)
        if group is None:
            if not self._admission.may_admit(active_version):
                raise DomainError(
                    Reason.QUEUE_FULL,
                    f"{self._admission.outstanding} groups are outstanding, no more may begin now",
                    {"outstanding": self._admission.outstanding, "group_id": group_id},
                    retry_after_seconds=1.0,
                )
            group = Group(group_id, size, None, trajectory_pb2.PURPOSE_TRAIN, active_version)
            self._register(group)
        if group.task is not None:
            raise FieldInvalid(
                "trajectory_id", "is not the one leased for its group", trajectory_id
            )
        if group.size != size:
            raise FieldInvalid("group_size", f"differs from the group's {group.size}", size)
        attempt = group.attempts[sample_index]
        if attempt.leased or attempt.final:
            raise FieldInvalid("sample_index", "is taken in this group", sample_index)
        attempt.trajectory_id, attempt.leased = trajectory_id, True
        self._attempts[trajectory_id] = attempt
        self._touch(attempt)

    def attempt_of(self, trajectory_id: str) -> Attempt | None:
        """The attempt a trajectory id stands for; None for a trajectory of its own.

        Raises LEASE_EXPIRED where it stood for one.
        """
        retried = self._expired.get(trajectory_id)
        if retried is not None:
            raise DomainError(
                Reason.LEASE_EXPIRED,
                f"the lease of {trajectory_id} ran out; "
                f"its attempt {'is made again' if retried else 'counts as failed'}",
                {"trajectory_id": trajectory_id, "retried": str(retried).lower()},
            )
        return self._attempts.get(trajectory_id)

    def renew(self, trajectory_id: str) -> bool:
        """Extends a lease; False where it has run out or never was."""
        attempt = self._attempts.get(trajectory_id)
        if attempt is None:
            return False
        attempt.orphaned = False
        self._touch(attempt)
        return True

    def call_began(self, attempt: Attempt) -> None:
        """A call on the trajectory is open: its lease does not run."""
        attempt.open_calls += 1
        attempt.orphaned = False

    def call_ended(self, attempt: Attempt) -> None:
        """The call is over: the lease runs from now, or what the grace leaves of it."""
        attempt.open_calls = max(0, attempt.open_calls - 1)
        if attempt.orphaned:
            # A call that broke off with the stream is no sign of life.
            attempt.deadline = self._clock() + self.rules.grace_seconds
            self._arm(attempt.deadline)
        else:
            self._touch(attempt)

    def _touch(self, attempt: Attempt) -> None:
        deadline = self._clock() + self.rules.seconds
        # A caller's own group lives as a whole: siblings not yet opened have no call of their own.
        siblings = [attempt] if attempt.group.task is not None else attempt.group.attempts
        for sibling in siblings:
            sibling.deadline = deadline
        self._arm(deadline)

    def _arm(self, deadline: float) -> None:
        if self._armed is None or deadline < self._armed:
            self._armed = deadline
            self.deadline_sooner.notify()

    def holder_lost(self, holder: Holder) -> None:
        """The lease stream ended: its leases run out after the grace, unless renewed."""
        limit = self._clock() + self.rules.grace_seconds
        for trajectory_id in list(holder.held):
            attempt = self._attempts[trajectory_id]
            attempt.deadline = min(attempt.deadline, limit)
            attempt.holder, attempt.orphaned = None, True
            self._arm(attempt.deadline)
        holder.held.clear()
        for group in self._groups.values():
            if group.holder is holder:
                group.holder = None
        self._changed.notify()

    def next_deadline(self) -> float | None:
        """When `expire` should next be called; None while no lease can run out."""
        self._armed = min(
            (a.deadline for g in self._groups.values() for a in g.attempts if _can_expire(a)),
            default=None,
        )
        return self._armed

    def expire(self) -> list[tuple[Attempt, str, Settled]]:
        """Gives back what ran out: each attempt, the id it had, and what that came to."""
        now = self._clock()
        due = [
            attempt
            for group in self._groups.values()
            for attempt in group.attempts
            if _can_expire(attempt) and attempt.deadline <= now
        ]
        expired: list[tuple[Attempt, str, Settled]] = []
        for attempt in due:
            trajectory_id = attempt.trajectory_id
            settled = self.settle(attempt, failed=True)
            if trajectory_id:
                self._remember_expired(trajectory_id, retried=not settled.final)
            expired.append((attempt, trajectory_id, settled))
        return expired

    def _remember_expired(self, trajectory_id: str, *, retried: bool) -> None:
        self._expired[trajectory_id] = retried
        while len(self._expired) > self._max_pending:
            self._expired.popitem(last=False)

    def retried(self, trajectory_id: str) -> bool:
        """Whether the attempt of an expired lease is made again."""
        return self._expired.get(trajectory_id, False)

    def settle(self, attempt: Attempt, *, failed: bool) -> Settled:
        """Closes an attempt: it is final, or, failed with retries left, goes back to the queue."""
        group = attempt.group
        self._attempts.pop(attempt.trajectory_id, None)
        if attempt.holder is not None:
            attempt.holder.held.discard(attempt.trajectory_id)
        attempt.holder, attempt.leased, attempt.open_calls = None, False, 0
        attempt.orphaned = False
        retry = (
            failed and group.task is not None and attempt.retry_count + 1 < self.rules.max_attempts
        )
        attempt.final = not retry
        discarded: list[str] = []
        if retry:
            self._make_again(attempt)
        if group.whole and group.holder is None and any(_waits(a) for a in group.attempts):
            # Whoever judged the siblings together is gone: they are made together again.
            for sibling in group.attempts:
                if sibling.final:
                    discarded.append(sibling.trajectory_id)
                    self._make_again(sibling)
        completed = None
        if group.complete:
            completed = self._groups.pop(group.group_id)
        self._changed.notify()
        return Settled(attempt.final, completed, tuple(discarded))

    def _make_again(self, attempt: Attempt) -> None:
        attempt.retry_count += 1
        attempt.trajectory_id, attempt.final = "", False
        self._waiting.appendleft(attempt)

    def resubmit(self, task: task_service_pb2.Task) -> None:
        """Puts a known task back at the head: its group was thrown away for age."""
        self._pending[_effective(task.purpose)].appendleft(task)
        self._changed.notify()

    def drop_all(self) -> tuple[int, list[Group]]:
        """Forgets every task and open group; returns the tasks' count and the groups."""
        dropped, groups = self.pending_count, list(self._groups.values())
        for tasks in self._pending.values():
            tasks.clear()
        self._known_tasks.clear()
        self._waiting.clear()
        for group in groups:
            for attempt in group.attempts:
                if attempt.leased:
                    self._remember_expired(attempt.trajectory_id, retried=False)
                    self._attempts.pop(attempt.trajectory_id, None)
                    if attempt.holder is not None:
                        attempt.holder.held.discard(attempt.trajectory_id)
        self._groups.clear()
        self._changed.notify()
        return dropped, groups


def _effective(purpose: trajectory_pb2.Purpose.ValueType) -> trajectory_pb2.Purpose.ValueType:
    if purpose == trajectory_pb2.PURPOSE_UNSPECIFIED:
        return trajectory_pb2.PURPOSE_TRAIN
    return purpose


def _wanted(holder: Holder, purpose: trajectory_pb2.Purpose.ValueType) -> bool:
    return holder.purpose in (trajectory_pb2.PURPOSE_UNSPECIFIED, purpose)


def _waits(attempt: Attempt) -> bool:
    return not attempt.final and not attempt.leased


def _can_expire(attempt: Attempt) -> bool:
    if attempt.final or attempt.open_calls:
        return False
    return attempt.leased or attempt.group.task is None
