"""Decides whether a run has reached its target (`[run.target]`). Pure.

    rewards of a step -> window: the fewest latest steps with enough rewards -> its mean, one per step
                      -> reached: the last `patience` means are all at the target

The state is part of the checkpoint. It holds the means rather than a verdict, so that a run resumed with
another target is judged by that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.trainer.config.trainer import TargetConfig


@dataclass(frozen=True, slots=True)
class Ending:
    """How close a run is to its target."""

    window: tuple[tuple[int, float], ...] = ()
    """Number and sum of the rewards of each step in the window, oldest first."""
    means: tuple[float, ...] = ()
    """Mean of the window after each of the latest steps, oldest first: `patience` of them at most."""

    def after(self, rewards: Sequence[float], target: TargetConfig) -> Ending:
        """Returns the state after one more step. The order of its rewards does not matter."""
        window = (*self.window, (len(rewards), math.fsum(rewards)))
        while sum(count for count, _ in window[1:]) >= target.attempts:
            window = window[1:]
        count = sum(count for count, _ in window)
        if count < target.attempts:
            return Ending(window)
        mean = math.fsum(total for _, total in window) / count
        return Ending(window, (*self.means, mean)[-target.patience :])

    @property
    def mean(self) -> float | None:
        """The latest mean of the window; None before it has enough rewards."""
        return self.means[-1] if self.means else None

    def reached(self, target: TargetConfig) -> bool:
        held = self.means[-target.patience :]
        return len(held) == target.patience and min(held) >= target.reward
