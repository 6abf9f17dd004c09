"""Endpoints compatible with other services' SDKs: routes to surfaces, behind the same gate as gRPC
calls.

    POST /v1/chat/completions    POST /v1/attempts/ID/chat/completions    OpenAI chat completions
    POST /v1/responses           POST /v1/attempts/ID/responses           OpenAI responses
    POST /v1/messages            POST /v1/attempts/ID/v1/messages         Anthropic messages
    POST /v1/messages/count_tokens, and the same below an attempt     tokens of a conversation
    GET  /v1/models              GET  /v1/attempts/ID/models          the model that is served
    GET  /v1/models/NAME         GET  /v1/attempts/ID/models/NAME     the same, under any name
    GET  /health                                                          for probes; no authentication

Order for each request: authentication and role (`authorization`) -> the body is read -> the turn
begins (`http_turns`) -> the answer, whole or as server-sent events. The body is bounded in bytes
and in time, and charged to its caller's account until the surface has read it. Before the first
byte of the answer an error becomes an HTTP status; after it, an event in the surface's own format.
If the connection is lost, or takes no data for `limits.stalled_seconds`, its turn is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from penstock.common import telemetry
from penstock.server.core.errors import DomainError
from penstock.server.http import errors as http_errors
from penstock.server.http.reply import Delta, Reply, tell, tell_whole
from penstock.server.http.server import CLIENT_NAMES, CUT_OFF, WRITE_BUFFER_BYTES
from penstock.server.http.turns import AgentTurns, Asked
from penstock.server.security.credentials import AUTHORIZATION
from penstock.server.security.gate import Gate, Presented
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock.server.http.requests import Previous
    from penstock.server.text.messages import Message, Tool
    from penstock.server.text.renderer import Renderer

T = TypeVar("T")
logger = logging.getLogger(__name__)

TURNS = "penstock.v1.RolloutService/Generate"
MODELS = "penstock.v1.RolloutService/GetServerInfo"
"""The rpcs whose roles apply to the endpoints."""
# Longer bodies are parsed off the event loop.
LONG_BODY = 65_536
# This much of a body, or its end, must arrive within each `limits.stalled_seconds`.
PIECE_BYTES = 262_144
RETRY_HEADER = "x-stainless-retry-count"


class Parsed(Protocol):
    """The parts of a request that every surface reads."""

    @property
    def messages(self) -> list[Message]: ...
    @property
    def tools(self) -> list[Tool]: ...
    @property
    def sampling(self) -> dict[str, Any]: ...
    @property
    def stream(self) -> bool: ...
    @property
    def previous(self) -> Previous | None: ...


class Surface(Protocol):
    """Requests, answers and errors in the format of one service."""

    def read(self, body: bytes) -> Parsed:
        """Parses a request. Raises DomainError."""
        ...

    def whole(self, request: Any, reply: Reply) -> str:
        """Returns the answer as JSON."""
        ...

    def events(
        self, request: Any, reply: Reply, deltas: AsyncGenerator[Delta]
    ) -> AsyncIterator[str]:
        """Yields the answer as server-sent events."""
        ...

    def error(self, error: DomainError) -> Mapping[str, object]:
        """Returns an error as the body of an answer."""
        ...

    def error_event(self, error: DomainError) -> str:
        """Returns an error as the last event of a stream."""
        ...


class Counting(Surface, Protocol):
    """A surface that also counts the tokens of a conversation."""

    def read_count(self, body: bytes) -> Parsed:
        """Parses a request to count tokens. Raises DomainError."""
        ...


Unread = Callable[[int], contextlib.AbstractContextManager[None]]
Serve = Callable[[Surface, "Scope", "Receive", "_Sending"], Awaitable[None]]


class Endpoints:
    """Serves all surfaces of one server."""

    def __init__(
        self,
        surfaces: Mapping[str, Surface],
        turns: AgentTurns,
        renderer: Renderer,
        model: str,
        gate: Gate,
        stalled_seconds: float,
        counting: Counting | None = None,
    ) -> None:
        """`surfaces` maps path suffixes to surfaces. `counting` is the one that also counts
        tokens."""
        self._surfaces = surfaces
        self._turns = turns
        self._renderer = renderer
        self._model = model
        self._gate = gate
        self._stalled_seconds = stalled_seconds
        self._counting = counting

    def application(self) -> Starlette:
        routes = [Route("/health", _health, methods=["GET"])]
        for end, surface in self._surfaces.items():
            routes += _routes(end, "POST", self._guarded(TURNS, surface, self._answer))
        if self._counting is not None:
            count = self._guarded(MODELS, self._counting, self._count)
            routes += _routes("messages/count_tokens", "POST", count)
        first = next(iter(self._surfaces.values()))
        routes += _routes("models", "GET", self._guarded(MODELS, first, self._models))
        routes += _routes("models/{name:path}", "GET", self._guarded(MODELS, first, self._named))
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_endpoint})

    def _guarded(self, method: str, surface: Surface, serve: Serve) -> ASGIApp:
        """Puts an endpoint behind the gate and turns its exceptions into error answers."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            unread = self._gate.callers.unread
            sending = _Sending(send, scope[CUT_OFF], self._stalled_seconds, unread)
            try:
                with self._gate.visit(method, _presented(scope)) as caller:
                    async with self._gate.while_in_force(caller):
                        await serve(surface, scope, receive, sending)
            except _Gone:
                return
            except DomainError as error:
                self._gate.callers.refused(error)
                await sending.refuse(surface, error)
            except Exception:
                logger.exception("%s failed", scope["path"])
                await sending.refuse(surface, DomainError(Reason.INTERNAL_ERROR, "internal error"))

        return handle

    async def _models(
        self, surface: Surface, scope: Scope, receive: Receive, sending: _Sending
    ) -> None:
        ends = {"first_id": self._model, "last_id": self._model, "has_more": False}
        table = {"object": "list", "data": [self._describe_model()], **ends}
        await sending.json(json.dumps(table))

    async def _named(
        self, surface: Surface, scope: Scope, receive: Receive, sending: _Sending
    ) -> None:
        # Any name is accepted, as for turns: agents use the name that they were written for.
        await sending.json(json.dumps(self._describe_model()))

    def _describe_model(self) -> dict[str, object]:
        """Describes the model for OpenAI and Anthropic at once, because both use the same path."""
        ours = {"id": self._model, "object": "model", "created": 0, "owned_by": "penstock"}
        theirs = {
            "type": "model",
            "display_name": self._model,
            "created_at": "1970-01-01T00:00:00Z",
        }
        return {**ours, **theirs}

    async def _count(
        self, surface: Surface, scope: Scope, receive: Receive, sending: _Sending
    ) -> None:
        assert self._counting is not None
        counting = self._counting
        async with self._body(scope, receive) as body:

            def count() -> int:
                request = counting.read_count(body)
                return len(self._renderer.render(request.messages, request.tools))

            counted = await _off_loop(len(body), count)
        await sending.json(json.dumps({"input_tokens": counted}))

    async def _answer(
        self, surface: Surface, scope: Scope, receive: Receive, sending: _Sending
    ) -> None:
        digest = hashlib.blake2b(scope["path"].encode() + b"\0", digest_size=16)
        async with self._body(scope, receive) as body:
            digest.update(body)
            request = await _off_loop(len(body), partial(surface.read, body))
        # Free it now, because a turn may take long.
        del body
        headers = Headers(scope=scope)
        asked = Asked(
            attempt_id=str(scope["path_params"].get("attempt", "")),
            messages=request.messages,
            tools=request.tools,
            sampling=request.sampling,
            stream=request.stream,
            digest=digest.digest(),
            says_retry=headers.get(RETRY_HEADER, "0") not in ("", "0"),
            previous=request.previous,
        )
        trace = telemetry.incoming(headers.items())
        await _unless_gone(receive, self._tell(surface, request, asked, trace, sending))

    async def _tell(
        self, surface: Surface, request: Parsed, asked: Asked, trace: Context, sending: _Sending
    ) -> None:
        async with self._turns.ask(asked, trace) as answer:
            turn = answer.turn
            reply = Reply(
                answer.answer_id,
                self._model,
                turn.context_token_count,
                turn.budget,
                turn.sampling,
            )
            if asked.stream:
                before = turn.record.token_array()[: turn.context_token_count].tolist()
                stream = self._renderer.open_stream(before, answer.tools)
                deltas = tell(self._turns, answer, reply, stream)
                async with contextlib.aclosing(deltas):
                    async for event in surface.events(request, reply, deltas):
                        await sending.event(event)
                await sending.end()
            else:
                await tell_whole(self._turns, answer, reply)
                await sending.json(surface.whole(request, reply))
            answer.note.delivered = True

    @contextlib.asynccontextmanager
    async def _body(self, scope: Scope, receive: Receive) -> AsyncGenerator[bytes]:
        """Yields the whole body, which is charged to its caller's account until the block exits."""
        most = self._gate.callers.message_bytes
        announced = Headers(scope=scope).get("content-length", "0")
        body, size, more = bytearray(), int(announced) if announced.isdigit() else 0, True
        now = asyncio.get_running_loop().time
        with self._gate.callers.arriving() as keep:
            try:
                # The timeout covers a whole piece. A byte at a time could hold the body in memory
                # forever.
                async with asyncio.timeout(self._stalled_seconds) as limit:
                    while more and size <= most:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise _Gone
                        part = message.get("body", b"")
                        keep(len(part))
                        before = len(body) // PIECE_BYTES
                        body += part
                        if len(body) // PIECE_BYTES > before:
                            limit.reschedule(now() + self._stalled_seconds)
                        more, size = message.get("more_body", False), max(size, len(body))
            except TimeoutError:
                raise DomainError(
                    Reason.MALFORMED_MESSAGE,
                    f"the body stalled at {len(body)} bytes: less than {PIECE_BYTES} more arrived within "
                    f"{self._stalled_seconds:g} s",
                    {"body_bytes": len(body), "seconds": self._stalled_seconds},
                ) from None
            if size > most:
                raise DomainError(
                    Reason.MESSAGE_TOO_LARGE,
                    f"the body has at least {size} bytes; at most {most} are allowed",
                    {"message_bytes": size, "limit": most},
                )
            yield bytes(body)


