"""The compatible endpoints as their SDKs see them, and access control, around the fake engine."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from penstock.server.config import settings as config
from penstock.server.config.settings import ConfigError
from penstock.server.core.errors import STATUS_CODES
from penstock.server.http import chat as http_chat
from penstock.server.http import messages as http_messages
from penstock.server.http import responses as http_responses
from penstock.server.http.errors import STATUSES
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.text.renderer import Written
from tests.support.authorities import client_certificate, make_authorities, write_certificate
from tests.support.fakes import ByteRenderer
from tests.support.harness import GetServerInfoRequest, Harness, serve, until
from tests.support.sdk_agents import ANSWER, USER, chat_agent, messages_agent, responses_agent


class CallingRenderer(ByteRenderer):
    """Parses a turn as a call of the first tool, unless it follows that tool's answer."""

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
        name: str,
    ) -> Written:
        text = self.decode(token_ids)
        if not tools or ANSWER in self.decode(prompt_token_ids):
            return Written(Message("assistant", text))
        call = ToolCall(f"call-{name}", tools[0].name, json.dumps({"q": text}))
        return Written(Message("assistant", "", (call,)))

    def open_stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> Any:
        if tools and ANSWER not in self.decode(prompt_token_ids):
            return Silent()
        return super().open_stream(prompt_token_ids, tools)


class Silent:
    def add(self, token_ids: Sequence[int]) -> tuple[str, str]:
        return "", ""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, "http.listen=127.0.0.1:0", renderer=CallingRenderer()) as running:
        yield running


def unbroken(server: Harness, attempt: str) -> None:
    """Check that the conversation is one trajectory of two turns."""
    record = server.serving.store.find(attempt)
    assert record is not None
    assert (record.turn_count, record.children) == (2, [])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", [chat_agent, responses_agent, messages_agent])
async def test_an_sdk_has_a_conversation_with_tools(server: Harness, agent: Any, stream: bool):
    said = await agent(f"{server.http}/attempts/a", stream)
    unbroken(server, "a")
    record = server.serving.store.find("a")
    assert record is not None and record.turn is not None
    count = record.turn.policy_token_count
    assert said == ByteRenderer().decode(record.turn.policy_tokens(count).tolist())


REASON = "what follows <tool_call> is no tool call"


class MalformedRenderer(ByteRenderer):
    """Parses every turn as a malformed call."""

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
        name: str,
    ) -> Written:
        return Written(Message("assistant", self.decode(token_ids)), REASON if tools else "")


@pytest.fixture
async def malformed(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, "http.listen=127.0.0.1:0", renderer=MalformedRenderer()) as running:
        yield running


def reason_of(found: Any) -> Any:
    """The value of the extra field, which the SDK's models do not declare."""
    return (found.model_extra or {}).get("tool_call_error")


async def chat_reasons(base: str, stream: bool, tools: list[Any]) -> list[Any]:
    """The field's value in each part of the answer that may have it, in order."""
    functions = [{"type": "function", "function": tool} for tool in tools]
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 8}
    asked |= {"tools": functions} if tools else {}
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        if not stream:
            answer = await client.chat.completions.create(**asked)
            return [reason_of(answer.choices[0])]
        async with client.chat.completions.stream(**asked) as events:
            chunks = [event.chunk async for event in events if event.type == "chunk"]
    return [reason_of(choice) for chunk in chunks for choice in chunk.choices]


async def responses_reasons(base: str, stream: bool, tools: list[Any]) -> list[Any]:
    functions = [{"type": "function", **tool} for tool in tools]
    asked: dict[str, Any] = {"model": "m", "input": [USER], "max_output_tokens": 8}
    asked |= {"tools": functions} if tools else {}
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        if not stream:
            return [reason_of(await client.responses.create(**asked))]
        async with client.responses.stream(**asked) as events:
            told = [event.response async for event in events if hasattr(event, "response")]
    return [reason_of(answer) for answer in told]


async def messages_reasons(base: str, stream: bool, tools: list[Any]) -> list[Any]:
    given = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
    asked: dict[str, Any] = {"model": "m", "messages": [USER], "max_tokens": 8}
    asked |= {"tools": given} if tools else {}
    async with anthropic.AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key="any") as client:
        if not stream:
            return [reason_of(await client.messages.create(**asked))]
        async with client.messages.stream(**asked) as events:
            told = [event async for event in events]
    return [reason_of(event.delta) for event in told if event.type == "message_delta"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("ask", [chat_reasons, responses_reasons, messages_reasons])
async def test_an_agent_is_told_why_its_call_is_none(malformed: Harness, ask: Any, stream: bool):
    tool = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    *before, reason = await ask(malformed.http, stream, [tool])
    assert reason == REASON and not any(before)
    # The field is absent if there is no error.
    assert not any(await ask(malformed.http, stream, []))


PARTS = [{"type": "text", "text": "It is"}, {"type": "document", "title": "a page"}]
FOUND = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "c", "content": PARTS}],
}
SAID = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
PICTURED = {**SAID, "content": [{"type": "output_text", "text": "So"}, {"type": "input_image"}]}
TOOL = {"name": "t", "input_schema": {"type": "object"}}
BLOCK, DEFERRED, EXAMPLES = (
    "messages[0].content[0].type",
    "tools[0].defer_loading",
    "tools[0].input_",
)
SAYS, EMPTY = {"role": "assistant", "content": "So"}, {"role": "user", "content": []}
OUT, CALLED = [{"type": "output_text", "text": "So"}], "function_call"
FUNCTION = {"name": "t", "arguments": "{}"}
CALL = {"type": "function", "id": "c", "function": FUNCTION}
CHAT_TOOL = {"type": "function", "function": {"name": "t", "parameters": {}}}
RESPONSES_TOOL = {"type": "function", "name": "t", "parameters": {}}
SECRET = {"type": "reasoning", "summary": [], "encrypted_content": "x"}

