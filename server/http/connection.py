"""One HTTP connection's request and answer: both bounded in bytes and time, and charged to their caller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from penstock.server.core.errors import DomainError
from penstock.server.http import errors as http_errors
from penstock.server.http.server import CLIENT_NAMES, CUT_OFF, WRITE_BUFFER_BYTES
from penstock.server.http.surface import Surface
from penstock.server.security.callers import Callers
from penstock.server.security.credentials import AUTHORIZATION
from penstock.server.security.gate import Presented, Unread
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

# This much of a body, or its end, must arrive within each `limits.stalled_seconds`.
PIECE_BYTES = 262_144


class Gone(Exception):
    """The connection was lost, or its client stopped reading."""


@dataclass(eq=False)
class HttpCall:
    """One request and its answer. The answer is charged to its caller's account until it is read."""

    scope: Scope
    receive: Receive
    put: Send
    callers: Callers
    stalled_seconds: float
    _begun: bool = False
    _ended: bool = False

    def __post_init__(self) -> None:
        self._unread: Unread = self.callers.unread

    @contextlib.asynccontextmanager
    async def body(self, check_memory: Callable[[int], None]) -> AsyncGenerator[bytes]:
        """Yields the whole body, which is charged to its caller's account until the block exits."""
        most = self.callers.message_bytes
        announced = Headers(scope=self.scope).get("content-length", "0")
        body, size, more = bytearray(), int(announced) if announced.isdigit() else 0, True
        now = asyncio.get_running_loop().time
        with self.callers.arriving(check_memory) as keep:
            try:
                # The timeout covers a whole piece. A byte at a time could hold the body in memory forever.
                async with asyncio.timeout(self.stalled_seconds) as limit:
                    while more and size <= most:
                        message = await self.receive()
                        if message["type"] == "http.disconnect":
                            raise Gone
                        part = message.get("body", b"")
                        keep(len(part))
                        before = len(body) // PIECE_BYTES
                        body += part
                        if len(body) // PIECE_BYTES > before:
                            limit.reschedule(now() + self.stalled_seconds)
                        more, size = message.get("more_body", False), max(size, len(body))
            except TimeoutError:
                raise DomainError(
                    Reason.MALFORMED_MESSAGE,
                    f"the body stalled at {len(body)} bytes: less than {PIECE_BYTES} more arrived within "
                    f"{self.stalled_seconds:g} s",
                    {"body_bytes": len(body), "seconds": self.stalled_seconds},
                ) from None
            if size > most:
                raise DomainError(
                    Reason.MESSAGE_TOO_LARGE,
                    f"the body has at least {size} bytes; at most {most} are allowed",
                    {"message_bytes": size, "limit": most},
                )
            yield bytes(body)

    async def unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Cancels the work and raises Gone if the client disconnects."""

        async def gone() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass

        working = asyncio.create_task(work)
        leaving = asyncio.create_task(gone())
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Gone
            working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def json(
        self, text: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        body = text.encode()
        length = {"content-length": str(len(body))}
        with self._unread(len(body)):
            await self._start(status, "application/json", {**length, **(headers or {})})
            await self._piece(body)
            await self.end()

    async def event(self, event: str) -> None:
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
        """Waits until the previous piece has been taken."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
        self._ended = True

    async def refuse(self, surface: Surface, error: DomainError) -> None:
        """Does nothing once the answer has ended."""
        # The call has already ended, and its charges with it.
        self._unread = lambda _: contextlib.nullcontext()
        with contextlib.suppress(Gone):
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
            async with asyncio.timeout(self.stalled_seconds):
                await self.put(message)
        except TimeoutError:
            self.scope[CUT_OFF]()
            self._ended = True
            logger.warning(
                "client read nothing for %g s; closed the connection", self.stalled_seconds
            )
            raise Gone from None


def presented(scope: Scope) -> Presented:
    """What gRPC would present for the same caller."""
    headers = Headers(scope=scope).items()
    if AUTHORIZATION not in dict(headers):
        # Anthropic's SDKs send their API key in this header.
        headers = [
            (AUTHORIZATION, f"Bearer {value}") if name == "x-api-key" else (name, value)
            for name, value in headers
        ]
    host, port = scope.get("client") or ("", 0)
    peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    shown = [name.encode() for name in scope.get(CLIENT_NAMES, ())]
    return Presented(headers, peer, lambda: {"x509_common_name": shown} if shown else {})
