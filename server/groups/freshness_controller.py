"""How many groups may be outstanding: enough to keep the trainer busy, and no more.

Lag is a cost, not a budget to spend. Every group that lies finished in the buffer while the trainer
works ages by a version per step, so the number of outstanding groups should be the smallest one
that still has a batch finished whenever the trainer asks. That number depends on how long groups
take compared to a step, which nobody knows beforehand and which changes as the policy learns to
write longer. So it is found by feedback, once per step.

The feedback is an integral: each step moves it by how much longer, or shorter, than `TOLERATED_WAIT` the
trainer starved. Summed over a run the moves telescope to the distance between the first value and the
last, which is bounded; so wherever it stays clear of its ends, the mean wait tends to `TOLERATED_WAIT`, for
every distribution of lengths and every size of batch (for batches of one or two groups it is up to four
times that, because the move of one step is capped). Fixed steps up and down (an eighth and a sixteenth of a
batch were tried) settle where their frequencies balance: anywhere from 0.5 % to 28 %, for batches of 1 to
64 groups and the loads of `benchmarks/staleness.py`.

It has two parts, the target and a *debt*. What the trainer starved raises the target, but by no more groups
than were lacking when it asked: where groups are fast, one that is missing costs as much time as many. Nor
by those that the step before raised it by: they were begun too late for this one. The rest is debt, which
steps without starvation pay before they lower the target again. So where a target is a cliff, with no wait
above it and a long one below, it stays at the edge, and tries a group less as seldom as the tolerated wait
allows. There is one at two batches, of which one is being trained: below it every step waits for a whole
group. With the target alone, after every such step it stood half a batch or more too high for dozens.

A step that starves although the one before did is at no edge where more groups are lacking than that one
raised the target by, nor is the third in a row: it raises the target by all that it starved. Without that
the trainer of 32 engines and more, whose groups take several steps, idled for 28 % of its fifth to tenth
step, and does for 3 % (`benchmarks/simulate.py`, `max_lag` 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERATED_WAIT = 0.02
"""Part of its time the trainer may wait for groups; less costs more lag than it is worth."""

EDGE_STEPS = 2
"""Steps in a row that starve at an edge: what the first one raised is there for the third."""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What one step of the trainer showed, from one version to the next."""

    seconds: float
    """The whole step: gathering the batch, training on it, publishing the weights."""
    starved_seconds: float
    """Thereof with demand unmet because too few groups were finished."""
    surplus: int
    """Groups that were finished and left over when the demand was met."""
    lacking: int
    """The most that were asked for and not finished."""
    filled: bool
    """Whether the target was what kept further groups from being admitted."""


class FreshnessController:
    """Moves the bound on outstanding groups between `floor` and `ceiling`, which wins over it."""

    def __init__(self, groups_per_step: int, floor: int, ceiling: int) -> None:
        self._groups_per_step = groups_per_step
        self._floor = min(floor, ceiling)
        self._ceiling = ceiling
        self._level = float(min(max(2 * groups_per_step, floor), ceiling))
        """The target before rounding: so a batch of one is steered as finely as a large one."""
        self._debt = 0.0
        """In groups, at most a batch: what the trainer starved and the target did not rise by."""
        self._raised = 0.0
        """By how much the step before raised the level."""
        self._starving = 0
        """Steps in a row that starved for longer than is tolerated."""

    @property
    def target(self) -> int:
        """Groups that may be outstanding now."""
        # Rounded up: else it was over the edge as soon as it had moved at all. The level is a sum of many
        # moves: what is a whole number but for their rounding is one.
        return math.ceil(self._level - 1e-9)

    def observe(self, step: StepObservation) -> None:
        """Adjusts the target after one step."""
        raised, self._raised = self._raised, 0.0
        if step.seconds <= 0.0:
            return
        excess = step.starved_seconds - TOLERATED_WAIT * step.seconds
        if excess > 0.0 and not step.filled:
            return  # A higher bound would start no more groups: there are no agents to take them.
        busy = step.seconds - step.starved_seconds
        # One batch at most: a step that starved for ten says no more than that one was missing.
        move = (excess / busy if excess < busy else 1.0) * self._groups_per_step
        self._starving = self._starving + 1 if move > 0.0 else 0
        if move > 0.0:
            at_no_edge = self._starving > EDGE_STEPS or step.lacking > math.ceil(raised) > 0
            self._raised = move if at_no_edge else min(move, max(0.0, step.lacking - raised))
            self._debt = min(self._debt + move - self._raised, float(self._groups_per_step))
            move = self._raised
        else:
            paid = min(self._debt, -move)
            self._debt -= paid
            move += paid
        if step.starved_seconds == 0.0:
            # More than a batch left over is no noise but a load that has become lighter.
            move -= max(0.0, step.surplus - self._groups_per_step) / 8
        self._level = min(max(self._level + move, self._floor), self._ceiling)
