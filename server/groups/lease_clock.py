"""Deadlines of leases, and the memory of expired ones.

- Every call on a trajectory renews its lease; while a call is open the lease does not run.
- When the worker's LeaseTasks stream is lost, its leases expire after a short grace period, unless
  renewed.
- If the server itself stood still, every lease gets at least the grace period. Calls that renew it may be
  in a socket, unread.
- A group opened by a caller has no leases but one deadline: a call on any sibling keeps all of them alive.
- No call extends the time limit of an attempt, nor of a caller's group. After it and the grace period, in
  which its agent may still report the failure, the attempt is over. Siblings that are judged together wait
  for each other, so each new lease of one of them restarts the limit of all.
- The ids of expired leases and of their branches are remembered, so that late callers get LEASE_EXPIRED.

Pure apart from the injected clock; nothing here awaits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from penstock.server.config.limits import LeasesSection
from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.groups.attempts import Attempt, AttemptState, Group
from penstock.wire.reasons import Reason

MAX_REMEMBERED = 100_000


class LeaseClock:
    def __init__(self, rules: LeasesSection, clock: Callable[[], float]) -> None:
        self.rules = rules
        self._clock = clock
        self._armed: float | None = None
        self._expired: OrderedDict[str, bool] = OrderedDict()
        self.sooner = Broadcast()
        """Notified when a lease expires earlier than `next_deadline` last returned."""

    def now(self) -> float:
        return self._clock()

    def begin(self, attempts: Iterable[Attempt]) -> None:
        """Start the time limit of attempts."""
        ends_at = self.now() + self.rules.attempt_seconds + self.rules.grace_seconds
        for attempt in attempts:
            attempt.ends_at = ends_at
        self._arm(ends_at)

    def touch(self, attempt: Attempt) -> None:
        deadline = self._clock() + self.rules.seconds
        # A caller's group expires as a whole, because siblings not yet opened cannot be called.
        siblings = [attempt] if attempt.group.task is not None else attempt.group.attempts
        for sibling in siblings:
            sibling.deadline = deadline
        self._arm(deadline)

    def renew(self, attempt: Attempt) -> None:
        """Restart a lease after a sign of life of its agent, which makes up for a lost stream."""
        self._reached(attempt)
        self.touch(attempt)

    def call_began(self, attempt: Attempt) -> str:
        """Stop the lease while a call on the trajectory is open. Returns the lease, for `call_ended`."""
        attempt.open_calls += 1
        attempt.called_at = self._clock()
        self._reached(attempt)
        return attempt.trajectory_id

    def _reached(self, attempt: Attempt) -> None:
        if attempt.state is AttemptState.ORPHANED:
            attempt.to(AttemptState.LEASED)

    def call_ended(self, attempt: Attempt, lease: str) -> None:
        """Let the lease run again after a call; only for the grace period if its stream was lost. A call
        that outlived its lease is not one of the next holder's."""
        if attempt.trajectory_id != lease or not attempt.state.leased:
            return
        attempt.open_calls = max(0, attempt.open_calls - 1)
        attempt.called_at = self._clock()
        if attempt.state is AttemptState.ORPHANED:
            # A call that ended together with the stream is no sign of life.
            attempt.deadline = self._clock() + self.rules.grace_seconds
            self._arm(attempt.deadline)
        else:
            self.touch(attempt)

    def orphan(self, attempt: Attempt) -> None:
        """Cut the lease to the grace period, because its stream is lost."""
        attempt.deadline = min(attempt.deadline, self._clock() + self.rules.grace_seconds)
        attempt.holder = None
        attempt.to(AttemptState.ORPHANED)
        self._arm(attempt.deadline)

    def _arm(self, deadline: float) -> None:
        if self._armed is None or deadline < self._armed:
            self._armed = deadline
            self.sooner.notify()

    def next_deadline(self, groups: Iterable[Group]) -> float | None:
        """When to call `due` next; None while no lease can expire."""
        self._armed = min((deadline for _, deadline in _deadlines(groups)), default=None)
        return self._armed

    def forgive(self, groups: Iterable[Group]) -> None:
        """Give every lease at least the grace period, because the server stood still."""
        least = self._clock() + self.rules.grace_seconds
        for attempt, _ in _deadlines(groups):
            attempt.deadline = max(attempt.deadline, least)
            attempt.ends_at = max(attempt.ends_at, least)

    def due(self, groups: Iterable[Group]) -> list[Attempt]:
        now = self._clock()
        return [attempt for attempt, deadline in _deadlines(groups) if deadline <= now]

    def timed_out(self, attempt: Attempt) -> bool:
        """Whether its time limit is over, and not only its lease."""
        return attempt.ends_at <= self._clock()

    def remember_expired(self, trajectory_ids: Iterable[str], *, retried: bool) -> None:
        """Calls on these ids are refused from now on."""
        for trajectory_id in trajectory_ids:
            self._expired[trajectory_id] = retried
        while len(self._expired) > MAX_REMEMBERED:
            self._expired.popitem(last=False)

    @property
    def expired(self) -> Iterable[tuple[str, bool]]:
        """Ids of expired leases, and whether each attempt is made again."""
        return self._expired.items()

    def refuse_expired(self, trajectory_id: str) -> None:
        """Raise LEASE_EXPIRED if the lease of this trajectory or of its root has expired."""
        retried = self._expired.get(trajectory_id)
        if retried is not None:
            raise DomainError(
                Reason.LEASE_EXPIRED,
                f"the lease of {trajectory_id} has expired; its attempt "
                f"{'is made again' if retried else 'failed, or its group is complete without it'}",
                {"trajectory_id": trajectory_id, "retried": str(retried).lower()},
            )

    def retried(self, trajectory_id: str) -> bool:
        """Whether the attempt of an expired lease is made again."""
        return self._expired.get(trajectory_id, False)


def _deadlines(groups: Iterable[Group]) -> Iterator[tuple[Attempt, float]]:
    """Each attempt that can expire, and when it does."""
    for group in groups:
        own = group.task is None
        called = own and any(attempt.open_calls for attempt in group.attempts)
        for attempt in group.attempts:
            if attempt.state.leased or (own and not attempt.state.final):
                stopped = called or attempt.open_calls
                yield (
                    attempt,
                    attempt.ends_at if stopped else min(attempt.deadline, attempt.ends_at),
                )
