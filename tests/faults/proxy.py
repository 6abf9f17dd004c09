"""A TCP proxy that spoils what goes through it.

    client -- up --> Proxy -- up --> server
    client <- down -- Proxy <- down - server

Either direction has conditions that may change at any time and hold from the next byte on: latency, a
rate, darkness (nothing gets through, nothing is lost), and a chance that a bit of a piece flips.
Connections can be reset, closed in one direction, and cut after so many bytes. What is held back is
bounded, so a sender feels it as it would feel a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import Enum

PIECE_BYTES = 16 * 1024
PIECES_UNDER_WAY = 64
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset."""


class Way(Enum):
    """Which bytes are meant."""

    UP = "up"
    """Those to the server."""
    DOWN = "down"
    """Those to the client."""


class Conditions:
    """How one direction is, now."""

    def __init__(self, rng: random.Random) -> None:
        self.latency_seconds = 0.0
        self.bytes_per_second = 0.0
        """Zero: as fast as they come."""
        self.flips = 0.0
        """Chance that one bit of a piece is not what was sent."""
        self.flipped = 0
        self._rng = rng
        self._lit = asyncio.Event()
        self._lit.set()

    def go_dark(self) -> None:
        """Nothing gets through from now on."""
        self._lit.clear()

    def go_on(self) -> None:
        """What was held back gets through, and all that follows."""
        self._lit.set()

    def clear(self) -> None:
        """As if nothing were wrong."""
        self.latency_seconds = self.bytes_per_second = self.flips = 0.0
        self.go_on()

    async def pass_through(self, piece: bytes, read_at: float) -> bytes:
        """Holds a piece back for as long as it takes; returns it as it arrives."""
        now = asyncio.get_running_loop().time()
        late = read_at + self.latency_seconds - now
        if self.bytes_per_second:
            late = max(late, 0.0) + len(piece) / self.bytes_per_second
        if late > 0:
            await asyncio.sleep(late)
        await self._lit.wait()
        if self.flips and self._rng.random() < self.flips:
            spoiled = bytearray(piece)
            spoiled[self._rng.randrange(len(spoiled))] ^= 1 << self._rng.randrange(8)
            self.flipped += 1
            return bytes(spoiled)
        return piece


@dataclass(eq=False)
class Connection:
    """One client's connection and the proxy's own to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    left: dict[Way, int | None] = field(default_factory=lambda: {Way.UP: None, Way.DOWN: None})
    """Bytes that still get through before it is cut; None: all."""

    def towards(self, way: Way) -> asyncio.StreamWriter:
        """What bytes of a direction are written to."""
        return self.server if way is Way.UP else self.client

    def reset(self) -> None:
        """Both peers see a reset."""
        for writer in (self.client, self.server):
            found = writer.get_extra_info("socket")
            if found is not None and found.fileno() >= 0:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    def half_close(self, way: Way) -> None:
        """The receiver of a direction sees its end; the other direction goes on."""
        writer = self.towards(way)
        with contextlib.suppress(OSError, RuntimeError):
            if writer.can_write_eof():
                writer.write_eof()


class Proxy:
    """Listens on a free port of this machine; `proxying` makes one."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.conditions = {way: Conditions(rng) for way in Way}
        self.connections: set[Connection] = set()
        self.accepted = 0
        self.refusing = False
        """Whether whoever connects is reset at once."""
        self.address = ""
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> Conditions:
        """Of what goes to the server."""
        return self.conditions[Way.UP]

    @property
    def down(self) -> Conditions:
        """Of what goes to the client."""
        return self.conditions[Way.DOWN]

    def go_dark(self) -> None:
        """Nothing gets through in either direction."""
        for conditions in self.conditions.values():
            conditions.go_dark()

    def clear(self) -> None:
        """As if nothing were wrong; what was cut stays cut."""
        self.refusing = False
        for conditions in self.conditions.values():
            conditions.clear()

    def reset_all(self) -> int:
        """Resets every connection; returns how many there were."""
        cut = list(self.connections)
        for connection in cut:
            connection.reset()
        return len(cut)

    def half_close_all(self, way: Way) -> None:
        """Ends one direction of every connection."""
        for connection in self.connections:
            connection.half_close(way)

    def truncate_all(self, way: Way, length: int) -> None:
        """Cuts every connection in mid-message: so many more bytes get through, then a reset."""
        for connection in self.connections:
            connection.left[way] = length

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        connection = Connection(writer, server)
        if self.refusing:
            connection.reset()
            return
        self.connections.add(connection)
        try:
            # Cancelled by `close`; asyncio reports a handler that ends so as an error.
            with contextlib.suppress(asyncio.CancelledError):
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(connection, reader, Way.UP))
                    pumps.create_task(self._pump(connection, answers, Way.DOWN))
        finally:
            self.connections.discard(connection)
            for end in (writer, server):
                end.transport.abort()

    async def _pump(self, connection: Connection, reader: asyncio.StreamReader, way: Way) -> None:
        """Consumes one side's bytes; waits as the conditions say; produces them at the other side."""
        pieces: asyncio.Queue[tuple[bytes, float] | None] = asyncio.Queue(PIECES_UNDER_WAY)
        writing = asyncio.create_task(self._write(connection, pieces, way))
        clock = asyncio.get_running_loop().time
        try:
            with contextlib.suppress(OSError):
                while piece := await reader.read(PIECE_BYTES):
                    if writing.done():
                        return
                    await pieces.put((piece, clock()))
            await pieces.put(None)
            await writing
        finally:
            writing.cancel()
            await asyncio.wait([writing])

    async def _write(
        self, connection: Connection, pieces: asyncio.Queue[tuple[bytes, float] | None], way: Way
    ) -> None:
        conditions, writer = self.conditions[way], connection.towards(way)
        try:
            while (item := await pieces.get()) is not None:
                piece = await conditions.pass_through(*item)
                left = connection.left[way]
                if left is not None:
                    piece = piece[:left]
                    connection.left[way] = left - len(piece)
                writer.write(piece)
                await writer.drain()
                if connection.left[way] == 0:
                    connection.reset()
                    return
            connection.half_close(way)
        except (OSError, RuntimeError):
            # Its receiver has closed.
            connection.reset()
        finally:
            while not pieces.empty():
                pieces.get_nowait()  # Whoever waits for room learns that this has ended.

    async def close(self) -> None:
        """Ends every connection."""
        self.reset_all()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxying(port: int, rng: random.Random | None = None) -> AsyncGenerator[Proxy]:
    """A proxy in front of a port of this machine."""
    proxy = Proxy(port, rng or random.Random(0))
    listener = await asyncio.start_server(proxy.accept, "127.0.0.1", 0, backlog=4096)
    proxy.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.close()
