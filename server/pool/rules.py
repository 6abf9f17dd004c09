"""How a pool of engines is run; what a hub is configured with."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.server.engine.protocol import WHOLE
from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool.routing import RoutingRules


@dataclass(frozen=True, slots=True)
class PoolRules:
    """How a pool is run."""

    routing: RoutingRules = field(default_factory=RoutingRules)
    limits: LimitRules = field(default_factory=LimitRules)
    switches_at_once: bool = False
    """Whether all engines switch at the same time, and no turn begins meanwhile."""
    switch_part: float = 0.5
    """Part of the engines that switch at the same time otherwise; at least one does."""
    branches: int = 2
    """Hosts that each host hands a version on to; with none the hub sends it to each."""
    differences: bool = True
    """Whether hosts that hold the version before are sent what changed, where that is less."""
    look_seconds: float = 1.0
    """Between two looks at an engine."""
    flush_seconds: float = 0.2
    """Longest time that tokens wait on an engine server, of a turn that is read as it is sampled. Shorter
    than the engine server's own it would hand over token by token."""
    whole_flush_seconds: float = 1.0
    """The same, of a turn that nobody reads before it ends: what is sampled again of each when an engine
    is lost."""
    segments_per_second: float = 2_000.0
    """Most that all turns of the latter kind take together: with more turns they wait longer."""
    stage_seconds: float = 600.0
    """Longest time that one engine takes to have all of a version, from when the switch to it is asked for
    or the engine's turn to be brought up has come, before it is given up. Who has to do without another
    one of its host waits half as long for that, and a tenth for a host that has to be ready first."""
    switch_seconds: float = 600.0
    """Longest time that one engine takes to switch, its turns in flight included, before it is given up."""
    silent_seconds: float = 600.0
    """Longest time that an engine has turns and samples no token of any of them, before those go on
    elsewhere; switches are left out. Longer than the first token of the longest prompt takes alone."""
    bring_ups: int = 8
    """Engines that join and are given the pool's version at the same time. Those that took too long over it
    before have a quarter of as many places, of their own."""

    def flush_for(self, stream_interval: int, turns: int) -> float:
        """Seconds that the tokens of a request may wait on the engine server, where so many turns are in
        flight; `stream_interval` is the request's own."""
        if stream_interval == 1:
            return 0.0
        if stream_interval < WHOLE:
            return self.flush_seconds
        return max(self.whole_flush_seconds, turns / self.segments_per_second)
