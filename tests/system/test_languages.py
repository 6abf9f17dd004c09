"""The same agent yields the same trajectory in each language: the wire carries the rules, not the
client.

Each language drives whole trajectories against one server. The groups that the trainer receives are
compared byte for byte. They cover text and conversations, tool results, an aborted and continued
turn, a connection lost mid-turn, sampling parameters, complete outcomes, and a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.server.text.messages import Message, Tool
from penstock.server.text.renderer import Written
from penstock.v1 import trajectory_pb2
from tests.faults.proxy import Proxy, proxying
from tests.support.fakes import ByteRenderer
from tests.support.harness import (
    ChatMessage,
    Conversation,
    Harness,
    SamplingParams,
    SubmitTasksRequest,
    Task,
    hello,
    serve,
    until,
)
from tests.support.languages import Language, language, run

FROZEN_AT = 5
"""Number of tokens after which the engine freezes a turn, until the test has aborted or
disconnected it.
"""
ENDLESS = 1_000_000
"""A number of attempts that no test reaches."""
# The last one arrives over a stream that was opened after the lost connection.
AGENTS = ("text", "conversation", "chat", "aborted", "malformed", "lost", "failure")
NO_CALL = "what follows <tool_call> is no tool call"


class Malformed(ByteRenderer):
    """Treats a short turn as a malformed tool call."""

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
        name: str,
    ) -> Written:
        short = bool(tools) and len(token_ids) == 4
        return Written(Message("assistant", self.decode(token_ids)), NO_CALL if short else "")


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, renderer=Malformed()) as harness:
        yield harness


def task(name: str, agent: str) -> Any:
    """The task for an agent of that name, the same in every language."""
    prompt: dict[str, Any] = {"text": f"A prompt for {agent}: é"}
    if agent in ("conversation", "chat", "malformed"):
        messages = [ChatMessage(role="ROLE_SYSTEM", content="Be brief.")]
        prompt = {"conversation": Conversation(messages=messages)}
    return Task(
        task_id=f"{name}-{agent}",
        group_size=1,
        metadata={"agent": agent},
        data_source="life",
        sampling_params=SamplingParams(max_tokens=16, temperature=0.75, ignore_eos=True, seed=7),
        **prompt,
    )


async def drive(
    harness: Harness,
    exchange: Any,
    proxy: Proxy,
    spoken: Language,
    agents: Sequence[str] = AGENTS,
) -> dict[str, bytes]:
    """Have a language's agent make each attempt; return the groups that the trainer receives, by
    agent.
    """
    command = (*spoken.program("life"), proxy.address, str(ENDLESS), harness.http)
    working = asyncio.create_task(run(command, spoken.environment))
    received: dict[str, bytes] = {}
    try:
        for agent in agents:
            spoiling = asyncio.create_task(spoil(harness, proxy, agent))
            request = SubmitTasksRequest(tasks=[task(spoken.name, agent)])
            await harness.wire.SubmitTasks(request)
            exchange.send(demand={"group_count": 1})
            receiving = asyncio.create_task(exchange.receive("delivery", 60))
            await asyncio.wait([receiving, working], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                receiving.cancel()
                raise AssertionError(working.result())
            received[agent] = canonical(receiving.result().group)
            await spoiling
    finally:
        await end(harness, working)
    return received


async def end(harness: Harness, working: asyncio.Task[str]) -> None:
    """End a program; return when the server has noticed that the lease holder is gone."""
    ended, lost = asyncio.Event(), harness.serving.queue.holder_lost

    def holder_lost(holder: Any) -> None:
        lost(holder)
        ended.set()

    harness.serving.queue.holder_lost = holder_lost  # type: ignore[method-assign]
    working.cancel()
    await asyncio.wait([working])
    async with asyncio.timeout(20):
        await ended.wait()
    harness.serving.queue.holder_lost = lost  # type: ignore[method-assign]


async def spoil(harness: Harness, proxy: Proxy, agent: str) -> None:
    """Abort or disconnect a turn, as the agent's name says, while the engine is frozen mid-turn."""
    engine = harness.engine
    if agent not in ("aborted", "lost"):
        return
    engine.freeze_at = FROZEN_AT
    requests, aborts = len(engine.salts), harness.engine.abort
    frozen = asyncio.Event()

    async def abort(request_ids: Any) -> None:
        await aborts(request_ids)
        engine.freeze_at = None
        frozen.set()

    engine.abort = abort  # type: ignore[method-assign]
    try:
        if agent == "lost":
            await until(lambda: len(engine.salts) > requests, 60)
            assert proxy.reset_all()
        async with asyncio.timeout(60):
            await frozen.wait()
        # The turn continued afterwards, in a separate engine request.
        await until(lambda: len(engine.salts) >= requests + 2, 60)
    finally:
        engine.abort = aborts  # type: ignore[method-assign]
        engine.freeze_at = None


