"""Controls how many groups may be outstanding: enough to keep the trainer busy, and no more.

Every completed group that waits in the buffer while the trainer works ages by a version per step. So the
number of outstanding groups should be the smallest one that still has a batch finished whenever the
trainer asks. It depends on how long groups take compared to a step, which changes as the policy learns to
write longer. So the controller finds the number by feedback, once per step.

The feedback is an integral. Each step moves the target by how much longer, or shorter, than
`TOLERATED_WAIT` the trainer starved. Summed over a run, the moves telescope to the distance between the
first value and the last, which is bounded. So wherever the target stays clear of its limits, the mean wait
tends to `TOLERATED_WAIT`, for every distribution of lengths and every batch size. For batches of one or
two groups it is up to four times that, because the move of one step is capped. Fixed steps up and down (an
eighth and a sixteenth of a batch) settled anywhere from 0.5 % to 28 % (`benchmarks/staleness/gate.py`).

Starvation raises the target, but by no more groups than were lacking when the trainer asked: if groups are
fast, one missing group costs as much time as many. Groups that the previous step added do not count as
lacking either, because they started too late for this step. The rest of the starvation becomes *debt*.
Steps without starvation pay the debt before they lower the target again.

Some targets are a cliff, with no wait above and a long one below. One is at two batches, of which one is
being trained: below it every step waits for a whole group. The controller stays at such an edge, and tries
one group less only as seldom as the tolerated wait allows. Without the debt, each such step left the
target half a batch or more too high for dozens of steps.

A step is at no edge if the previous step also starved and more groups are lacking than that step added.
The same holds for the third starving step in a row. Such a step raises the target by all that it starved.
Without this rule a trainer of 32 or more engines, whose groups take several steps, idled for 28 % of its
fifth to tenth step; with it, for 3 % (`benchmarks/simulation/tables.py`, `max_lag` 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOLERATED_WAIT = 0.02
"""Fraction of its time that the trainer may wait for groups. A lower value would cost more lag than it
saves."""

EDGE_STEPS = 2
"""Steps in a row that can starve at an edge. Groups that the first one added are there for the third."""


@dataclass(slots=True)
class StepObservation:
    """Measurements of one trainer step, from one version to the next."""

    seconds: float = 0.0
    """Duration of the whole step: gathering the batch, training on it, publishing the weights."""
    starved_seconds: float = 0.0
    """Part of `seconds` with demand unmet because too few groups were finished."""
    surplus: int = 0
    """Finished groups left over when the demand was last met."""
    lacking: int = 0
    """Most groups that were requested and not finished."""
    filled: bool = False
    """Whether the target is what prevented the admission of further groups."""


class StepMeter:
    def __init__(self) -> None:
        self.step = StepObservation()
        """The step under way."""
        self._began: float | None = None
        self._unmet = 0
        """Groups that the batch still lacks."""
        self._starving_since: float | None = None

    def demand(self, unmet: int, completed: int, now: float) -> None:
        """`unmet` is the number of groups that the batch still lacks."""
        if self._starving_since is not None:
            self.step.starved_seconds += max(0.0, now - self._starving_since)
        self._unmet = unmet
        # Under WAIT a trainer may wait for an old group while enough others are completed. It does
        # not starve then, because more groups would not help.
        lacking = unmet - completed
        self.step.lacking = max(self.step.lacking, lacking)
        self._starving_since = now if lacking > 0 else None

    def supply(self, completed: int, now: float) -> None:
        """Note how many groups are completed, for the same demand."""
        self.demand(self._unmet, completed, now)

    def close_step(self, completed: int, now: float) -> StepObservation | None:
        """Begin another step. Return the one that ends, if its beginning was seen."""
        self.demand(0, completed, now)
        ended, self.step = self.step, StepObservation()
        began, self._began = self._began, now
        if began is None:
            return None
        ended.seconds = max(0.0, now - began)
        return ended


class FreshnessController:
    """Moves the limit on outstanding groups between `floor` and `ceiling`, which takes precedence."""

    def __init__(self, groups_per_step: int, floor: int, ceiling: int) -> None:
        self._groups_per_step = groups_per_step
        self._floor = min(floor, ceiling)
        self._ceiling = ceiling
        self._level = float(min(max(2 * groups_per_step, floor), ceiling))
        """The target before rounding, so that small batches are controlled as finely as large ones."""
        self._debt = 0.0
        """Starvation that did not raise the target, in groups; at most a batch."""
        self._raised = 0.0
        """By how much the previous step raised the level."""
        self._starving = 0
        """Steps in a row that starved for longer than is tolerated."""

    @property
    def target(self) -> int:
        """Groups that may be outstanding now."""
        # Rounded up, otherwise any downward move would step over the edge. The level is a sum of
        # many moves, so a value within rounding error of a whole number counts as that number.
        return math.ceil(self._level - 1e-9)

    def observe(self, step: StepObservation) -> None:
        raised, self._raised = self._raised, 0.0
        if step.seconds <= 0.0:
            return
        excess = step.starved_seconds - TOLERATED_WAIT * step.seconds
        if excess > 0.0 and not step.filled:
            return  # A higher bound would start no more groups: there are no agents to take them.
        busy = step.seconds - step.starved_seconds
        # At most one batch: a step that starved for ten steps' time only shows that one batch was missing.
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
            # A surplus of more than a batch is not noise: the load has become lighter.
            move -= max(0.0, step.surplus - self._groups_per_step) / 8
        self._level = min(max(self._level + move, self._floor), self._ceiling)
