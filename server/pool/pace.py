"""How slow an engine is, by its turns, and when one that is slow is tried again. No I/O, no clock.

Order of what happens to a `Pace`:

    unknown   no turn has ended yet: the engine is as quick as any
    measured  each turn that ends moves it a little, one of more tokens by more: what a short one takes is
              the way there and back. What it is against the others' decides what the engine is given
              (`routing`)
    due       nothing was measured for a while, as of an engine that is given nothing because it is slow: it
              is given one turn as if it was as quick as any, and what that takes is its pace

So an engine that was slow once, at its first turn or for a neighbour's sake, is measured again. One that
turns out slow again is left alone for twice as long as before, up to a bound. A turn that is lost on the
way, or samples nothing, measures nothing, and the next one is the trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from penstock.server.pool.routing import retry_seconds

FIRST_SECONDS = 10.0
"""From the last measurement to a trial."""
LONGEST_SECONDS = 300.0
"""The same, of an engine that every trial has found slow."""
NEWEST_PART = 0.1
"""How much of the newest turn is in what is known, where turns are as long as each other."""
SLOW = 1.5
"""From so many times the usual pace on a trial has found an engine slow."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the turns of one engine have shown; of one without any, as it begins."""

    seconds: float = 0.0
    """Of the turns so far, the older ones by less."""
    tokens: float = 0.0
    """Of the same, likewise."""
    measured_at: float = -math.inf
    """On the caller's clock."""
    slow_trials: int = 0
    """In a row that found it slow."""

    @property
    def seconds_per_token(self) -> float:
        """0 where nothing is known."""
        return self.seconds / self.tokens if self.tokens else 0.0

    def is_due(self, now: float) -> bool:
        """Whether what was measured is too old to go by."""
        alone = retry_seconds(self.slow_trials + 1, FIRST_SECONDS, LONGEST_SECONDS)
        return now >= self.measured_at + alone

    def after(self, seconds: float, tokens: int, now: float, usual: float) -> Pace:
        """With a turn of so many tokens, at least 1, that has ended; `usual` is the pool's `usual_pace`."""
        if not self.tokens:
            return Pace(seconds, tokens, now)
        if self.is_due(now):
            slow = 0.0 < SLOW * usual <= seconds / tokens
            return Pace(seconds, tokens, now, self.slow_trials + 1 if slow else 0)
        kept = 1.0 - NEWEST_PART
        return Pace(
            kept * self.seconds + seconds, kept * self.tokens + tokens, now, self.slow_trials
        )

    def slowness(self, usual: float, turns: int, now: float) -> float:
        """How many times the usual pace an engine with so many turns takes; at least 1, and 1 where it is
        to be tried."""
        if not usual or (not turns and self.is_due(now)):
            return 1.0
        return max(1.0, self.seconds_per_token / usual)


def usual_pace(paces: Iterable[Pace]) -> float:
    """Seconds per token of the engine in the middle, of two the quicker one's; 0 where nothing is known."""
    known = [pace.seconds_per_token for pace in paces if pace.seconds_per_token]
    return median_low(known) if known else 0.0
