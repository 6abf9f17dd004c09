"""An HTTP/2 caller that accepts no byte of any answer: its windows are empty from the start."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

_DATA, _HEADERS, _RESET, _SETTINGS, _PING = 0, 1, 3, 4, 6
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_INITIAL_WINDOW = 4


@dataclass
class ZeroWindow:
    writer: asyncio.StreamWriter
    ended: set[int] = field(default_factory=set)
    """Numbers of the calls that the server has ended."""
    _calls: int = 0

    async def call(self, method: str, request: Any = None) -> int:
        """Make a call and send its only message, or none. Return the number of the call."""
        stream = 1 + 2 * self._calls
        self._calls += 1
        headers = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", f"/{method}"),
            (":authority", "x"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
        head = b"".join(_literal(name, value) for name, value in headers)
        self.writer.write(_frame(_HEADERS, _END_HEADERS, stream, head))
        if request is not None:
            message = request.SerializeToString()
            body = b"\0" + struct.pack(">I", len(message)) + message
            self.writer.write(_frame(_DATA, _END_STREAM, stream, body))
        await self.writer.drain()
        return stream


@contextlib.asynccontextmanager
async def zero_window(port: int) -> AsyncGenerator[ZeroWindow]:
    """A connection, open until the end of the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    settings = struct.pack(">HI", _INITIAL_WINDOW, 0)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))
    caller = ZeroWindow(writer)
    reading = asyncio.create_task(_read(reader, caller))
    try:
        yield caller
    finally:
        reading.cancel()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, caller: ZeroWindow) -> None:
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            answer = payload if kind == _PING else b""
            caller.writer.write(_frame(kind, _ACK, 0, answer))
        elif kind == _RESET or (kind == _HEADERS and flags & _END_STREAM):
            caller.ended.add(stream)


def _literal(name: str, value: str) -> bytes:
    """A header without compression."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )
