"""F12: whatever body an HTTP endpoint is sent, it answers without a 5xx, and errors have its own
form.

hypothesis makes the bodies: valid requests with values replaced, added and removed at any depth,
other JSON, and bytes. They are sent over HTTP to a server around the fake engine.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.faults.report import Report
from tests.support.harness import serve

QUICK = 60
"""Examples of each endpoint without an option."""
SECONDS = 20.0

FUNCTION: dict[str, Any] = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object"},
}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto",
    "max_tokens": 2,
    "stop": ["x"],
    "stream": False,
    "metadata": {},
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
    ],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}],
    "max_tokens": 2,
    "stop_sequences": ["x"],
    "stream": False,
    "thinking": {"type": "adaptive"},
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "max_output_tokens": 2,
    "stream": False,
    "text": {"format": {"type": "text"}},
    "store": True,
}
COUNTED = {key: value for key, value in MESSAGES.items() if key not in ("max_tokens", "stream")}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "messages/count_tokens": COUNTED,
}


def words(value: Any) -> set[str]:
    """Every key and text in a body."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key for key, _ in items}.union(*(words(item) for _, item in items))
    if isinstance(value, list):
        return set[str]().union(*(words(item) for item in cast("list[Any]", value)))
    return {value} if isinstance(value, str) else set()


KNOWN = sorted(
    words(list(ENDPOINTS.values()))
    | {"stream_options", "include_usage", "previous_response_id", "temperature", "top_p", "top_k"}
    | {"seed", "n", "logprobs", "response_format", "logit_bias", "stop_token_ids", "ignore_eos"}
    | {"max_completion_tokens", "include", "reasoning", "functions", "image_url", "input_image"}
    | {"developer", "none", "required", "item_reference", "refusal", "output_text", "audio", "name"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(KNOWN),
    st.sampled_from(["\ud800", "\0", 10**400, -(2**63), 2**64, "x" * 700]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KNOWN), inner, max_size=4)
    ),
    max_leaves=8,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in a body."""
    if isinstance(value, dict):
        items = list(cast("dict[str, Any]", value).items())
    elif isinstance(value, list):
        items = list(enumerate(cast("list[Any]", value)))
    else:
        return [at]
    return [at, *(path for key, item in items for path in paths(item, (*at, key)))]


@st.composite
def changed(draw: st.DrawFn, right: dict[str, Any]) -> bytes:
    """A valid request with up to three changes. Copies first, because hypothesis may reuse an object."""
    body = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(paths(body)))
        holder: Any = body
        for key in where[:-1]:
            holder = holder[key]
        found = holder[where[-1]] if where else body
        change = draw(st.integers(0, 2))
        if isinstance(found, dict) and (change == 0 or not where):
            found[draw(st.sampled_from(KNOWN))] = copy.deepcopy(draw(VALUES))
        elif where and change == 1:
            del holder[where[-1]]
        elif where:
            holder[where[-1]] = copy.deepcopy(draw(VALUES))
    return json.dumps(body).encode()


def deep(right: dict[str, Any], name: str, depth: int) -> bytes:
    """The request with one value nested `depth` levels deep."""
    rest = json.dumps({key: value for key, value in right.items() if key != name})
    return f'{rest[:-1]}, "{name}": {"[" * depth}{"]" * depth}}}'.encode()


def bodies(right: dict[str, Any]) -> st.SearchStrategy[bytes]:
    whole = json.dumps(right).encode()
    return st.one_of(
        changed(right),
        changed(right),
        changed(right),
        VALUES.map(lambda value: json.dumps(value).encode()),
        st.binary(max_size=20),
        st.builds(
            deep, st.just(right), st.sampled_from(KNOWN), st.sampled_from([500, 960, 10_000])
        ),
        st.integers(0, len(whole)).map(lambda length: whole[:length]),
        st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)).map(
            lambda at: whole[: at[0]] + bytes([at[1]]) + whole[at[0] + 1 :]
        ),
    )


def own_form(endpoint: str, error: Any) -> bool:
    """Whether an error has the form that the endpoint's SDKs read."""
    of_messages = endpoint.startswith("messages")
    outer = {"type", "error"} if of_messages else {"error"}
    inner = {"message", "type", "param", "code", "metadata"}
    return set(error) == outer and set(error["error"]) == inner


@pytest.fixture(scope="module")
def post(
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[Callable[[str, bytes], httpx.Response]]:
    """A function that sends a body to an endpoint."""

    async def opened(folder: Path, stack: AsyncExitStack) -> tuple[str, httpx.AsyncClient]:
        server = await stack.enter_async_context(serve(folder, "http.listen=127.0.0.1:0"))
        http = httpx.AsyncClient(timeout=SECONDS)
        return server.http, await stack.enter_async_context(http)

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        base, http = runner.run(opened(tmp_path_factory.mktemp("http"), stack))

        def send(endpoint: str, body: bytes) -> httpx.Response:
            return runner.run(http.post(f"{base}/{endpoint}", content=body))

        yield send
        runner.run(stack.aclose())


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_bodies(
    post: Callable[[str, bytes], httpx.Response],
    endpoint: str,
    report: Report,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, name = ENDPOINTS[endpoint], f"{endpoint}, bodies"
    assert post(endpoint, json.dumps(right).encode()).status_code == 200
    count = report.count or QUICK
    answers: Counter[str] = Counter()

    @seeded(report.seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(body=bodies(right))
    def check(body: bytes) -> None:
        answer = post(endpoint, body)
        if answer.status_code == 200:
            answers["OK"] += 1
            assert "INTERNAL_ERROR" not in answer.text, body
            return
        assert 400 <= answer.status_code < 500, (body, answer.text)
        assert own_form(endpoint, answer.json()), (body, answer.text)
        answers[answer.json()["error"]["code"]] += 1

    try:
        check()
    except BaseException as error:
        done = answers.total()
        again = report.failed("F12 fake", name, report.seed, request.node.nodeid, done, count)
        error.add_note(f"again: {again}")
        raise
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    refused = answers.total() - answers["OK"]
    figures = f"{len(answers)} different answers, {refused} refusals"
    report.survived("F12 fake", name, answers.total(), "examples", figures)


@pytest.mark.parametrize(
    ("endpoint", "wrong"),
    [
        ("chat/completions", {"tools": 1}),
        ("chat/completions", {"tool_choice": "required", "tools": []}),
        ("chat/completions", {"stream_options": {"include_usage": True}}),
        ("chat/completions", {"messages": None}),
        ("chat/completions", {"messages": 1}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "user", "content": [None]}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [["x"]]}]}),
        ("messages", {"messages": None}),
        ("messages", {"messages": 1}),
        ("messages/count_tokens", {"messages": None}),
        ("responses", {"input": None}),
        ("responses", {"input": 1}),
    ],
)
def test_what_vllm_trips_over_is_refused_by_name(
    post: Callable[[str, bytes], httpx.Response], endpoint: str, wrong: dict[str, Any]
) -> None:
    answer = post(endpoint, json.dumps({**ENDPOINTS[endpoint], **wrong}).encode())
    assert answer.status_code == 400, answer.text
    assert own_form(endpoint, answer.json())
    assert answer.json()["error"]["param"].startswith(next(iter(wrong)))
