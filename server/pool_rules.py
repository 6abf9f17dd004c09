"""How a pool of engines is run; what a hub is configured with."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.server.routing import RoutingRules
from penstock.server.turn_limit import LimitRules


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
    look_seconds: float = 1.0
    """Between two looks at an engine."""
    flush_seconds: float = 0.1
    """Longest time that tokens wait on an engine server."""
    switch_seconds: float = 600.0
    """Longest time that one engine takes to switch, its turns in flight included, before it is given up."""
