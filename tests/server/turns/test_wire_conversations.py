"""Conversations over the wire: stored history, branches that share a
prefix, and a server that dies."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.text.renderer import Renderer, Written
from penstock.server.turns.matching import MatchKind, match
from penstock.trainer.batching.batching import read_group
from penstock.v1 import conversation_pb2, trajectory_pb2
from penstock.wire import branches, codec
from tests.support.chat_templates import make_tokenizer
from tests.support.fakes import EOS, FakeEngine
from tests.support.harness import (
    AbortRequest,
    ChatMessage,
    Conversation,
    GetTrajectoryRequest,
    Harness,
    T,
    hello,
    sampling,
    sequence,
    serve,
)

ToolMessage = T(conversation_pb2.Tool)
TOOL = ToolMessage(name="add", description="adds")
TOOLS = [Tool("add", "adds", {})]
SCRIPT = list(b'<tool_call>{"a": 1}</tool_call>')


class Scripted(FakeEngine):
    """Writes the script after any prefix, then ends the turn."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.choose = self._choose

    def _choose(self, prefix: bytes, version: int) -> tuple[int, float]:
        last = np.frombuffer(prefix, np.int32)[-len(SCRIPT) :].tolist()
        for begun in range(len(SCRIPT), 0, -1):
            if last[-begun:] == SCRIPT[:begun]:
                return [*SCRIPT, EOS][begun], -1.0
        return SCRIPT[0], -1.0


