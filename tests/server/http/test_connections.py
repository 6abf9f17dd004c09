"""Connections to the HTTP port: split bodies, pipelined requests, and limits on request heads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.http import chat as http_chat
from penstock.server.http.server import MOST_PIPELINED
from tests.support.harness import Harness, serve, until

MOST = 1 << 20
"""The largest accepted body, in bytes."""
SIZES = (0, 1, 32_767, 32_768, 32_769, 65_536, 200_000, 262_144, 262_145, 300_000, MOST - 300, MOST)
SAID = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    settings = ("http.listen=127.0.0.1:0", f"limits.caller.message_bytes={MOST}")
    async with serve(tmp_path, *settings) as running:
        yield running


def padded(size: int) -> bytes:
    """A valid request body padded to `size` bytes, if it is not already longer."""
    return SAID.encode().ljust(size)


def request(body: bytes, *, path: str = "/v1/chat/completions", head: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{head}\r\n"
    ).encode() + body


@contextlib.asynccontextmanager
async def connected(
    server: Harness,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.serving.info.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def put(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    """Send the pieces separately, until the server stops accepting them."""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of one response."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(length)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Everything the server sent before it closed the connection."""
    said = b""
    # The server resets the connection if it has not read everything.
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(20):
            while piece := await reader.read(65_536):
                said += piece
    return said


async def test_bodies_of_every_length_are_read_on_one_connection(server: Harness):
    url = f"{server.http}/chat/completions"
    async with httpx.AsyncClient(timeout=20) as http:
        for size in SIZES:
            answered = await http.post(url, content=padded(size))
            assert answered.status_code == 200, size
        assert (await http.post(url, content=padded(MOST + 1))).status_code == 413


@pytest.mark.parametrize("piece", [40_000, 200_000])
async def test_a_body_in_pieces_is_no_head(server: Harness, piece: int):
    async with connected(server) as (reader, writer):
        for size in (100_000, 200_000, 500_000):
            whole = request(padded(size))
            await put(writer, *(whole[at : at + piece] for at in range(0, len(whole), piece)))
            assert (await answer(reader))[0] == 200


async def test_a_body_in_chunks_of_its_own(server: Harness):
    async def chunks() -> AsyncGenerator[bytes]:
        for begin in range(0, 400_000, 70_000):
            yield padded(400_000)[begin : begin + 70_000]

    async with httpx.AsyncClient(timeout=20) as http:
        for _ in range(3):
            sent = await http.post(f"{server.http}/chat/completions", content=chunks())
            assert sent.status_code == 200


async def test_requests_in_one_piece_are_all_answered(server: Harness):
    sizes = (0, 100_000, 10, 40_000, *[0] * 100, 250_000, 33_000)
    async with connected(server) as (reader, writer):
        writer.write(b"".join(request(padded(size)) for size in sizes))
        for _ in sizes:
            assert (await answer(reader))[0] == 200
        # The end of one body and the start of the next head arrive in one piece.
        first, second = request(padded(100_000)), request(padded(50_000))
        await put(writer, first[:50_000], first[50_000:] + second[:20])
        assert (await answer(reader))[0] == 200
        await put(writer, second[20:])
        assert (await answer(reader))[0] == 200