REFUSED = [
    ("chat/completions", {"n": 2}, "n"),
    ("chat/completions", {"logprobs": True}, "logprobs"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("chat/completions", {"temperature": 9}, "temperature"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("chat/completions", {"max_tokens": 1 << 40}, "max_tokens"),
    ("messages", {"max_tokens": 5, "seed": "x"}, "seed"),
    ("messages", {"max_tokens": 5, "stop_token_ids": [[]]}, "stop_token_ids"),
    ("chat/completions", {"frequency_penalty": 1.5}, "frequency_penalty"),
    ("chat/completions", {"unheard_of": 1}, "unheard_of"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": ""}]}, "messages"),
    ("responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"input": "x", "background": True}, "background"),
    ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("messages", {"max_tokens": 5, "thinking": {"type": "disabled"}}, "thinking"),
    ("messages", {"max_tokens": 5, "tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"max_tokens": 5, "tools": [{"type": "bash_1", "name": "b"}]}, "tools[0].type"),
    ("messages", {}, "max_tokens"),
    ("messages", {"max_tokens": 5, "messages": [FOUND]}, "messages[0].content[0].content[1].type"),
    *(
        ("messages", {"max_tokens": 5, "messages": [{"role": role, "content": [block]}]}, BLOCK)
        for role, block in (
            ("user", {"type": "image"}),
            ("user", {"type": "image", "source": {"type": "url", "url": "http://x"}}),
            ("user", {"type": "document", "source": {"type": "text", "data": "x"}}),
            ("user", {"type": "tool_reference", "tool_name": "t"}),
            ("assistant", {"type": "redacted_thinking", "data": "x"}),
            ("assistant", {"type": "tool_result", "tool_use_id": "c", "content": "x"}),
            ("system", {"type": "image", "source": {"type": "url", "url": "http://x"}}),
            ("system", {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "t"}}),
            ("system", {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "t"}}),
        )
    ),
    ("messages", {"max_tokens": 5, "system": [{"type": "image"}]}, "system[0].type"),
    ("messages", {"max_tokens": 5, "tools": [{**TOOL, "defer_loading": True}]}, DEFERRED),
    ("messages", {"max_tokens": 5, "tools": [{**TOOL, "input_examples": [{}]}]}, EXAMPLES),
    ("chat/completions", {"messages": [USER, SAYS]}, "messages[1]"),
    ("chat/completions", {"messages": [USER, {**SAYS, "tool_calls": [CALL]}]}, "messages[1]"),
    ("messages", {"max_tokens": 5, "messages": [USER, USER, SAYS]}, "messages[2]"),
    ("messages", {"max_tokens": 5, "messages": [USER, SAYS, EMPTY]}, "messages[1]"),
    ("responses", {"input": [USER, SAYS]}, "input[1]"),
    ("responses", {"input": [USER, {**SAID, "status": "incomplete", "content": OUT}]}, "input[1]"),
    ("responses", {"input": [USER, {**FUNCTION, "call_id": "c", "type": CALLED}]}, "input[1]"),
    ("chat/completions", {"tool_choice": "none", "tools": [CHAT_TOOL]}, "tool_choice"),
    ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("chat/completions", {"messages": [{**USER, "name": "me"}]}, "messages[0].name"),
    ("responses", {"input": "x", "tool_choice": "none", "tools": [RESPONSES_TOOL]}, "tool_choice"),
    ("responses", {"input": "x", "include": ["reasoning.encrypted_content"]}, "include"),
    ("responses", {"input": "x", "text": {"verbosity": "low"}}, "text"),
    ("responses", {"input": "x", "truncation": "auto"}, "truncation"),
    ("responses", {"input": [USER, {"type": "item_reference", "id": "i"}]}, "input[1].type"),
    ("responses", {"input": [SECRET, USER]}, "input[0].encrypted_content"),
    (
        "messages",
        {"max_tokens": 5, "tool_choice": {"type": "none"}, "tools": [TOOL]},
        "tool_choice",
    ),
    ("responses", {"input": [PICTURED]}, "input[0].content[1].type"),
    ("responses", {"input": [{"type": "message", "role": "user", "content": [1]}]}, "input"),
]


@pytest.mark.parametrize(("path", "fields", "named"), REFUSED)
async def test_what_is_not_supported_is_refused_by_name(
    server: Harness, path: str, fields: dict[str, Any], named: str
):
    body = {"model": "m", **({} if path == "responses" else {"messages": [USER]}), **fields}
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.post(f"{server.http}/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"].startswith(named) and error["code"] == "FIELD_INVALID", error
    assert error["type"] == "invalid_request_error"
    assert not server.serving.store.records()


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"tool_choice": "none"}),
    ("chat/completions", {"tool_choice": "none", "tools": []}),
    ("chat/completions", {"tool_choice": "auto", "prompt_cache_options": {}}),
    ("responses", {"tool_choice": "none"}),
    ("responses", {"tool_choice": "none", "tools": [], "max_tool_calls": 3}),
    ("responses", {"truncation": "disabled", "text": {"format": {"type": "text"}}, "include": []}),
    ("messages", {"tool_choice": {"type": "none"}}),
]


@pytest.mark.parametrize(("path", "fields"), NEUTRAL)
async def test_what_says_what_happens_anyway_is_accepted(
    server: Harness, path: str, fields: dict[str, Any]
):
    asked = {"input": "x"} if path == "responses" else {"messages": [USER], "max_tokens": 5}
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.post(f"{server.http}/{path}", json={"model": "m", **asked, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("name", "sdk", "surface"),
    [
        ("chat completions", completion_create_params.CompletionCreateParamsBase, http_chat),
        ("responses", response_create_params.ResponseCreateParamsBase, http_responses),
        ("messages", message_create_params.MessageCreateParamsBase, http_messages),
    ],
)
def test_every_parameter_of_an_sdk_is_taken_or_said_to_be_refused(
    name: str, sdk: Any, surface: Any
):
    page = (Path(__file__).parents[3] / "docs" / "guides" / "endpoints.md").read_text()
    table = page[page.index("| surface | refused |") :]
    row = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    _, _, refused, but_for, _ = row.split("|")
    known = set(sdk.__annotations__)
    assert set(re.findall(r"`(\w+)`", refused)) == known - surface.READ - set(surface.NEUTRAL)
    valued = {name for name, values in surface.NEUTRAL.items() if values is not None}
    assert set(re.findall(r"`(\w+)`", but_for)) == known & valued


SENT_AS_NULL = {
    "chat/completions": ("tools", "tool_choice", "ignore_eos", "stop", "seed", "top_k", "n"),
    "responses": ("truncation", "background", "tools", "tool_choice", "service_tier", "ignore_eos"),
    "messages": ("system", "tools", "tool_choice", "top_k", "stop_sequences", "metadata", "stream"),
}


@pytest.mark.parametrize("path", SENT_AS_NULL)
async def test_what_is_null_is_not_given(server: Harness, path: str):
    asked = {"input": "x"} if path == "responses" else {"messages": [USER], "max_tokens": 5}
    async with httpx.AsyncClient(timeout=20) as http:
        for name in SENT_AS_NULL[path]:
            answer = await http.post(
                f"{server.http}/{path}", json={"model": "m", **asked, name: None}
            )
            assert answer.status_code == 200, (name, answer.text)


@pytest.mark.parametrize(
    "content",
    [
        "It is four.",
        [{"type": "output_text", "text": "It is "}, {"type": "output_text", "text": "four."}],
    ],
    ids=["a text", "parts"],
)
async def test_what_the_policy_said_is_read_whole_in_whatever_form_it_is_sent(
    server: Harness, content: Any
):
    asked = {"model": "m", "input": [USER, {**SAID, "content": content}, USER]}
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.post(f"{server.http}/attempts/a/responses", json=asked)
    assert answer.status_code == 200, answer.text
    record = server.serving.store.find("a")
    assert record is not None and record.turn is not None
    context = record.token_array()[: record.turn.context_token_count].tolist()
    assert "It is four." in ByteRenderer().decode(context)


FAILURES = [
    ("no such file", "Error: no such file"),
    (
        [{"type": "text", "text": "no"}, {"type": "text", "text": "such file"}],
        "Error: no\nsuch file",
    ),
    (None, "Error"),
    ([], "Error"),
]


@pytest.mark.parametrize(("content", "told"), FAILURES)
async def test_the_policy_is_told_that_a_tool_failed(server: Harness, content: Any, told: str):
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": content}
    said = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked = {"model": "m", "max_tokens": 5, "messages": said}
    async with httpx.AsyncClient(timeout=20) as http:
        for attempt, failed in (("a", True), ("b", False)):
            result["is_error"] = failed
            answer = await http.post(f"{server.http}/attempts/{attempt}/messages", json=asked)
            assert answer.status_code == 200, answer.text
            record = server.serving.store.find(attempt)
            assert record is not None and record.turn is not None
            context = record.token_array()[: record.turn.context_token_count].tolist()
            read = ByteRenderer().decode(context)
            assert (f"{told}" in read, "Error" in read) == (failed, failed)


async def test_errors_have_each_sdks_own_shape(server: Harness):
    long = [{"role": "user", "content": "x" * 600}]
    async with openai.AsyncOpenAI(base_url=server.http, api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=long)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("org/any-model")).id == "fake"
    base = server.http.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as said:
            await client.messages.create(model="m", messages=long, max_tokens=5)
        assert said.value.body["error"]["type"] == "invalid_request_error"
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("any-model")).display_name == "fake"
    async with httpx.AsyncClient(timeout=20) as http:
        for content, reason in ((b"{", "MALFORMED_MESSAGE"), (b"[]", "MALFORMED_MESSAGE")):
            answer = await http.post(f"{server.http}/chat/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, reason)
        assert (await http.get(f"{server.http}/chat/completions")).status_code == 405
        assert (await http.get(f"{server.http.removesuffix('/v1')}/health")).status_code == 200


@pytest.mark.parametrize("path", ["", "/attempts/a"])
async def test_a_conversation_is_counted_as_it_would_be_sampled_after(server: Harness, path: str):
    base = server.http.removesuffix("" if path else "/v1") + path
    conversation: dict[str, Any] = {
        "model": "m",
        "system": "Be brief.",
        "messages": [USER],
        "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {}}}],
    }
    async with anthropic.AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as client:
        counted = await client.messages.count_tokens(**conversation)
        assert not server.serving.store.records()
        answer = await client.messages.create(**conversation, max_tokens=5)
        usage = answer.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0
        # No turn follows a count, so the conversation may end with any message.
        said = [USER, {"role": "assistant", "content": "So"}]
        longer = await client.messages.count_tokens(**{**conversation, "messages": said})
        assert longer.input_tokens > counted.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="thinking"):
            await client.messages.count_tokens(**conversation, thinking={"type": "disabled"})


