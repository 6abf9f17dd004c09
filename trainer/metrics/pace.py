"""How long steps take, and what that says of those that are left.

A step lasts from its beginning to the next one's: checkpoints, evaluations, and whatever else comes
between two steps are in it. Only steps of this process count, so after a resume it begins anew; and its
first step, in which the server has yet to sample what is trained, counts only until there are others.

The remaining time is the number of steps left times the mean of the durations seen, in which the recent
ones weigh more (each older one by DECAY), less what the step under way has had. A mean, not a median: a
long step every so often, such as one with a checkpoint, is to count with its share. Its bounds are
those that four of five runs would stay between if the steps to come were drawn from those seen, the
mean's own error included. What comes after the last step, the evaluation of the last weights, is added
as long as it took before; as long as that is not known, the time told ends before it, and says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

DECAY = 0.97
# Older ones weigh nothing.
REMEMBERED = 200
# Durations it takes before there are bounds.
FEWEST = 3
# Four of five values of a normal distribution lie within so many standard deviations.
DEVIATIONS = 1.28


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left, in seconds; the bounds are None where too few steps were seen."""

    seconds: float
    least: float | None = None
    most: float | None = None
    whole: bool = True
    """Whether the run ends then; otherwise it goes on with an evaluation of unknown length."""

    def __str__(self) -> str:
        left = "left" if self.whole else "left before the last evaluation"
        if self.least is None or self.most is None:
            return f"roughly {in_words(self.seconds)} {left}"
        about, least, most = in_words(self.seconds), in_words(self.least), in_words(self.most)
        return f"about {about} {left}" + (f" ({least} to {most})" if least != most else "")


class Pace:
    """The durations of one process's steps."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`steps` is the number of the run's last one."""
        self._steps = steps
        self._clock = clock
        self._durations: list[float] = []
        self._step = 0
        self._begun = 0.0
        self._first: float | None = None
        self._first_counts = True
        self.afterwards: float | None = 0.0
        """Seconds that the run takes after its last step; None where that is not known."""

    def begin(self, step: int) -> None:
        """A step begins; the one before is over."""
        now = self._clock()
        if self._first is None:
            self._first = now
        else:
            kept = self._durations
            if self._first_counts and len(kept) == FEWEST:
                self._first_counts, kept = False, kept[1:]
            # Never changed in place: a display reads it in a thread of its own.
            self._durations = [*kept, now - self._begun][-REMEMBERED:]
        self._step, self._begun = step, now

    @property
    def elapsed(self) -> float:
        """Seconds since the first step of this process began."""
        return 0.0 if self._first is None else self._clock() - self._first

    def remaining(self) -> Remaining | None:
        """What is left of the run; None before a step is over."""
        if not self._durations:
            return None
        seen, running = self._durations, self._clock() - self._begun
        if running > max(seen):
            # It says so before it is over: a run that stands still has no end in sight.
            seen = [*seen, running]
        weights = [DECAY**age for age in reversed(range(len(seen)))]
        total = sum(weights)
        mean = sum(w * d for w, d in zip(weights, seen, strict=True)) / total
        # The step under way is the first of them.
        left = self._steps - self._step + 1
        afterwards = self.afterwards
        whole = afterwards is not None
        seconds = max(mean - running, 0.0) + (left - 1) * mean + (afterwards or 0.0)
        if len(seen) < FEWEST:
            return Remaining(seconds, whole=whole)
        spread = sum(w * (d - mean) ** 2 for w, d in zip(weights, seen, strict=True)) / total
        independent = total**2 / sum(w * w for w in weights)
        variance = spread * independent / (independent - 1)
        off = DEVIATIONS * math.sqrt(variance * (left + left**2 / independent))
        return Remaining(seconds, max(seconds - off, afterwards or 0.0), seconds + off, whole)


def in_words(seconds: float) -> str:
    """A duration with two digits or so, for a person."""
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            count = seconds / length
            return f"{count:.0f} {unit}" if count >= 10 or unit == "min" else f"{count:.1f} {unit}"
    return f"{seconds:.0f} s"
