"""Problems of reasoning-gym, with further tries after a wrong answer.

A correct answer at try k (from zero) is worth `discount ** k`. On the last try, the data set's score for a
partly correct answer counts, with the same discount. Earlier wrong answers are worth nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.client.environments.environment import EnvironmentInvalid, Step, TaskUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

FEEDBACK = "That is not right. Try again."

_INTEGER = re.compile(r"-?\d+")


class DataSet(Protocol):
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float: ...


class ReasoningGym:
    """`reasoning_gym:DATA_SET`.

    A task's options are the data set's own, such as `max_digits`. Instead, a task can contain the
    entry itself, as `[data.reasoning_gym]` writes it.
    """

    def __init__(
        self, data_set: str = "", *, tries: int = 3, discount: float = 0.5, feedback: str = FEEDBACK
    ) -> None:
        """Without `data_set`, each task names its own. Raises EnvironmentInvalid."""
        import reasoning_gym

        names = cast("Any", reasoning_gym.factory).DATASETS
        if data_set and data_set not in names:
            raise EnvironmentInvalid(f"reasoning-gym has no data set {data_set!r}")
        if tries < 1 or not 0 <= discount <= 1:
            raise EnvironmentInvalid(
                f"tries must be at least 1 and discount from 0 to 1, got tries {tries} "
                f"and discount {discount}"
            )
        self._name, self._feedback = data_set, feedback
        self._tries, self._discount = tries, discount
        self._tried = 0
        self._entry: Mapping[str, Any] = {}

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> str | None:
        """Returns None if the task contains the problem. Raises TaskUnusable."""
        self._tried = 0
        if "entry_json" in options:
            name = str(options.get("dataset", ""))
            if self._name and name != self._name:
                raise TaskUnusable(
                    f"the task is a problem of {name!r}, but this environment plays {self._name!r}"
                )
            try:
                # The entry is text because a protobuf Struct does not distinguish 1 from 1.0, and
                # some data sets do.
                self._entry = cast("dict[str, Any]", json.loads(options["entry_json"]))
                self._data_set = data_set(name)
            except (ValueError, TypeError) as error:
                raise TaskUnusable(f"cannot read the entry of {name!r}: {error}") from error
            return None
        if not self._name:
            raise TaskUnusable("the task names no reasoning-gym data set and contains no entry")
        try:
            self._data_set = create(self._name, seed, options)
            self._entry = self._data_set[0]
        except (ValueError, TypeError, AssertionError) as error:
            raise TaskUnusable(f"{self._name!r}: {error}") from error
        return str(self._entry["question"])

    def step(self, action: str) -> Step:
        answer = extract_answer(action, str(self._entry.get("answer", "")))
        score, readable = self._score(answer)
        worth = self._discount**self._tried
        self._tried += 1
        solved = score >= 1.0
        metrics = {"solved": float(solved), "solved_at_once": float(solved and self._tried == 1)}
        if solved or self._tried >= self._tries:
            return Step(reward=score * worth, done=True, invalid=not readable, metrics=metrics)
        return Step(self._feedback, invalid=not readable, metrics=metrics)

    def _score(self, answer: str) -> tuple[float, bool]:
        """Returns a score from 0 to 1, and whether the data set could read the answer."""
        try:
            return float(self._data_set.score_answer(answer, self._entry)), True
        except Exception:
            # Several data sets raise their own exceptions for text they cannot read, for example
            # prime_factorization for any letter. That is a wrong answer; `invalid_actions` counts it.
            return 0.0, False


def extract_answer(text: str, expected: str) -> str:
    """Returns the part of a reply to score: the text in `<answer>` tags if there is any; else the
    last integer if an integer is expected; else the whole reply."""
    tagged: Sequence[str] = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return str(tagged[-1]).strip()
    if _INTEGER.fullmatch(expected):
        number = last_integer(text)
        return text.strip() if number is None else str(number)
    return text.strip()


def last_integer(text: str) -> int | None:
    found = _INTEGER.findall(text)
    return int(found[-1]) if found else None


def create(name: str, seed: int, options: Mapping[str, Any]) -> DataSet:
    """Makes a data set of one problem. Raises reasoning-gym's errors."""
    import reasoning_gym

    make = cast("Callable[..., DataSet]", reasoning_gym.create_dataset)  # pyright: ignore[reportUnknownMemberType]
    return make(name, size=1, seed=seed, **options)


@cache
def data_set(name: str) -> DataSet:
    """Returns a data set for its `score_answer`."""
    return create(name, 0, {})
