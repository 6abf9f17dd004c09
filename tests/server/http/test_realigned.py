"""Reasoning over HTTP, and history that an SDK sends back in another
form, with vLLM's own parsers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

pytest.importorskip("vllm")

from penstock.server.config.settings import StreamingSection
from penstock.server.text.messages import Message
from penstock.server.text.renderer import Renderer
from penstock.server.vllm.parsers import VllmParsers
from tests.support.chat_templates import make_tokenizer
from tests.support.fakes import EOS, FakeEngine
from tests.support.harness import Harness, serve

REASONING = "They want a sum, so I add."
TEXT = "Let me see."
ARGUMENTS = '{"a": 1, "b": 2}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCRIPT = f"<think>\n{REASONING}\n</think>\n\n{TEXT}{CALL}"
ANSWER = "3"
USER = {"role": "user", "content": "1 + 2?"}
SCHEMA = {"type": "object"}
MAX_TOKENS = 150

TOKENIZER: Any = make_tokenizer("qwen3")
TOKENS: list[int] = TOKENIZER.encode(SCRIPT, add_special_tokens=False)


class Scripted(FakeEngine):
    """Writes the script in each turn."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.choose = self._choose

    def _choose(self, prefix: bytes, version: int) -> tuple[int, float]:
        last = np.frombuffer(prefix, np.int32)[-len(TOKENS) :].tolist()
        for begun in range(len(TOKENS), 0, -1):
            if last[-begun:] == TOKENS[:begun]:
                return [*TOKENS, EOS][begun], -1.0
        return TOKENS[0], -1.0


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(TOKENIZER, [EOS], VllmParsers(TOKENIZER, "hermes", "qwen3"))


@pytest.fixture
async def server(tmp_path: Path, renderer: Renderer) -> AsyncGenerator[Harness]:
    parts: dict[str, Any] = {"renderer": renderer, "make_engine": Scripted}
    async with serve(tmp_path, "http.listen=127.0.0.1:0", **parts) as running:
        yield running


# Each function takes a turn. It returns the messages that an agent sends back, and the
# tool's answer in the same form.


async def chat(base: str, history: list[Any], stream: bool) -> tuple[list[Any], list[Any]]:
    function = {"name": "add", "parameters": SCHEMA}
    asked: Any = {"model": "m", "messages": history, "max_tokens": MAX_TOKENS}
    asked["tools"] = [{"type": "function", "function": function}]
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert (message.content.strip(), message.reasoning.strip()) == (TEXT, REASONING)
    said = message.model_dump(exclude_none=True, exclude={"parsed"})
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": ANSWER}
    return [said], [result]


