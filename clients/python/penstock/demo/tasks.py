"""The demo's own prompts, written as JSON lines for the trainer's data source."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_SUMMAND = 20
PRINTABLE_PROMPTS = 64


def write_sums(path: Path) -> None:
    """Writes all of `sums`, one a line."""
    _write(path, sums())


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
