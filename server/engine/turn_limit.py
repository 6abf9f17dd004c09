"""How many turns an engine gets at a time: a pure controller of its load. No I/O, no clock.

Too few turns leave the engine idle. Too many fill its key-value cache until it evicts turns and computes
them again (*preemption*), which costs more than waiting here. The right number depends on the lengths of
the turns, so it is not known in advance. On each report of the engine, the limit changes as follows:

    the engine still has more turns than the limit               unchanged: the limit fell, turns are ending
    preempted since the last report, or the cache nearly full    falls to a fraction of the present turns
    turns wait in the engine's own queue                         unchanged: more would only wait there
    the limit is reached and the cache has room                  grows by a step
    the limit is not reached                                     unchanged: nothing was learnt

A lower limit takes no turn away: turns in flight come down to it as they end, which can take many reports.
The cache is full all that time and shows nothing about the new limit. So neither a full cache nor a
preemption on the way down counts. The first report only starts the count of preemptions, because earlier
ones were not of this hub's turns.

Growth is additive and the fall multiplicative, as in TCP, so engines that share nothing need no agreement.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.v1 import rollout_service_pb2


@dataclass(frozen=True, slots=True)
class LimitRules:
    first: int = 32
    fewest: int = 1
    most: int = 4096
    full: float = 0.95
    """Fraction of the key-value cache from which it counts as full."""
    room: float = 0.85
    """Fraction below which there is room for more turns."""
    fall: float = 0.75
    growth: float = 0.125
    """Fraction of the limit by which it grows, at least one turn."""

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.first <= self.most:
            raise ValueError(
                f"1 <= fewest <= first <= most, got {self.fewest}, {self.first}, {self.most}"
            )


@dataclass(frozen=True, slots=True)
class TurnLimit:
    value: int
    preemptions: int | None = None
    """Count in the last report; None before the first."""
    coming_down: bool = False
    """Whether the engine had more turns than this at the last report."""
    proven: bool = False
    """Whether it ever fell. Until then it shows what was tried, not what the engine can take."""

    def bounded(self, turns: int, rules: LimitRules) -> TurnLimit:
        """The limit of an engine that took this many turns and refused one more."""
        value = max(rules.fewest, min(self.value, turns))
        return TurnLimit(value, self.preemptions, self.coming_down, proven=True)

    def after(
        self, turns: int, load: rollout_service_pb2.ServerLoad, rules: LimitRules
    ) -> TurnLimit:
        """The limit after an engine's report of its load, at which it had `turns` of this hub's turns."""
        value, proven = self.value, self.proven
        before = load.preemption_count if self.preemptions is None else self.preemptions
        # A count that decreased comes from another engine process.
        preempted = load.preemption_count > before and not self.coming_down
        if turns <= value:
            if preempted or load.kv_cache_usage >= rules.full:
                value = max(rules.fewest, int(max(1, turns) * rules.fall))
                proven = True
            elif (
                turns == value and not load.waiting_turn_count and load.kv_cache_usage < rules.room
            ):
                value = min(rules.most, value + max(1, int(value * rules.growth)))
        return TurnLimit(value, load.preemption_count, turns > value, proven)
