"""The agent `chat` of tests/support/life.py, written with OpenAI's SDK.

    python -m tests.support.life_openai ADDRESS ATTEMPTS HTTP

It knows a base URL and nothing of turns. The worker leases and closes the attempt around it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai

from penstock.client import Outcome, Task, Trajectory, connect
from tests.support.life import judged


async def converse(base_url: str) -> int:
    """Ask twice; return the number of questions."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    asked = ("What is 2 + 3?", "Is that so?")
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        for question in asked:
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(
                model="fake", messages=messages, max_completion_tokens=10
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return len(asked)


async def main(address: str, attempts: int, base_url: str) -> None:
    async def agent(task: Task, trajectory: Trajectory) -> Outcome:
        return judged(await converse(f"{base_url}/attempts/{trajectory.trajectory_id}"))

    async with connect(address) as penstock:
        await penstock.work(agent, concurrency=1, attempts=attempts)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
