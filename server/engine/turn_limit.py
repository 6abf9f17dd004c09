"""How many turns an engine is given at a time: a pure controller of its load. No I/O, no clock.

Too few leave it idle; too many fill its key-value cache until it throws turns out and computes them again
(*preemption*), which costs more than waiting here. Nobody knows the number beforehand: it depends on the
lengths. So, on each report of the engine:

    it still has more turns than the limit                      it stays: it fell, and none has ended yet
    preempted since the last report, or the cache nearly full   the limit falls to a part of what it has now
    turns wait in the engine's own queue                        it stays: more would only wait there
    the limit is reached and the cache has room                 it grows by a step
    the limit is not reached                                    it stays: nothing was learnt

A limit that falls takes no turn away: those in flight come down to it as they end, which can take many
reports. The cache is full all that time, and says nothing of the new limit. So it falls once, and again
only where they have come down to it and it proves too high; what was preempted on the way down counts no
more.

The first report only begins the count of preemptions: those before it were not of turns from here.

Additive growth and multiplicative fall, as of TCP: engines that share nothing need no agreement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LimitRules:
    """How the limit moves."""

    first: int = 32
    fewest: int = 1
    most: int = 4096
    full: float = 0.95
    """Part of the key-value cache from which on it counts as full."""
    room: float = 0.85
    """Part below which there is room for more."""
    fall: float = 0.75
    growth: float = 0.125
    """Part of the limit that it grows by, at least one turn."""

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.first <= self.most:
            raise ValueError(
                f"1 <= fewest <= first <= most, got {self.fewest}, {self.first}, {self.most}"
            )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine said of itself, and how many turns it then had of this hub."""

    turns: int
    running: int
    waiting: int
    kv_cache_usage: float
    """From 0 to 1."""
    preemptions: int
    """Ever, by this process of the engine."""


@dataclass(frozen=True, slots=True)
class TurnLimit:
    """The limit, and what it was moved by last."""

    value: int
    preemptions: int | None = None
    """As of the last report; None before the first."""
    coming_down: bool = False
    """Whether the engine had more turns than this at the last report."""
    proven: bool = False
    """Whether it ever fell: until then it says what was tried, and not what the engine can take."""

    @classmethod
    def begin(cls, rules: LimitRules) -> TurnLimit:
        """For an engine of which nothing is known."""
        return cls(rules.first)

    def bounded(self, turns: int, rules: LimitRules) -> TurnLimit:
        """The limit of an engine that took so many turns, and refused one more."""
        value = max(rules.fewest, min(self.value, turns))
        return TurnLimit(value, self.preemptions, self.coming_down, proven=True)

    def after(self, report: LoadReport, rules: LimitRules) -> TurnLimit:
        """The limit after a report."""
        value, proven = self.value, self.proven
        before = report.preemptions if self.preemptions is None else self.preemptions
        # A count that went back is that of another process.
        preempted = report.preemptions > before and not self.coming_down
        if report.turns <= value:
            if preempted or report.kv_cache_usage >= rules.full:
                value = max(rules.fewest, int(max(1, report.turns) * rules.fall))
                proven = True
            elif (
                report.turns == value and not report.waiting and report.kv_cache_usage < rules.room
            ):
                value = min(rules.most, value + max(1, int(value * rules.growth)))
        return TurnLimit(value, report.preemptions, report.turns > value, proven)
