"""Decides which engine of a pool takes a turn. Pure functions: no I/O, no clock.

The hub uses them, and so does the simulator. Rules, in order:

1. An engine takes a turn only while it is in rotation and has fewer turns than its limit.
2. The *home* of a turn is the engine whose key-value cache holds most of its prefix: the engine of the
   trajectory's last turn, else the engine of its group's siblings. A turn goes home if home is at most a
   margin busier than the least busy engine.
3. Otherwise it goes to the least busy engine; among equals, to the one with the fewest turns so far, so
   that idle engines alternate.

These rules are the policy *sticky*. *least_loaded* ignores homes. *round_robin* takes the engine with the
fewest turns so far, however busy it is. Both serve as baselines.

Busyness is the used fraction of an engine's limit times its slowness (`health`). A trajectory between two
turns counts as a turn, because it will be back in a moment: with its room given away, the engine would be
one turn over its limit.

A limit that was never found too high only shows the load tried so far, not what the engine can take.
Compared by that limit, an engine with a low one would get fewer turns, and so never raise it. So all
engines with unproven limits are compared by the highest of these limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.server.config.pool import PoolSection


@dataclass(frozen=True, slots=True)
class EngineLoad:
    name: str
    turns: int
    """Number of turns that it has from this hub."""
    limit: int
    """Maximum number of turns that it is given; at least 1."""
    slowness: float = 1.0
    """Seconds per token relative to the pool's usual, at least 1; 1 if it is to be tried again."""
    given: int = 0
    """Number of turns it was ever given."""
    between: int = 0
    """Number of trajectories between two turns whose last turn it had."""
    proven: bool = False
    """Whether its limit was ever found too high."""

    def busy(self, widest: int) -> float:
        """With one more turn: 1 at its limit, more if slow. `widest` replaces an unproven limit."""
        limit = self.limit if self.proven else widest
        return (self.turns + self.between + 1) / limit * self.slowness


def place(
    engines: Sequence[EngineLoad], homes: Sequence[str], rules: PoolSection
) -> EngineLoad | None:
    """None if all are at their limits. `homes` lists the best first."""
    free = [engine for engine in engines if engine.turns < engine.limit]
    if not free:
        return None
    if rules.routing == "round_robin":
        return min(free, key=lambda engine: (engine.given, engine.name))
    widest = widest_limit(engines)
    least = min(free, key=lambda engine: (engine.busy(widest), engine.given, engine.name))
    if rules.routing == "least_loaded":
        return least
    known = {engine.name: engine for engine in free}
    for name in homes:
        home = known.get(name)
        if home is not None and home.busy(widest) - least.busy(widest) <= rules.margin:
            return home
    return least


def widest_limit(engines: Iterable[EngineLoad]) -> int:
    """Return the highest unproven limit; 0 if all are proven."""
    return max((engine.limit for engine in engines if not engine.proven), default=0)


def retry_seconds(failures: int, first: float = 0.2, longest: float = 2.0) -> float:
    """0 for no failures."""
    return min(longest, first * 2.0 ** (min(failures, 64) - 1)) if failures else 0.0
