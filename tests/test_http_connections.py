"""The HTTP port's connections: bodies in many pieces, requests one after the other, and bounds of heads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import Harness, serve

MOST = 1 << 20
"""Bytes of a body that are taken."""
SIZES = (0, 1, 32_767, 32_768, 32_769, 65_536, 200_000, 262_144, 262_145, 300_000, MOST - 300, MOST)
SAID = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    settings = ("http.listen=127.0.0.1:0", f"limits.caller.message_bytes={MOST}")
    async with serve(tmp_path, *settings) as running:
        yield running


def padded(size: int) -> bytes:
    """A right request of so many bytes, or of as few as it has."""
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
    """Sends pieces, each by itself, for as long as the server takes any."""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body of one answer."""
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(length)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What was said before the server hung up."""
    said = b""
    # A reset, where it had not read all that was sent.
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
        # The last of a body and the first of the next head in one piece.
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
