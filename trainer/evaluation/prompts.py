"""The state of an evaluation's prompts, and the schedule of a set. Pure.

    waiting --next--> asked (its task is at the server) --its group arrives--> measured
       ^                |
       +----------------+   pinned, and the group has tokens of another version: asked again under a new
                            id; after the configured number of times it is measured as failed

A duplicate group, or a group of another evaluation, changes nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from penstock.trainer.evaluation.record import MeasuredPrompt

OTHER_VERSION = "OTHER_VERSION"
# The first prompts of a set are the same in every run, regardless of the run's seed.
SEED = 0


class Verdict(Enum):
    """What to do with a group."""

    MEASURED = auto()
    """Its prompt is measured; also for a duplicate."""
    AGAIN = auto()
    """Unusable: its prompt will be asked again."""
    UNKNOWN = auto()
    """It belongs to no prompt that is asked here, or its prompt was asked again since."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that is asked, with its task id."""

    index: int
    """Its index in the data."""
    task_id: str


@dataclass(eq=False)
class Prompts:
    """Tracks the prompts of one evaluation."""

    prefix: str
    """A task id consists of the prefix, a slash and a unique suffix."""
    count: int
    concurrency: int
    """Largest number of prompts asked at a time."""
    pinned_version: int | None = None
    """Only tokens of this version count, if it is given."""
    max_other_version: int = 0
    asked_again: int = 0
    """How many times a prompt was asked again."""
    asked: dict[str, Asked] = field(default_factory=dict[str, Asked])
    """Prompts at the server, by task id."""

    def __post_init__(self) -> None:
        self._unasked = iter(range(self.count))
        self._again: deque[Asked] = deque()
        self._times: dict[int, int] = {}
        self._measured: dict[str, MeasuredPrompt] = {}

    @property
    def measured(self) -> list[MeasuredPrompt]:
        return list(self._measured.values())

    @property
    def done(self) -> bool:
        return len(self._measured) == self.count

    def next(self) -> list[Asked]:
        """Returns the prompts to ask now, and marks them as asked."""
        fresh: list[Asked] = []
        while len(self.asked) < self.concurrency:
            one = self._again.popleft() if self._again else self._first()
            if one is None:
                break
            self.asked[one.task_id] = one
            fresh.append(one)
        return fresh

    def take(self, task_id: str, measured: MeasuredPrompt) -> Verdict:
        """Records a group that arrived for a task."""
        if task_id in self._measured:
            return Verdict.MEASURED
        asked = self.asked.pop(task_id, None)
        if asked is None:
            return Verdict.UNKNOWN
        if self._is_of_another_version(measured):
            times = self._times.get(asked.index, 0)
            if times < self.max_other_version:
                self._times[asked.index] = times + 1
                self.asked_again += 1
                self._again.append(Asked(asked.index, f"{self.prefix}/{asked.index}+{times + 1}"))
                return Verdict.AGAIN
            samples = len(measured.rewards) + len(measured.failure_reasons)
            measured = replace(
                measured,
                rewards=(),
                tokens=(),
                truncated=0,
                failure_reasons=(OTHER_VERSION,) * samples,
                versions=(),
                failed_versions=(*measured.versions, *measured.failed_versions),
            )
        self._measured[task_id] = measured
        return Verdict.MEASURED

    def _first(self) -> Asked | None:
        index = next(self._unasked, None)
        return None if index is None else Asked(index, f"{self.prefix}/{index}")

    def _is_of_another_version(self, measured: MeasuredPrompt) -> bool:
        pinned = self.pinned_version
        versions = *measured.versions, *measured.failed_versions
        return pinned is not None and any(version != pinned for version in versions)


class Schedule:
    """When a set is due: at the start, every so many versions, and at the end.

    An evaluation that comes due while the previous one is running is skipped and counted. This keeps the
    grid of versions, and an evaluation never measures weights older than those sampled when it begins.
    """

    def __init__(
        self, *, every: int, at_start: bool, at_end: bool, last_step: int | None = None
    ) -> None:
        """`last_step` is the step of the last evaluation that a resuming run has a result of."""
        self._every = every
        self._at_end = at_end
        self._begun = last_step
        self._seen = last_step if last_step is not None else -1 if at_start else 0
        self.skipped = 0
        """Number of evaluations skipped since the last `begin`."""

    def due(self, step: int) -> bool:
        """Returns whether an evaluation came due since the last one began or was skipped. It then
        begins with the first available weights."""
        newest = step - step % self._every if self._every else 0
        return newest > self._seen

    def due_at_end(self, step: int) -> bool:
        """Returns whether the weights of the last step are still to be measured."""
        return self._at_end and self._begun != step

    def ends_with(self, step: int) -> bool:
        """Returns whether weights of this step would be measured if it were the last."""
        return self._at_end or bool(self._every and step % self._every == 0)

    def begin(self, step: int) -> int:
        """Marks an evaluation as begun. Returns how many were skipped before it."""
        self._begun = self._seen = step
        skipped, self.skipped = self.skipped, 0
        return skipped

    def forget(self, step: int) -> bool:
        """Discards measurements of this step and later ones. Returns whether there were any."""
        if self._begun is None or self._begun < step:
            return False
        self._begun, self._seen = None, step - 1
        return True

    def skip(self, step: int) -> None:
        """Counts an evaluation that came due while the previous one was running."""
        self._seen = step
        self.skipped += 1
