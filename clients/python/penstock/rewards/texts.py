"""Rewards that compare texts and numbers: 1 if the answer is right, else 0."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from penstock.rewards.attempt import Answered, PlainReward, expected

if TYPE_CHECKING:
    from penstock.client.tasks import Task

THINKING = r"<think>.+</think>.+"
_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact(*, field: str = "answer", ignore_case: bool = False) -> PlainReward:
    """The whole answer equals the field of the task's metadata, apart from white space around it."""

    def score(task: Task, trajectory: Answered) -> float:
        return float(_same(trajectory.text, expected(task, field), ignore_case))

    return score


def numeric(*, field: str = "answer", tolerance: float = 1e-6) -> PlainReward:
    """The last number of the answer equals the last one of the field, as in GSM8K's "... #### 1,234".

    `tolerance` is relative for numbers above 1, and absolute below.
    """

    def score(task: Task, trajectory: Answered) -> float:
        right, given = last_number(expected(task, field)), last_number(trajectory.text)
        if right is None:
            raise ValueError(f"metadata[{field!r}] has no number: {task.metadata[field]!r}")
        if given is None:
            return 0.0
        return float(math.isclose(given, right, rel_tol=tolerance, abs_tol=tolerance))

    return score


def regex(*, pattern: str, field: str = "answer", ignore_case: bool = False) -> PlainReward:
    """The first group of the pattern's last match equals the field; without a group, the whole match."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(task: Task, trajectory: Answered) -> float:
        found = list(compiled.finditer(trajectory.text))
        given = found[-1][1 if compiled.groups else 0] if found else None
        return float(given is not None and _same(given, expected(task, field), ignore_case))

    return score


def format(*, pattern: str = THINKING) -> PlainReward:  # noqa: A001 - its name in configurations.
    """The whole answer has a form: by default <think>, thoughts, </think> and then a text."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(task: Task, trajectory: Answered) -> float:
        return float(compiled.fullmatch(trajectory.text.strip()) is not None)

    return score


def last_number(text: str) -> float | None:
    """The last number in a text; commas between its digits are left out."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _same(given: str, right: str, ignore_case: bool) -> bool:
    given = given.strip()
    return given.casefold() == right.casefold() if ignore_case else given == right