def canonical(group: Any) -> bytes:
    """A group as bytes, without the ids that differ between attempts."""
    plain = trajectory_pb2.TrajectoryGroup.FromString(group.SerializeToString())
    assert plain.group_id and plain.task_id
    plain.group_id = plain.task_id = "its own"
    for trajectory in plain.trajectories:
        assert trajectory.trajectory_id
        trajectory.trajectory_id = "its own"
    return plain.SerializeToString(deterministic=True)


@contextlib.asynccontextmanager
async def trainer(harness: Harness) -> AsyncGenerator[Any]:
    """A trainer session that receives finished groups."""
    exchange = await hello(harness.wire, groups_per_step=8, max_lag=4)
    yield exchange
    exchange.half_close()


@pytest.mark.parametrize("name", ["typescript", "go"])
async def test_an_agent_in_another_language_is_the_same_trajectory(
    harness: Harness, name: str
) -> None:
    other = language(name)
    async with (
        proxying(harness.port, random.Random(6)) as proxy,
        trainer(harness) as exchange,
    ):
        ours = await drive(harness, exchange, proxy, language("python"))
        theirs = await drive(harness, exchange, proxy, other)
    for agent in AGENTS:
        shown = trajectory_pb2.TrajectoryGroup.FromString
        assert theirs[agent] == ours[agent], f"{shown(theirs[agent])}\n{shown(ours[agent])}"


async def test_the_openai_endpoint_is_the_same_trajectory(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, "http.listen=127.0.0.1:0") as harness,
        proxying(harness.port, random.Random(6)) as proxy,
        trainer(harness) as exchange,
    ):
        ours = await drive(harness, exchange, proxy, language("python"), ["chat"])
        theirs = await drive(harness, exchange, proxy, language("openai"), ["chat"])
    shown = trajectory_pb2.TrajectoryGroup.FromString
    assert theirs == ours, f"{shown(theirs['chat'])}\n{shown(ours['chat'])}"


async def test_what_is_compared_is_all_of_it(harness: Harness) -> None:
    # Without this, two comparisons of nothing would pass as well.
    async with (
        proxying(harness.port, random.Random(6)) as proxy,
        trainer(harness) as exchange,
    ):
        received = await drive(harness, exchange, proxy, language("python"))
    found = {
        agent: trajectory_pb2.TrajectoryGroup.FromString(each).trajectories[0]
        for agent, each in received.items()
    }
    policy = {
        agent: [s for s in trajectory.segments if s.author == trajectory_pb2.AUTHOR_POLICY]
        for agent, trajectory in found.items()
    }
    assert {agent: [len(s.token_ids) for s in runs] for agent, runs in policy.items()} == {
        "text": [12, 8],
        "conversation": [10, 10, 10],
        "chat": [10, 10],
        "failure": [4],
        "malformed": [4],
        "aborted": [24],
        "lost": [24],
    }
    assert [s.temperature for s in policy["text"]] == [0.75, 0.5]
    assert list(found["text"].outcome.turn_rewards) == [0.25, 0.75]
    assert found["conversation"].outcome.metrics == {"turns": 3.0, "half": 0.5}
    assert found["conversation"].outcome.metadata["nested"]["deep"]["number"] == 1.5
    assert found["malformed"].outcome.failure.message == NO_CALL
    assert found["failure"].outcome.failure.reason == "TOOL_TIMEOUT"
