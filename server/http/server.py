"""The HTTP port next to gRPC's: its socket, TLS, and its lifetime in the server's event loop.

Exposure, authentication and encryption are the same as for gRPC, with the same certificate, client
authority and tokens, which are read again for each connection.

The server closes a connection that keeps it waiting for `limits.stalled_seconds`: for the whole head of a
request, the first or one that has begun, for the rest of a request that is already answered, or for the
client to read. An answer counts as sent when at most `WRITE_BUFFER_BYTES` of it are unread. These remain
for as long as an idle connection does.

Order of a stop: no new connections, idle ones are closed -> answers under way are sent to their end,
because their turns have been drained or aborted by then -> after `GRACE_SECONDS` the rest are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.server.config.settings import AddressInUse
from penstock.wire.channel import MOST_METADATA_BYTES, split_address

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

    from penstock.server.config.limits import LimitsSection
    from penstock.server.config.settings import ServeConfig
    from penstock.server.security.credentials import Credentials

GRACE_SECONDS = 2
KEEP_ALIVE_SECONDS = 75
"""Longer than in clients' own pools, so that no request is sent into a closing connection."""
WRITE_BUFFER_BYTES = 16 << 10
"""Unread bytes with which an answer counts as sent. The kernel holds more."""
TICKS_PER_LOOK = 5
"""uvicorn ticks, of a tenth of a second each, between two checks of all connections."""
MOST_PIPELINED = 256
"""Requests that may wait behind the one being answered. They are parsed as they arrive."""
CLIENT_NAMES = "penstock.client_names"
"""Key in a request's scope for the common names in its client's certificate."""
CUT_OFF = "penstock.cut_off"
"""Key in a request's scope for a function that closes its connection, even with unread data."""


def bind(listen: str) -> socket.socket:
    """Raises AddressInUse."""
    host, port = split_address(listen)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            # Allows a port that a previous server has just left. A port in use is still refused.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(1)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise AddressInUse(f"cannot listen on {listen}: {error}") from error
    return bound


def open_http(config: ServeConfig, grpc_port: int, credentials: Credentials) -> HttpServer | None:
    """None if the port is off. Raises AddressInUse and ConfigError."""
    listen = config.http.address(config.listen, grpc_port)
    if listen is None:
        return None
    context = credentials.ssl_context()
    return HttpServer(listen, context, config.limits)


class HttpServer:
    def __init__(self, listen: str, context: ssl.SSLContext | None, limits: LimitsSection) -> None:
        """Raises AddressInUse."""
        self._socket = bind(listen)
        self.port = int(self._socket.getsockname()[1])
        scheme, host = "http" if context is None else "https", listen.rpartition(":")[0]
        self.url = f"{scheme}://{host}:{self.port}/v1"
        """The base URL for SDKs, without an attempt."""
        self._context = context
        self._limits = limits
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, application: ASGI3Application) -> None:
        """Returns when the server is up."""
        context = self._context
        config = uvicorn.Config(
            application,
            loop="none",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            # Forwarding headers come from the caller and are not trusted.
            proxy_headers=False,
            server_header=False,
            limit_concurrency=self._limits.concurrent_calls,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ssl_context_factory=None if context is None else lambda _config, _default: context,
        )
        self._server = _Uvicorn(config, self._limits.stalled_seconds)
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        await self._server.up.wait()

    async def stop(self) -> None:
        if self._server is None or self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._serving


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, which the server has itself. Also checks its connections."""

    def __init__(self, config: uvicorn.Config, stalled_seconds: float) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self._stalled_seconds = stalled_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_LOOK == 0:
            now = asyncio.get_running_loop().time()
            for connection in tuple(self.server_state.connections):
                cast("_Protocol", connection).look(now, self._stalled_seconds)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """Records the client certificate of a connection, and bounds request heads and waiting.

    The parser holds a head of any length. An incomplete head is bounded by the bytes received so far, a
    complete one by its content, whatever else arrived in the same piece. The application bounds bodies.
    """

    _head_bytes = 0
    """Bytes received since a request last ended."""
    _in_body = False
    _waits_since: float | None = None
    """Since when the server has waited for a head, or for the client to read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        tls = cast("ssl.SSLObject | None", transport.get_extra_info("ssl_object"))
        self._known: dict[str, object] = {CLIENT_NAMES: _names(tls), CUT_OFF: transport.abort}

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_body:
            self._head_bytes = 0
        elif self._head_bytes > MOST_METADATA_BYTES:
            self.transport.close()

    def look(self, now: float, patience: float) -> None:
        """Closes the connection if it has kept the server waiting for `patience` seconds."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        # While the keep-alive timer runs, no data has arrived since the last answer.
        idle = self.timeout_keep_alive_task is not None
        asks = cycle is None or (cycle.response_complete and not idle)
        unread = self.flow.write_paused or self.transport.is_closing()
        if not asks and not unread:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since >= patience:
            self.transport.abort()

    def resume_writing(self) -> None:
        # The client reads, however slowly.
        self._waits_since = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            # close() would wait until the client has read that.
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            raise _Refused
        super().on_message_begin()
        cast("dict[str, object]", self.scope).update(self._known)

    def on_headers_complete(self) -> None:
        length = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if length > MOST_METADATA_BYTES:
            raise _Refused
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._head_bytes = 0
        super().on_message_complete()


class _Refused(Exception):
    """Stops the parser. The base class then answers 400."""


def _names(tls: ssl.SSLObject | None) -> list[str]:
    shown = None if tls is None else tls.getpeercert()
    subject = cast("tuple[tuple[tuple[str, str], ...], ...]", (shown or {}).get("subject", ()))
    return [value for part in subject for key, value in part if key == "commonName"]
