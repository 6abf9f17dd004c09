"""States of an attempt (one of a group's `group_size` attempts):

    waiting --lease--> leased <--> orphaned
       ^  <--given back--+            |
       |                 |            |
       |                 +-----+------+
       |                       |
       +-- retries left -------+--> succeeded   closed with a reward
       |                       +--> failed      closed with a failure or expired, no retry left
       |                                |
       +--------------------------------+  the siblings are sampled again

A lease is given back if its stream was lost before the agent received it: the attempt counts as never
leased. An attempt is orphaned when its lease stream is lost, until the next call or renewal. The failure
of an attempt without retries is data: it becomes part of the group. Final attempts wait again if a group
that was leased as a whole lost its holder. A sibling of a caller's own group that was never opened also
goes from waiting to failed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from penstock.server.core.aio import Broadcast
from penstock.server.journal.protocol import Record
from penstock.v1 import journal_pb2, task_service_pb2, trajectory_pb2
from penstock.wire.messages import GroupChanged, JournalAttempt, JournalRecord


@dataclass(slots=True, eq=False)
class Holder:
    """One LeaseTasks stream of an agent."""

    agent_id: str
    concurrency: int
    purpose: trajectory_pb2.Purpose.ValueType
    whole_groups: bool = False
    held: set[str] = field(default_factory=set[str])
    owed: OrderedDict[str, Group] = field(default_factory=lambda: OrderedDict[str, "Group"]())
    """Groups leased to it as a whole of which attempts wait, by id."""
    freed: Broadcast = field(default_factory=Broadcast)
    """Notified when it holds one attempt fewer."""

    @property
    def full(self) -> bool:
        return len(self.held) >= self.concurrency

    def wants(self, purpose: trajectory_pb2.Purpose.ValueType) -> bool:
        return self.purpose in (trajectory_pb2.PURPOSE_UNSPECIFIED, purpose)

    def takes(self, task: task_service_pb2.Task) -> bool:
        if not self.whole_groups:
            return True
        is_race = 0 < task.finish_count < task.group_size
        return task.group_size <= self.concurrency and not is_race


class AttemptState(Enum):
    WAITING = "waiting"
    """For a lease or, in a caller's own group, until its trajectory is opened."""
    LEASED = "leased"
    ORPHANED = "orphaned"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def leased(self) -> bool:
        """Includes orphaned attempts."""
        return self in (AttemptState.LEASED, AttemptState.ORPHANED)

    @property
    def final(self) -> bool:
        return self in (AttemptState.SUCCEEDED, AttemptState.FAILED)


_SETTLED = frozenset({AttemptState.WAITING, AttemptState.SUCCEEDED, AttemptState.FAILED})
TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = {
    AttemptState.WAITING: frozenset({AttemptState.LEASED, AttemptState.FAILED}),
    AttemptState.LEASED: frozenset({AttemptState.ORPHANED}) | _SETTLED,
    AttemptState.ORPHANED: frozenset({AttemptState.LEASED}) | _SETTLED,
    AttemptState.SUCCEEDED: frozenset({AttemptState.WAITING}),
    AttemptState.FAILED: frozenset({AttemptState.WAITING}),
}


@dataclass(slots=True, eq=False)
class Attempt:
    """One sample of a group, across its retries."""

    group: Group
    sample_index: int
    retry_count: int = 0
    trajectory_id: str = ""
    holder: Holder | None = None
    deadline: float = 0.0
    """When its lease expires, unless a call renews it."""
    ends_at: float = math.inf
    """When its time is over, whatever its agent does."""
    leased_at: float = 0.0
    called_at: float = 0.0
    """When its agent last made or ended a call on it. A renewal is none."""
    open_calls: int = 0
    branches: set[str] = field(default_factory=set[str])
    """Direct and indirect branches."""
    state: AttemptState = AttemptState.WAITING
    """Changed by `to` only."""

    def to(self, state: AttemptState) -> None:
        """Raises ValueError if no attempt moves from its state to that one."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"an attempt cannot go from {self.state.value} to {state.value}")
        self.state = state


@dataclass(slots=True, eq=False)
class Group:
    """The attempts of a task, or of a group that a caller formed itself."""

    group_id: str
    size: int
    task: task_service_pb2.Task | None
    purpose: trajectory_pb2.Purpose.ValueType
    admitted_version: int
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    whole: bool = False
    """Whether it is leased as a whole, because siblings are compared with one another."""
    holder: Holder | None = None
    """The only stream that a whole group is leased to, while that stream lives."""
    waiting: deque[Attempt] = field(default_factory=deque[Attempt])
    """Attempts of a task that wait for a lease: those made again, then in order of `sample_index`."""
    begun_at: float = 0.0
    """By this server's clock."""

    @property
    def untouched(self) -> bool:
        """Whether no attempt is leased or has ended."""
        return len(self.waiting) == self.size

    @property
    def complete(self) -> bool:
        return self.race_over or all(attempt.state.final for attempt in self.attempts)

    @property
    def race_over(self) -> bool:
        """Whether enough attempts have a reward, for a task that needs fewer than all of them."""
        wanted = 0 if self.task is None else self.task.finish_count
        return 0 < wanted < self.size and len(self.succeeded) >= wanted

    @property
    def succeeded(self) -> list[Attempt]:
        return [a for a in self.attempts if a.state is AttemptState.SUCCEEDED]


@dataclass(frozen=True, slots=True)
class Lease:
    group: Group
    """Always the group of a task."""
    trajectory_id: str
    sample_index: int
    retry_count: int


@dataclass(frozen=True, slots=True)
class Settled:
    final: bool
    """False if the attempt will be made again."""
    completed: Group | None = None
    """The group, if this was its last attempt."""
    discarded: tuple[str, ...] = ()
    """Trajectories to make again, because their group was leased as a whole."""
    left_out: tuple[str, ...] = ()
    """Trajectories that the group was completed without, including their branches."""
    taken_back: tuple[str, ...] = ()
    """The leased ones among `left_out`."""


@dataclass(frozen=True, slots=True)
class Expired:
    """An attempt that was taken back from its agent."""

    attempt: Attempt
    trajectory_ids: tuple[str, ...]
    """Its own before its branches; empty if it was never opened."""
    settled: Settled
    timed_out: bool
    """Whether it reached its time limit. Otherwise its agent was silent."""


def group_changed(group: Group) -> Record:
    return JournalRecord(
        group_changed=GroupChanged(
            group_id=group.group_id,
            task_id=group.task.task_id if group.task is not None else "",
            group_size=group.size,
            purpose=group.purpose,
            admitted_weight_version=group.admitted_version,
            whole=group.whole,
            attempts=[
                JournalAttempt(
                    trajectory_id=attempt.trajectory_id,
                    retry_count=attempt.retry_count,
                    leased=attempt.state.leased,
                    final=attempt.state.final,
                    failed=attempt.state is AttemptState.FAILED,
                )
                for attempt in group.attempts
            ],
        )
    )


def recorded_state(attempt: journal_pb2.JournalAttempt) -> AttemptState:
    """Whether a lease stream was lost is not recorded."""
    if attempt.final:
        return AttemptState.FAILED if attempt.failed else AttemptState.SUCCEEDED
    return AttemptState.LEASED if attempt.leased else AttemptState.WAITING