def test_every_code_of_the_error_table_has_a_status():
    assert set(STATUS_CODES.values()) == set(STATUSES)


async def test_bodies_and_heads_are_bounded(tmp_path: Path):
    settings = ("http.listen=127.0.0.1:0", "limits.caller.message_bytes=2000")
    async with serve(tmp_path, *settings) as server, httpx.AsyncClient(timeout=20) as http:
        url = f"{server.http}/chat/completions"

        async def endless() -> AsyncGenerator[bytes]:
            for _ in range(100):
                yield b" " * 100

        for content in (b" " * 3000, endless()):
            answer = await http.post(url, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                413,
                "MESSAGE_TOO_LARGE",
            )
        answer = await http.post(url, json={}, headers={"x-long": "x" * 17_000})
        assert answer.status_code == 413
        with pytest.raises(httpx.TransportError):
            await http.post(url, json={}, headers={"x-longer": "x" * 400_000})
        info = await server.wire.GetServerInfo(GetServerInfoRequest())
        assert server.http.endswith(f":{info.http_port}/v1")


async def test_a_key_is_the_bearer_token_and_an_attempt_its_agents(tmp_path: Path):
    made = make_authorities(tmp_path / "secrets")
    settings = (*made.settings(), "http.listen=127.0.0.1:0")
    trusted = ssl.create_default_context(cafile=str(made.ca))
    body = {"model": "m", "messages": [USER], "max_tokens": 5}
    async with serve(tmp_path, *settings, security=made.security("admin")) as server:
        base = server.http.replace("http:", "https:")
        async with httpx.AsyncClient(verify=trusted, timeout=20) as http:
            for key, status in (
                (None, 401),
                ("nonsense", 401),
                (made.tokens["expired"], 401),
                (made.tokens["trainer"], 403),
                (made.tokens["agent"], 200),
            ):
                for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
                    headers = {} if key is None else {name: str(value)}
                    answer = await http.post(f"{base}/messages", json=body, headers=headers)
                    assert answer.status_code == status, (key, name)
            assert (await http.get(f"{base.removesuffix('/v1')}/health")).status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await http.post(f"{server.http}/messages", json=body)
            # After the certificate is replaced, the next connection gets the new one.
            write_certificate(made.folder, "server", client_certificate("stranger", trusted=False))
        async with httpx.AsyncClient(verify=trusted, timeout=20) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get(f"{base}/models")


