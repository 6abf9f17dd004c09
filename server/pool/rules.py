"""Settings of a pool of engines, from the hub's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.server.engine.protocol import WHOLE
from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool.routing import RoutingRules


@dataclass(frozen=True, slots=True)
class PoolRules:
    routing: RoutingRules = field(default_factory=RoutingRules)
    limits: LimitRules = field(default_factory=LimitRules)
    switches_at_once: bool = False
    """Whether all engines switch at the same time; no turn begins meanwhile."""
    switch_part: float = 0.5
    """Otherwise, the fraction of engines that switch at the same time; at least one does."""
    branches: int = 2
    """Hosts that each host hands a version on to; with 0, the hub sends it to each host."""
    differences: bool = True
    """Whether hosts that hold the previous version get only what changed, if that is smaller."""
    look_seconds: float = 1.0
    """Interval between two looks at an engine."""
    flush_seconds: float = 0.2
    """Longest time that tokens of a streamed turn wait on an engine server. Below the engine server's own
    interval, each token would be sent separately."""
    whole_flush_seconds: float = 1.0
    """The same for a turn not read before its end. A lost engine's turns sample up to this much again."""
    segments_per_second: float = 2_000.0
    """Limit for all turns that are not streamed together; with more turns, each waits longer."""
    stage_seconds: float = 600.0
    """Longest time for an engine to receive a version, from the request to switch or the beginning of its
    bring-up. It waits half of it for its host's leader, and a tenth for a peer host to become ready."""
    switch_seconds: float = 600.0
    """Longest time for an engine to switch, with its turns in flight, before it is given up."""
    silent_seconds: float = 600.0
    """Longest time that an engine with turns may sample nothing before they continue elsewhere. Switches
    do not count. Must exceed the time to the first token of the longest prompt, alone in the engine."""
    bring_ups: int = 8
    """Joining engines that are given the pool's version at the same time. Engines that took too long
    before share a separate quarter of that number."""

    def flush_for(self, stream_interval: int, turns: int) -> float:
        """Seconds that a request's tokens may wait on the engine server; `turns` are those in flight."""
        if stream_interval == 1:
            return 0.0
        if stream_interval < WHOLE:
            return self.flush_seconds
        return max(self.whole_flush_seconds, turns / self.segments_per_second)