class _Gone(Exception):
    """The connection was lost, or its client stopped reading."""


class _Sending:
    """Sends one answer, and charges it to its caller's account until it is read."""

    def __init__(
        self, send: Send, cut_off: Callable[[], None], stalled_seconds: float, unread: Unread
    ) -> None:
        self._put = send
        self._cut_off = cut_off
        self._stalled_seconds = stalled_seconds
        self._unread = unread
        self._begun = self._ended = False

    async def json(
        self, text: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole answer."""
        body = text.encode()
        length = {"content-length": str(len(body))}
        with self._unread(len(body)):
            await self._start(status, "application/json", {**length, **(headers or {})})
            await self._piece(body)
            await self.end()

    async def event(self, event: str) -> None:
        """Sends one event of a streamed answer."""
        if not self._begun:
            await self._start(
                200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"}
            )
        data = event.encode()
        with self._unread(len(data)):
            await self._piece(data)
            if len(data) > WRITE_BUFFER_BYTES:
                await self._piece(b"")

    async def _piece(self, data: bytes) -> None:
        """Sends a piece once the previous one has been taken."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """Ends a streamed answer."""
        await self._send({"type": "http.response.body", "body": b""})
        self._ended = True

    async def refuse(self, surface: Surface, error: DomainError) -> None:
        """Sends an error, if the answer has not ended yet."""
        # The call has already ended, and its charges with it.
        self._unread = _uncounted
        with contextlib.suppress(_Gone):
            if not self._begun:
                body = json.dumps(surface.error(error))
                status = http_errors.status_of(error)
                await self.json(body, status, http_errors.headers_of(error))
            elif not self._ended:
                await self.event(surface.error_event(error))
                await self.end()

    async def _start(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self._begun = True
        pairs = [(b"content-type", kind.encode())]
        pairs += [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stalled_seconds):
                await self._put(message)
        except TimeoutError:
            self._cut_off()
            self._ended = True
            logger.warning(
                "client read nothing for %g s; closed the connection", self._stalled_seconds
            )
            raise _Gone from None


def _uncounted(_: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class _Endpoint:
    """Wraps an ASGI application in a class, because Starlette would call a function with a
    request."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


def _routes(end: str, method: str, application: ASGIApp) -> list[Route]:
    # Ids may contain slashes. Anthropic's SDKs add the version to the path themselves.
    paths = (f"/v1/{end}", *(f"/v1/attempts/{{attempt:path}}/{v}{end}" for v in ("v1/", "")))
    return [Route(path, _Endpoint(application), methods=[method]) for path in paths]


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work and cancels it if the client disconnects. Raises _Gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    leaving = asyncio.create_task(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _Gone
        working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _off_loop(length: int, read: Callable[[], T]) -> T:
    return read() if length < LONG_BODY else await asyncio.to_thread(read)


def _presented(scope: Scope) -> Presented:
    """What gRPC would present for the same caller."""
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
    ]
    names = {name for name, _ in headers}
    if AUTHORIZATION not in names:
        # Anthropic's SDKs send their API key in this header.
        headers = [
            (AUTHORIZATION, f"Bearer {value}") if name == "x-api-key" else (name, value)
            for name, value in headers
        ]
    host, port = scope.get("client") or ("", 0)
    peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    shown = [name.encode() for name in scope.get(CLIENT_NAMES, ())]
    return Presented(headers, peer, lambda: {"x509_common_name": shown} if shown else {})


async def _health(request: Request) -> Response:
    return PlainTextResponse("")


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path}: {phrase}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": body}, error.status_code, error.headers)
