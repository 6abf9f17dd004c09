"""How requests with whole conversations map to trajectories: continued,
branched, resumed, repeated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.server.core.errors import DomainError
from penstock.wire import codec
from penstock.wire.reasons import Reason
from tests.support.fakes import decode_bytes, expected_tokens
from tests.support.harness import (
    AbortRequest,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    SubmitTasksRequest,
    Task,
    hello,
    sampling,
    serve,
    until,
    upload,
)

USER = {"role": "user", "content": "hello"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, "http.listen=127.0.0.1:0") as running:
        yield running


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, "http.listen=127.0.0.1:0", step_seconds=0.005) as running:
        yield running


def client(server: Harness, attempt: str = "", **fields: Any) -> openai.AsyncOpenAI:
    path = f"/attempts/{attempt}" if attempt else ""
    return openai.AsyncOpenAI(base_url=server.http + path, api_key="any", **fields)


async def ask(agent: openai.AsyncOpenAI, messages: list[Any], **fields: Any) -> str:
    body = {"ignore_eos": True, **fields.pop("extra_body", {})}
    answer = await agent.chat.completions.create(
        model="m",
        messages=messages,
        max_tokens=fields.pop("max_tokens", 8),
        extra_body=body,
        **fields,
    )
    return str(answer.choices[0].message.content)


def body(max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [USER],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **fields,
    }


async def tokens_of(server: Harness, trajectory_id: str) -> list[tuple[str, list[int]]]:
    """(author, tokens) of each segment."""
    request = GetTrajectoryRequest(trajectory_id=trajectory_id)
    found = (await server.wire.GetTrajectory(request)).trajectory
    return [
        (
            "policy" if len(segment.logprobs) else "context",
            [int(t) for t in codec.token_ids(segment)],
        )
        for segment in found.segments
    ]


def branches(server: Harness, attempt: str) -> list[Any]:
    record = server.serving.store.find(attempt)
    assert record is not None
    return record.children


def kinds(server: Harness) -> dict[str, int]:
    return server.serving.metrics.conversations


async def test_what_goes_on_is_appended_to_the_tokens_that_the_policy_wrote(server: Harness):
    async with client(server, "a") as agent:
        messages: list[Any] = [USER]
        for turn in range(3):
            said = await ask(agent, messages)
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"{turn}?"},
            ]
    segments = await tokens_of(server, "a")
    assert [author for author, _ in segments] == ["context", "policy"] * 3
    context: list[int] = []
    for author, tokens in segments:
        if author == "policy":
            assert tokens == expected_tokens(context, [0] * 8)[0]
        context += tokens
    assert not branches(server, "a")
    assert kinds(server) == {"new": 1, "continued": 2}


async def test_history_that_was_rewritten_is_a_branch_that_shares_what_stands(server: Harness):
    async with client(server, "a") as agent:
        first = await ask(agent, [USER])
        assistant = {"role": "assistant", "content": first}
        await ask(agent, [USER, assistant, {"role": "user", "content": "more"}])
        await ask(
            agent,
            [USER, {**assistant, "content": f" {first}\n"}, {"role": "user", "content": "less"}],
        )
        await ask(agent, [{"role": "user", "content": "a summary"}])
    mine = branches(server, "a")
    assert [child.parent_trajectory_id for child in mine] == ["a", "a"]
    assert kinds(server) == {"new": 1, "continued": 1, "branched": 2}
    root = server.serving.store.find("a")
    assert root is not None
    kept = len(root.segments[0].tokens) + len(root.segments[1].tokens)
    assert mine[0].token_array().tobytes()[:kept] == root.token_array().tobytes()[:kept]
    # The branch continues independently.
    async with client(server, "a") as agent:
        summary = mine[1].token_array()[-8:]
        said = decode_bytes(summary.tolist())
        more = [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        await ask(agent, [{"role": "user", "content": "a summary"}, *more])
    assert mine[1].turn_count == 2 and len(branches(server, "a")) == 2


async def test_another_sample_of_the_same_prompt_is_a_branch(slow: Harness):
    async with client(slow, "a") as agent:
        said = await asyncio.gather(*(ask(agent, [USER], max_tokens=30) for _ in range(3)))
        again = await ask(agent, [USER], max_tokens=30)
    # The fake engine is a function of its context.
    assert len({*said, again}) == 1
    assert len(branches(slow, "a")) == 3


async def test_votes_on_a_compacted_context_store_its_prompt_once(server: Harness):
    exchange = await hello(server.wire, groups_per_step=1)
    task = Task(task_id="t", group_size=1, sampling_params=sampling(8))
    await server.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
    lease = await server.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=1)).read()
    system = {"role": "system", "content": "Be brief."}
    compacted = [system, {"role": "user", "content": "a summary of all there was " * 4}]
    async with client(server, lease.trajectory_id) as agent:
        await ask(agent, [system, USER])
        for _ in range(3):
            await ask(agent, compacted)
    await server.complete(lease.trajectory_id)
    exchange.send(demand={"group_count": 1})
    delivered = (await exchange.receive("delivery")).group.trajectories
    exchange.half_close()
    root, first, *votes = delivered
    own = [sum(len(codec.token_ids(s)) for s in found.segments) for found in delivered]
    # The first branch shares only the template's text around the system message with the root.
    prompt = first.parent_token_count + own[1] - 8
    assert root.parent_token_count == 0 and first.parent_trajectory_id == lease.trajectory_id
    assert prompt > 100 > first.parent_token_count
    for vote, count in zip(votes, own[2:], strict=True):
        assert vote.parent_trajectory_id == first.trajectory_id
        assert (vote.parent_token_count, count) == (prompt, 8)


async def test_a_retry_of_an_answer_that_was_given_gets_it_again_and_samples_nothing(
    server: Harness,
):
    async with httpx.AsyncClient(timeout=20) as http:
        url = f"{server.http}/attempts/a/chat/completions"
        first = (await http.post(url, json=body())).json()
        again = await http.post(url, json=body(), headers={"x-stainless-retry-count": "1"})
        streamed = await http.post(
            url, json=body(stream=True), headers={"x-stainless-retry-count": "1"}
        )
    assert again.json()["id"] == first["id"]
    assert again.json()["choices"] == first["choices"]
    # A request with other bytes is a different request.
    assert streamed.status_code == 200
    assert len(branches(server, "a")) == 1


async def test_a_retry_joins_the_turn_in_flight_from_its_beginning(slow: Harness):
    async with httpx.AsyncClient(timeout=20) as http:
        url = f"{slow.http}/attempts/a/chat/completions"
        asked = body(60, stream=True)
        slow.engine.freeze_at = 20
        first = asyncio.create_task(http.post(url, json=asked))
        await slow.sampled("a")
        second = asyncio.create_task(
            http.post(url, json=asked, headers={"x-stainless-retry-count": "1"})
        )
        await until(lambda: followers(slow, "a") == 2)
        slow.engine.freeze_at = None
        texts = [text_of(answer.text) for answer in (await first, await second)]
    record = slow.serving.store.find("a")
    assert record is not None and record.turn is not None
    assert texts == [decode_bytes(record.turn.policy_tokens(60).tolist())] * 2
    assert len(slow.engine.salts) == 1


def followers(server: Harness, trajectory_id: str) -> int:
    record = server.serving.store.find(trajectory_id)
    return 0 if record is None or record.answered is None else record.answered.followers


def text_of(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


async def test_a_lost_connection_ends_the_turn_and_the_retry_goes_on_at_the_exact_token(
    slow: Harness,
):
    url = f"{slow.http}/attempts/a/chat/completions"
    async with httpx.AsyncClient(timeout=20) as http:
        slow.engine.freeze_at = 40
        lost = asyncio.create_task(http.post(url, json=body(100)))
        await until(lambda: followers(slow, "a") == 1)
        lost.cancel()
        record = slow.serving.store.find("a")
        assert record is not None and record.turn is not None
        turn = record.turn
        await until(lambda: not turn.in_flight)
        assert turn.policy_token_count < 100
        slow.engine.freeze_at = None
        answer = (await http.post(url, json=body(100))).json()
    segments = await tokens_of(slow, "a")
    context, policy = (
        segments[0][1],
        [t for author, ts in segments if author == "policy" for t in ts],
    )
    assert policy == expected_tokens(context, [0] * 100)[0]
    assert answer["choices"][0]["message"]["content"] == decode_bytes(policy)
    assert not branches(slow, "a") and record.turn_count == 1


async def test_aborts_are_not_noticed(slow: Harness):
    async with client(slow, "a") as agent:
        every = AbortRequest()
        every.all.SetInParent()
        asked = asyncio.create_task(ask(agent, [USER], max_tokens=60))
        for frozen in (5, 17, 30):
            slow.engine.freeze_at = frozen
            await until(lambda: bool(slow.engine.salts))
            await slow.wire.Abort(every)
        slow.engine.freeze_at = None
        said = await asked
    assert len(slow.engine.salts) == 4
    segments = await tokens_of(slow, "a")
    policy = [t for author, ts in segments if author == "policy" for t in ts]
    assert policy == expected_tokens(segments[0][1], [0] * 60)[0]
    assert said == decode_bytes(policy)


@pytest.mark.parametrize("policy", ["KEEP", "RECOMPUTE", "ABORT"])
async def test_a_switch_of_weights_is_not_noticed(slow: Harness, policy: str):
    slow.engine.freeze_at = 20
    async with client(slow, "a") as agent:
        stream = await agent.chat.completions.create(
            model="m", messages=[USER], max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        await slow.sampled("a", 16)
        await upload(slow.wire, 1, in_flight=f"IN_FLIGHT_POLICY_{policy}")
        slow.engine.freeze_at = None
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    record = slow.serving.store.find("a")
    assert record is not None and record.turn is not None and record.turn_count == 1
    assert record.policy_versions() == [0, 1]
    assert said == decode_bytes(record.turn.policy_tokens(60).tolist())


async def test_a_leased_attempt_is_delivered_with_what_its_agent_did(server: Harness):
    exchange = await hello(server.wire, groups_per_step=1)
    task = Task(task_id="t", group_size=1, sampling_params=sampling(5, stop=["zz"]))
    await server.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
    lease = await server.wire.LeaseTasks(LeaseTasksRequest(agent_id="agent", concurrency=1)).read()
    async with client(server, lease.trajectory_id) as agent:
        answer = await agent.chat.completions.create(model="m", messages=[USER])
        await ask(agent, [{"role": "user", "content": "a sub-agent"}])
    record = server.serving.store.find(lease.trajectory_id)
    # The task's sampling parameters apply if the request sets none.
    assert record is not None and record.sampling.max_tokens == 5
    assert record.sampling.ignore_eos and record.sampling.stop == ("zz",)
    assert answer.choices[0].finish_reason == "length"
    assert await server.complete(lease.trajectory_id)
    exchange.send(demand={"group_count": 1})
    delivery = await exchange.receive("delivery")
    parents = [found.parent_trajectory_id for found in delivery.group.trajectories]
    assert parents == ["", lease.trajectory_id]
    with pytest.raises(openai.BadRequestError, match="closed"):
        async with client(server, lease.trajectory_id) as agent:
            await ask(agent, [USER])
    exchange.half_close()


async def test_without_an_attempt_nothing_is_left(slow: Harness):
    async with client(slow) as agent:
        await ask(agent, [USER])
        with pytest.raises(openai.APITimeoutError):
            await ask(agent.with_options(max_retries=0, timeout=0.2), [USER], max_tokens=200)
    await until(lambda: not slow.serving.store.records())
    assert not slow.serving.turns.in_flight


async def test_a_stop_string_ends_what_is_told_and_the_agent_can_go_on(server: Harness):
    async with client(server, "a") as agent:
        whole = await ask(agent, [USER], max_tokens=40)
    stop = whole[10:12]
    before = whole[: whole.index(stop)]
    for stream in (False, True):
        attempt = f"b{stream}"
        async with client(server, attempt) as agent:
            if stream:
                answer = await agent.chat.completions.create(
                    model="m", messages=[USER], max_tokens=40, stop=stop, stream=True
                )
                told = "".join(
                    [c.choices[0].delta.content or "" async for c in answer if c.choices]
                )
            else:
                told = await ask(agent, [USER], max_tokens=40, stop=stop)
            assert told == before
            await ask(agent, [USER, {"role": "assistant", "content": told}, USER])
        assert not branches(server, attempt)
        record = server.serving.store.find(attempt)
        assert record is not None and record.turn_count == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_what_was_told_is_gone_on_with_after_a_restart(tmp_path: Path, stream: bool):
    settings = ("http.listen=127.0.0.1:0", f"journal.folder={tmp_path / 'journal'}")
    async with serve(tmp_path, *settings) as server:
        async with client(server) as agent:
            whole = await ask(agent, [USER], max_tokens=40)
        asked = body(40, stop=[whole[10:12]], stream=stream)
        async with httpx.AsyncClient(timeout=20) as http:
            url = f"{server.http}/attempts/a/chat/completions"
            assert (await http.post(url, json=asked)).status_code == 200
    told = whole[: whole.index(whole[10:12])]
    async with serve(tmp_path, *settings) as server, client(server, "a") as agent:
        await ask(agent, [USER, {"role": "assistant", "content": told}, USER])
        assert kinds(server) == {"continued": 1}
        assert not branches(server, "a")


async def test_a_turn_that_finds_its_context_full_leaves_what_is_held_as_it_was(server: Harness):
    async with client(server, "a") as agent:
        said = {"role": "assistant", "content": await ask(agent, [USER])}
        full = await agent.chat.completions.create(
            model="m", messages=[USER, said, {"role": "user", "content": "x" * 600}]
        )
        assert (full.choices[0].finish_reason, full.usage.completion_tokens) == ("length", 0)
        await ask(agent, [USER, said, USER])
    assert kinds(server) == {"new": 1, "continued": 2}
    assert not branches(server, "a")


async def test_the_message_before_a_full_turn_outlives_its_abort_and_its_retry(server: Harness):
    async with client(server, "a") as agent, httpx.AsyncClient(timeout=20) as http:
        said = {"role": "assistant", "content": await ask(agent, [USER])}
        url = f"{server.http}/attempts/a/chat/completions"
        full = body(messages=[USER, said, {"role": "user", "content": "x" * 600}])
        server.serving.switch.await_trainer(True)
        lost = asyncio.create_task(http.post(url, json=full))
        record = server.serving.store.find("a")
        assert record is not None
        await until(lambda: record.turn is not None and record.turn.index == 1)
        lost.cancel()
        await until(lambda: record.turn is not None and not record.turn.in_flight)
        server.serving.switch.await_trainer(False)
        again = await http.post(url, json=full, headers={"x-stainless-retry-count": "1"})
        assert again.json()["choices"][0]["finish_reason"] == "length"
        await ask(agent, [USER, said, USER])
    assert not branches(server, "a")
    assert record.turn_count == 2


async def test_an_answer_that_was_aborted_goes_on_as_soon_as_there_is_room(tmp_path: Path):
    settings = ("http.listen=127.0.0.1:0", f"journal.folder={tmp_path / 'journal'}")
    async with serve(tmp_path, *settings, step_seconds=0.005) as server:
        journal: Any = server.serving.journal
        check_room, refused = journal.check_room, 0

        def full(_: int) -> None:
            nonlocal refused
            refused += 1
            journal.check_room = check_room
            raise DomainError(Reason.DISK_FULL, "full", {}, retry_after_seconds=0.05)

        async with client(server, "a", max_retries=0) as agent:
            answer = await agent.chat.completions.create(
                model="m",
                messages=[USER],
                max_tokens=60,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await anext(answer)
            journal.check_room = full
            await server.serving.turns.abort(server.serving.turns.in_flight)
            async for chunk in answer:
                assert chunk.object == "chat.completion.chunk"
        record = server.serving.store.find("a")
        assert record is not None and record.turn is not None
        assert (record.turn.policy_token_count, refused) == (60, 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_response_that_finds_its_context_full_is_empty(server: Harness, stream: bool):
    async with client(server, "a", max_retries=0) as agent:
        first = await respond(agent, "0?", None)
        asked: Any = {"model": "m", "input": "x" * 600, "previous_response_id": first.id}
        if stream:
            async with agent.responses.stream(**asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await agent.responses.create(**asked)
        assert (answer.status, answer.output_text, answer.usage.output_tokens) == (
            "incomplete",
            "",
            0,
        )
        await respond(agent, "1?", first.id)
    assert not branches(server, "a")


async def test_what_a_resumed_turn_had_written_is_no_cached_part_of_its_prompt(slow: Harness):
    async with client(slow, "a") as agent:
        answering = asyncio.create_task(
            agent.chat.completions.create(
                model="m", messages=[USER], max_tokens=60, extra_body={"ignore_eos": True}
            )
        )
        record = slow.serving.store.find
        await until(lambda: (found := record("a")) is not None and found.token_count > 60)
        await slow.wire.Abort(AbortRequest(all={}))
        usage: Any = (await answering).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    assert usage.completion_tokens == 60


# Continuing from the id of a previous answer, instead of the whole conversation

TOOL = {
    "type": "function",
    "name": "look",
    "description": "looks",
    "parameters": {"type": "object", "properties": {}},
}


async def respond(agent: openai.AsyncOpenAI, said: str, previous: str | None, **fields: Any) -> Any:
    return await agent.responses.create(
        model="m",
        input=said,
        previous_response_id=previous or openai.omit,
        max_output_tokens=8,
        extra_body={"ignore_eos": True},
        **fields,
    )


async def test_a_response_goes_on_with_the_one_that_it_names(server: Harness):
    instructions: dict[str, Any] = {"instructions": "Be brief.", "tools": [TOOL]}
    async with client(server, "a") as agent:
        answer, answers = None, []
        for turn in range(3):
            # Settings of the previous response remain in force, whether the
            # request repeats them or not.
            again = instructions if turn < 2 else {}
            answer = await respond(agent, f"{turn}?", answer and answer.id, **again)
            assert answer.previous_response_id == (answers[-1].id if answers else None)
            answers.append(answer)
        assert len({answer.id for answer in answers}) == 3
    segments = await tokens_of(server, "a")
    assert [author for author, _ in segments] == ["context", "policy"] * 3
    texts = [decode_bytes(tokens) for author, tokens in segments if author == "policy"]
    assert [answer.output_text for answer in answers] == texts
    context: list[int] = []
    for author, tokens in segments:
        if author == "policy":
            assert tokens == expected_tokens(context, [0] * 8)[0]
        context += tokens
    assert not branches(server, "a") and kinds(server) == {"new": 1, "continued": 2}
    # The same conversation sent whole has the same tokens.
    async with client(server, "b") as agent:
        items: list[Any] = []
        for turn in range(3):
            items.append({"role": "user", "content": f"{turn}?"})
            answer = await agent.responses.create(
                model="m",
                input=items,
                max_output_tokens=8,
                extra_body={"ignore_eos": True},
                **instructions,
            )
            items.append({"role": "assistant", "content": answer.output_text})
    assert await tokens_of(server, "b") == segments


async def test_a_response_that_names_an_earlier_one_branches_from_it(server: Harness):
    async with client(server, "a") as agent:
        first = await respond(agent, "0?", None)
        second = await respond(agent, "1?", first.id)
        other = await respond(agent, "or?", first.id)
        await respond(agent, "2?", second.id)
        await respond(agent, "and?", other.id)
        await respond(agent, "else?", other.id)
    root = server.serving.store.find("a")
    assert root is not None and root.turn_count == 3
    (branch, last) = (branches(server, "a")[0], branches(server, "a")[0].children[0])
    assert (branch.turn_count, last.turn_count) == (2, 1)
    kept = sum(len(tokens) for _, tokens in (await tokens_of(server, "a"))[:2])
    assert branch.parent_token_count >= kept
    assert branch.token_array()[:kept].tolist() == root.token_array()[:kept].tolist()
    own = (await tokens_of(server, branch.trajectory_id))[:2]
    before = root.token_array()[: branch.parent_token_count].tolist()
    assert own[1][1] == expected_tokens(before + own[0][1], [0] * 8)[0]
    assert last.token_array()[:kept].tolist() == root.token_array()[:kept].tolist()
    assert kinds(server) == {"new": 1, "continued": 3, "branched": 2}


async def test_a_response_that_names_what_it_cannot_is_refused(slow: Harness):
    async with client(slow, "a", max_retries=0) as agent, client(slow) as alone:
        with pytest.raises(
            openai.BadRequestError, match="does not name a complete answer"
        ) as refused:
            await respond(agent, "x", "resp_a-0")
        assert refused.value.param == "previous_response_id"
        first = await respond(agent, "0?", None, instructions="Be brief.", tools=[TOOL])
        for named in ("resp_a-1", "resp_b-0", "resp_a", "resp_a--1", "resp_", first.id + "0"):
            with pytest.raises(openai.BadRequestError, match="does not name a complete answer"):
                await respond(agent, "x", named)
        changed: list[dict[str, Any]] = [
            {"instructions": "Be long."},
            {"tools": [{**TOOL, "name": "see"}]},
        ]
        for fields in changed:
            with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
                await respond(agent, "x", first.id, **fields)
        with pytest.raises(openai.BadRequestError, match="must answer"):
            await agent.responses.create(
                model="m",
                input=[{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}],
                previous_response_id=first.id,
            )
        # An answer of which nothing was stored.
        passing = await respond(alone, "0?", None)
        with pytest.raises(openai.BadRequestError, match="does not name a complete answer"):
            await respond(alone, "x", passing.id)
        # A turn in flight.
        long = asyncio.create_task(
            agent.responses.create(
                model="m",
                input="1?",
                previous_response_id=first.id,
                max_output_tokens=200,
                extra_body={"ignore_eos": True},
            )
        )
        record = slow.serving.store.find("a")
        assert record is not None
        await until(lambda: record.turn is not None and record.turn.index == 1)
        with pytest.raises(openai.BadRequestError, match="does not name a complete answer"):
            await respond(agent, "x", "resp_a-1")
        # Meanwhile complete answers can be branched from.
        await respond(agent, "or?", first.id)
        await long
    assert len(branches(slow, "a")) == 1


async def test_a_retry_of_what_is_new_samples_nothing_again(server: Harness):
    async with httpx.AsyncClient(timeout=20) as http:
        url = f"{server.http}/attempts/a/responses"
        first = (await http.post(url, json={"model": "m", "input": "0?"})).json()
        more = {"model": "m", "input": "1?", "previous_response_id": first["id"]}
        answers = [
            (await http.post(url, json=more, headers=headers)).json()
            for headers in ({}, {"x-stainless-retry-count": "1"})
        ]
    assert answers[0]["id"] == answers[1]["id"] != first["id"]
    assert not branches(server, "a")


async def test_answers_are_found_by_name_after_a_restart(tmp_path: Path):
    settings = ("http.listen=127.0.0.1:0", f"journal.folder={tmp_path / 'journal'}")
    async with serve(tmp_path, *settings) as server, client(server, "a") as agent:
        first = await respond(agent, "0?", None)
        second = await respond(agent, "1?", first.id)
    async with serve(tmp_path, *settings) as server, client(server, "a") as agent:
        await respond(agent, "2?", second.id)
        await respond(agent, "or?", first.id)
        assert [author for author, _ in await tokens_of(server, "a")] == ["context", "policy"] * 3
        assert len(branches(server, "a")) == 1