async def responses(base: str, history: list[Any], stream: bool) -> tuple[list[Any], list[Any]]:
    asked: Any = {"model": "m", "input": history, "max_output_tokens": MAX_TOKENS}
    asked["tools"] = [{"type": "function", "name": "add", "parameters": SCHEMA}]
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        if stream:
            async with client.responses.stream(**asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
    reasoning, text, call = answer.output
    assert answer.output_text.strip() == TEXT == text.content[0].text.strip()
    assert reasoning.content[0].text.strip() == REASONING
    fields = ("type", "call_id", "name", "arguments")
    said = [
        reasoning.model_dump(exclude_none=True),
        text.model_dump(exclude_none=True),
        {name: getattr(call, name) for name in fields},
    ]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": ANSWER}
    return said, [result]


async def messages(base: str, history: list[Any], stream: bool) -> tuple[list[Any], list[Any]]:
    asked: Any = {"model": "m", "messages": history, "max_tokens": MAX_TOKENS}
    asked["tools"] = [{"name": "add", "input_schema": SCHEMA}]
    async with anthropic.AsyncAnthropic(base_url=base, api_key="any") as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
    thinking, text, call = answer.content
    assert (thinking.thinking.strip(), text.text.strip()) == (REASONING, TEXT)
    said = [block.model_dump(exclude_none=True) for block in answer.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": ANSWER}
    return [{"role": "assistant", "content": said}], [{"role": "user", "content": [result]}]


SURFACES = pytest.mark.parametrize("surface", [chat, responses, messages])


def spaced(field: str, value: Any) -> Any:
    return f"\n{value} " if field in ("content", "text") and isinstance(value, str) else value


def reordered(field: str, value: Any) -> Any:
    if field == "arguments":
        return json.dumps(dict(reversed(json.loads(value).items())), separators=(",", ":"))
    return dict(reversed(value.items())) if field == "input" else value


def unreasoned(field: str, value: Any) -> Any:
    return None if field == "reasoning" else value


def changed(said: Any, change: Callable[[str, Any], Any]) -> Any:
    """The messages that an agent sends back, with each field changed. `unreasoned` also
    removes whole reasoning parts."""
    if isinstance(said, list):
        parts = [
            part
            for part in said
            if change is not unreasoned or part.get("type") not in ("reasoning", "thinking")
        ]
        return [changed(part, change) for part in parts]
    if isinstance(said, dict):
        return {name: changed(change(name, value), change) for name, value in said.items()}
    return said


FORMS: dict[str, tuple[Callable[[str, Any], Any], str]] = {
    "as it came": (lambda field, value: value, "continued"),
    "space around": (spaced, "realigned"),
    "order of arguments": (reordered, "realigned"),
    "without reasoning": (unreasoned, "realigned"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", FORMS)
@SURFACES
async def test_history_in_another_form_goes_on_with_the_tokens_that_were_sampled(
    server: Harness, renderer: Renderer, surface: Any, form: str, stream: bool
) -> None:
    base = f"{server.http}/attempts/a"
    base = base if surface is not messages else base.removesuffix("/v1")
    said, result = await surface(base, [USER], stream)
    record = server.serving.store.find("a")
    assert record is not None
    held = record.token_array().tolist()
    assert held[-len(TOKENS) - 1 :] == [*TOKENS, EOS]
    change, kind = FORMS[form]
    sent = changed(said, change)
    assert (json.dumps(sent) == json.dumps(said)) == (kind == "continued")
    await surface(base, [USER, *sent, *result], stream)
    answered = renderer.render_next([Message("tool", ANSWER, tool_call_id="any")], EOS).tolist()
    assert record.token_array().tolist() == [*held, *answered, *TOKENS, EOS]
    assert (record.turn_count, record.children) == (2, [])
    assert server.serving.metrics.conversations == {"new": 1, kind: 1}


# Each function yields pieces of reasoning and text as they arrive.

Pieces = AsyncIterator[tuple[str, str]]


async def chat_pieces(base: str) -> Pieces:
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        asked: Any = {"model": "m", "messages": [USER], "max_tokens": MAX_TOKENS, "stream": True}
        async for chunk in await client.chat.completions.create(**asked):
            for choice in chunk.choices:
                extra = choice.delta.model_extra or {}
                yield extra.get("reasoning") or "", choice.delta.content or ""


async def responses_pieces(base: str) -> Pieces:
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        asked: Any = {"model": "m", "input": [USER], "max_output_tokens": MAX_TOKENS}
        async for event in await client.responses.create(**asked, stream=True):
            if event.type == "response.reasoning_text.delta":
                yield event.delta, ""
            if event.type == "response.output_text.delta":
                yield "", event.delta


async def messages_pieces(base: str) -> Pieces:
    async with anthropic.AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key="any") as client:
        asked: Any = {"model": "m", "messages": [USER], "max_tokens": MAX_TOKENS, "stream": True}
        async for event in await client.messages.create(**asked):
            if event.type == "content_block_delta" and event.delta.type == "thinking_delta":
                yield event.delta.thinking, ""
            if event.type == "content_block_delta" and event.delta.type == "text_delta":
                yield "", event.delta.text


@pytest.mark.parametrize("pieces", [chat_pieces, responses_pieces, messages_pieces])
async def test_reasoning_is_streamed_as_it_is_written(server: Harness, pieces: Any) -> None:
    # The engine stops mid-turn until the client has seen the reasoning so far.
    server.engine.freeze_at = 1 + StreamingSection().interval
    reasoning = text = ""
    async with asyncio.timeout(20):
        async for thought, said in pieces(server.http):
            assert not (thought and text.strip()), "reasoning after text"
            reasoning, text = reasoning + thought, text + said
            if thought and server.engine.freeze_at is not None:
                assert REASONING.startswith(reasoning.strip()) and not text
                server.engine.freeze_at = None
    assert server.engine.freeze_at is None
    assert reasoning.strip() == REASONING
    # Without tools, a call is text.
    assert text.strip() == TEXT + CALL


# Fields required by the SDKs' types, read without an SDK, because an SDK
# returns None for a missing field

THINK, END_OF_THINK = (TOKENIZER.encode(mark)[0] for mark in ("<think>", "</think>"))
REASONING_COUNT = TOKENS.index(END_OF_THINK) - TOKENS.index(THINK) - 1
BODIES = {
    "chat/completions": {"messages": [USER], "stream_options": {"include_usage": True}},
    "responses": {"input": [USER]},
    "messages": {"messages": [USER], "max_tokens": MAX_TOKENS},
}


async def told(server: Harness, path: str, stream: bool) -> list[Any]:
    """The answer, or the events of its stream."""
    body = {"model": "m", "stream": stream, **BODIES[path]}
    if not stream:
        body.pop("stream_options", None)
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.post(f"{server.http}/{path}", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()]
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tokens_of_reasoning_are_counted(server: Harness, stream: bool) -> None:
    usage = (await told(server, "chat/completions", stream))[-1]["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == REASONING_COUNT > 20
    last = (await told(server, "responses", stream))[-1]
    answer = last["response"] if stream else last
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == REASONING_COUNT
    # The field must be present in every response, complete or not.
    assert "error" in answer and answer["error"] is None


def test_tokens_of_reasoning_that_the_template_begins_are_counted() -> None:
    prompt, thought = [*TOKENIZER.encode("1 + 2?"), THINK], TOKENIZER.encode(REASONING)
    written = [*thought, END_OF_THINK, *TOKENIZER.encode(TEXT)]
    for name in ("qwen3", "deepseek_r1"):
        parsed = VllmParsers(TOKENIZER, "hermes", name).parse(
            TOKENIZER.decode(written), written, prompt, ()
        )
        assert (parsed.message.reasoning, parsed.reasoning_token_count) == (REASONING, len(thought))


async def test_blocks_and_messages_have_all_of_anthropics_fields(server: Harness) -> None:
    (whole,) = await told(server, "messages", False)
    assert "stop_sequence" in whole and whole["stop_sequence"] is None
    events = await told(server, "messages", True)
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert begun == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
    ]
