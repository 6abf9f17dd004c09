"""What an external process can reach over HTTP: its own attempt, under its own key, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from penstock.client.calls import Calls, Patience
from penstock.client.external.relay import Admitted, Relay
from penstock.client.external.settings import Api, SandboxUse
from penstock.wire.security import Security
from tests.support.authorities import make_authorities
from tests.support.external_workers import delivered, python, run, submit
from tests.support.harness import serve

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The agents of docs/guides/programs.md: language, interpreter, and required tools.
AGENTS = (("python", sys.executable, ()), ("sh", "sh", ("curl", "jq")))
OPENAI = """
import json, os, openai
task = json.load(open(os.environ["PENSTOCK_TASK_FILE"]))
client = openai.OpenAI()
messages = task["messages"]
for word in ("first", "second"):
    answer = client.chat.completions.create(
        model=os.environ["PENSTOCK_MODEL"], messages=messages, max_tokens=8
    )
    messages.append(dict(role="assistant", content=answer.choices[0].message.content))
    messages.append(dict(role="user", content=word))
pieces = list(client.chat.completions.create(model="any", messages=messages, max_tokens=8, stream=True))
result = dict(reward=1.0, metrics=dict(pieces=len(pieces)))
result["metadata"] = dict(environment=dict(os.environ))
json.dump(result, open(os.environ["PENSTOCK_RESULT_FILE"], "w"))
"""


@contextlib.asynccontextmanager
async def upstream(handler: Handler) -> AsyncGenerator[int]:
    """A server that answers with the given handler. Yields its port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def relaying(
    port: int, security: Security | None = None, patience: Patience | None = None
) -> AsyncGenerator[tuple[Relay, Admitted, aiohttp.ClientSession]]:
    """A relay to the server on `port`, with one admitted attempt and a client that holds its key."""
    security = security or Security()
    # No gRPC server listens here. The relay asks it for another port only if the HTTP server is away.
    calls = Calls("127.0.0.1:1", patience or Patience(), security)
    relay = Relay(calls, security)
    await relay.open(port)
    admitted = relay.admit("trajectory/1 ä")
    headers = {"Authorization": f"Bearer {admitted.key}"}
    base = f"http://127.0.0.1:{relay.port}"
    async with aiohttp.ClientSession(base, headers=headers) as client:
        try:
            yield relay, admitted, client
        finally:
            await relay.close()
            await calls.close()


