"""The search example's agent: what it reads, when it is stopped, and how the trainer reads its
outcomes.

Rollout server, retrieval server and refiner each have a port. Only the models' answers are
scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

pytest.importorskip("bm25s")

from research import indexes
from research.agent import TOOL_ERROR, Researcher, Stop
from research.batching import Limits
from research.grammar import (
    NO_ACTION,
    NO_WORDS,
    TOOL_FAILED,
    Call,
    TextGrammar,
    ToolGrammar,
    read_lines,
)
from research.indexes import Shard
from research.refine import Refiner
from research.retrieval_client import RetrievalClient
from research.retrieval_server import make_app
from research.settings import AgentSettings, RefineSettings, Settings, load

from penstock.client import (
    Failed,
    FinishReason,
    Message,
    SamplingParams,
    Task,
    ToolCall,
    Turn,
    connect,
)
from penstock.server.text import renderer as conversation
from penstock.trainer.batching.batching import read_group
from penstock.trainer.config.trainer import TrainerConfig
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from tests.support.fakes import EOS, START_OF_TURN, ByteRenderer, decode_bytes
from tests.support.harness import Harness, hello, serve

FOLDER = Path(__file__).parents[2] / "examples" / "search"
TEXTS = ("The Nile is 6650 km long.", "The Danube is 2850 km long.", "Paris has a metro.")
QUESTION = "How long is the Nile?"
SCRIPTS: dict[str, tuple[str, ...]] = {
    "right": ("search: Nile long", "answer: 6650 km"),
    "two at once": ("search: Nile | Danube\nsearch: metro", "answer: 6650"),
    "answers at once": ("answer: 6650 km",),
    "searches and answers": ("search: Nile\nanswer: 1 km", "answer: 2850 km"),
    "repeats": ("search: Nile long", "search: long, NILE!"),
    "too many at once": ("search: a1 | b2 | c3 | d4",),
    "too many in all": ("search: a1 | b2", "search: c3 | d4"),
    "never answers": ("hm", "I see", "search: Nile"),
    "says nothing first": ("hm", "search: ?!", "answer: 6650 km"),
    "rambles": ("search: Nile", "answer: " + "6650 km " * 40),
}
TOOL_SCRIPTS: dict[str, tuple[str, ...]] = {
    "malformed at first": ("<call>Nile long", "<call>Nile long</call>", "6650 km"),
    "malformed again and again": ("<call>Nile",) * 3,
}
CUT_OFF = "<call> without </call>"


class ToolRenderer(ByteRenderer):
    """Reads `<call>words</call>` as a search, and an unclosed `<call>` as a malformed call."""

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[conversation.Tool],
        name: str,
    ) -> conversation.Written:
        text = self.decode(token_ids)
        if not text.startswith("<call>"):
            return conversation.Written(conversation.Message("assistant", text))
        if not text.endswith("</call>"):
            return conversation.Written(conversation.Message("assistant", text), CUT_OFF)
        query = text.removeprefix("<call>").removesuffix("</call>")
        call = conversation.ToolCall("1", "search", json.dumps({"query": query}))
        return conversation.Written(conversation.Message("assistant", "", (call,)))


def scripted(prefix: bytes, version: int) -> tuple[int, float]:
    """Replaces the fake engine's sampling: the next token of the script that the task names."""
    tokens = np.frombuffer(prefix, np.int32)
    opened = int(np.flatnonzero(tokens == START_OF_TURN)[-1])
    name, *turns = decode_bytes(tokens[: opened + 11].tolist()).split("[")[-1].split("assistant\n")
    said = (SCRIPTS | TOOL_SCRIPTS)[name.split("]")[0]][len(turns) - 1].encode()
    at = len(tokens) - opened - len("assistant\n") - 1
    return (said[at] if at < len(said) else EOS), -0.5


