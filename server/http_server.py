"""The HTTP port beside gRPC's: its socket, TLS, and its life in the server's own event loop.

What is listened on, who is let in and what a connection is made with are those of gRPC: the same rule for
addresses that are not of loopback (`config.check_exposure`), the same certificate, client authority and
tokens, looked at again for each connection. The port is bound before the engine starts, as gRPC's is.

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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.wire.channel import MOST_METADATA_BYTES, split_address

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

    from penstock.server.config import ServeConfig
    from penstock.server.credentials import Credentials

GRACE_SECONDS = 2
KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than the clients' own pools keep one, so that no request
is sent into a connection that is just being closed."""
CLIENT_NAMES = "penstock.client_names"
"""Where a request's scope holds the common names of its client's certificate."""


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
    return HttpServer(bind(listen), context, listen, config.limits.concurrent_calls)


class HttpServer:
    """Serves an application on a socket."""

    def __init__(
        self,
        bound: socket.socket,
        context: ssl.SSLContext | None,
        listen: str,
        concurrent_calls: int,
    ) -> None:
        self._socket = bound
        self.port = int(bound.getsockname()[1])
        scheme, host = "http" if context is None else "https", listen.rpartition(":")[0]
        self.url = f"{scheme}://{host}:{self.port}/v1"
        """What the SDKs call the base URL, without an attempt."""
        self._context = context
        self._concurrent_calls = concurrent_calls
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
        self._server = _Uvicorn(config)
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
    """Without handlers of signals, which are the server's own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """Knows whose certificate a connection was made with, and bounds what comes before a body.

    The parser holds a head of any length. It is counted by the pieces that come until it is whole, and a
    whole one by what is in it, whatever else came in the same piece; a body is bounded where it is read.
    """

    _head_bytes = 0
    """Of the pieces since a request ended in one."""
    _in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = cast("ssl.SSLObject | None", transport.get_extra_info("ssl_object"))
        shown = None if tls is None else tls.getpeercert()
        if shown:
            names = [
                value
                for part in cast(
                    "tuple[tuple[tuple[str, str], ...], ...]", shown.get("subject", ())
                )
                for key, value in part
                if key == "commonName"
            ]
            self.app = cast("Any", partial(_with_names, self.app, names))

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_body:
            self._head_bytes = 0
        elif self._head_bytes > MOST_METADATA_BYTES:
            self.transport.close()

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


class _HeadTooLong(Exception):
    """The line and the headers of a request have more than MOST_METADATA_BYTES bytes."""


async def _with_names(
    app: ASGI3Application, names: list[str], scope: Any, receive: Any, send: Any
) -> None:
    scope[CLIENT_NAMES] = names
    await app(scope, receive, send)