class Calls:
    """Finds the script's call. Treats it as malformed if the tool's name is "other"."""

    def parse(
        self,
        text: str,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Written:
        if not tools:
            return Written(Message("assistant", text))
        if tools[0].name == "other":
            problem = "what follows <tool_call> is no tool call"
            return Written(Message("assistant", text), problem)
        calls = (ToolCall("", "add", '{"a": 1}'),)
        return Written(Message("assistant", "", calls, reasoning="I call."))


def said(role: str, content: str, **fields: Any) -> Any:
    number = conversation_pb2.Role.Value(f"ROLE_{role.upper()}")
    return ChatMessage(role=number, content=content, **fields)


def conversation(*messages: Any, tool: Any = TOOL) -> Any:
    return Conversation(messages=messages, tools=[tool] if tool is not None else [])


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(make_tokenizer("chatml"), [EOS], Calls())


def scripted(folder: Path, renderer: Renderer, *settings: str) -> Any:
    return serve(folder, *settings, renderer=renderer, make_engine=Scripted)


ASK = said("user", "Add.")
LONG = {"sampling_params": sampling(64, ignore_eos=False)}


def copied(message: Any) -> Any:
    return ChatMessage.FromString(message.SerializeToString())


def tokens_of(trajectory: Any) -> list[int]:
    return [int(t) for s in trajectory.segments for t in codec.token_ids(s)]


async def test_a_turn_comes_back_as_calls_and_reasoning(tmp_path: Path, renderer: Renderer) -> None:
    async with scripted(tmp_path, renderer) as server:
        turn = await server.generate("t", conversation=conversation(ASK), **LONG)
        message = turn.finished.message
        assert (message.content, message.reasoning) == ("", "I call.")
        [call] = message.tool_calls
        assert (call.name, call.arguments_json) == ("add", '{"a": 1}')
        assert turn.finished.tool_call_error == ""
        held = await server.wire.GetTrajectory(GetTrajectoryRequest(trajectory_id="t"))
        assert held.last_turn == turn.finished
        answer = said("tool", "1", tool_call_id=call.tool_call_id)
        again = await server.resume("t", conversation=conversation(answer, tool=None))
        [other] = again.finished.message.tool_calls
        assert other.tool_call_id != call.tool_call_id


async def test_a_malformed_call_is_text_with_a_reason(tmp_path: Path, renderer: Renderer) -> None:
    async with scripted(tmp_path, renderer) as server:
        shown = conversation(ASK, tool=ToolMessage(name="other"))
        turn = await server.generate("t", conversation=shown, **LONG)
        assert turn.finished.message.content == bytes(SCRIPT).decode()
        assert not turn.finished.message.tool_calls
        assert turn.finished.tool_call_error == "what follows <tool_call> is no tool call"


# Branches


async def branched(server: Harness, reward: float = 1.0) -> tuple[Any, list[list[int]]]:
    """A group of a trajectory, a branch from its first turn and a branch from that
    branch. Also returns their tokens."""
    exchange = await hello(server.wire)
    first = await server.generate(
        "t", conversation=conversation(ASK), group_id="g", group_size=1, **LONG
    )
    call = copied(first.finished.message)
    result = said("tool", "1", tool_call_id=call.tool_calls[0].tool_call_id)
    await server.resume("t", conversation=conversation(result, tool=None))
    rewritten = said("tool", "2", tool_call_id=call.tool_calls[0].tool_call_id)
    shown = conversation(ASK, call, rewritten)
    branch = await server.generate("b", conversation=shown, parent_trajectory_id="t", **LONG)
    shown = conversation(ASK, call, rewritten, copied(branch.finished.message), said("user", "Go."))
    await server.generate("c", conversation=shown, parent_trajectory_id="b", **LONG)
    whole: list[list[int]] = []
    for name in "tbc":
        record = server.serving.store.get(name)
        whole.append(record.token_array().tolist())
    await server.complete("t", reward)
    exchange.send(demand={"group_count": 1})
    return (await exchange.receive("delivery")).group, whole


async def test_a_branch_stores_and_delivers_what_is_its_own(
    tmp_path: Path, renderer: Renderer
) -> None:
    async with scripted(tmp_path, renderer) as server:
        group, whole = await branched(server)
        root, branch, leaf = group.trajectories
        shared = branches.shared_prefixes(group)
        for trajectory, tokens in zip(group.trajectories, whole, strict=True):
            assert [*shared[trajectory.trajectory_id], *tokens_of(trajectory)] == tokens
        first = renderer.render([Message("user", "Add.")], TOOLS).tolist()
        # The shared prefix ends where the answers differ, at their first character.
        before = renderer.render_next([Message("tool", "", tool_call_id="x")], EOS).tolist()
        answered = before.index(EOS)
        assert root.parent_token_count == 0
        assert branch.parent_token_count == len(first) + len(SCRIPT) + 1 + answered
        assert leaf.parent_token_count == len(whole[1])
        assert tokens_of(branch)[0] == ord("2")
        # Each trajectory's turns are trained once.
        samples = read_group(group, trainer_version=0, max_lag=4).samples
        assert [sample.token_ids.tolist() for sample in samples] == whole
        assert [int(sample.trained.sum()) for sample in samples] == [
            2 * len(SCRIPT) + 2,
            len(SCRIPT) + 1,
            len(SCRIPT) + 1,
        ]
        assert [sample.counts_in_baseline for sample in samples] == [True, False, False]


async def test_tokens_that_both_begin_with_are_the_parents(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        parent = await server.generate("t", [1, 2, 3], group_id="g", group_size=1)
        prompt = [1, 2, 3, *parent.tokens[:4], 7]
        await server.generate("b", prompt, parent_trajectory_id="t")
        # A repeated prompt shares everything.
        again = await server.generate("again", [1, 2, 3], parent_trajectory_id="t")
        assert again.started.context_token_count == 3
        held = await server.wire.GetTrajectory(GetTrajectoryRequest(trajectory_id="b"))
        assert held.trajectory.parent_token_count == 7
        assert tokens_of(held.trajectory)[0] == 7
        given = server.serving.store.get("again")
        assert (given.parent_token_count, given.token_count) == (3, 19)
        assert [s.author for s in given.segments] == [trajectory_pb2.AUTHOR_POLICY]
        exchange = await hello(server.wire)
        await server.complete("t")
        exchange.send(demand={"group_count": 1})
        group = (await exchange.receive("delivery")).group
        shared = branches.shared_prefixes(group)
        assert shared["b"].tolist() == prompt[:7]
        assert shared["again"].tolist() == [1, 2, 3]


async def test_a_branch_shares_nothing_of_a_turn_in_flight(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.005) as server:
        parent = asyncio.ensure_future(server.generate("t", sampling_params=sampling(500)))
        await server.sampled("t", 4)
        written = server.serving.store.get("t").token_array().tolist()[:7]
        await server.generate("b", [*written, 9], parent_trajectory_id="t")
        assert server.serving.store.get("b").parent_token_count == 3
        await server.wire.Abort(AbortRequest(all={}))
        await parent


def test_a_branch_without_its_parent_is_malformed() -> None:
    group = T(trajectory_pb2.TrajectoryGroup)()
    group.trajectories.add(trajectory_id="b", parent_trajectory_id="t", parent_token_count=2)
    with pytest.raises(codec.MalformedMessage, match="not in its group"):
        branches.shared_prefixes(group)
    parent = group.trajectories.add(trajectory_id="t")
    parent.segments.add(token_ids=codec.array_bytes(np.asarray([1], np.int32)))
    with pytest.raises(codec.MalformedMessage, match="which has 1"):
        branches.shared_prefixes(group)
    parent.parent_trajectory_id, parent.parent_token_count = "b", 1
    with pytest.raises(codec.MalformedMessage):
        branches.shared_prefixes(group)


# A server that dies


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    yield before, after


def journal(folder: Path) -> tuple[str, str]:
    return f"journal.folder={folder / 'journal'}", "journal.segment_bytes=1048576"


async def test_what_is_held_of_a_conversation_outlives_the_server(
    folders: tuple[Path, Path], renderer: Renderer
) -> None:
    before, after = folders
    async with scripted(before, renderer, *journal(before)) as server:
        turn = await server.generate("t", conversation=conversation(ASK), **LONG)
        call = copied(turn.finished.message)
        result = said("tool", "1", tool_call_id=call.tool_calls[0].tool_call_id)
        last = await server.resume("t", conversation=conversation(result, tool=None))
        branch = conversation(ASK, call, said("tool", "2"))
        await server.generate("b", conversation=branch, parent_trajectory_id="t", **LONG)
        kept = [server.serving.store.get(name) for name in "tb"]
        shutil.copytree(before / "journal", after / "journal")
    for _ in range(2):
        # The second restart reads the snapshot that the first one wrote.
        async with scripted(after, renderer, *journal(after)) as again:
            found = [again.serving.store.get(name) for name in "tb"]
            for old, new in zip(kept, found, strict=True):
                assert new.token_array().tolist() == old.token_array().tolist()
                assert new.parent_token_count == old.parent_token_count
                assert new.history is not None and old.history is not None
                assert new.history.messages == old.history.messages
                assert new.history.tools == old.history.tools == tuple(TOOLS)
            held = await again.wire.GetTrajectory(GetTrajectoryRequest(trajectory_id="t"))
            assert held.last_turn.message == last.finished.message
            messages = [Message("user", "Add.")]
            assert match(found, messages, TOOLS).kind is MatchKind.BRANCHED
    async with scripted(after, renderer, *journal(after)) as again:
        shown = conversation(ASK, call, said("tool", "3"))
        await again.generate("c", conversation=shown, parent_trajectory_id="t", **LONG)
        first, third = (again.serving.store.get(name) for name in "tc")
        assert third.parent_token_count == kept[1].parent_token_count
        assert third.token_array()[: third.parent_token_count].tolist() == (
            first.token_array()[: third.parent_token_count].tolist()
        )


async def test_a_turn_that_was_cut_off_by_the_servers_death_is_gone_on_with(
    folders: tuple[Path, Path], renderer: Renderer
) -> None:
    before, after = folders
    async with scripted(before, renderer, *journal(before)) as server:
        server.engine.freeze_at = 5
        fields = {"conversation": conversation(ASK), **LONG}
        turn = asyncio.ensure_future(server.generate("t", **fields))
        await server.sampled("t")
        # The opening was queued before this append. Sampling itself never waits for the disk.
        await server.serving.journal.append([])
        shutil.copytree(before / "journal", after / "journal")
        server.engine.freeze_at = None
        server.engine._wake.set()
        await turn
    async with scripted(after, renderer, *journal(after)) as again:
        found = match([again.serving.store.get("t")], [Message("user", "Add.")], TOOLS)
        assert (found.kind, found.new_messages) == (MatchKind.CONTINUED, ())
        resumed = await again.resume("t")
        assert resumed.finished.finish_reason == trajectory_pb2.FINISH_REASON_STOP
        history = again.serving.store.get("t").history
        assert history is not None
        assert [held.written for held in history.messages] == [False, True]


async def test_a_conversation_is_refused_as_before(tmp_path: Path, renderer: Renderer) -> None:
    async with scripted(tmp_path, renderer) as server:
        await server.generate("t", conversation=conversation(ASK), **LONG)
        for shown in (conversation(ASK), conversation(said("assistant", "x"), tool=None)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await server.resume("t", conversation=shown)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        history = server.serving.store.get("t").history
        assert history is not None and len(history.messages) == 2
        # Tokens form no message, so no later message matches them.
        await server.resume("t", tokens=sequence([65]))
        assert [held.written for held in history.messages] == [False, True, False, True]