@contextlib.asynccontextmanager
async def http(app: Starlette) -> AsyncIterator[str]:
    """Serve an application on a free port."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    running = asyncio.create_task(server.serve([listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


@pytest.fixture
async def retrieval(tmp_path: Path) -> AsyncGenerator[RetrievalClient]:
    rows = [
        {"chunk_id": number, "passage": number, "title": f"T{number}", "text": text}
        for number, text in enumerate(TEXTS)
    ]
    (tmp_path / "chunks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    indexes.build(tmp_path, "bm25", TEXTS)
    app = make_app(tmp_path, ["bm25"], Shard(), Limits(window_seconds=0.001))
    async with http(app) as url, RetrievalClient([[url]]) as client:
        yield client


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Harness]:
    monkeypatch.setattr("tests.support.fakes.sampled", scripted)
    async with serve(tmp_path, max_context=4096) as running:
        yield running


def settings(**agent: Any) -> Settings:
    return Settings.model_validate({"agent": agent, "retrieval": {"count": 1}})


async def attempt(harness: Harness, researcher: Researcher, *scripts: str) -> Any:
    """Run each script as a group of one. Returns the groups that the trainer receives, by script."""
    exchange = await hello(harness.wire, groups_per_step=len(scripts))
    metadata = {"answers": ["6650 km"], "gold": [0]}
    async with connect(harness.address) as client:
        await client.submit_tasks(
            Task(
                f"task-{name}",
                QUESTION,
                {**metadata, "question": f"{QUESTION} [{name}]"},
                sampling=SamplingParams(max_tokens=64),
            )
            for name in scripts
        )
        exchange.send(demand={"group_count": len(scripts)})
        working = asyncio.create_task(client.work(researcher.attempt, attempts=len(scripts)))
        deliveries = [await exchange.receive("delivery") for _ in scripts]
        await working
    return {each.group.task_id.removeprefix("task-"): each.group for each in deliveries}


def said(group: Any) -> dict[str, float]:
    return dict(group.trajectories[0].outcome.metrics)


def contexts(group: Any) -> list[str]:
    """The text that the policy was shown after its turns."""
    return [
        decode_bytes(codec.token_ids(segment).tolist())
        for segment in group.trajectories[0].segments[1:]
        if segment.author == trajectory_pb2.AUTHOR_CONTEXT
    ]


async def test_attempts_are_scored_stopped_and_counted(
    harness: Harness, retrieval: RetrievalClient
) -> None:
    researcher = Researcher(settings(max_calls=3), retrieval, None)
    groups = await attempt(harness, researcher, *SCRIPTS)
    rewards = {name: group.trajectories[0].outcome.reward for name, group in groups.items()}
    assert rewards == pytest.approx(
        {
            "right": 1.0,
            "two at once": 0.7 * 2 / 3 + 0.3,
            "answers at once": 0.7,
            # A turn that searches does not count as an answer.
            "searches and answers": 0.7 * 0.5 + 0.3,
            "says nothing first": 0.7,
            "repeats": 0.0,
            "too many at once": 0.0,
            "too many in all": 0.0,
            "never answers": 0.0,
            "rambles": 0.0,
        }
    )
    stops = {
        name: [reason for reason in Stop if said(group)[f"stopped_{reason}"]]
        for name, group in groups.items()
    }
    assert {name: own for name, own in stops.items() if own} == {
        "repeats": [Stop.REPEATED],
        "too many at once": [Stop.PARALLEL],
        "too many in all": [Stop.CALLS],
        "never answers": [Stop.TURNS],
    }
    assert said(groups["two at once"])["calls"] == 3 and said(groups["two at once"])["turns"] == 2
    for text in TEXTS:
        assert any(text in told for told in contexts(groups["two at once"]))
    quiet = said(groups["says nothing first"])
    assert (quiet["idle_turns"], quiet["bad_calls"], quiet["turns"]) == (1, 1, 3)
    told = contexts(groups["says nothing first"])
    assert NO_ACTION in told[0] and NO_WORDS in told[1]
    assert said(groups["rambles"])["overlong"] == 1.0


async def test_a_malformed_tool_call_is_told_and_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retrieval: RetrievalClient
) -> None:
    monkeypatch.setattr("tests.support.fakes.sampled", scripted)
    researcher = Researcher(settings(calls="tools"), retrieval, None)
    async with serve(tmp_path, max_context=4096, renderer=ToolRenderer()) as harness:
        groups = await attempt(harness, researcher, *TOOL_SCRIPTS)
    mended, hopeless = groups["malformed at first"], groups["malformed again and again"]
    assert mended.trajectories[0].outcome.reward == pytest.approx(1.0)
    figures = said(mended)
    assert (figures["bad_calls"], figures["calls"], figures["turns"]) == (1, 2, 3)
    assert figures["idle_turns"] == 0 and figures["answered"] == 1
    told = contexts(mended)
    assert f"user\n{CUT_OFF}" in told[0] and "tool\n" in told[1] and TEXTS[0] in told[1]
    assert hopeless.trajectories[0].outcome.reward == 0.0
    assert said(hopeless)["bad_calls"] == 3 and said(hopeless)["answered"] == 0
    assert said(hopeless)[f"stopped_{Stop.TURNS}"] == 1


async def test_what_was_cut_off_carries_no_gradient_and_stays_in_the_baseline(
    harness: Harness, retrieval: RetrievalClient
) -> None:
    groups = await attempt(harness, Researcher(settings(), retrieval, None), "right", "rambles")
    read = {name: read_group(group, trainer_version=0, max_lag=4) for name, group in groups.items()}
    assert read["right"].samples[0].trained.sum() == sum(map(len, SCRIPTS["right"])) + 2
    assert not read["rambles"].samples[0].trained.any()
    assert read["rambles"].samples[0].counts_in_baseline and read["rambles"].rewards == (0.0,)
    assert said(groups["rambles"])["masked"] == 1.0 and said(groups["right"])["masked"] == 0.0


async def test_it_is_trained_where_it_is_told_so(
    harness: Harness, retrieval: RetrievalClient
) -> None:
    researcher = Researcher(settings(mask_overlong=False), retrieval, None)
    group = (await attempt(harness, researcher, "rambles"))["rambles"]
    assert read_group(group, trainer_version=0, max_lag=4).samples[0].trained.sum() > 64
    assert said(group)["masked"] == 0.0


@contextlib.asynccontextmanager
async def nowhere() -> AsyncIterator[RetrievalClient]:
    """A retrieval client whose only server is gone."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with RetrievalClient([[f"http://127.0.0.1:{port}"]], patience_seconds=0.1) as client:
        yield client


