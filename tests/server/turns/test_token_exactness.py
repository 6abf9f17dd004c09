"""What the trainer gets is bit for bit what the engine saw and wrote, whatever became of a conversation.

Four agents at a time, one by gRPC and one by each of the compatible endpoints, talk at random with a policy
that writes at random, while turns are aborted and weights are switched, each time with another policy for
turns in flight. The tokenizers have merges and the policy does not keep to them: what it wrote, decoded and
encoded again, would be other tokens. That this is so is asserted as well, so that the test can fail.
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

from penstock.server.text.renderer import TokenizerRenderer
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
# Of the turns, at least these shares are other tokens once they are encoded again; and although their text
# is whole.
DRIFTING, READABLE = 0.6, 0.4


@dataclass
class Talk:
    """One group, as it was delivered, and all that there is to compare it with."""

    group: Any
    engine: WritingEngine
    agents: list[Agent]
    encoded: list[str]
    """Every text that the server had encoded."""
    policies: list[int]
    """Of the switches."""
    kinds: dict[str, int]
    """What the requests of the endpoints did to what was held."""

    @property
    def lines(self) -> list[Line]:
        """All that the policy said."""
        return [line for agent in self.agents for _, line in agent.asked]


@dataclass
class Family:
    """A tokenizer, its parsers, and how its policy writes."""

    name: str
    style: Style = field(init=False)
    tokenizer: Any = field(init=False)
    parsers: VllmParsers = field(init=False)

    def __post_init__(self) -> None:
        self.style = Style(self.name)
        self.tokenizer = make_merging_tokenizer(self.name)
        self.parsers = VllmParsers(self.tokenizer, *PARSERS[self.name])

    def renderer(self, encoded: list[str]) -> TokenizerRenderer:
        """With a tokenizer of its own, which tells what it encodes."""
        tokenizer: Any = make_merging_tokenizer(self.name)
        encode = tokenizer.encode

        def spy(text: str, **fields: Any) -> Any:
            encoded.append(text)
            return encode(text, **fields)

        tokenizer.encode = spy
        return TokenizerRenderer(tokenizer, [EOS], self.parsers)


async def disturb(server: Harness, engine: WritingEngine, seed: float, used: list[int]) -> None:
    """Aborts everything, or switches weights, every so many tokens; ends by being cancelled."""
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
    """While this is entered, things happen."""
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
    """One agent of each surface; `names` are those of their attempts, the one by gRPC first."""
    surfaces: list[Surface] = [Grpc(server, random.Random(draw.random()))]
    async with contextlib.AsyncExitStack() as stack:
        for (make, make_client), name in zip(HTTP_SURFACES, names[1:], strict=True):
            base = f"{server.http}/attempts/{name}"
            # What is lost is asked for again by the agent itself.
            opened = make_client(base_url=base, api_key="any", max_retries=0)
            client = await stack.enter_async_context(opened)
            surfaces.append(make(client, engine, random.Random(draw.random())))
        yield [Agent(surface, random.Random(draw.random())) for surface in surfaces]


async def converse(folder: Path, family: Family, seed: int) -> Talk:
    """One attempt of each surface, all of one group and at once."""
    draw, encoded, used = random.Random(seed), list[str](), list[int]()
    make_engine = functools.partial(WritingEngine, style=family.style)
    parts: dict[str, Any] = {"renderer": family.renderer(encoded), "make_engine": make_engine}
    # So slow that what disturbs it comes in the middle of turns.
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
    """That every trajectory is what its requests saw and wrote: tokens, log-probabilities and versions, and
    that every token that the policy wrote is trained once."""
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
    """That what the engine saw before each turn begins with what it saw and wrote up to the last message of
    the policy's in the agent's history, and ends with what is new; returns how many had such a message."""
    compared = 0
    for agent in talk.agents:
        known: dict[Any, list[list[int]]] = {}
        for lines, line in agent.asked:
            attempts = talk.engine.turns.get(line.turn or ("", 0))
            if attempts is None:
                # It was aborted before the engine had it.
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
    """What tells one history from another: two turns may read the same and be other tokens."""
    return tuple((line.role, line.text.strip(), *(c[1:] for c in line.calls)) for line in lines)


def check_encoded(talk: Talk, family: Family) -> None:
    """That no text which the policy wrote was encoded."""
    control = "|".join(map(re.escape, family.tokenizer.get_added_vocab()))
    encoded = "\0".join(talk.encoded)
    for line in talk.lines:
        for text in (line.text, line.reasoning):
            longest = max(re.split(control, text.strip()), key=len).strip()
            # The policy calls the tool in the words in which it was told of it.
            own = len(longest) > 8 and longest not in TOLD
            assert not own or longest not in encoded, line.turn


def drift(engine: WritingEngine, tokenizer: Any) -> Iterator[str]:
    """Of each turn, what would become of its tokens if they were decoded and encoded again."""
    for attempts in engine.turns.values():
        wrote = [token for attempt in attempts for token in attempt.wrote]
        text = tokenizer.decode(wrote, skip_special_tokens=False)
        same = tokenizer.encode(text, add_special_tokens=False) == wrote
        yield "same" if same else "broken" if "\ufffd" in text else "readable"


def count_events(talk: Talk) -> Counter[str]:
    """How much came to pass, by name."""
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
    """What has to have come to pass for the test to mean anything."""
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
    # It was as eventful as it is meant to be.
    assert not [event for event in wanted_events(name) if not events[event]], events
    assert compared > drifts.total() / 2
    assert drifts["readable"] + drifts["broken"] >= DRIFTING * drifts.total(), drifts
    assert drifts["readable"] >= READABLE * drifts.total(), drifts
