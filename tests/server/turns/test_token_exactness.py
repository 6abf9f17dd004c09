"""The trainer gets exactly the tokens that the engine saw and wrote, whatever happened to the
conversation.

Four concurrent agents, one over gRPC and one over each compatible endpoint, have random
conversations with a policy that writes random tokens. Meanwhile turns are aborted and weights are
switched, each time with another policy for turns in flight. The tokenizers have merges that the
policy does not follow. Decoding its output and encoding it again would therefore give other tokens.
The test asserts this too, because otherwise it could not fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from penstock.server.text.renderer import Renderer
from penstock.server.vllm.parsers import VllmParsers
from penstock.trainer.batching.batching import read_group
from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire import codec
from tests.support.fakes import EOS
from tests.support.harness import (
    AbortRequest,
    Harness,
    LeaseTasksRequest,
    SubmitTasksRequest,
    Task,
    hello,
    serve,
)
from tests.support.merging_tokenizers import make_merging_tokenizer
from tests.support.random_agents import (
    DESCRIPTION,
    NAME,
    SCHEMA,
    Agent,
    Grpc,
    Line,
    Surface,
)
from tests.support.random_sdks import HTTP_SURFACES
from tests.support.writing_engine import Attempt, Style, WritingEngine

PARSERS = {"chatml": ("hermes", ""), "llama3": ("llama3_json", ""), "qwen3": ("hermes", "qwen3")}
POLICIES = [policy for policy in weights_pb2.InFlightPolicy.values() if policy]
TOLD = json.dumps({"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA})
SEEDS = 3
# The minimum shares of turns that change when they are re-encoded: among
# all turns, and with valid text.
DRIFTING, READABLE = 0.6, 0.4


@dataclass
class Talk:
    """One delivered group, and everything to compare it with."""

    group: Any
    engine: WritingEngine
    agents: list[Agent]
    encoded: list[str]
    """Every text that the server encoded."""
    policies: list[int]
    """The in-flight policies of the switches."""
    kinds: dict[str, int]
    """How often the endpoints' requests started, continued or branched a trajectory."""

    @property
    def lines(self) -> list[Line]:
        """All messages of the policy."""
        return [line for agent in self.agents for _, line in agent.asked]


@dataclass
class Family:
    """A tokenizer, its parsers, and the style of its policy."""

    name: str
    style: Style = field(init=False)
    tokenizer: Any = field(init=False)
    parsers: VllmParsers = field(init=False)

    def __post_init__(self) -> None:
        self.style = Style(self.name)
        self.tokenizer = make_merging_tokenizer(self.name)
        self.parsers = VllmParsers(self.tokenizer, *PARSERS[self.name])

    def renderer(self, encoded: list[str]) -> Renderer:
        """A renderer with its own tokenizer, which records every text it encodes."""
        tokenizer: Any = make_merging_tokenizer(self.name)
        encode = tokenizer.encode

        def spy(text: str, **fields: Any) -> Any:
            encoded.append(text)
            return encode(text, **fields)

        tokenizer.encode = spy
        return Renderer(tokenizer, [EOS], self.parsers)


async def disturb(server: Harness, engine: WritingEngine, seed: float, used: list[int]) -> None:
    """Abort every turn, or switch weights, every few tokens, until cancelled."""
    draw, version = random.Random(seed), 0
    while True:
        await engine.written(draw.randrange(3, 60))
        if draw.random() < 0.4:
            await server.wire.Abort(AbortRequest(all={}))
        else:
            version += 1
            policy = draw.choice(POLICIES)
            await server.upload(version, in_flight=policy)
            used.append(policy)


@contextlib.asynccontextmanager
async def disturbed(
    server: Harness, engine: WritingEngine, seed: float, used: list[int]
) -> AsyncGenerator[None]:
    """Run `disturb` until the end of the block."""
    disturbing = asyncio.create_task(disturb(server, engine, seed, used))
    try:
        yield
    finally:
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing


