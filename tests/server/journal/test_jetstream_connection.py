"""The connection to NATS after connection attempts that fail early, in various ways."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("nats", reason="nats-py is not installed (the extra jetstream)")

from penstock.server.config.journal import JournalSection
from penstock.server.journal.jetstream.answers import StreamRefused, Unreachable
from penstock.server.journal.jetstream.connection import Connection

INFO = {
    "server_id": "S",
    "version": "2.10.22",
    "proto": 1,
    "headers": True,
    "max_payload": 1 << 20,
}
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def section(url: str, patience_seconds: float) -> JournalSection:
    return JournalSection(
        url=url, stream="S", durability="process", patience_seconds=patience_seconds
    )


async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The part of the NATS protocol that a client needs before it counts as connected."""
    writer.write(f"INFO {json.dumps(INFO)}\r\n".encode())
    while (line := await reader.readline()).split()[:1] != [b"PING"]:
        assert line, "the client has gone"
    writer.write(b"PONG\r\n")


@asynccontextmanager
async def listening(handler: Handler) -> AsyncGenerator[str]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def never_closed() -> list[str]:
    """Warnings of the garbage collector about sockets and transports that were never closed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        await asyncio.sleep(0.05)
        gc.collect()
    return [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)]


async def test_tries_that_fail_in_the_handshake_leave_no_socket() -> None:
    tries = 0
    again = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        if tries in (1, 5):
            await shake_hands(reader, writer)
            if tries == 5:
                again.set()
                await reader.read()
        writer.close()

    async with listening(serve) as url:
        connection = Connection(section(url, 20))
        await connection.connect()
        async with asyncio.timeout(20):
            await again.wait()
        found = await never_closed()
        await connection.close()
    assert not found
    assert tries == 5


async def test_nothing_is_sent_to_a_server_that_came_back_until_it_says_what_it_promises() -> None:
    connected = 0
    sent: list[int] = []
    gone = asyncio.Event()
    answers: list[str | OSError | None] = [None, OSError("it does not answer"), OSError("nor now")]
    last = asyncio.Event()

    async def check() -> str | None:
        if not answers:
            await last.wait()
            return "it syncs nothing"
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        await shake_hands(reader, writer)
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            elif line.startswith(b"PUB"):
                sent.append(connected)
                break
        writer.close()
        gone.set()

    async with listening(serve) as url:
        connection = Connection(section(url, 20), check)
        await connection.connect()
        asking = asyncio.create_task(connection.state())
        await gone.wait()
        async with asyncio.timeout(20):
            while answers:
                await asyncio.sleep(0.01)
        # The client is connected, and the request waits to be sent again.
        await asyncio.sleep(0.3)
        assert (connected, sent, asking.done()) == (2, [1], False)
        last.set()
        with pytest.raises(StreamRefused, match="it syncs nothing"):
            await asking
        assert sent == [1]
        await connection.close()


async def test_a_server_that_says_nothing_leaves_no_socket() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        closed.set()
        writer.close()

    async with listening(serve) as url:
        connection = Connection(section(url, 0.3))
        with pytest.raises(Unreachable, match="cannot be reached"):
            await connection.connect()
        async with asyncio.timeout(5):
            await closed.wait()
        assert not await never_closed()


async def test_a_refusal_is_said_though_later_tries_fail_otherwise() -> None:
    tries = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        writer.write(f"INFO {json.dumps(INFO)}\r\n".encode())
        await reader.readline()
        if tries == 1:
            writer.write(b"-ERR 'Authorization Violation'\r\n")
        else:
            # As if the end of the connection overtook the server's error message.
            end = writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with listening(serve) as url:
        connection = Connection(section(url, 0.5))
        with pytest.raises(Unreachable) as failed:
            await connection.connect()
    assert tries > 1
    said, later = str(failed.value).removeprefix("NATS cannot be reached: ").split("; ")
    assert said == "nats: 'Authorization Violation'"
    assert "reset" in later


async def test_a_close_that_nobody_cancelled_comes_to_its_end() -> None:
    async with listening(shake_hands_and_read) as url:
        connection = Connection(section(url, 20))
        await connection.connect()
        # The library leaves this state when it gives up a connection
        # attempt that is waiting to close.
        writer = connection._client._transport._io_writer
        writer._protocol._get_close_waiter(writer).cancel()
        await connection.close()
        assert not await never_closed()


async def shake_hands_and_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await shake_hands(reader, writer)
    await reader.read()
    writer.close()
