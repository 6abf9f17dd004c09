"""What the trainer gets is bit for bit what the engine saw and wrote, whatever became of a conversation.

The engine writes tokens that no text stands for: bytes that are no UTF-8, special tokens in the middle of
a turn, calls cut short. A token that had been decoded and encoded again would not come back as itself.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from penstock.server.conversation import Parsed, ParsedCall, TokenizerRenderer
from penstock.server.engine import Delta, EngineRequest
from penstock.trainer.batching import Sample, read_group
from penstock.v1 import conversation_pb2, trajectory_pb2
from tests.chat_templates import FAMILIES, make_tokenizer
from tests.fakes import EOS, FakeEngine
from tests.harness import (
    AbortRequest,
    ChatMessage,
    Conversation,
    GenerateRequest,
    Harness,
    T,
    Turn,
    collect,
    hello,
    sampling,
    serve,
)

ToolMessage = T(conversation_pb2.Tool)
AllSelector = {"all": {}}
CALL = '{"a": 1}'
CALL_TOKENS = [258, *CALL.encode(), 259]
MAX_TOKENS = 40
TURNS = 5


class SpyEngine(FakeEngine):
    """Writes anything, and keeps what it was given and what it wrote, by request."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.given: dict[str, list[int]] = {}
        self.wrote: dict[str, list[int]] = {}
        self.scored: dict[str, list[float]] = {}
        self.count = 0
        self.counted = asyncio.Event()
        self.special_count = 0
        self.choose = self._choose

    def _choose(self, prefix: bytes, version: int) -> tuple[int, float]:
        digest = xxhash.xxh3_64_intdigest(prefix, seed=version)
        logprob = -float((digest >> 16) % 1000) / 1000.0
        last = np.frombuffer(prefix, np.int32)[-len(CALL_TOKENS) :].tolist()
        for begun in range(len(CALL_TOKENS) - 1, 0, -1):
            # One call in some is cut short.
            if last[-begun:] == CALL_TOKENS[:begun] and digest % 97:
                return CALL_TOKENS[begun], logprob
        kind = digest % 40
        if kind < 2:
            return EOS, logprob
        if kind < 5:
            return CALL_TOKENS[0], logprob
        if kind < 7:
            return EOS + 1 + (digest >> 8) % (self.special_count - 1), logprob
        return (digest >> 8) % 256, logprob

    async def generate(self, request: EngineRequest) -> Any:
        assert request.request_id not in self.given
        self.given[request.request_id] = request.token_ids.tolist()
        deltas = await super().generate(request)
        return self._spied(request.request_id, deltas)

    async def _spied(self, request_id: str, deltas: Any) -> Any:
        wrote, scored = (
            self.wrote.setdefault(request_id, []),
            self.scored.setdefault(request_id, []),
        )
        delta: Delta
        async for delta in deltas:
            wrote += delta.token_ids.tolist()
            scored += delta.logprobs.tolist()
            self.count += len(delta.token_ids)
            self.counted.set()
            yield delta


class CallParser:
    """Finds the one call that is ever written whole; content is the rest."""

    def parse(self, text: str, token_ids: Any, prompt_token_ids: Any, tools: Any) -> Parsed:
        whole = f"<tool_call>{CALL}</tool_call>"
        calls = (ParsedCall("add", '{"a": 1}'),) * text.count(whole) if tools else ()
        return Parsed(text.replace(whole, ""), calls=calls)


@dataclass
class Held:
    """A trajectory as its agent knows it."""

    trajectory_id: str
    messages: list[Any] = field(default_factory=list[Any])
    with_tools: bool = True
    branched: int = 0


@dataclass
class Agent:
    """Talks at random, and starts branches at random; resumes whatever is aborted."""

    server: Harness
    draw: random.Random
    held: list[Held] = field(default_factory=list[Held])
    aborted: int = 0
    calls: int = 0

    async def attempt(self, index: int, size: int) -> None:
        root = Held(f"t{index}", with_tools=self.draw.random() < 0.8)
        root.messages.append(_message("system", "Be <|im_end|> brief. ü"))
        root.messages.append(_message("user", f"Question {self.draw.random()}"))
        group = {"group_id": "g", "group_size": size, "sample_index": index}
        await self._first(root, **group)
        for _ in range(TURNS):
            await self._act(self.draw.choice(self.held))
        await self.server.complete(root.trajectory_id, self.draw.random())

    async def _first(self, held: Held, **fields: Any) -> None:
        tool = ToolMessage(name="add", description="adds </tool_call> two")
        conversation = Conversation(messages=held.messages, tools=[tool] if held.with_tools else [])
        request = GenerateRequest(
            trajectory_id=held.trajectory_id,
            conversation=conversation,
            sampling_params=sampling(MAX_TOKENS, ignore_eos=False),
            **fields,
        )
        await self._take(held, await collect(self.server.wire.Generate(request)))
        self.held.append(held)

    async def _take(self, held: Held, turn: Turn) -> None:
        while turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED:
            self.aborted += 1
            if self.draw.random() < 0.2:
                # What there is of it is answered.
                break
            turn = await self.server.resume(held.trajectory_id)
        message = turn.finished.message
        self.calls += len(message.tool_calls)
        held.messages.append(ChatMessage.FromString(message.SerializeToString()))

    def _answers(self, held: Held) -> list[Any]:
        calls = held.messages[-1].tool_calls
        if calls:
            return [
                _message("tool", f"result {self.draw.random()}", tool_call_id=call.tool_call_id)
                for call in calls
            ]
        return [_message("user", f"<|eot_id|> and {self.draw.random()}?")]

    async def _act(self, held: Held) -> None:
        if self.draw.random() < 0.6:
            new = self._answers(held)
            held.messages += new
            turn = await self.server.resume(
                held.trajectory_id, conversation=Conversation(messages=new)
            )
            await self._take(held, turn)
            return
        held.branched += 1
        ends = [i for i, m in enumerate(held.messages) if m.role == conversation_pb2.ROLE_ASSISTANT]
        branch = Held(f"{held.trajectory_id}.{held.branched}", with_tools=held.with_tools)
        kind = self.draw.choice(["rewritten", "again", "compacted"])
        if kind == "rewritten":
            kept = held.messages[: self.draw.choice(ends) + 1]
            branch.messages = [*kept, _message("user", f"Rather {self.draw.random()}")]
        elif kind == "again":
            branch.messages = held.messages[: self.draw.choice(ends)]
        else:
            branch.messages = [_message("user", f"In short: {self.draw.random()}")]
        await self._first(branch, parent_trajectory_id=held.trajectory_id)


