"""Prompts of rising difficulty: reasoning-gym's sums, one level after another.

The share of each level among the prompts moves along with the run: a level begins while the one before is
still asked, peaks, and stays as a small part of all that follows, so that what was learned is kept.

What is evaluated is never trained. Another seed would not do: reasoning-gym draws problem i of seed s from
s + i, so that the seeds of two sets would have to be further apart than the sets are long, and of two terms
of one digit there are 200 sums in all. So training passes over the very questions that evaluation asks.
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
"""Part of the prompts that are of a level that is over."""
LEVEL_SIZE = 100_000
HELD_OUT_SEED = 10 * LEVEL_SIZE
"""Of evaluation: further from training's than a level is long."""
HELD_OUT = 64
"""Questions of each level that are evaluated and never trained; of the first level a third of all."""


class Curriculum(Sequence[dict[str, object]]):
    """Levels that rise over `rise` prompts, then more of the last; an index is always the same prompt."""

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
        # Where the run is, from zero to the number of levels; the levels blend into each other.
        place = index / self._rise * len(LEVELS) + rng.uniform(-0.5, 0.5)
        newest = min(max(int(place), 0), len(LEVELS) - 1)
        chosen = rng.randrange(newest + 1) if rng.random() < REVISION else newest
        entry = self._levels[chosen][index]
        while str(entry["question"]) in self._held_out:
            entry = self._levels[chosen][rng.randrange(LEVEL_SIZE)]
        return row(entry, chosen)


def level(settings: dict[str, int], seed: int) -> Any:
    """One level's problems."""
    return reasoning_gym.create_dataset("chain_sum", size=LEVEL_SIZE, seed=seed, **settings)


def row(entry: Any, number: int) -> dict[str, object]:
    """As the trainer's data sources take it, with what the reward needs."""
    return {
        "prompt": str(entry["question"]),
        "answer": str(entry["answer"]),
        "dataset": "chain_sum",
        "level": number,
        "entry_json": json.dumps(entry, default=str),
    }


def training(rise: int = 4_000, seed: int = 1) -> Curriculum:
    """What is trained on."""
    return Curriculum(rise, seed)


def evaluation(number: int, size: int = HELD_OUT) -> list[dict[str, object]]:
    """The first `size`, at most HELD_OUT, different questions of one level, which training passes over."""
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
