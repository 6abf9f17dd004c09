"""The questions for the trainer's data source: easy ones first, and some held out for evaluation.

The difficulty of a question depends on the rank of its answer in a search for the question itself, and on
the length of the answer. Levels blend into each other during the run. Earlier levels keep a share of the
prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import overload

from research import corpus, indexes
from research.corpus import Question
from research.indexes import Shard

EVALUATED = 192
"""Questions that are held out for evaluation."""
SPLIT_SEED = 7
ASKED_FOR = 100_000
"""Prompts in a curriculum, more than any run uses."""
REVISION = 0.3
"""Share of the prompts that come from earlier levels."""
NEVER = 1000
"""Rank of an answer that the search does not find."""

Level = Callable[[int, int], bool]
LEVELS: tuple[tuple[str, Level], ...] = (
    ("found at once", lambda rank, length: rank == 0 and length <= 2),
    ("found, longer answer", lambda rank, length: rank == 0),
    ("all", lambda rank, length: True),
)
"""Conditions on the rank of the first chunk with the answer, from zero, and on the number of words in the
shortest right answer. A question belongs to the first level whose condition it meets."""


class Curriculum(Sequence[dict[str, object]]):
    """Levels that rise over `rise` prompts, then all of them.

    An index always gives the same prompt.
    """

    def __init__(self, levels: Sequence[Sequence[Question]], rise: int, seed: int) -> None:
        self._levels, self._rise, self._seed = levels, rise, seed

    def __len__(self) -> int:
        return ASKED_FOR

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
        # Position in the curriculum, from zero to the number of levels.
        place = index / self._rise * len(self._levels) + rng.uniform(-0.5, 0.5)
        newest = min(max(int(place), 0), len(self._levels) - 1)
        chosen = rng.randrange(newest + 1) if rng.random() < REVISION else newest
        return row(rng.choice(self._levels[chosen]), chosen)


def training(rise: int = 600, seed: int = 1) -> Curriculum:
    """The training set, as a curriculum."""
    return Curriculum(by_level(split()[0]), rise, seed)


def evaluation(level: int, size: int = 64) -> list[dict[str, object]]:
    """Held-out questions of one level."""
    kept = by_level(split()[1])[level]
    return [row(question, level) for question in kept[:size]]


def row(question: Question, level: int) -> dict[str, object]:
    """The row that an agent gets for a question."""
    return {
        "prompt": question.question,
        "question": question.question,
        "answers": list(question.answers),
        "gold": list(question.gold),
        "level": level,
        "data_source": LEVELS[level][0],
    }


def split() -> tuple[list[Question], list[Question]]:
    """The training questions, and the held-out questions."""
    questions = _questions()
    shuffled = random.Random(SPLIT_SEED).sample(questions, len(questions))
    return shuffled[EVALUATED:], shuffled[:EVALUATED]


def by_level(questions: Sequence[Question]) -> list[list[Question]]:
    """The questions of each level, in their original order."""
    levels: list[list[Question]] = [[] for _ in LEVELS]
    for question, rank in zip(questions, ranks(questions), strict=True):
        length = min(len(answer.split()) for answer in question.answers)
        first = next(at for at, (_, takes) in enumerate(LEVELS) if takes(rank, length))
        levels[first].append(question)
    return levels


def ranks(questions: Sequence[Question], depth: int = 10) -> list[int]:
    """Rank of the first chunk with the answer in a search for each question; NEVER beyond `depth`."""
    index = indexes.load(corpus.prepare(print), "bm25", Shard())
    found = index.search([question.question for question in questions], depth)
    return [
        next((at for at, hit in enumerate(hits) if hit.chunk_id in question.gold), NEVER)
        for question, hits in zip(questions, found, strict=True)
    ]


@cache
def _questions() -> list[Question]:
    return corpus.load_questions(corpus.prepare(print))
