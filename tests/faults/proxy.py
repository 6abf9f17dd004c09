"""A TCP proxy that injects network faults.

    client -- up --> Proxy -- up --> server
    client <- down -- Proxy <- down - server

Each direction has conditions that may change at any time and apply from the next byte on. They are latency,
a rate, darkness (nothing gets through, but nothing is lost), and a chance that a bit of a piece flips.
Connections can be reset, closed in one direction, and cut after a number of bytes. The proxy buffers a
bounded amount, so a sender is slowed down as by a real network.
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
"""SO_LINGER value that turns a close into a reset."""


class Way(Enum):
    """Direction of the bytes."""

    UP = "up"
    """Towards the server."""
    DOWN = "down"
    """Towards the client."""


class Conditions:
    """The current conditions of one direction."""

    def __init__(self, rng: random.Random) -> None:
        self.latency_seconds = 0.0
        self.bytes_per_second = 0.0
        """Zero means no limit."""
        self.flips = 0.0
        """Chance that one bit of a piece is flipped."""
        self.flipped = 0
        self._rng = rng
        self._lit = asyncio.Event()
        self._lit.set()

    def go_dark(self) -> None:
        """Stops all bytes from now on."""
        self._lit.clear()

    def go_on(self) -> None:
        """Releases the bytes that were held, and lets all later ones through."""
        self._lit.set()

    def clear(self) -> None:
        """Restores normal conditions in this direction."""
        self.latency_seconds = self.bytes_per_second = self.flips = 0.0
        self.go_on()

    async def pass_through(self, piece: bytes, read_at: float) -> bytes:
        """Delays a piece according to the conditions; returns it as it arrives."""
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
    """A client's connection, and the proxy's connection to the server for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    left: dict[Way, int | None] = field(default_factory=lambda: {Way.UP: None, Way.DOWN: None})
    """Bytes that still get through before the cut; None means all."""

    def towards(self, way: Way) -> asyncio.StreamWriter:
        """The writer for the bytes of a direction."""
        return self.server if way is Way.UP else self.client

    def reset(self) -> None:
        """Resets the connections to both peers."""
        for writer in (self.client, self.server):
            found = writer.get_extra_info("socket")
            if found is not None and found.fileno() >= 0:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    def half_close(self, way: Way) -> None:
        """Ends one direction for its receiver; the other direction continues."""
        writer = self.towards(way)
        with contextlib.suppress(OSError, RuntimeError):
            if writer.can_write_eof():
                writer.write_eof()


class Proxy:
    """Listens on a free port of this machine. Made by `proxying`."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.conditions = {way: Conditions(rng) for way in Way}
        self.connections: set[Connection] = set()
        self.accepted = 0
        self.refusing = False
        """Whether new connections are reset immediately."""
        self.address = ""
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> Conditions:
        """Conditions towards the server."""
        return self.conditions[Way.UP]

    @property
    def down(self) -> Conditions:
        """Conditions towards the client."""
        return self.conditions[Way.DOWN]

    def go_dark(self) -> None:
        """Stops all bytes in both directions."""
        for conditions in self.conditions.values():
            conditions.go_dark()

    def clear(self) -> None:
        """Restores normal conditions; cut connections stay cut."""
        self.refusing = False
        for conditions in self.conditions.values():
            conditions.clear()

    def reset_all(self) -> int:
        """Reset every connection; return how many there were."""
        cut = list(self.connections)
        for connection in cut:
            connection.reset()
        return len(cut)

    def half_close_all(self, way: Way) -> None:
        """End one direction of every connection."""
        for connection in self.connections:
            connection.half_close(way)

    def truncate_all(self, way: Way, length: int) -> None:
        """Resets every connection mid-message, after this many more bytes."""
        for connection in self.connections:
            connection.left[way] = length

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection until it ends."""
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
            # Cancelled by `close`. asyncio would report a handler that ends this way as an error.
            with contextlib.suppress(asyncio.CancelledError):
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(connection, reader, Way.UP))
                    pumps.create_task(self._pump(connection, answers, Way.DOWN))
        finally:
            self.connections.discard(connection)
            for end in (writer, server):
                end.transport.abort()

    async def _pump(self, connection: Connection, reader: asyncio.StreamReader, way: Way) -> None:
        """Reads one side's bytes, delays them as the conditions say, and writes them to the other side."""
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
            # The receiver has closed.
            connection.reset()
        finally:
            while not pieces.empty():
                pieces.get_nowait()  # Wakes the reader if it waits for room, so that it sees the end.

    async def close(self) -> None:
        """Closes all connections of the proxy."""
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