@contextlib.asynccontextmanager
async def agents_of(
    server: Harness, engine: WritingEngine, names: Sequence[str], draw: random.Random
) -> AsyncGenerator[list[Agent]]:
    """One agent for each surface. `names` are their attempts, with the gRPC agent's first."""
    surfaces: list[Surface] = [Grpc(server, random.Random(draw.random()))]
    async with contextlib.AsyncExitStack() as stack:
        for (make, make_client), name in zip(HTTP_SURFACES, names[1:], strict=True):
            base = f"{server.http}/attempts/{name}"
            # The agent itself retries, not the SDK.
            opened = make_client(base_url=base, api_key="any", max_retries=0)
            client = await stack.enter_async_context(opened)
            surfaces.append(make(client, engine, random.Random(draw.random())))
        yield [Agent(surface, random.Random(draw.random())) for surface in surfaces]


async def converse(folder: Path, family: Family, seed: int) -> Talk:
    """Run one attempt per surface, all at once and in one group."""
    draw, encoded, used = random.Random(seed), list[str](), list[int]()
    make_engine = functools.partial(WritingEngine, style=family.style)
    parts: dict[str, Any] = {"renderer": family.renderer(encoded), "make_engine": make_engine}
    # Slow enough that disturbances happen mid-turn.
    parts |= {"step_seconds": 0.002, "max_context": 8192}
    async with serve(folder, "http.listen=127.0.0.1:0", **parts) as server:
        engine = server.engine
        assert isinstance(engine, WritingEngine)
        exchange = await hello(server.wire, groups_per_step=1)
        size = 1 + len(HTTP_SURFACES)
        await server.wire.SubmitTasks(
            SubmitTasksRequest(tasks=[Task(task_id="t", group_size=size)])
        )
        leases = server.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=size))
        names = [(await leases.read()).trajectory_id for _ in range(size)]
        async with (
            agents_of(server, engine, names, draw) as agents,
            disturbed(server, engine, draw.random(), used),
            asyncio.TaskGroup() as tasks,
        ):
            for agent, name in zip(agents, names, strict=True):
                tasks.create_task(agent.talk(name))
        for name in names:
            await server.complete(name, draw.random())
        exchange.send(demand={"group_count": 1})
        group = (await exchange.receive("delivery")).group
        kinds = dict(server.serving.metrics.conversations)
        return Talk(group, engine, agents, encoded, used, kinds)


def check_delivery(talk: Talk) -> None:
    """Check that every trajectory equals what its requests saw and wrote: tokens, log-probabilities
    and versions. Also check that every token of the policy is trained once."""
    samples = read_group(talk.group, trainer_version=1000, max_lag=2000).samples
    heard = {line.turn[0] for line in talk.lines if line.turn is not None}
    missed = {sample.trajectory_id for sample in samples} ^ heard
    assert not missed, missed
    own = {trajectory.trajectory_id: trajectory for trajectory in talk.group.trajectories}
    count = 0
    for sample in samples:
        attempts = _attempts_of(talk.engine, sample.trajectory_id)
        tokens = sample.token_ids.tolist()
        trained = np.zeros(len(tokens), np.bool_)
        for attempt in attempts:
            begin, end = len(attempt.given), len(attempt.tokens)
            assert tokens[:end] == attempt.tokens, sample.trajectory_id
            trained[begin:end] = True
            scores = np.asarray(attempt.logprobs, np.float32)
            assert (sample.behaviour_logprobs[begin:end] == scores).all()
        assert (sample.trained == trained).all()
        versions = [version for attempt in attempts for version in attempt.versions]
        assert _versions(own[sample.trajectory_id]) == versions
        count += int(trained.sum())
    wrote = [len(a.wrote) for attempts in talk.engine.turns.values() for a in attempts]
    assert count == sum(wrote)


def _attempts_of(engine: WritingEngine, trajectory_id: str) -> list[Attempt]:
    turns = sorted(name for name in engine.turns if name[0] == trajectory_id)
    return [attempt for name in turns for attempt in engine.turns[name]]


def _versions(trajectory: Any) -> list[int]:
    return [
        segment.weight_version
        for segment in trajectory.segments
        if segment.author == trajectory_pb2.AUTHOR_POLICY
        for _ in codec.token_ids(segment)
    ]


