"""Measures a model's reward for each problem before training.

Writes baseline.json, which orders the curriculum. For each problem it has the mean reward of the first
answers, and the shares of answers that parse, define the function, pass some checks, and pass all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from agent import extract_code
from judge import Verdict, judge
from problems import BASELINE, rows

from penstock.client import Client, connect

AT_ONCE = 32
MAX_TOKENS = 192
"""As in run.toml."""


async def main(address: str, count: int, samples: int) -> None:
    """Measures the `count` problems with the shortest prompts, and updates the file after each."""
    judging, asking = asyncio.Semaphore(2), asyncio.Semaphore(AT_ONCE)
    table: dict[str, dict[str, float]] = {}
    async with connect(address) as penstock:

        async def sample(row: dict[str, Any]) -> Verdict:
            async with asking:
                text = await answer(penstock, row)
            async with judging:
                with tempfile.TemporaryDirectory() as folder:
                    return await asyncio.to_thread(judge, row, extract_code(text), Path(folder))

        async def measure(row: dict[str, Any]) -> None:
            verdicts = await asyncio.gather(*(sample(row) for _ in range(samples)))
            table[row["task_id"]] = summary(verdicts)
            BASELINE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")

        chosen = sorted(rows(), key=lambda row: len(row["prompt"]))[:count]
        await asyncio.gather(*(measure(row) for row in chosen))
    for name in ("reward", "parses", "defines", "some", "solved"):
        print(f"{name}: {mean(entry[name] for entry in table.values()):.3f}")


async def answer(penstock: Client, row: dict[str, Any]) -> str:
    """Samples one answer to a problem."""
    trajectory = penstock.trajectory()
    turn = await trajectory.turn(row["messages"], max_tokens=MAX_TOKENS, temperature=1.0)
    await trajectory.fail("MEASURED")
    return turn.text


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Means over all answers to one problem."""
    return {
        "reward": round(mean(verdict.reward for verdict in verdicts), 4),
        "parses": mean(verdict.parses for verdict in verdicts),
        "defines": mean(verdict.defines for verdict in verdicts),
        "some": mean(verdict.share > 0 for verdict in verdicts),
        "solved": mean(verdict.solved for verdict in verdicts),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure a model's rewards before any training.")
    parser.add_argument("address", help="HOST:PORT of a server")
    parser.add_argument(
        "--problems", type=int, default=164, help="number of problems, shortest first"
    )
    parser.add_argument("--samples", type=int, default=8, help="answers to each problem")
    given = parser.parse_args()
    asyncio.run(main(given.address, given.problems, given.samples))