async def test_a_request_goes_on_with_the_workers_token_and_comes_back_piece_by_piece() -> None:
    seen: list[web.Request] = []
    go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        assert await request.read() == b'{"stream": true}'
        response = web.StreamResponse(status=201, headers={"X-Of-Server": "yes"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: 2\n\n")
        return response

    security = Security(token="penstock_worker")
    async with upstream(answer) as port, relaying(port, security) as (_, admitted, client):
        path = f"{admitted.path}/chat/completions?a=b%20c"
        headers = {"X-Mine": "kept"}
        async with client.post(
            aiohttp.client.URL(path, encoded=True), data=b'{"stream": true}', headers=headers
        ) as got:
            assert (got.status, got.headers["X-Of-Server"]) == (201, "yes")
            # The first chunk arrives before the server writes the second.
            assert await got.content.readany() == b"data: 1\n\n"
            go_on.set()
            assert await got.content.read() == b"data: 2\n\n"
        (request,) = seen
        assert request.headers["Authorization"] == "Bearer penstock_worker"
        assert request.headers["X-Mine"] == "kept" and "X-Api-Key" not in request.headers
        assert request.raw_path == path and "%2F1%20" in path


@pytest.mark.parametrize(
    ("headers", "where", "status"),
    [
        ({"Authorization": "Bearer another"}, "/chat/completions", 401),
        ({"Authorization": ""}, "/chat/completions", 401),
        ({"Authorization": "", "x-api-key": "KEY"}, "/v1/messages", 200),
        ({}, "/../other/chat/completions", 404),
        ({}, "/../../chat/completions", 404),
    ],
)
async def test_a_key_opens_the_paths_of_its_attempt_alone(
    headers: dict[str, str], where: str, status: int
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert "x-api-key" not in request.headers
        return web.json_response({})

    async with upstream(answer) as port, relaying(port) as (_, admitted, client):
        shown = {name: value.replace("KEY", admitted.key) for name, value in headers.items()}
        url = aiohttp.client.URL(admitted.path + where, encoded=True)
        async with client.post(url, headers=shown) as got:
            assert got.status == status
            if status != 200:
                assert (await got.json())["error"]["message"]


async def test_what_is_in_flight_ends_with_the_process_and_nothing_follows() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async with upstream(answer) as port, relaying(port) as (relay, admitted, client):
        url = aiohttp.client.URL(f"{admitted.path}/responses", encoded=True)
        asking = asyncio.ensure_future(client.post(url))
        await asyncio.wait_for(began.wait(), 20)
        await relay.dismiss(admitted)
        await asyncio.wait_for(cancelled.wait(), 20)
        with pytest.raises(aiohttp.ClientError):
            await asking
        async with client.post(url) as got:
            assert got.status == 404


async def test_a_server_that_is_away_is_waited_for_and_then_named() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async with upstream(answer) as port:
        pass
    async with relaying(port, patience=Patience(0.05, 0.5)) as (_, admitted, client):
        url = aiohttp.client.URL(f"{admitted.path}/models", encoded=True)
        async with client.get(url) as got:
            assert got.status == 503


async def test_an_agent_of_the_openai_sdk_takes_its_turns_by_tls_without_the_workers_token(
    tmp_path: Path, sandbox_here: str
) -> None:
    made = make_authorities(tmp_path / "secrets")
    settings = ("http.listen=127.0.0.1:0", "leases.max_attempts=1", *made.settings())
    lock = SandboxUse.OFF if sandbox_here else SandboxUse.REQUIRE
    admin, agent = made.security("admin"), made.security("agent")
    async with serve(tmp_path, *settings, max_context=2048, security=admin) as server:
        await submit(server, text=None, conversation=conversation("hello"))
        statistics = await run(
            server, tmp_path, python(OPENAI), sandbox=lock, api=Api.HTTP, security=agent
        )
        assert statistics.scored_count == 1, statistics
        # The SDK sent its history back, and the turns continued one trajectory: three turns of
        # eight tokens.
        assert statistics.token_count == 24
        (outcome,) = await delivered(server)
        # The agents of the page, verbatim.
        for language, command, tools in AGENTS:
            if not all(shutil.which(tool) for tool in tools):
                continue
            agent_file = tmp_path / f"agent.{language}"
            agent_file.write_text(found_in_the_docs(language))
            await submit(
                server,
                text=None,
                conversation=conversation("hello"),
                metadata={"answer": "nobody says this"},
            )
            statistics = await run(
                server,
                tmp_path,
                f"{command} {agent_file.name}",
                sandbox=lock,
                api=Api.HTTP,
                security=agent,
                files=(agent_file,),
            )
            assert statistics.scored_count == 1 and statistics.reward_sum == 0.0, statistics
    assert outcome.reward == 1.0 and outcome.metrics["pieces"] > 1
    environment = outcome.metadata["environment"]
    assert environment["OPENAI_API_KEY"].startswith("attempt-")
    assert made.tokens["agent"] not in str(environment)


def found_in_the_docs(language: str) -> str:
    """The page's one agent in a language."""
    page = Path(__file__).parents[3] / "docs" / "guides" / "programs.md"
    blocks = re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    (agent,) = [block for block in blocks if "PENSTOCK_RESULT_FILE" in block]
    return agent


def conversation(text: str) -> object:
    from penstock.v1 import conversation_pb2
    from tests.support.harness import ChatMessage, Conversation

    message = ChatMessage(role=conversation_pb2.ROLE_USER, content=text)
    return Conversation(messages=[message])
