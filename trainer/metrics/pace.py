"""Estimates a run's remaining time from the durations of its steps.

A step lasts until the next one begins, so it includes checkpoints, evaluations and anything else in
between. Only steps of this process count, except the first one: in it, the server has yet to sample the
data, and the libraries warm up. There is no estimate before the second step has ended.

The remaining time is the number of steps left times the weighted mean of the durations, minus the time
that the current step has taken so far. Each older step weighs less, by DECAY. The mean is used rather than
the median, so that an occasional long step, such as one with a checkpoint, counts with its share. The
bounds, which include the error of the mean itself, would hold for four of five runs if the remaining steps
were drawn from those seen. The evaluation of the last weights is added with its previous duration. If that
is unknown, the estimate ends before the evaluation, and the text states that. The text of a run that
ends early once it has reached its target is "at most", with the upper bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

DECAY = 0.97
# The weight of older steps is negligible.
REMEMBERED = 200
# Steps needed before there are bounds.
FEWEST = 3
# Four of five values of a normal distribution lie within this many standard deviations.
DEVIATIONS = 1.28


@dataclass(frozen=True, slots=True)
class Remaining:
    """The remaining time in seconds; the bounds are None after too few steps."""

    seconds: float
    least: float | None = None
    most: float | None = None
    whole: bool = True
    """Whether the run ends then; otherwise an evaluation of unknown duration follows."""
    may_end_early: bool = False

    def __str__(self) -> str:
        left = "left" if self.whole else "left before the last evaluation"
        if self.may_end_early:
            most = self.seconds if self.most is None else self.most
            return f"at most {in_words(most)} {left}"
        if self.least is None or self.most is None:
            return f"roughly {in_words(self.seconds)} {left}"
        about, least, most = in_words(self.seconds), in_words(self.least), in_words(self.most)
        return f"about {about} {left}" + (f" ({least} to {most})" if least != most else "")


class Pace:
    """The step durations of one process."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`steps` is the number of the run's last step."""
        self._steps = steps
        self._clock = clock
        self._durations: list[float] = []
        self._step = 0
        self._begun = 0.0
        self._first: float | None = None
        self._warm = False
        self.afterwards: float | None = 0.0
        """Seconds that the run takes after its last step; None if unknown."""
        self.may_end_early = False
        """Whether the run ends before its last step if it reaches its target."""

    def begin(self, step: int) -> None:
        """Begin a step, which ends the previous one."""
        now = self._clock()
        if self._first is None:
            self._first = now
        elif not self._warm:
            self._warm = True
        else:
            # Replaced, never modified: a display reads the list in another thread.
            self._durations = [*self._durations, now - self._begun][-REMEMBERED:]
        self._step, self._begun = step, now

    @property
    def elapsed(self) -> float:
        """Seconds since the first step of this process began."""
        return 0.0 if self._first is None else self._clock() - self._first

    def remaining(self) -> Remaining | None:
        """Estimate the remaining time; None before the second step has ended."""
        if not self._durations:
            return None
        seen, running = self._durations, self._clock() - self._begun
        if running > max(seen):
            # Count an unusually long step before it ends, because the run may be stuck.
            seen = [*seen, running]
        weights = [DECAY**age for age in reversed(range(len(seen)))]
        total = sum(weights)
        mean = sum(w * d for w, d in zip(weights, seen, strict=True)) / total
        # Including the current step.
        left = self._steps - self._step + 1
        afterwards, whole = self.afterwards or 0.0, self.afterwards is not None
        seconds = max(mean - running, 0.0) + (left - 1) * mean + afterwards
        if len(seen) < FEWEST:
            return Remaining(seconds, whole=whole, may_end_early=self.may_end_early)
        spread = sum(w * (d - mean) ** 2 for w, d in zip(weights, seen, strict=True)) / total
        independent = total**2 / sum(w * w for w in weights)
        variance = spread * independent / (independent - 1)
        off = DEVIATIONS * math.sqrt(variance * (left + left**2 / independent))
        least = max(seconds - off, afterwards)
        return Remaining(seconds, least, seconds + off, whole, self.may_end_early)


def in_words(seconds: float) -> str:
    """Format a duration for people, with about two digits."""
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            count = seconds / length
            return f"{count:.0f} {unit}" if count >= 10 or unit == "min" else f"{count:.1f} {unit}"
    return f"{seconds:.0f} s"
