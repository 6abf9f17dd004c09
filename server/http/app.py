"""Endpoints compatible with other services' SDKs: routes to surfaces, behind the same gate as gRPC calls.

docs/guides/endpoints.md lists the paths. `/health` is for probes, without authentication.

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
from penstock.server.http.connection import Gone, HttpCall, presented
from penstock.server.http.reply import Reply, tell, tell_whole
from penstock.server.http.surface import Surface
from penstock.server.http.turns import AgentTurns
from penstock.server.security.gate import Gate
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from penstock.server.http.messages import Messages
    from penstock.server.text.renderer import Renderer

T = TypeVar("T")
logger = logging.getLogger(__name__)

# The rpcs whose roles apply to the endpoints.
TURNS = "penstock.v1.RolloutService/Generate"
MODELS = "penstock.v1.RolloutService/GetServerInfo"
# Longer bodies are parsed off the event loop.
LONG_BODY = 65_536

Serve = Callable[[Surface, HttpCall], Awaitable[None]]


@dataclass(frozen=True, eq=False)
class Endpoints:
    surfaces: Mapping[str, Surface]
    """By path suffix."""
    messages: Messages
    turns: AgentTurns
    renderer: Renderer
    model: str
    gate: Gate
    check_memory: Callable[[int], None]
    """Raises MEMORY_BUDGET if this many bytes do not fit."""
    stalled_seconds: float

    def application(self) -> Starlette:
        guarded = partial(_Endpoint, self.gate, self.stalled_seconds)
        routes = [Route("/health", _health, methods=["GET"])]
        for end, surface in self.surfaces.items():
            routes += _routes(end, "POST", guarded(TURNS, surface, self._answer))
        count = guarded(MODELS, self.messages, self._count)
        routes += _routes("messages/count_tokens", "POST", count)
        first = next(iter(self.surfaces.values()))
        routes += _routes("models", "GET", guarded(MODELS, first, self._models))
        routes += _routes("models/{name:path}", "GET", guarded(MODELS, first, self._named))
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_endpoint})

    async def _models(self, surface: Surface, call: HttpCall) -> None:
        ends = {"first_id": self.model, "last_id": self.model, "has_more": False}
        table = {"object": "list", "data": [self._describe_model()], **ends}
        await call.json(json.dumps(table))

    async def _named(self, surface: Surface, call: HttpCall) -> None:
        # Any name is accepted, as for turns: agents use the name that they were written for.
        await call.json(json.dumps(self._describe_model()))

    def _describe_model(self) -> dict[str, object]:
        """Describes the model for OpenAI and Anthropic at once, because both use the same path."""
        ours = {"id": self.model, "object": "model", "created": 0, "owned_by": "penstock"}
        created = "1970-01-01T00:00:00Z"
        return {**ours, "type": "model", "display_name": self.model, "created_at": created}

    async def _count(self, surface: Surface, call: HttpCall) -> None:
        async with call.body(self.check_memory) as body:

            def count() -> int:
                request = self.messages.read_count(body)
                return len(self.renderer.render(request.messages, request.tools))

            counted = await _off_loop(len(body), count)
        await call.json(json.dumps({"input_tokens": counted}))

    async def _answer(self, surface: Surface, call: HttpCall) -> None:
        scope = call.scope
        digest = hashlib.blake2b(scope["path"].encode() + b"\0", digest_size=16)
        async with call.body(self.check_memory) as body:
            digest.update(body)
            request = await _off_loop(len(body), partial(surface.read, body))
        # Free it now, because a turn may take long.
        del body
        headers = Headers(scope=scope)
        asked = Asked(
            attempt_id=str(scope["path_params"].get("attempt", "")),
            request=request,
            digest=digest.digest(),
            says_retry=headers.get("x-stainless-retry-count", "0") not in ("", "0"),
            trace=telemetry.incoming(headers.items()),
        )
        await call.unless_gone(self._tell(surface, asked, call))

    async def _tell(self, surface: Surface, asked: Asked, call: HttpCall) -> None:
        request = asked.request
        async with self.turns.ask(asked) as answer:
            turn = answer.turn
            reply = Reply(
                answer.answer_id, self.model, turn.context_token_count, turn.budget, turn.sampling
            )
            if request.stream:
                before = turn.record.token_array(0, turn.context_token_count).tolist()
                stream = self.renderer.open_stream(before, answer.tools)
                deltas = tell(self.turns, answer, reply, stream)
                async with contextlib.aclosing(deltas):
                    async for event in surface.events(request, reply, deltas):
                        await call.event(event)
                await call.end()
            else:
                await tell_whole(self.turns, answer, reply)
                await call.json(surface.whole(request, reply))
            answer.note.delivered = True


@dataclass(frozen=True, eq=False)
class _Endpoint:
    """An ASGI application behind the gate. Starlette would call a function with a request instead."""

    gate: Gate
    stalled_seconds: float
    method: str
    surface: Surface
    serve: Serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        callers = self.gate.callers
        call = HttpCall(scope, receive, send, callers, self.stalled_seconds)
        try:
            with self.gate.visit(self.method, presented(scope)) as caller:
                async with self.gate.while_in_force(caller):
                    await self.serve(self.surface, call)
        except Gone:
            return
        except DomainError as error:
            callers.refused(error)
            await call.refuse(self.surface, error)
        except Exception:
            logger.exception("%s failed", scope["path"])
            await call.refuse(self.surface, DomainError(Reason.INTERNAL_ERROR, "internal error"))


def _routes(end: str, method: str, endpoint: _Endpoint) -> list[Route]:
    # Ids may contain slashes. Anthropic's SDKs add the version to the path themselves.
    paths = (f"/v1/{end}", *(f"/v1/attempts/{{attempt:path}}/{v}{end}" for v in ("v1/", "")))
    return [Route(path, endpoint, methods=[method]) for path in paths]


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