LONG_HEADS: dict[str, Any] = {
    "whole": (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",),
    "by a long path": (b"GET /" + b"h" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",),
    "never ended": (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", *[b"y" * 1_000] * 100),
    "of many headers": (
        b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
    ),
}


@pytest.mark.parametrize("before", [b"", request(padded(100_000))], ids=["first", "after a body"])
@pytest.mark.parametrize("pieces", LONG_HEADS.values(), ids=LONG_HEADS)
async def test_a_long_head_is_refused(server: Harness, pieces: tuple[bytes, ...], before: bytes):
    async with connected(server) as (reader, writer):
        if before:
            await put(writer, before)
            assert (await answer(reader))[0] == 200
        await put(writer, *pieces)
        said = await ended(reader)
    assert not said or said.startswith(b"HTTP/1.1 400")


async def test_a_head_after_a_body_that_nobody_read_is_bounded_too(server: Harness):
    async with connected(server) as (reader, writer):
        await put(writer, request(padded(MOST + 1)))
        assert (await answer(reader))[0] == 413
        await put(writer, b"GET /health HTTP/1.1\r\nx: ", *[b"y" * 1_000] * 100)
        assert await ended(reader) == b""


STALLED = 0.5


@pytest.fixture
async def impatient(tmp_path: Path) -> AsyncGenerator[Harness]:
    settings = ("http.listen=127.0.0.1:0", f"limits.stalled_seconds={STALLED}")
    async with serve(tmp_path, *settings, "limits.caller.unread_bytes=300000") as running:
        yield running


async def test_who_never_sends_the_rest_of_what_is_answered_is_cut_off(impatient: Harness):
    most = impatient.serving.callers.message_bytes
    async with connected(impatient) as (reader, writer):
        await put(writer, request(b"{}").replace(b"length: 2", b"length: %d" % (most + 1)))
        assert (await answer(reader))[0] == 413
        await put(writer, b"x" * 1000)
        assert await ended(reader) == b""


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nx: ", request(padded(0)) + b"GET /hea"],
    ids=["nothing", "half a head", "half the next head"],
)
async def test_who_sends_no_whole_head_is_cut_off(impatient: Harness, sent: bytes):
    async with connected(impatient) as (reader, writer):
        if sent.startswith(b"POST"):
            # Send the rest only after the answer to the first request.
            await put(writer, sent[:-8])
            assert (await answer(reader))[0] == 200
            sent = sent[-8:]
        await put(writer, sent)
        async with asyncio.timeout(10):
            assert await ended(reader) == b""


async def test_who_takes_its_time_and_keeps_sending_is_served(impatient: Harness):
    async with connected(impatient) as (reader, writer):
        for _ in range(3):
            whole = request(padded(0))
            await put(writer, whole[:30], whole[30:])
            assert (await answer(reader))[0] == 200
            # An idle connection does not count as stalled.
            await asyncio.sleep(2 * STALLED)


def connections(server: Harness) -> list[Any]:
    http: Any = server.serving.http
    return list(http._server.server_state.connections)


@contextlib.contextmanager
def narrow(server: Harness) -> Generator[socket.socket]:
    """A connection whose reader has almost no receive buffer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.serving.info.http_port))
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Everything the server sends until it closes the connection."""
    said = b""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            said += piece
    return said


async def test_whole_answers_that_nobody_reads_are_on_an_account_and_then_cut_off(
    impatient: Harness, monkeypatch: pytest.MonkeyPatch
):
    said = json.dumps({"x": "x" * 20_000_000})
    monkeypatch.setattr(http_chat.ChatCompletions, "whole", lambda *_: said)
    callers, budget = impatient.serving.callers, impatient.serving.budget
    used = budget.used_bytes
    with narrow(impatient) as first, narrow(impatient) as second:
        first.sendall(request(padded(0)))
        await until(lambda: callers.unread_bytes == len(said))
        assert budget.used_bytes - used > 2 * len(said)
        # The next request is refused, because its caller reads nothing.
        second.sendall(request(padded(0), head="connection: close\r\n"))
        refusal = (await asyncio.to_thread(read_all, second)).decode()
        assert refusal.startswith("HTTP/1.1 429") and "unread_bytes" in refusal
        await until(lambda: not connections(impatient))
        assert callers.unread_bytes == 0
        assert len(await asyncio.to_thread(read_all, first)) < len(said)


async def test_a_long_answer_that_is_read_slowly_is_read_to_its_end(
    impatient: Harness, monkeypatch: pytest.MonkeyPatch
):
    said = json.dumps({"x": "x" * 3_000_000})
    monkeypatch.setattr(http_chat.ChatCompletions, "whole", lambda *_: said)
    async with connected(impatient) as (reader, writer):
        await put(writer, request(padded(0)))
        assert json.loads((await answer(reader))[1]) == json.loads(said)
        # A second request on the same connection.
        await put(writer, request(padded(0)))
        assert (await answer(reader))[0] == 200
    assert impatient.serving.callers.unread_bytes == 0


NOWHERE = b"GET /" + b"x" * 12_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"
"""A request that any caller gets a long answer to."""


async def test_who_reads_nothing_of_what_anybody_is_told_is_cut_off(impatient: Harness):
    with narrow(impatient) as connection:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while not connections(impatient) or not connections(impatient)[0].flow.write_paused:
                    await loop.sock_sendall(connection, NOWHERE)
                    await asyncio.sleep(0.001)
        await until(lambda: not connections(impatient))


async def test_what_an_idle_connection_leaves_unread_does_not_keep_it(impatient: Harness):
    with narrow(impatient) as connection:
        await until(lambda: len(connections(impatient)) == 1)
        served = connections(impatient)[0]
        served.timeout_keep_alive = 2 * STALLED
        kernel = served.transport.get_extra_info("socket")
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while not served.transport.get_write_buffer_size():
            connection.sendall(b"GET /" + b"x" * 500 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.01)
        assert not served.flow.write_paused
        await until(lambda: not connections(impatient))


async def test_more_requests_ahead_than_any_client_sends_are_not_held(server: Harness):
    async with connected(server) as (reader, writer):
        await put(writer, b"GET /health HTTP/1.1\r\nx: y\r\n\r\n" * (MOST_PIPELINED + 2))
        assert b"HTTP/1.1 400" in await ended(reader)


async def refusal(reader: asyncio.StreamReader) -> tuple[int, str]:
    status, body = await answer(reader)
    return status, body.decode()


async def test_a_body_that_goes_on_and_on_is_not_kept(impatient: Harness):
    callers = impatient.serving.callers
    async with connected(impatient) as (reader, writer):
        whole = request(padded(200_000))
        await put(writer, whole[:150_000])
        await until(lambda: 100_000 < callers.unread_bytes < 200_000)
        began = asyncio.get_running_loop().time()
        with contextlib.suppress(ConnectionError):
            for at in range(150_000, 150_040):
                writer.write(whole[at : at + 1])
                await writer.drain()
                await asyncio.sleep(STALLED / 5)
                if not callers.unread_bytes:
                    break
        assert asyncio.get_running_loop().time() - began < 6 * STALLED
        status, said = await refusal(reader)
        assert status == 400 and "MALFORMED_MESSAGE" in said
    await until(lambda: not callers.unread_bytes)


async def test_a_long_body_that_comes_slowly_but_comes_is_taken(impatient: Harness):
    async with connected(impatient) as (reader, writer):
        whole = request(padded(1_500_000))
        # A machine may be slow for a while.
        for at in range(0, len(whole), 150_000):
            await put(writer, whole[at : at + 150_000])
            await asyncio.sleep(STALLED * 0.3)
        assert (await answer(reader))[0] == 200
    assert impatient.serving.callers.unread_bytes == 0


async def test_bodies_that_are_on_their_way_are_on_their_callers_account(impatient: Harness):
    callers = impatient.serving.callers
    async with connected(impatient) as (reader, writer), connected(impatient) as (other, second):
        whole = request(padded(250_000))
        await put(writer, whole[:200_000])
        await until(lambda: callers.unread_bytes > 150_000)
        # Send no more than the server reads: unread data would reset the connection.
        await put(second, whole[:150_000])
        status, said = await refusal(other)
        assert status == 429 and "CALLER_LIMIT" in said and "unread_bytes" in said
        # The earlier request is unaffected.
        await put(writer, whole[200_000:])
        assert (await answer(reader))[0] == 200
        await until(lambda: not callers.unread_bytes)


async def test_bodies_that_are_on_their_way_are_in_the_memory_budget(tmp_path: Path):
    async with serve(
        tmp_path, "http.listen=127.0.0.1:0", "limits.memory_bytes=16777216"
    ) as running:
        budget, used = running.serving.budget, running.serving.budget.used_bytes
        async with connected(running) as (reader, writer):
            whole = request(padded(8_000_000))
            await put(writer, whole[:5_000_000])
            await until(lambda: budget.used_bytes - used > 14_000_000)
            await put(writer, whole[5_000_000:5_700_000])
            status, said = await refusal(reader)
            assert status == 429 and "MEMORY_BUDGET" in said
        await until(lambda: budget.used_bytes == used)
