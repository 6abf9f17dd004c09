"""Endpoints compatible with other services' SDKs: routes to surfaces, behind the same gate as gRPC calls.

    POST /v1/chat/completions    POST /v1/attempts/ID/chat/completions    OpenAI chat completions
    POST /v1/responses           POST /v1/attempts/ID/responses           OpenAI responses
    POST /v1/messages            POST /v1/attempts/ID/v1/messages         Anthropic messages
    POST /v1/messages/count_tokens, and the same below an attempt     tokens of a conversation
    GET  /v1/models              GET  /v1/attempts/ID/models          the model that is served
    GET  /v1/models/NAME         GET  /v1/attempts/ID/models/NAME     the same, under any name
    GET  /health                                                          for probes; no authentication

Order for each request: authentication and role (`security.gate`) -> the body is read -> the turn begins
(`http.turns`) -> the answer, whole or as server-sent events. Before the first byte of the answer an error
becomes an HTTP status; after it, an event in the surface's own format. If the connection is lost, or takes
no data for `limits.stalled_seconds`, its turn is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
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
from penstock.server.http.connection import Gone, Sending, presented, read_body, unless_gone
from penstock.server.http.reply import Reply, tell, tell_whole
from penstock.server.http.server import CUT_OFF
from penstock.server.http.surface import Counting, Surface
from penstock.server.http.turns import AgentTurns
from penstock.server.security.gate import Gate
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from starlette.types import ASGIApp, Receive, Scope, Send

    from penstock.server.text.renderer import Renderer

T = TypeVar("T")
logger = logging.getLogger(__name__)

# The rpcs whose roles apply to the endpoints.
TURNS = "penstock.v1.RolloutService/Generate"
MODELS = "penstock.v1.RolloutService/GetServerInfo"
# Longer bodies are parsed off the event loop.
LONG_BODY = 65_536
RETRY_HEADER = "x-stainless-retry-count"

Serve = Callable[[Surface, "Scope", "Receive", Sending], Awaitable[None]]


@dataclass(frozen=True, eq=False)
class Endpoints:
    surfaces: Mapping[str, Surface]
    """By path suffix."""
    counting: Counting
    turns: AgentTurns
    renderer: Renderer
    model: str
    gate: Gate
    check_memory: Callable[[int], None]
    """Raises MEMORY_BUDGET if this many bytes do not fit."""
    stalled_seconds: float

    def application(self) -> Starlette:
        routes = [Route("/health", _health, methods=["GET"])]
        for end, surface in self.surfaces.items():
            routes += _routes(end, "POST", self._guarded(TURNS, surface, self._answer))
        count = self._guarded(MODELS, self.counting, self._count)
        routes += _routes("messages/count_tokens", "POST", count)
        first = next(iter(self.surfaces.values()))
        routes += _routes("models", "GET", self._guarded(MODELS, first, self._models))
        routes += _routes("models/{name:path}", "GET", self._guarded(MODELS, first, self._named))
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_endpoint})

    def _guarded(self, method: str, surface: Surface, serve: Serve) -> ASGIApp:
        """Puts an endpoint behind the gate and turns its exceptions into error answers."""

        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            callers = self.gate.callers
            sending = Sending(send, scope[CUT_OFF], self.stalled_seconds, callers.unread)
            try:
                with self.gate.visit(method, presented(scope)) as caller:
                    async with self.gate.while_in_force(caller):
                        await serve(surface, scope, receive, sending)
            except Gone:
                return
            except DomainError as error:
                callers.refused(error)
                await sending.refuse(surface, error)
            except Exception:
                logger.exception("%s failed", scope["path"])
                await sending.refuse(surface, DomainError(Reason.INTERNAL_ERROR, "internal error"))

        return handle

    async def _models(
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
    ) -> None:
        ends = {"first_id": self.model, "last_id": self.model, "has_more": False}
        table = {"object": "list", "data": [self._describe_model()], **ends}
        await sending.json(json.dumps(table))

    async def _named(
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
    ) -> None:
        # Any name is accepted, as for turns: agents use the name that they were written for.
        await sending.json(json.dumps(self._describe_model()))

    def _describe_model(self) -> dict[str, object]:
        """Describes the model for OpenAI and Anthropic at once, because both use the same path."""
        ours = {"id": self.model, "object": "model", "created": 0, "owned_by": "penstock"}
        created = "1970-01-01T00:00:00Z"
        return {**ours, "type": "model", "display_name": self.model, "created_at": created}

    def _body(
        self, scope: Scope, receive: Receive
    ) -> contextlib.AbstractAsyncContextManager[bytes]:
        return read_body(scope, receive, self.gate.callers, self.check_memory, self.stalled_seconds)

    async def _count(
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
    ) -> None:
        async with self._body(scope, receive) as body:

            def count() -> int:
                request = self.counting.read_count(body)
                return len(self.renderer.render(request.messages, request.tools))

            counted = await _off_loop(len(body), count)
        await sending.json(json.dumps({"input_tokens": counted}))

    async def _answer(
        self, surface: Surface, scope: Scope, receive: Receive, sending: Sending
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
            request=request,
            digest=digest.digest(),
            says_retry=headers.get(RETRY_HEADER, "0") not in ("", "0"),
        )
        trace = telemetry.incoming(headers.items())
        await unless_gone(receive, self._tell(surface, asked, trace, sending))

    async def _tell(self, surface: Surface, asked: Asked, trace: Context, sending: Sending) -> None:
        request = asked.request
        async with self.turns.ask(asked, trace) as answer:
            turn = answer.turn
            reply = Reply(
                answer.answer_id, self.model, turn.context_token_count, turn.budget, turn.sampling
            )
            if request.stream:
                before = turn.record.token_array()[: turn.context_token_count].tolist()
                stream = self.renderer.open_stream(before, answer.tools)
                deltas = tell(self.turns, answer, reply, stream)
                async with contextlib.aclosing(deltas):
                    async for event in surface.events(request, reply, deltas):
                        await sending.event(event)
                await sending.end()
            else:
                await tell_whole(self.turns, answer, reply)
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
