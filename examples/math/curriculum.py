"""Prompts of rising difficulty: reasoning-gym's sums, level by level.

The mix of levels changes during the run. A level begins while the previous one is still in use, and peaks.
After that, it keeps a small share of the prompts, so that what was learned is not lost.

Evaluation questions are never trained. A different seed is not enough: reasoning-gym draws problem i of
seed s from s + i, so two data sets overlap unless their seeds differ by more than their length. And there
are only 200 sums of two one-digit terms. So training explicitly skips the questions of the evaluation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, overload

import reasoning_gym

LEVELS: tuple[dict[str, int], ...] = (
    {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2},
)
"""Settings of reasoning-gym's `chain_sum`."""
REVISION = 0.25
"""Share of the prompts that come from earlier levels."""
LEVEL_SIZE = 100_000
HELD_OUT_SEED = 10 * LEVEL_SIZE
"""Seed of the evaluation: further from training's seeds than a level is long."""
HELD_OUT = 64
"""Questions of each level that are held out for evaluation; a third of all questions of the first level."""


class Curriculum(Sequence[dict[str, object]]):
    """Levels that rise over `rise` prompts, then more of the last level.

    An index always gives the same prompt.
    """

    def __init__(self, rise: int, seed: int) -> None:
        self._rise, self._seed = rise, seed
        self._levels = [level(settings, seed + number) for number, settings in enumerate(LEVELS)]
        self._held_out = {
            str(row["prompt"]) for number in range(len(LEVELS)) for row in evaluation(number)
        }

    def __len__(self) -> int:
        return LEVEL_SIZE

    @overload
    def __getitem__(self, index: int) -> dict[str, object]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, object]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, object] | list[dict[str, object]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        rng = random.Random(f"{self._seed} {index}")
        # Position in the curriculum, from zero to the number of levels; noise blends adjacent levels.
        place = index / self._rise * len(LEVELS) + rng.uniform(-0.5, 0.5)
        newest = min(max(int(place), 0), len(LEVELS) - 1)
        chosen = rng.randrange(newest + 1) if rng.random() < REVISION else newest
        entry = self._levels[chosen][index]
        while str(entry["question"]) in self._held_out:
            entry = self._levels[chosen][rng.randrange(LEVEL_SIZE)]
        return row(entry, chosen)


def level(settings: dict[str, int], seed: int) -> Any:
    """The problems of one level."""
    return reasoning_gym.create_dataset("chain_sum", size=LEVEL_SIZE, seed=seed, **settings)


def row(entry: Any, number: int) -> dict[str, object]:
    """A row for the trainer's data sources, with what the reward function needs."""
    return {
        "prompt": str(entry["question"]),
        "answer": str(entry["answer"]),
        "dataset": "chain_sum",
        "level": number,
        "entry_json": json.dumps(entry, default=str),
    }


def training(rise: int = 4_000, seed: int = 1) -> Curriculum:
    return Curriculum(rise, seed)


def evaluation(number: int, size: int = HELD_OUT) -> list[dict[str, object]]:
    """The first `size` different held-out questions of one level; `size` is at most HELD_OUT."""
    if not 1 <= size <= HELD_OUT:
        raise ValueError(f"size: {size}; {HELD_OUT} of each level are held out")
    problems = level(LEVELS[number], HELD_OUT_SEED + number)
    found: dict[str, dict[str, object]] = {}
    for index in range(LEVEL_SIZE):
        asked = row(problems[index], number)
        found.setdefault(str(asked["prompt"]), asked)
        if len(found) == size:
            break
    return list(found.values())