def check_contexts(talk: Talk, family: Family) -> int:
    """Check the engine's context before each turn. It must start with the tokens up to the
    policy's last message in the agent's history, and end with the new messages. Return the number
    of turns with such a message."""
    compared = 0
    for agent in talk.agents:
        known: dict[Any, list[list[int]]] = {}
        for lines, line in agent.asked:
            attempts = talk.engine.turns.get(line.turn or ("", 0))
            if attempts is None:
                # The turn was aborted before the engine got it.
                continue
            given, new = attempts[0].given, lines
            for end in reversed([at for at, said in enumerate(lines, 1) if said.turn]):
                if before := known.get(_meaning(lines[:end])):
                    kept = [tokens for tokens in before if given[: len(tokens)] == tokens]
                    assert kept, (line.turn, lines[end - 1].turn)
                    given, new = given[len(kept[0]) :], lines[end:]
                    compared += 1
                    break
            text = family.tokenizer.decode(given, skip_special_tokens=False)
            assert all(said.text in text for said in new if said.turn is None), line.turn
            known.setdefault(_meaning([*lines, line]), []).append(attempts[-1].tokens)
    return compared


def _meaning(lines: Sequence[Line]) -> Any:
    """Identifies a history by its text. Two turns may have the same text and different tokens."""
    return tuple((line.role, line.text.strip(), *(c[1:] for c in line.calls)) for line in lines)


def check_encoded(talk: Talk, family: Family) -> None:
    """Check that no text written by the policy was encoded."""
    control = "|".join(map(re.escape, family.tokenizer.get_added_vocab()))
    encoded = "\0".join(talk.encoded)
    for line in talk.lines:
        for text in (line.text, line.reasoning):
            longest = max(re.split(control, text.strip()), key=len).strip()
            # The policy's calls repeat the tool's description, which the server did encode.
            own = len(longest) > 8 and longest not in TOLD
            assert not own or longest not in encoded, line.turn


def drift(engine: WritingEngine, tokenizer: Any) -> Iterator[str]:
    """For each turn, whether its tokens survive decoding and re-encoding."""
    for attempts in engine.turns.values():
        wrote = [token for attempt in attempts for token in attempt.wrote]
        text = tokenizer.decode(wrote, skip_special_tokens=False)
        same = tokenizer.encode(text, add_special_tokens=False) == wrote
        yield "same" if same else "broken" if "\ufffd" in text else "readable"


def count_events(talk: Talk) -> Counter[str]:
    """The number of occurrences of each kind of event."""
    found = Counter({f"http {kind}": count for kind, count in talk.kinds.items()})
    found.update(f"policy {policy}" for policy in talk.policies)
    for agent in talk.agents:
        name = "grpc" if isinstance(agent.surface, Grpc) else "http"
        found[f"{name} interrupted"] += agent.surface.interrupted
        found["calls"] += sum(len(line.calls) for _, line in agent.asked)
    found["malformed"] = sum(bool(line.error) for line in talk.lines)
    found["reasoning"] = sum(bool(line.reasoning) for line in talk.lines)
    branches = [own for own in talk.group.trajectories if own.parent_trajectory_id]
    found["branches"] = len(branches)
    found["shared"] = sum(own.parent_token_count for own in branches)
    found["attempts beyond the first"] = sum(len(a) - 1 for a in talk.engine.turns.values())
    return found


def wanted_events(family: str) -> list[str]:
    """The events that must occur for the test to be meaningful."""
    return [
        *(f"policy {policy}" for policy in POLICIES),
        *("grpc interrupted", "http interrupted", "calls"),
        *("http new", "http continued", "http branched"),
        *("malformed", "branches", "shared", "attempts beyond the first"),
        *(["reasoning"] if family == "qwen3" else []),
    ]


@pytest.mark.parametrize("name", PARSERS)
async def test_the_trainer_gets_what_the_engine_saw_and_wrote(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    family, events, drifts, compared = Family(name), Counter[str](), Counter[str](), 0
    first: int = request.config.getoption("fault_seed") or 0
    for seed in range(first, first + SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            talk = await converse(folder, family, seed)
            check_delivery(talk)
            compared += check_contexts(talk, family)
            check_encoded(talk, family)
        except BaseException as error:
            error.add_note(f"it began with seed {seed}: --fault-seed {seed}")
            raise
        events += count_events(talk)
        drifts.update(drift(talk.engine, family.tokenizer))
    # Check that the run covered what it should.
    assert not [event for event in wanted_events(name) if not events[event]], events
    assert compared > drifts.total() / 2
    assert drifts["readable"] + drifts["broken"] >= DRIFTING * drifts.total(), drifts
    assert drifts["readable"] >= READABLE * drifts.total(), drifts
