"""The HTTP port beside gRPC's: its socket, TLS, and its life in the server's own event loop.

What is listened on, who is let in and what a connection is made with are those of gRPC: the same rule for
addresses that are not of loopback (`config.check_exposure`), the same certificate, client authority and
tokens, looked at again for each connection. The port is bound before the engine starts, as gRPC's is.

A connection is cut off that for `limits.stalled_seconds` has not brought the whole head of a request, its
first one or one that it has begun, or the rest of one that is answered, or has taken none of what is there
for it. An answer counts as sent when no more than `WRITE_BUFFER_BYTES` of it lie unread: these stay for as
long as an idle connection does.

Order of a stop: no new connections, idle ones are closed -> answers under way are sent to their end, which
turns that were drained or aborted have reached by then -> after `GRACE_SECONDS` whoever is left is cut off.
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
"""How long an idle connection stays open: longer than the clients' own pools keep one, so that no request
is sent into a connection that is just being closed."""
WRITE_BUFFER_BYTES = 16 << 10
"""What may lie unread when an answer counts as sent; the kernel holds more."""
TICKS_PER_LOOK = 5
"""Of uvicorn's own, of a tenth of a second, from one look at all connections to the next."""
MOST_PIPELINED = 256
"""Requests on a connection beyond the one that is answered; they are parsed as they come."""
CLIENT_NAMES = "penstock.client_names"
"""Where a request's scope holds the common names of its client's certificate."""
CUT_OFF = "penstock.cut_off"
"""And what ends its connection, whatever of its answer is unread."""


class HttpAddressInUse(Exception):
    """The address cannot be listened on."""


def bind(listen: str) -> socket.socket:
    """A socket bound to HOST:PORT. Raises HttpAddressInUse."""
    host, port = split_address(listen)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            # A port that a server before has just left; one that is in use is refused all the same.
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
    """The HTTP port that a configuration asks for beside gRPC's; None where it is off.

    Raises HttpAddressInUse and ConfigError.
    """
    listen = config.http.address(config.listen, grpc_port)
    if listen is None:
        return None
    context = credentials.ssl_context()
    limits = config.limits
    return HttpServer(
        bind(listen), context, listen, limits.concurrent_calls, limits.stalled_seconds
    )


class HttpServer:
    """Serves an application on a socket."""

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
        """What the SDKs call the base URL, without an attempt."""
        self._context = context
        self._concurrent_calls = concurrent_calls
        self._stalled_seconds = stalled_seconds
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, application: ASGI3Application) -> None:
        """Serves from here on."""
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
            # What a caller says of where it comes from is not believed.
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
        """Ends as the module's docstring says."""
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
    """Without handlers of signals, which are the server's own; looks after its connections."""

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
    """Knows whose certificate a connection was made with, and bounds what comes before a body, and how long
    it is waited for.

    The parser holds a head of any length. It is counted by the pieces that come until it is whole, and a
    whole one by what is in it, whatever else came in the same piece; a body is bounded where it is read.
    """

    _head_bytes = 0
    """Of the pieces since a request ended in one."""
    _in_body = False
    _waits_since: float | None = None
    """For a head, or for what was written to be taken."""

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
        """Cuts the connection off where it has kept the server waiting for so many seconds."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        # With the timer of an idle connection nothing has come since the last answer.
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
        # It is read, however slowly.
        self._waits_since = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            # To close it would be to wait until that is read.
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
    """More than MOST_PIPELINED requests came before the first of them was answered."""


class _HeadTooLong(Exception):
    """The line and the headers of a request have more than MOST_METADATA_BYTES bytes."""


def _names(tls: ssl.SSLObject | None) -> list[str]:
    """The common names of a client's certificate."""
    shown = None if tls is None else tls.getpeercert()
    subject = cast("tuple[tuple[tuple[str, str], ...], ...]", (shown or {}).get("subject", ()))
    return [value for part in subject for key, value in part if key == "commonName"]


async def _with(
    app: ASGI3Application, known: dict[str, object], scope: Any, receive: Any, send: Any
) -> None:
    scope.update(known)
    await app(scope, receive, send)
