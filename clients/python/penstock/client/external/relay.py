"""Gives an external process HTTP access to the compatible endpoints, limited to its attempt.

    process ── http, its own key ──► worker ── the worker's token, TLS if the server uses it ──► server

The worker makes a key for each attempt. The key opens only that attempt's paths and expires when the
process ends. The worker's own token never leaves the worker. A process in its own network namespace
reaches the relay through a socket that was opened inside that namespace (`keeper.launch`).

| event | what the process sees |
|---|---|
| wrong or missing key | 401 |
| a path of another attempt | 404 |
| the server is away and nothing was sent | waits up to `--reconnect-timeout`, then 503 |
| the connection is lost mid-request | its connection is lost too; its SDK retries |
| the process has ended | requests and turns in flight are cancelled |

gRPC traffic is not inspected. With `--api grpc`, the relay passes the bytes to the server unchanged.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from penstock.client.calls import Backoff, Calls
from penstock.client.errors import PenstockError
from penstock.wire.channel import MAX_MESSAGE_BYTES, split_address
from penstock.wire.security import Security, TokenSource, open_token_source

logger = logging.getLogger("penstock.rollout")

# Hop-by-hop headers, and headers that the relay sets itself.
_NOT_FORWARDED = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "authorization",
    "x-api-key",
}
_CONNECT_SECONDS = 10.0
_PIECE_BYTES = 64 * 1024


@dataclass
class Admitted:
    """An attempt whose process can call the relay."""

    trajectory_id: str
    key: str = field(default_factory=lambda: f"attempt-{secrets.token_urlsafe(24)}", repr=False)
    calls: set[asyncio.Task[object]] = field(default_factory=set[asyncio.Task[object]])
    """Requests in flight."""
    closers: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """Closers of the servers opened for this attempt only."""

    @property
    def path(self) -> str:
        return f"/v1/attempts/{quote(self.trajectory_id, safe='')}"

    @contextmanager
    def in_flight(self) -> Generator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        try:
            yield
        finally:
            self.calls.discard(task)


class Relay:
    def __init__(self, calls: Calls, security: Security) -> None:
        """Raises CredentialsUnusable, and ValueError for an invalid address."""
        self._calls = calls
        host, self._grpc_port = split_address(calls.address)
        self._host = host.strip("[]")
        self._shown_host = host
        self._http_port = 0
        self._security = security
        self._tokens: TokenSource | None = open_token_source(security, calls.address)
        self._admitted: dict[str, Admitted] = {}
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | bool = True
        self.port = 0
        """Port at which processes in the host's network reach the relay."""

    async def open(self, http_port: int) -> None:
        self._http_port = http_port
        if self._security.encrypted:
            self._tls = _tls(self._security)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=MAX_MESSAGE_BYTES)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def admit(self, trajectory_id: str) -> Admitted:
        admitted = Admitted(trajectory_id)
        self._admitted[admitted.path] = admitted
        return admitted

    async def dismiss(self, admitted: Admitted) -> None:
        """Closes the attempt's paths and cancels its requests in flight."""
        self._admitted.pop(admitted.path, None)
        for close in admitted.closers:
            close()
        calls = list(admitted.calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)

    async def serve_http(self, admitted: Admitted, listener: socket.socket) -> None:
        """Serves a socket that listens in the attempt's own network."""
        assert self._runner is not None and self._runner.server is not None
        server = await asyncio.get_running_loop().create_server(
            self._runner.server, sock=listener.dup()
        )
        admitted.closers.append(server.close)

    async def serve_grpc(self, admitted: Admitted, listener: socket.socket) -> None:
        """Forwards connections to a listening socket to the server's gRPC address, byte by byte."""

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with admitted.in_flight(), closing(writer):
                await self._forward(reader, writer)

        server = await asyncio.start_server(forward, sock=listener.dup())
        admitted.closers.append(server.close)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(self._host, self._grpc_port)
            try:
                done, pending = await asyncio.wait(
                    [
                        asyncio.ensure_future(_pump(reader, far_writer)),
                        asyncio.ensure_future(_pump(far_reader, writer)),
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for pump in pending:
                    pump.cancel()
                await asyncio.wait([*done, *pending])
            finally:
                far_writer.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        admitted = self._admitted.get("/".join(path.split("/")[:4]))
        if admitted is None:
            return _refusal(404, "not_found", "this attempt has no such path")
        if not hmac.compare_digest(_key_of(request).encode(), admitted.key.encode()):
            return _refusal(401, "invalid_api_key", "the key is not the key of this attempt")
        with admitted.in_flight():
            return await self._relay(request, path)

    async def _relay(self, request: web.Request, path: str) -> web.StreamResponse:
        body = await request.read()
        headers = CIMultiDict(request.headers)
        for name in _NOT_FORWARDED:
            headers.popall(name, None)
        if self._tokens is not None:
            headers.extend(self._tokens.metadata())
        query = request.rel_url.raw_query_string
        target = f"{path}?{query}" if query else path
        lost = Backoff(self._calls.patience.reconnect_seconds)
        while True:
            try:
                answer = await self._ask(request.method, target, headers, body)
            except aiohttp.ClientConnectorError as error:
                # Nothing was sent. A restarted server may listen on another port.
                if not await lost.wait():
                    return _refusal(
                        503, "server_unavailable", f"cannot reach the server: {error.strerror}"
                    )
                with suppress(PenstockError):
                    info = await self._calls.get_server_info()
                    self._http_port = info.http_port or self._http_port
                continue
            except aiohttp.ClientError as error:
                return _refusal(
                    502, "server_unavailable", f"lost the connection to the server: {error}"
                )
            async with answer:
                return await _pass_on(request, answer)

    async def _ask(
        self, method: str, target: str, headers: CIMultiDict[str], body: bytes
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        scheme = "https" if self._security.encrypted else "http"
        return await self._session.request(
            method,
            URL(f"{scheme}://{self._shown_host}:{self._http_port}{target}", encoded=True),
            headers=headers,
            data=body or None,
            allow_redirects=False,
            ssl=self._tls,
            server_hostname=(self._security.server_name or None)
            if self._security.encrypted
            else None,
        )


def _tls(security: Security) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=security.ca)
    if security.certificate is not None:
        context.load_cert_chain(security.certificate, security.key)
    return context


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Streams the server's answer to the process as it arrives."""
    headers = CIMultiDict(answer.headers)
    for name in ("Connection", "Keep-Alive", "Transfer-Encoding"):
        headers.popall(name, None)
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    await response.prepare(request)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


def _key_of(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.headers.get("X-Api-Key", "")


def _refusal(status: int, code: str, message: str) -> web.Response:
    """An error in a form that both SDKs can read."""
    return web.json_response(
        {"type": "error", "error": {"type": code, "code": code, "message": message}}, status=status
    )