async def test_a_tool_error_is_told_and_masked(harness: Harness) -> None:
    async with nowhere() as gone:
        group = (await attempt(harness, Researcher(settings(), gone, None), "right"))["right"]
    assert TOOL_FAILED in contexts(group)[0]
    assert said(group)["tool_errors"] == said(group)["retrieval_errors"] == 1
    assert group.trajectories[0].outcome.reward == pytest.approx(0.7)
    assert not read_group(group, trainer_version=0, max_lag=4).samples[0].trained.any()


async def test_a_tool_error_fails_the_attempt_where_it_is_told_so(harness: Harness) -> None:
    async with nowhere() as gone, connect(harness.address) as client:
        researcher = Researcher(settings(on_tool_error="fail"), gone, None)
        await client.submit_tasks(
            [Task("t", QUESTION, {"question": "[right]", "answers": ["x"], "gold": []})]
        )
        async with client.lease_tasks() as leases:
            lease = await anext(leases)
            outcome = await researcher.attempt(lease.task, lease.trajectory)
            assert isinstance(outcome, Failed) and outcome.reason == TOOL_ERROR
            assert (await lease.trajectory.close(outcome)).retried


@dataclass
class RefinerServer:
    """An OpenAI-compatible chat completions server whose first `failures` calls fail."""

    failures: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: set[str] = field(default_factory=set[str])

    async def answer(self, request: Request) -> JSONResponse:
        self.requests.append(await request.json())
        self.keys.add(request.headers.get("authorization", ""))
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": {"message": "busy"}}, 503)
        content = "<think>The Danube?</think>The Nile has 6650 km."
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": content}}]})

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])


