"""The agent of test_languages.py: `python -m tests.support.life ADDRESS ATTEMPTS`.

The task's metadata names what the agent does with an attempt. Each behaviour is the same, call by
call, in clients/typescript/test/life.ts and clients/go/internal/life.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

from penstock.client import (
    Failed,
    Message,
    Outcome,
    Task,
    Tool,
    Trajectory,
    connect,
)

Score = float | Outcome | Failed


async def text(trajectory: Trajectory) -> Score:
    first = await trajectory.turn(max_tokens=12)
    second = await trajectory.turn(f" and {len(first.text)} more", max_tokens=8, temperature=0.5)
    return Outcome((len(first.text) + len(second.text)) / 8, turn_rewards=(0.25, 0.75))


async def conversation(trajectory: Trajectory) -> Score:
    add = Tool("add", "Adds.", {"type": "object", "required": ["a", "b"]})
    await trajectory.turn([Message("user", "What is 2 + 3?")], max_tokens=10, tools=[add])
    await trajectory.turn(Message("tool", '{"sum": 5}', tool_call_id="call-1"))
    await trajectory.turn("Is that so?")
    return judged(len(trajectory.turns))


async def chat(trajectory: Trajectory) -> Score:
    asked = [Message("system", "Be brief."), Message("user", "What is 2 + 3?")]
    await trajectory.turn(asked, max_tokens=10)
    await trajectory.turn("Is that so?")
    return judged(len(trajectory.turns))


async def aborted(trajectory: Trajectory) -> Score:
    # A worker resumes aborted turns automatically; here the agent resumes them.
    trajectory.resume_aborted = False
    stream = trajectory.stream(max_tokens=24, flush_seconds=0.001)
    async with aclosing(stream) as segments:
        async for segment in segments:
            if segment.position == 0:
                await trajectory.abort("the test asks for it")
    if not trajectory.last_turn.aborted:
        return Failed("NOT_ABORTED")
    turn = await trajectory.resume()
    return judged(len(turn.segments))


async def malformed(trajectory: Trajectory) -> Score:
    add = Tool("add", "Adds.", {"type": "object"})
    turn = await trajectory.turn([Message("user", "Add.")], max_tokens=4, tools=[add])
    return Failed("TOOL_CALL", turn.tool_call_error)


async def lost(trajectory: Trajectory) -> Score:
    await trajectory.turn(max_tokens=24)
    return len(trajectory.turns)


async def failure(trajectory: Trajectory) -> Score:
    await trajectory.turn(max_tokens=4)
    return Failed("TOOL_TIMEOUT", "the sandbox was silent")


def judged(count: int) -> Outcome:
    metadata = {"note": "é", "list": [1, True, None, "two"], "nested": {"deep": {"number": 1.5}}}
    return Outcome(count / 4, {"turns": count, "half": 0.5}, metadata)


AGENTS = {
    agent.__name__: agent for agent in (text, conversation, chat, aborted, malformed, lost, failure)
}


async def agent(task: Task, trajectory: Trajectory) -> Score:
    return await AGENTS[str(task.metadata["agent"])](trajectory)


async def main(address: str, attempts: int) -> None:
    async with connect(address) as penstock:
        await penstock.work(agent, concurrency=1, attempts=attempts)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
