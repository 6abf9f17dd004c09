"""Endpoints compatible with other services' SDKs: routes to surfaces, behind the same gate as gRPC calls.

    POST /v1/chat/completions    POST /v1/attempts/ID/chat/completions    OpenAI chat completions
    POST /v1/responses           POST /v1/attempts/ID/responses           OpenAI responses
    POST /v1/messages            POST /v1/attempts/ID/v1/messages         Anthropic messages
    POST /v1/messages/count_tokens, and the same below an attempt     tokens of a conversation
    GET  /v1/models              GET  /v1/attempts/ID/models          the model that is served
    GET  /v1/models/NAME         GET  /v1/attempts/ID/models/NAME     the same, under any name
    GET  /health                                                          for probes; no authentication

Order for each request: authentication and role (`security.gate`) -> the body is read -> the turn
begins (`http.turns`) -> the answer, whole or as server-sent events. The body is bounded in bytes
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
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from penstock.common import telemetry
from penstock.server.core.errors import DomainError
from penstock.server.http.asked import Asked
from penstock.server.http.connection import Bodies, Gone, Sending, presented, unless_gone
from penstock.server.http.reply import Reply, tell, tell_whole
from penstock.server.http.server import CUT_OFF
from penstock.server.http.surface import Counting, Surface, SurfaceRequest
from penstock.server.http.turns import AgentTurns
from penstock.server.security.gate import Gate
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock.server.text.renderer import Renderer

T = TypeVar("T")
logger = logging.getLogger(__name__)

TURNS = "penstock.v1.RolloutService/Generate"
MODELS = "penstock.v1.RolloutService/GetServerInfo"
"""The rpcs whose roles apply to the endpoints."""
# Longer bodies are parsed off the event loop.
LONG_BODY = 65_536
RETRY_HEADER = "x-stainless-retry-count"

Serve = Callable[[Surface, "Scope", "Receive", Sending], Awaitable[None]]


class Endpoints:
    def __init__(
        self,
        surfaces: Mapping[str, Surface],
        turns: AgentTurns,
        renderer: Renderer,
        model: str,
        gate: Gate,
        check_memory: Callable[[int], None],
        stalled_seconds: float,
        counting: Counting | None = None,
    ) -> None:
        """`surfaces` is by path suffix. `check_memory` raises MEMORY_BUDGET if the bytes do not fit."""
        self._surfaces = surfaces
        self._turns = turns
        self._renderer = renderer
        self._model = model
        self._gate = gate
        self._bodies = Bodies(gate.callers, check_memory, stalled_seconds)
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
            sending = Sending(send, scope[CUT_OFF], self._stalled_seconds, unread)
            try:
                with self._gate.visit(method, presented(scope)) as caller:
                    async with self._gate.while_in_force(caller):
                        await serve(surface, scope, receive, sending)
            except Gone:
                return
            except DomainError as error:
                self._gate.callers.refused(error)
                await sending.refuse(surface, error)
            except Exception:
                logger.exception("%s failed", scope["path"])
                await sending.refuse(surface, DomainError(Reason.INTERNAL_ERROR, "internal error"))

        return handle

    async def _models(
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
    ) -> None:
        ends = {"first_id": self._model, "last_id": self._model, "has_more": False}
        table = {"object": "list", "data": [self._describe_model()], **ends}
        await sending.json(json.dumps(table))

    async def _named(
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
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
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
    ) -> None:
        assert self._counting is not None
        counting = self._counting
        async with self._bodies.read(scope, receive) as body:

            def count() -> int:
                request = counting.read_count(body)
                return len(self._renderer.render(request.messages, request.tools))

            counted = await _off_loop(len(body), count)
        await sending.json(json.dumps({"input_tokens": counted}))

    async def _answer(
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
    ) -> None:
        digest = hashlib.blake2b(scope["path"].encode() + b"\0", digest_size=16)
        async with self._bodies.read(scope, receive) as body:
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
        await unless_gone(receive, self._tell(surface, request, asked, trace, sending))

    async def _tell(
        self,
        surface: Surface,
        request: SurfaceRequest,
        asked: Asked,
        trace: Context,
        sending: Sending,
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


class _Endpoint:
    """Wraps an ASGI application in a class, because Starlette would call a function with a request."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


def _routes(end: str, method: str, application: ASGIApp) -> list[Route]:
    # Ids may contain slashes. Anthropic's SDKs add the version to the path themselves.
    paths = (f"/v1/{end}", *(f"/v1/attempts/{{attempt:path}}/{v}{end}" for v in ("v1/", "")))
    return [Route(path, _Endpoint(application), methods=[method]) for path in paths]


async def _off_loop(length: int, read: Callable[[], T]) -> T:
    return read() if length < LONG_BODY else await asyncio.to_thread(read)


async def _health(request: Request) -> Response:
    return PlainTextResponse("")


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path}: {phrase}"
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": body}, error.status_code, error.headers)
