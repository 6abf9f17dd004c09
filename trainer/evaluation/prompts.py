"""Which prompt of an evaluation stands where, and when a set is due. Pure.

States of a prompt:

    waiting --next--> asked (a task of it is at the server) --its group comes--> measured
       ^                |
       +----------------+   pinned, and the group has tokens of another version: asked again, under an id of
                            its own; after so many times it is measured as failed

No more than `concurrency` prompts are asked at a time, however many there are. A group that comes twice,
or is of another evaluation, changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from penstock.trainer.evaluation.record import MeasuredPrompt

OTHER_VERSION = "OTHER_VERSION"
# The first prompts of a set are the same in every run, whatever its own seed.
SEED = 0


class Verdict(Enum):
    """What becomes of a group."""

    MEASURED = auto()
    """Its prompt is; also where it comes once more."""
    AGAIN = auto()
    """Of no use: its prompt is asked again."""
    UNKNOWN = auto()
    """It is none of this evaluation, or its prompt was asked again since."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as it is asked."""

    index: int
    """Its place in the data."""
    task_id: str


class Prompts:
    """The prompts of one evaluation."""

    def __init__(
        self,
        prefix: str,
        count: int,
        *,
        concurrency: int,
        pinned_version: int | None = None,
        max_other_version: int = 0,
    ) -> None:
        """Task ids are the prefix, a slash and what tells them apart. With `pinned_version` only tokens of
        that one count."""
        self.prefix = prefix
        self.count = count
        self._concurrency = concurrency
        self._pinned_version = pinned_version
        self._max_other_version = max_other_version
        self._unasked = iter(range(count))
        self._again: deque[Asked] = deque()
        self._times: dict[int, int] = {}
        self._asked: dict[str, Asked] = {}
        self._measured: dict[str, MeasuredPrompt] = {}
        self.asked_again = 0
        """Times that a prompt had to be."""

    @property
    def asked(self) -> Mapping[str, Asked]:
        """Prompts at the server, by task id."""
        return self._asked

    @property
    def measured(self) -> list[MeasuredPrompt]:
        """What is known."""
        return list(self._measured.values())

    @property
    def done(self) -> bool:
        """Whether every prompt is measured."""
        return len(self._measured) == self.count

    def next(self) -> list[Asked]:
        """The prompts to ask now; they count as asked from here on."""
        fresh: list[Asked] = []
        while len(self._asked) < self._concurrency:
            one = self._again.popleft() if self._again else self._first()
            if one is None:
                break
            self._asked[one.task_id] = one
            fresh.append(one)
        return fresh

    def take(self, task_id: str, measured: MeasuredPrompt) -> Verdict:
        """A group came."""
        if task_id in self._measured:
            return Verdict.MEASURED
        asked = self._asked.pop(task_id, None)
        if asked is None:
            return Verdict.UNKNOWN
        if self._is_of_another_version(measured):
            times = self._times.get(asked.index, 0)
            if times < self._max_other_version:
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
        pinned = self._pinned_version
        versions = *measured.versions, *measured.failed_versions
        return pinned is not None and any(version != pinned for version in versions)


class Schedule:
    """When a set is due: at the start, each so many versions, at the end.

    What comes due while the evaluation before still runs is skipped and counted; so the grid of versions
    stays, and no evaluation is ever of older weights than those sampled when it begins.
    """

    def __init__(
        self, *, every: int, at_start: bool, at_end: bool, last_step: int | None = None
    ) -> None:
        """`last_step` is that of the last evaluation which a run that resumes has the result of."""
        self._every = every
        self._at_end = at_end
        self._begun = last_step
        self._seen = last_step if last_step is not None else -1 if at_start else 0
        self.skipped = 0
        """Evaluations that were due and not begun, since `begin`."""

    def due(self, step: int) -> bool:
        """Whether an evaluation was due since the last that began, or was skipped: it begins with the
        first weights that can be had."""
        newest = step - step % self._every if self._every else 0
        return newest > self._seen

    def due_at_end(self, step: int) -> bool:
        """Whether the weights of the last step are still to be measured."""
        return self._at_end and self._begun != step

    def ends_with(self, step: int) -> bool:
        """Whether weights of this step would be measured if it were the last."""
        return self._at_end or bool(self._every and step % self._every == 0)

    def begin(self, step: int) -> int:
        """An evaluation begins; returns how many were skipped before it."""
        self._begun = self._seen = step
        skipped, self.skipped = self.skipped, 0
        return skipped

    def forget(self, step: int) -> bool:
        """What was measured of this step and later ones counts no more; whether something was."""
        if self._begun is None or self._begun < step:
            return False
        self._begun, self._seen = None, step - 1
        return True

    def skip(self, step: int) -> None:
        """One was due, and the one before still runs."""
        self._seen = step
        self.skipped += 1
