"""Measures what a model gets for each problem before any training.

Writes baseline.json, which orders the curriculum: for each problem the mean reward of the first answer, and
the shares of answers that parse, pass a part of the checks, and pass all.
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
    """The first `count` problems by the length of their prompt; the file has those that are done."""
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
    """One answer to a problem."""
    trajectory = penstock.trajectory()
    turn = await trajectory.turn(row["messages"], max_tokens=MAX_TOKENS, temperature=1.0)
    await trajectory.fail("MEASURED")
    return turn.text


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Of all answers to one problem."""
    return {
        "reward": round(mean(verdict.reward for verdict in verdicts), 4),
        "parses": mean(verdict.parses for verdict in verdicts),
        "defines": mean(verdict.defines for verdict in verdicts),
        "some": mean(verdict.share > 0 for verdict in verdicts),
        "solved": mean(verdict.solved for verdict in verdicts),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a model gets before any training.")
    parser.add_argument("address", help="HOST:PORT of a server")
    parser.add_argument("--problems", type=int, default=164, help="those with the shortest prompts")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    given = parser.parse_args()
    asyncio.run(main(given.address, given.problems, given.samples))
