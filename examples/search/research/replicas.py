"""Several servers that do the same: which is asked next, and what a failure does to one.

States of a replica, as its client sees it:

    serving ──a call fails──► backing off, twice as long each time ──its time is over──► on trial: one call
       ▲                              ▲                                                    │         │
       │                              └──────────────────── fails ─────────────────────────┘         │
       └──────────────────────────────────── succeeds ───────────────────────────────────────────────┘

A call that fails is made again on another replica; each is tried once in a round. Where all of them back
off, the call waits for the first whose time is over, as long as its patience lasts. So a replica that is
killed costs the calls it had one more try, and one that comes back is used again after one call's trial.
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
    """A call failed for a reason that lies with the replica: another may answer it."""


class NoReplica(Exception):
    """No replica answered in time; the message has the last failure."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long a replica that failed is left alone."""

    first_seconds: float = 0.2
    longest_seconds: float = 10.0
    jitter: float = 0.2
    """Part of the time by which it varies, so that clients do not come back all at once."""

    def seconds(self, failures: int) -> float:
        """After so many failures in a row."""
        # The exponent is bounded: a replica that is gone for good fails any number of times.
        base = min(self.first_seconds * 2 ** min(failures - 1, 32), self.longest_seconds)
        return base * (1 + random.uniform(-self.jitter, self.jitter))


@dataclass(eq=False)
class Replica:
    """One server, and what its client knows of it."""

    url: str
    outstanding: int = 0
    """Calls it has not answered."""
    failures: int = 0
    """Calls that failed since the last that did not."""
    away_until: float = 0.0
    """Until then it is not asked; a time of the clock."""
    calls: int = 0
    """Calls it was asked."""
    failed: int = 0
    """Those of them that failed."""

    @property
    def on_trial(self) -> bool:
        """Whether it has one call to show that it is back, and that is under way."""
        return self.failures > 0 and self.outstanding > 0


class Replicas:
    """Calls one of several servers, and another where that fails."""

    def __init__(
        self,
        urls: Sequence[str],
        balance: Balance = "least_outstanding",
        back_off: BackOff | None = None,
        *,
        patience_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience_seconds` is how long a call goes on being tried. Raises ValueError without a URL."""
        if not urls:
            raise ValueError("there must be a replica")
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self._balance, self._back_off = balance, back_off or BackOff()
        self._patience, self._clock = patience_seconds, clock
        self._next = 0
        self._changed = asyncio.Event()

    async def call(self, ask: Callable[[str], Awaitable[T]]) -> T:
        """What `ask(url)` returns for some replica.

        Raises NoReplica when the patience is over, and whatever `ask` raises that is no ReplicaFailed.
        """
        ends_at = self._clock() + self._patience
        tried: set[str] = set()
        last = ""
        while True:
            replica = self.choose(tried)
            if replica is None:
                # All were tried, or are away: the next round begins with the first that may be asked.
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
        """The replica to ask next, of those not tried and not away; None where there is none."""
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
        # The first of those with least to do, in turn, so that ties do not all fall on one.
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
            # Calls that were under way together are one failure.
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
        """Until a replica may be asked; whether that is before the end."""
        now = self._clock()
        if self.choose_is_possible():
            return True
        if now >= ends_at:
            return False
        self._changed.clear()
        # A replica on trial may be back at any time: its call's end wakes us.
        away = (each.away_until for each in self.replicas if not each.on_trial)
        until = min(ends_at, *away)
        try:
            async with asyncio.timeout(max(until - now, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            pass  # The time of some replica is over, or ours is.
        return True

    def choose_is_possible(self) -> bool:
        """Whether some replica may be asked now."""
        now = self._clock()
        return any(each.away_until <= now and not each.on_trial for each in self.replicas)