async def test_mutual_tls_names_the_caller_by_its_certificate(tmp_path: Path):
    made = make_authorities(tmp_path / "secrets")
    settings = (*made.settings(mutual=True), "http.listen=127.0.0.1:0")
    admin = made.security("admin", "admin-1")
    body = {"model": "m", "messages": [USER], "max_tokens": 5}
    async with serve(tmp_path, *settings, security=admin) as server:
        url = server.http.replace("http:", "https:") + "/chat/completions"
        for name, status in (("agent-1", 200), ("trainer-1", 403), ("nobody", 403)):
            shown = ssl.create_default_context(cafile=str(made.ca))
            files = (made.folder / f"{name}.pem", made.folder / f"{name}-key.pem")
            shown.load_cert_chain(*map(str, files))
            async with httpx.AsyncClient(verify=shown, timeout=20) as http:
                assert (await http.post(url, json=body)).status_code == status
        anonymous = ssl.create_default_context(cafile=str(made.ca))
        async with httpx.AsyncClient(verify=anonymous, timeout=20) as http:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await http.post(url, json=body)


def test_an_address_of_no_loopback_needs_what_grpc_needs():
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:8000 can be reached from outside"):
        config.load(None, ["http.listen=0.0.0.0:8000"])
    with pytest.raises(ConfigError, match=r"^--set http\.listen: .*HOST:PORT"):
        config.load(None, ["http.listen=localhost"])
    loaded = config.load(None, ["listen=127.0.0.1:50051"])
    assert loaded.http.address(loaded.listen, 50051) == "127.0.0.1:50052"
    assert loaded.http.address("127.0.0.1:0", 4711) == "127.0.0.1:0"
    assert loaded.http.address("127.0.0.1:65535", 65535) == "127.0.0.1:0"
    off = config.load(None, ["http.listen="])
    assert off.http.address(off.listen, 50051) is None


async def test_a_stop_tells_the_agent_when_to_come_back(tmp_path: Path):
    async with serve(tmp_path, "http.listen=127.0.0.1:0") as server:
        server.engine.freeze_at = 10
        body = {"model": "m", "messages": [USER], "max_tokens": 50, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=20) as http:
            url = f"{server.http}/attempts/a/chat/completions"
            whole = asyncio.create_task(http.post(url, json=body))
            streamed = asyncio.create_task(
                http.post(f"{server.http}/messages", json={**body, "stream": True})
            )
            await until(lambda: len(server.serving.turns.sampling) == 2)
            await server.sampled("a")
            await server.life.stop(0.0)
            refused = await whole
            cut = await streamed
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "DRAINING"
    assert int(refused.headers["retry-after"]) >= 1
    assert cut.status_code == 503 or '"code": "DRAINING"' in cut.text.splitlines()[-2]


async def test_limits_of_a_caller_are_those_of_grpc(tmp_path: Path):
    settings = ("http.listen=127.0.0.1:0", "limits.caller.turns_in_flight=1")
    async with serve(tmp_path, *settings) as server:
        server.engine.freeze_at = 5
        body = {"model": "m", "messages": [USER], "max_tokens": 50, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=20) as http:
            url = f"{server.http}/chat/completions"
            first = asyncio.create_task(http.post(url, json=body))
            await until(lambda: len(server.serving.turns.sampling) == 1)
            answer = await http.post(url, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "CALLER_LIMIT")
            assert float(answer.headers["retry-after-ms"]) > 0
            server.engine.freeze_at = None
            assert (await first).status_code == 200
