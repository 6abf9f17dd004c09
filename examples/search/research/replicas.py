"""Balances calls over several equivalent servers, and avoids those that fail.

States of a replica, as its client sees it:

    serving ──a call fails──► backing off, twice as long each time ──its time is over──► on trial: one call
       ▲                              ▲                                                    │         │
       │                              └──────────────────── fails ─────────────────────────┘         │
       └──────────────────────────────────── succeeds ───────────────────────────────────────────────┘

A call that fails is retried on another replica; each is tried once in a round. If all replicas back off,
the call waits for the first whose time is over, within its patience. So a killed replica costs each of its
calls one retry. After it comes back, one successful trial call puts it back in use.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

T = TypeVar("T")

Balance: TypeAlias = Literal["round_robin", "least_outstanding"]


class ReplicaFailed(Exception):
    """A call failed because of the replica; another replica may answer it."""


class NoReplica(Exception):
    """No replica answered in time; the message has the last failure."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long a replica is not used after a failure."""

    first_seconds: float = 0.2
    longest_seconds: float = 10.0
    jitter: float = 0.2
    """Random variation, as a share of the time, so that clients do not all return at once."""

    def seconds(self, failures: int) -> float:
        """Time to wait after this many failures in a row."""
        # The exponent is bounded: a replica that is gone for good may fail any number of times.
        base = min(self.first_seconds * 2 ** min(failures - 1, 32), self.longest_seconds)
        return base * (1 + random.uniform(-self.jitter, self.jitter))


@dataclass(eq=False)
class Replica:
    """One server, as its client sees it."""

    url: str
    outstanding: int = 0
    """Calls in progress."""
    failures: int = 0
    """Failures since its last success; calls that fail together count once."""
    away_until: float = 0.0
    """Time of the clock until which it is not used."""
    calls: int = 0
    """Calls made to it so far."""
    failed: int = 0
    """Calls to it that failed."""

    @property
    def on_trial(self) -> bool:
        """Whether its trial call after a failure is in progress."""
        return self.failures > 0 and self.outstanding > 0


class Replicas:
    """Calls one of several servers, and another if that fails."""

    def __init__(
        self,
        urls: Sequence[str],
        balance: Balance = "least_outstanding",
        back_off: BackOff | None = None,
        *,
        patience_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience_seconds` is how long a call is retried. Raises ValueError without a URL."""
        if not urls:
            raise ValueError("there must be a replica")
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self._balance, self._back_off = balance, back_off or BackOff()
        self._patience, self._clock = patience_seconds, clock
        self._next = 0
        self._changed = asyncio.Event()

    async def call(self, ask: Callable[[str], Awaitable[T]]) -> T:
        """Returns what `ask(url)` returns for some replica.

        Raises NoReplica once the patience is over, and any error of `ask` other than ReplicaFailed.
        """
        ends_at = self._clock() + self._patience
        tried: set[str] = set()
        last = ""
        while True:
            replica = self.choose(tried)
            if replica is None:
                # All were tried or are away. The next round begins when one may be used.
                tried.clear()
                if not await self._wait(ends_at):
                    raise NoReplica(last or "every replica is backing off")
                continue
            tried.add(replica.url)
            try:
                return await self._ask(replica, ask)
            except ReplicaFailed as error:
                last = f"{replica.url}: {error}"
                if self._clock() >= ends_at:
                    raise NoReplica(last) from error

    def choose(self, tried: set[str] | frozenset[str] = frozenset()) -> Replica | None:
        """The replica to use next, among those not tried and not away; None if there is none."""
        now = self._clock()
        free = [
            replica
            for at in range(len(self.replicas))
            if (replica := self.replicas[(self._next + at) % len(self.replicas)]).url not in tried
            and replica.away_until <= now
            and not replica.on_trial
        ]
        if not free:
            return None
        # Picks the least busy, starting after the last choice, so that ties are spread evenly.
        least = self._balance == "least_outstanding"
        chosen = min(free, key=lambda each: each.outstanding) if least else free[0]
        self._next = (self.replicas.index(chosen) + 1) % len(self.replicas)
        return chosen

    async def _ask(self, replica: Replica, ask: Callable[[str], Awaitable[T]]) -> T:
        replica.outstanding += 1
        replica.calls += 1
        try:
            answer = await ask(replica.url)
        except ReplicaFailed:
            replica.failed += 1
            # Calls in progress at the same time count as one failure.
            if replica.away_until <= self._clock():
                replica.failures += 1
                replica.away_until = self._clock() + self._back_off.seconds(replica.failures)
            raise
        else:
            replica.failures, replica.away_until = 0, 0.0
            return answer
        finally:
            replica.outstanding -= 1
            self._changed.set()

    async def _wait(self, ends_at: float) -> bool:
        """Waits until a replica may be used; returns False if the time is over."""
        now = self._clock()
        if self.choose_is_possible():
            return True
        if now >= ends_at:
            return False
        self._changed.clear()
        # A replica on trial may be back at any time; the end of its call sets the event.
        away = (each.away_until for each in self.replicas if not each.on_trial)
        until = min(ends_at, *away)
        try:
            async with asyncio.timeout(max(until - now, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            pass  # A replica's back-off is over, or the patience is.
        return True

    def choose_is_possible(self) -> bool:
        """Whether some replica may be used now."""
        now = self._clock()
        return any(each.away_until <= now and not each.on_trial for each in self.replicas)
