"""When leases run out, and which have.

- Every call on a trajectory renews its lease; while one is open the lease does not run.
- When the agent's LeaseTasks stream is lost its leases run out after a short grace, unless renewed.
- Where the server itself stood still every lease has the grace left: what renews it may be in a socket,
  unread.
- A caller's own group has no leases but one deadline: its siblings live as long as any of them is called.
- The ids of leases that ran out are remembered, those of their branches too, so that whoever comes late
  is told so.

Pure but for the clock it is given; nothing here awaits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.groups.attempts import Attempt, Group, LeaseRules
from penstock.wire.reasons import Reason

MAX_REMEMBERED = 100_000


class LeaseClock:
    """Deadlines of attempts, and the memory of those that passed."""

    def __init__(
        self,
        rules: LeaseRules,
        clock: Callable[[], float],
        *,
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self.rules = rules
        self._clock = clock
        self._max_remembered = max_remembered
        self._armed: float | None = None
        self._expired: OrderedDict[str, bool] = OrderedDict()
        self.sooner = Broadcast()
        """Notified when a lease runs out earlier than `next_deadline` last said."""

    def touch(self, attempt: Attempt) -> None:
        """The lease begins, or begins anew."""
        deadline = self._clock() + self.rules.seconds
        # A caller's own group lives as a whole: siblings not yet opened have no call of their own.
        siblings = [attempt] if attempt.group.task is not None else attempt.group.attempts
        for sibling in siblings:
            sibling.deadline = deadline
        self._arm(deadline)

    def renew(self, attempt: Attempt) -> None:
        """A sign of life: the lease begins anew, whatever became of its stream."""
        attempt.orphaned = False
        self.touch(attempt)

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
            self.touch(attempt)

    def orphan(self, attempt: Attempt) -> None:
        """The stream it was leased on is lost: only the grace is left, unless it is renewed."""
        attempt.deadline = min(attempt.deadline, self._clock() + self.rules.grace_seconds)
        attempt.holder, attempt.orphaned = None, True
        self._arm(attempt.deadline)

    def _arm(self, deadline: float) -> None:
        if self._armed is None or deadline < self._armed:
            self._armed = deadline
            self.sooner.notify()

    def next_deadline(self, groups: Iterable[Group]) -> float | None:
        """When `due` should next be asked; None while no lease can run out."""
        self._armed = min(
            (attempt.deadline for group in groups for attempt in _running(group)), default=None
        )
        return self._armed

    def forgive(self, groups: Iterable[Group]) -> None:
        """The server stood still: no lease runs out before the grace is over."""
        least = self._clock() + self.rules.grace_seconds
        for group in groups:
            for attempt in _running(group):
                attempt.deadline = max(attempt.deadline, least)

    def due(self, groups: Iterable[Group]) -> list[Attempt]:
        """Attempts whose lease has run out."""
        now = self._clock()
        return [
            attempt for group in groups for attempt in _running(group) if attempt.deadline <= now
        ]

    def remember_expired(self, trajectory_ids: Iterable[str], *, retried: bool) -> None:
        """Calls on these are refused from now on."""
        for trajectory_id in trajectory_ids:
            self._expired[trajectory_id] = retried
        while len(self._expired) > self._max_remembered:
            self._expired.popitem(last=False)

    @property
    def expired(self) -> Iterable[tuple[str, bool]]:
        """Ids whose lease ran out, and whether the attempt is made again."""
        return self._expired.items()

    def refuse_expired(self, trajectory_id: str) -> None:
        """Raises LEASE_EXPIRED for an id whose lease, or whose root's, has run out."""
        retried = self._expired.get(trajectory_id)
        if retried is not None:
            raise DomainError(
                Reason.LEASE_EXPIRED,
                f"the lease of {trajectory_id} is over; its attempt "
                f"{'is made again' if retried else 'failed, or its group is complete without it'}",
                {"trajectory_id": trajectory_id, "retried": str(retried).lower()},
            )

    def retried(self, trajectory_id: str) -> bool:
        """Whether the attempt of an expired lease is made again."""
        return self._expired.get(trajectory_id, False)


def _running(group: Group) -> list[Attempt]:
    """Attempts of a group whose deadline counts now."""
    if group.task is not None:
        return [a for a in group.attempts if a.leased and not a.final and not a.open_calls]
    if any(attempt.open_calls for attempt in group.attempts):
        return []
    return [attempt for attempt in group.attempts if not attempt.final]
