"""Measures how long an engine has had turns without sampling a token for any of them. No I/O, no
clock.

    given a turn    the engine owes tokens from now on, unless it already did
    a token         of any of its turns: the time starts over. So turns waiting in the engine are no silence
    no turns        the engine owes nothing, but the time so far is kept. An engine whose turns are given up
                    one after another because it samples nothing is still silent
    other weights   counts like a token, because the engine stops for them

`pool_turns` decides how long is too long, and what happens to the engine's turns.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        """Duration of the silence so far."""
        return self.before + (0.0 if self.since is None else now - self.since)
