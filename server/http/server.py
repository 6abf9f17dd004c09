"""The HTTP port next to gRPC's: its socket, TLS, and its lifetime in the server's event loop.

Exposure, authentication and encryption are the same as for gRPC. The same rule applies to non-loopback
addresses (`config.check_exposure`), and the same certificate, client authority and tokens are used. They
are read again for each connection. The port is bound before the engine starts, as gRPC's is.

The server closes a connection that keeps it waiting for `limits.stalled_seconds`. It waits for the
whole head of a request, the first or one that has begun, or for the rest of a request that is
already answered. It also waits for the client to read. An answer counts as sent when at most
`WRITE_BUFFER_BYTES` of it are unread. These remain for as long as an idle connection does.

Order of a stop: no new connections, idle ones are closed -> answers under way are sent to their
end, because their turns have been drained or aborted by then -> after `GRACE_SECONDS` the remaining
connections are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.wire.channel import MOST_METADATA_BYTES, split_address

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

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


class HttpAddressInUse(Exception):
    """The server cannot listen on the address."""


def bind(listen: str) -> socket.socket:
    """Raises HttpAddressInUse."""
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
        raise HttpAddressInUse(f"cannot listen on {listen}: {error}") from error
    return bound


def open_http(config: ServeConfig, grpc_port: int, credentials: Credentials) -> HttpServer | None:
    """None if the port is off. Raises HttpAddressInUse and ConfigError."""
    listen = config.http.address(config.listen, grpc_port)
    if listen is None:
        return None
    context = credentials.ssl_context()
    limits = config.limits
    return HttpServer(
        bind(listen), context, listen, limits.concurrent_calls, limits.stalled_seconds
    )


class HttpServer:
    def __init__(
        self,
        bound: socket.socket,
        context: ssl.SSLContext | None,
        listen: str,
        concurrent_calls: int,
        stalled_seconds: float,
    ) -> None:
        self._socket = bound
        self.port = int(bound.getsockname()[1])
        scheme, host = "http" if context is None else "https", listen.rpartition(":")[0]
        self.url = f"{scheme}://{host}:{self.port}/v1"
        """The base URL for SDKs, without an attempt."""
        self._context = context
        self._concurrent_calls = concurrent_calls
        self._stalled_seconds = stalled_seconds
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
            limit_concurrency=self._concurrent_calls,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ssl_context_factory=None if context is None else _always(context),
        )
        self._server = _Uvicorn(config, self._stalled_seconds)
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        await self._server.up.wait()

    async def stop(self) -> None:
        """Stops in the order that the module's docstring describes."""
        if self._server is None or self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await self._serving


def _always(context: ssl.SSLContext) -> Callable[[uvicorn.Config, Any], ssl.SSLContext]:
    def make(_config: uvicorn.Config, _default: Any) -> ssl.SSLContext:
        return context

    return make


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

    The parser holds a head of any length. An incomplete head is bounded by the bytes received so far. A
    complete one is bounded by its content, whatever else arrived in the same piece. The application bounds
    bodies.
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
        known: dict[str, object] = {CLIENT_NAMES: _names(tls), CUT_OFF: transport.abort}
        self.app = cast("Any", partial(_with, self.app, known))

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
            # The parser stops here, and the base class answers 400.
            raise _TooManyRequests
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        length = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if length > MOST_METADATA_BYTES:
            # The parser stops here, and the base class answers 400.
            raise _HeadTooLong
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._head_bytes = 0
        super().on_message_complete()


class _TooManyRequests(Exception):
    """More than MOST_PIPELINED requests arrived before the first of them was answered."""


class _HeadTooLong(Exception):
    """The request line and headers exceed MOST_METADATA_BYTES."""


def _names(tls: ssl.SSLObject | None) -> list[str]:
    """Returns the common names in a client's certificate."""
    shown = None if tls is None else tls.getpeercert()
    subject = cast("tuple[tuple[tuple[str, str], ...], ...]", (shown or {}).get("subject", ()))
    return [value for part in subject for key, value in part if key == "commonName"]


async def _with(
    app: ASGI3Application, known: dict[str, object], scope: Any, receive: Any, send: Any
) -> None:
    scope.update(known)
    await app(scope, receive, send)