async def test_a_second_model_refines_what_was_found(
    harness: Harness, retrieval: RetrievalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFINE_API_KEY", "secret")
    broken, well = RefinerServer(failures=1), RefinerServer()
    async with http(broken.app) as first, http(well.app) as second:
        refine = RefineSettings(
            servers=(f"{first}/v1", f"{second}/v1"), model="other", balance="round_robin"
        )
        refiner = Refiner(refine)
        groups = await attempt(harness, Researcher(settings(), retrieval, refiner), "right")
        await refiner.close()
    (told,) = contexts(groups["right"])
    assert "The Nile has 6650 km." in told and "Danube" not in told and TEXTS[0] not in told
    assert len(broken.requests) == len(well.requests) == 1 and well.keys == {"Bearer secret"}
    asked = well.requests[0]
    assert asked["model"] == "other" and TEXTS[0] in asked["messages"][0]["content"]
    assert said(groups["right"])["tool_errors"] == 0.0
    assert said(groups["right"])["found"] == 1.0


async def test_a_refiner_that_fails_leaves_the_passages_and_masks(
    harness: Harness, retrieval: RetrievalClient
) -> None:
    broken = RefinerServer(failures=1000)
    async with http(broken.app) as url:
        refiner = Refiner(RefineSettings(servers=(f"{url}/v1",), patience_seconds=0.1))
        groups = await attempt(harness, Researcher(settings(), retrieval, refiner), "right")
        await refiner.close()
    assert TEXTS[0] in contexts(groups["right"])[0]
    assert said(groups["right"])["refine_errors"] == said(groups["right"])["masked"] == 1.0
    read = read_group(groups["right"], trainer_version=0, max_lag=4)
    assert not read.samples[0].trained.any()


@pytest.mark.parametrize(
    ("text", "queries", "answer"),
    [
        ("search: the Nile", ["the Nile"], None),
        ("Search : x | b\n search:c", ["x", "b", "c"], None),
        ("answer: yes\nanswer: no", [], "yes"),
        ("answer:", [], ""),
        ("answer: 12:30", [], "12:30"),
        ("answer: x\nsearch: y", ["y"], None),
        ("search:", [""], None),
        ("search: " + "x" * 2001, [""], None),
        ("search: |x", ["", "x"], None),
        ("research: x\nthe answer: y", [], None),
        ("", [], None),
    ],
)
def test_lines_are_read_as_actions(text: str, queries: list[str], answer: str | None) -> None:
    actions = read_lines(text)
    assert [call.query for call in actions.calls] == queries and actions.answer == answer
    assert all(bool(call.query) != bool(call.error) for call in actions.calls)


def _turn(content: str, *calls: ToolCall) -> Turn:
    return Turn(0, (), FinishReason.STOP, content, Message("assistant", content, calls))


def test_tool_calls_are_read_as_actions() -> None:
    grammar = ToolGrammar()
    calls = (
        ToolCall("1", "search", '{"query": "the Nile"}'),
        ToolCall("2", "search", '{"query": 3}'),
        ToolCall("3", "search", "{"),
        ToolCall("4", "browse", "{}"),
        ToolCall("5", "search", "[]"),
    )
    actions = grammar.read(_turn("Let me see.", *calls))
    assert [call.query for call in actions.calls] == ["the Nile", "", "", "", ""]
    assert [call.call_id for call in actions.calls] == ["1", "2", "3", "4", "5"]
    assert actions.answer is None and all(call.error for call in actions.calls[1:])
    replies = grammar.reply(actions.calls, [f"said {n}" for n in range(5)])
    assert [(reply.role, reply.tool_call_id) for reply in replies] == [
        ("tool", str(n)) for n in range(1, 6)
    ]
    assert grammar.read(_turn(" 6650 km ")).answer == "6650 km"
    assert grammar.read(_turn(" ")).answer is None
    malformed = replace(_turn("<tool_call>{"), tool_call_error="the tool call is cut off")
    actions = grammar.read(malformed)
    assert actions.answer is None and actions.calls == (Call("", "", "the tool call is cut off"),)
    (told,) = grammar.reply(actions.calls, [call.error for call in actions.calls])
    assert (told.role, told.content, told.tool_call_id) == ("user", "the tool call is cut off", "")
    assert grammar.tools[0].parameters["required"] == ["query"]


def test_what_several_searches_found_is_told_once() -> None:
    calls = [Call("a"), Call("b"), Call("c")]
    (message,) = TextGrammar().reply(calls, ["one", "Nothing found.", "Nothing found."])
    assert message.content == "one\nNothing found."


def test_the_configuration_is_one() -> None:
    document = tomllib.loads((FOLDER / "run.toml").read_text())["train"]
    config = TrainerConfig.model_validate({**document, "model": {"path": "somewhere"}})
    assert config.data.python is not None and not config.data.python.shuffle
    read = load(FOLDER / "search.toml")
    assert read.retrieval.replicas >= 2 and not read.refine.servers
    assert AgentSettings().mask_overlong and not read.agent.mask_overlong
