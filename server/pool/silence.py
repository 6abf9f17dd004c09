"""How long an engine has had turns and sampled nothing for them. No I/O, no clock.

    given a turn    it owes tokens from now on, unless it did already
    a token         of any of its turns: the time begins anew. So turns that wait in it are no silence
    no turns        it owes nothing. What passed is kept: an engine whose turns are given up one by one, for
                    nothing comes, is silent all the same
    other weights   as a token: it stands still for them

What the time is compared with, and what then becomes of its turns, is in `pool_turns`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Silence:
    """Since the last token of an engine, the times at which it had no turns left out."""

    before: float = 0.0
    """Seconds of it, up to `since`."""
    since: float | None = None
    """On the caller's clock; None while it has no turns."""

    def given(self, now: float) -> Silence:
        """It has a turn."""
        return self if self.since is not None else Silence(self.before, now)

    def left(self, now: float) -> Silence:
        """It has no turns any more."""
        return Silence(self.seconds(now))

    def broken(self, now: float) -> Silence:
        """It has sampled, or may begin anew."""
        return Silence(0.0, None if self.since is None else now)

    def seconds(self, now: float) -> float:
        """How long it has lasted."""
        return self.before + (0.0 if self.since is None else now - self.since)
