"""The demo's own prompts, written as JSON lines for the trainer's data source."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, cast

from penstock.demo.settings import PRINTABLE, SUMS

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_SUMMAND = 20
PRINTABLE_PROMPTS = 64
HELD_OUT_SUMS = ("What is 3 + 14?", "What is 8 + 5?", "What is 17 + 16?")
HELD_OUT_SEED = 1_000_003
"""Seed of the problems of a data set that are not trained; the data has the seed of the command line."""


def held_out(task: str) -> tuple[str, ...]:
    """Three prompts of a task that are not trained. `task` may be a data set of reasoning-gym."""
    if task == SUMS:
        return HELD_OUT_SUMS
    if task == PRINTABLE:
        return ("one", "two", "three")
    import reasoning_gym

    create = cast("Any", reasoning_gym).create_dataset
    problems = create(task, seed=HELD_OUT_SEED, size=len(HELD_OUT_SUMS))
    return tuple(str(problem["question"]) for problem in problems)


def write_sums(path: Path) -> None:
    """Writes all of `sums` but those that are held out, one a line."""
    _write(path, [line for line in sums() if line["prompt"] not in HELD_OUT_SUMS])


def sums() -> list[dict[str, object]]:
    """Every "What is a + b?" with a and b from 1 to 20, and its answer."""
    numbers = range(1, LARGEST_SUMMAND + 1)
    return [{"prompt": f"What is {a} + {b}?", "answer": a + b} for a in numbers for b in numbers]


def write_printable(path: Path) -> None:
    """Writes prompts of random letters; their content does not matter to a model of random weights."""
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    _write(
        path,
        [{"prompt": "".join(generator.choices(letters, k=12))} for _ in range(PRINTABLE_PROMPTS)],
    )


def _write(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