def _message(role: str, content: str, **fields: Any) -> Any:
    number = conversation_pb2.Role.Value(f"ROLE_{role.upper()}")
    return ChatMessage(role=number, content=content, **fields)


async def disturb(server: Harness, engine: SpyEngine, draw: random.Random) -> int:
    """Aborts everything, or switches weights, every so many tokens; ends by being cancelled."""
    version = 0
    while True:
        until = engine.count + draw.randrange(3, 40)
        while engine.count < until:
            engine.counted.clear()
            await engine.counted.wait()
        if draw.random() < 0.5:
            await server.wire.Abort(AbortRequest(**AllSelector))
        else:
            version += 1
            await server.upload(version)


async def converse(folder: Path, family: str, seed: int) -> tuple[Any, SpyEngine, Agent, list[str]]:
    """Two attempts of one group; what is delivered, and everything that was seen."""
    draw = random.Random(seed)
    tokenizer: Any = make_tokenizer(family)
    encoded: list[str] = []
    encode = tokenizer.encode

    def spy(text: str, **fields: Any) -> Any:
        encoded.append(text)
        return encode(text, **fields)

    tokenizer.encode = spy
    renderer = TokenizerRenderer(tokenizer, [EOS], CallParser())
    fields = {"renderer": renderer, "make_engine": SpyEngine}
    # So slow that what disturbs it comes in the middle of turns.
    async with serve(folder, step_seconds=0.003, max_context=8192, **fields) as server:
        engine = server.engine
        assert isinstance(engine, SpyEngine)
        engine.special_count = len(FAMILIES[family][0])
        agents = [Agent(server, random.Random(draw.random())) for _ in range(2)]
        exchange = await hello(server.wire)
        disturbing = asyncio.create_task(disturb(server, engine, draw))
        try:
            async with asyncio.TaskGroup() as group:
                for index, agent in enumerate(agents):
                    group.create_task(agent.attempt(index, len(agents)))
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
        exchange.send(demand={"group_count": 1})
        delivery = await exchange.receive("delivery")
        seen = Agent(server, draw, [held for agent in agents for held in agent.held])
        seen.aborted = sum(agent.aborted for agent in agents)
        seen.calls = sum(agent.calls for agent in agents)
        return delivery.group, engine, seen, encoded


def check_sample(sample: Sample, engine: SpyEngine) -> int:
    """That a trajectory is what its requests saw and wrote; returns how much of it the policy wrote."""
    tokens = sample.token_ids.tolist()
    trained = np.zeros(len(tokens), np.bool_)
    for request_id, given in engine.given.items():
        if request_id.split("/")[0] != sample.trajectory_id:
            continue
        wrote = engine.wrote.get(request_id, [])
        end = len(given) + len(wrote)
        assert tokens[:end] == [*given, *wrote], request_id
        trained[len(given) : end] = True
        scores = np.asarray(engine.scored.get(request_id, []), np.float32)
        assert (sample.behaviour_logprobs[len(given) : end] == scores).all()
    assert (sample.trained == trained).all()
    return int(trained.sum())


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_trainer_gets_what_the_engine_saw_and_wrote(family: str, tmp_path: Path) -> None:
    branches = aborted = calls = shared = 0
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        group, engine, agent, encoded = await converse(folder, family, seed)
        samples = read_group(group, trainer_version=1000, max_lag=2000).samples
        ids = {sample.trajectory_id for sample in samples}
        assert ids == {held.trajectory_id for held in agent.held}
        # Every token that the policy wrote is trained, and once.
        count = sum(check_sample(sample, engine) for sample in samples)
        assert count == sum(map(len, engine.wrote.values()))
        delivered = sum(len(s.token_ids) // 4 for t in group.trajectories for s in t.segments)
        whole = sum(len(sample.token_ids) for sample in samples)
        own = sum(t.parent_token_count for t in group.trajectories)
        assert delivered + own == whole
        for held in agent.held:
            for message in held.messages:
                if message.role == conversation_pb2.ROLE_ASSISTANT and len(message.content) > 8:
                    assert not any(message.content in text for text in encoded)
        branches += sum(bool(t.parent_trajectory_id) for t in group.trajectories)
        aborted, calls, shared = aborted + agent.aborted, calls + agent.calls, shared + own
    # It was as eventful as it is meant to be.
    assert branches and aborted and calls and shared
