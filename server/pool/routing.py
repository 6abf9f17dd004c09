"""Where a turn goes in a pool of engines: pure functions of what is known of each. No I/O, no clock.

The hub drives these, and so does the simulator. Order of what decides:

1. An engine takes a turn only while it is in rotation and has fewer turns than its limit.
2. The *home* of a turn is the engine whose key-value cache has most of it: the one that had the
   trajectory's last turn, else the one that its group's siblings went to. A turn goes home while home is
   at most a margin busier than the least busy engine.
3. Else it goes to the least busy one; among equals to the one with the fewest turns so far, so that
   idle engines take turns.

So it is with the policy *sticky*. *least_loaded* knows no homes, and *round_robin* takes the engine with
the fewest turns so far, however busy: what there is to compare with.

How busy an engine is, is the part of its limit that it has, times how slow it is (`engine_pace`): an engine
that takes twice as long for a token as the others is as full with half as many turns.

A trajectory between two turns counts as a turn: it comes back in a moment, and another one in its place
would be one too many for as long as both last.

A limit that was never found too high says what was tried, not what the engine can take. By that alone the
lower of two of them would leave an engine with fewer turns, and so with the lower limit: engines with such
limits are compared by the highest of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.server.config.settings import RoutingPolicy


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine in rotation."""

    name: str
    turns: int
    """That it has of this hub."""
    limit: int
    """Most that it is given; at least 1."""
    slowness: float = 1.0
    """Seconds per token over what is usual in the pool; at least 1, and 1 where that is to be tried."""
    given: int = 0
    """Turns it was ever given."""
    between: int = 0
    """Trajectories that are between two turns, of which it had the last."""
    proven: bool = False
    """Whether its limit was ever found too high."""

    def busy(self, widest: int) -> float:
        """How full it is with one turn more: 1 at its limit, and more where it is slow. Of one that is not
        proven the limit is `widest`, the highest of those that are not."""
        limit = self.limit if self.proven else widest
        return (self.turns + self.between + 1) / limit * self.slowness


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """How much the prefix cache is worth."""

    margin: float = 0.25
    """How much busier than the least busy engine home may be, as a part of its limit."""
    policy: RoutingPolicy = "sticky"


def place(
    engines: Sequence[EngineLoad], homes: Sequence[str], rules: RoutingRules
) -> EngineLoad | None:
    """The engine that takes a turn; None where each is at its limit. `homes` has the best first."""
    free = [engine for engine in engines if engine.turns < engine.limit]
    if not free:
        return None
    if rules.policy == "round_robin":
        return min(free, key=lambda engine: (engine.given, engine.name))
    widest = widest_limit(engines)
    least = min(free, key=lambda engine: (engine.busy(widest), engine.given, engine.name))
    if rules.policy == "least_loaded":
        return least
    known = {engine.name: engine for engine in free}
    for name in homes:
        home = known.get(name)
        if home is not None and home.busy(widest) - least.busy(widest) <= rules.margin:
            return home
    return least


def widest_limit(engines: Iterable[EngineLoad]) -> int:
    """The highest limit of those that are not proven; 0 where all are."""
    return max((engine.limit for engine in engines if not engine.proven), default=0)


def retry_seconds(failures: int, first: float = 0.2, longest: float = 2.0) -> float:
    """How long an engine is left alone that failed so many times in a row; 0 for none."""
    return min(longest, first * 2.0 ** (min(failures, 64) - 1)) if failures else 0.0
