"""Bounds the memory that grows with the callers:

    open trajectories    their tokens and log-probabilities; while a turn is in flight, also those it may
                         still write; outcomes, until the group is complete
    completed groups     without a journal on disk, until they can no longer be requested
    tasks                until their group is complete
    answers              until their callers have read them
    requests             over HTTP, until they are complete and parsed
    own, closed          unleased trajectories, until the memory is needed for something else
    kept                 completed groups that are also in the journal, until their first delivery: up to a
                         sixteenth of the budget, and only memory that nothing else needs

A call states how much it is about to add. It is then either refused with MEMORY_BUDGET, which changes
nothing, or added. Shortly before the bound no new group begins, so that those under way can finish.

Not included are the model, staged weights, marks of closed trajectories (some hundred bytes each, a
bounded number), each open call's request, and incomplete gRPC requests. gRPC does not report how much it
holds of those, but holds them for at most `limits.stalled_seconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.machine.resources import memory_bytes
from penstock.server.core.errors import DomainError
from penstock.wire.reasons import Reason

# No group begins above this fraction of the budget.
BEGIN_BELOW = 0.8
# Divisor of the budget for groups that are kept in memory although they are on disk.
KEPT_PART = 16


class GivesWay(Protocol):
    @property
    def byte_count(self) -> int: ...

    def give_way(self, byte_count: int) -> None: ...


class Kept(Protocol):
    @property
    def byte_count(self) -> int: ...

    def clear(self) -> None: ...


def default_bytes() -> int:
    """A quarter of the memory of this machine, or of its container."""
    return memory_bytes() // 4


@dataclass(eq=False)
class MemoryBudget:
    limit_bytes: int
    parts: Sequence[Callable[[], int]]
    """Each returns the bytes that a part takes."""
    kept: Kept
    """Cleared if any part needs memory."""
    last: GivesWay
    """Frees as much as the other parts need."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all parts and of the cache."""
        return self._needed + self.kept.byte_count

    @property
    def _needed(self) -> int:
        return sum(part() for part in self.parts)

    def may_keep(self, byte_count: int) -> bool:
        return self.used_bytes + byte_count <= self.limit_bytes

    def check(self, byte_count: int) -> None:
        """Make room for `byte_count` bytes; raise MEMORY_BUDGET if they do not fit."""
        used = self._needed
        if not self.may_keep(byte_count):
            self.kept.clear()
        missing = used + byte_count - self.limit_bytes
        if 0 < missing <= self.last.byte_count:
            self.last.give_way(missing)
        elif missing > 0:
            raise DomainError(
                Reason.MEMORY_BUDGET,
                f"{used} of {self.limit_bytes} bytes are in use; {byte_count} more do not fit",
                {"used_bytes": used, "byte_count": byte_count, "limit": self.limit_bytes},
            )

    def may_begin(self) -> bool:
        return self._needed - self.last.byte_count < BEGIN_BELOW * self.limit_bytes
