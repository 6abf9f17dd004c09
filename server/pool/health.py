"""Measures how fast an engine is by its turns, and for how long it samples nothing. No I/O, no clock.

States of a `Pace`:

    unknown   no turn has ended yet: the engine counts as fast as any
    measured  each turn that ends adjusts the pace a little, a longer one more, because a short one mostly
              measures the round trip. The ratio to the other engines' pace decides how many turns the
              engine gets (`routing`)
    due       nothing was measured for a while, for example because a slow engine gets no turns. It gets one
              turn as if it was as fast as any, and the time of that turn becomes its pace

So an engine that was slow once, at its first turn or because of another process, is measured again. If it
is slow again, it is left alone for twice as long as before, up to a limit. A turn that is lost, or samples
nothing, measures nothing; the next turn then becomes the trial.

What changes a `Silence`, the time in which an engine had turns and sampled no token for any of them:

    given a turn    the engine owes tokens from now on, unless it already did
    a token         of any of its turns: the time starts over. So turns waiting in the engine are no silence
    no turns        the engine owes nothing, but the time so far is kept. An engine whose turns are given up
                    one after another because it samples nothing is still silent
    other weights   counts like a token, because the engine stops for them

`turns` decides how long is too long, and what happens to the engine's turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

from penstock.server.pool.routing import retry_seconds

FIRST_SECONDS = 10.0
"""Time from the last measurement to a trial."""
LONGEST_SECONDS = 300.0
"""Longest such time, for an engine that every trial has found slow."""
NEWEST_PART = 0.1
"""Weight of the newest turn in the average, for turns of equal length."""
SLOW = 1.5
"""An engine is slow if its trial takes at least this many times the usual pace."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the turns of one engine have shown. The default is an engine without turns."""

    seconds: float = 0.0
    """Duration of its turns; older ones weigh less."""
    tokens: float = 0.0
    """Tokens of its turns, weighted the same way."""
    measured_at: float = -math.inf
    """Time of the last measurement on the caller's clock."""
    slow_trials: int = 0
    """Number of trials in a row that found it slow."""

    @property
    def seconds_per_token(self) -> float:
        """The pace; 0 if it is unknown."""
        return self.seconds / self.tokens if self.tokens else 0.0

    def is_due(self, now: float) -> bool:
        """Whether the last measurement is too old to rely on."""
        alone = retry_seconds(self.slow_trials + 1, FIRST_SECONDS, LONGEST_SECONDS)
        return now >= self.measured_at + alone

    def after(self, seconds: float, tokens: int, now: float, usual: float) -> Pace:
        """Add a turn that has ended, of `tokens` >= 1. `usual` is the pool's `usual_pace`."""
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
        """Its pace over the usual one, at least 1; exactly 1 for an idle engine due for a trial."""
        if not usual or (not turns and self.is_due(now)):
            return 1.0
        return max(1.0, self.seconds_per_token / usual)


def usual_pace(paces: Iterable[Pace]) -> float:
    """Median seconds per token of the engines; of two, the faster one's. 0 if nothing is known."""
    known = [pace.seconds_per_token for pace in paces if pace.seconds_per_token]
    return median_low(known) if known else 0.0


@dataclass(frozen=True, slots=True)
class Silence:
    """Time since an engine's last token, without the times at which it had no turns."""

    before: float = 0.0
    """Seconds accumulated before `since`."""
    since: float | None = None
    """Start of the current period on the caller's clock; None while the engine has no turns."""

    def given(self, now: float) -> Silence:
        """The engine got a turn."""
        return self if self.since is not None else Silence(self.before, now)

    def left(self, now: float) -> Silence:
        """The engine has no more turns."""
        return Silence(self.seconds(now))

    def broken(self, now: float) -> Silence:
        """The engine sampled a token, or starts over for another reason."""
        return Silence(0.0, None if self.since is None else now)

    def seconds(self, now: float) -> float:
        return self.before + (0.0 if self.since is None else now - self.since)
