"""Surfaces: the formats of other services, as the endpoints use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock.server.core.errors import DomainError

if TYPE_CHECKING:
    from penstock.server.http.reply import Reply, ReplyPart
    from penstock.server.http.requests import AgentRequest


class Surface(Protocol):
    """Requests, answers and errors in the format of one service."""

    def read(self, body: bytes) -> AgentRequest: ...

    # The answer: as JSON, or as server-sent events.
    def whole(self, request: Any, reply: Reply) -> str: ...
    def events(
        self, request: Any, reply: Reply, deltas: AsyncGenerator[ReplyPart]
    ) -> AsyncIterator[str]: ...

    # An error: as the body of an answer, or as the last event of a stream.
    def error(self, error: DomainError) -> Mapping[str, object]: ...
    def error_event(self, error: DomainError) -> str: ...
