"""How much memory trajectories, groups and tasks may take.

    open trajectories    their tokens and log-probabilities, and, while a turn is in flight, those it may
                         still write; outcomes, until the group is complete
    finished groups      where there is no journal on the disk, until nobody can ask for them again
    tasks                until their group is complete
    answers              until their callers have read them
    requests             over HTTP, until they are whole and read
    own, closed          those that their callers opened for themselves, as long as nobody needs the memory
    kept                 finished groups that lie in the journal as well, until they are first delivered:
                         up to a sixteenth of the budget, and only what nobody else needs

Order: a call says what it is about to add -> refused with MEMORY_BUDGET, changing nothing, or added. A
little before the bound no new group begins, so that those under way can be finished.

Beside this the server takes what does not grow with its callers: the model, staged weights (`max_staged`
and the one that is held), what is remembered of closed trajectories (some hundred bytes each, a bounded
number); for each open call what its request says; and of requests over gRPC that are not whole yet what
gRPC holds, which tells nobody: for `limits.stalled_seconds` at most.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.server.core.errors import DomainError
from penstock.wire.reasons import Reason

# No group begins beyond this part of the budget.
BEGIN_BELOW = 0.8
OF_PHYSICAL_MEMORY = 4
# What may be kept that lies on the disk as well: this part of the budget.
KEPT_PART = 16


class GivesWay(Protocol):
    """What is in memory as long as nobody needs it for anything else."""

    @property
    def byte_count(self) -> int: ...

    def give_way(self, byte_count: int) -> None: ...


class Kept(Protocol):
    """What is in memory for speed only."""

    @property
    def byte_count(self) -> int: ...

    def clear(self) -> None: ...


def default_bytes() -> int:
    """A quarter of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // OF_PHYSICAL_MEMORY


class MemoryBudget:
    """A bound on what several parts take together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.parts: Sequence[Callable[[], int]] = ()
        """Each says how many bytes it takes."""
        self.kept: Kept | None = None
        """What gives way to any of them."""
        self.last: GivesWay | None = None
        """What is among the parts and gives way to the others, as far as they need it."""

    @property
    def used_bytes(self) -> int:
        """What all parts take, and what is kept."""
        return self._needed + (0 if self.kept is None else self.kept.byte_count)

    @property
    def _needed(self) -> int:
        return sum(part() for part in self.parts)

    def may_keep(self, byte_count: int) -> bool:
        """Whether there is room for what is not needed."""
        return self.used_bytes + byte_count <= self.limit_bytes

    def check(self, byte_count: int) -> None:
        """Raises MEMORY_BUDGET where so many bytes do not fit."""
        used = self._needed
        if self.kept is not None and not self.may_keep(byte_count):
            self.kept.clear()
        missing = used + byte_count - self.limit_bytes
        if self.last is not None and 0 < missing <= self.last.byte_count:
            self.last.give_way(missing)
            return
        if missing > 0:
            raise DomainError(
                Reason.MEMORY_BUDGET,
                f"{used} of {self.limit_bytes} bytes are in use, {byte_count} more do not fit",
                {"used_bytes": used, "byte_count": byte_count, "limit": self.limit_bytes},
                retry_after_seconds=1.0,
            )

    def may_begin(self) -> bool:
        """Whether another group may begin."""
        gives_way = 0 if self.last is None else self.last.byte_count
        return self._needed - gives_way < BEGIN_BELOW * self.limit_bytes
