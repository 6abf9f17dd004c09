"""Surfaces: the formats of other services, as the endpoints use them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock.server.core.errors import DomainError

if TYPE_CHECKING:
    from penstock.server.http.reply import Reply, ReplyPart
    from penstock.server.http.requests import Previous
    from penstock.server.text.messages import Message, Tool


class SurfaceRequest(Protocol):
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

    def read(self, body: bytes) -> SurfaceRequest:
        """Raises DomainError."""
        ...

    def whole(self, request: Any, reply: Reply) -> str:
        """The answer as JSON."""
        ...

    def events(
        self, request: Any, reply: Reply, deltas: AsyncGenerator[ReplyPart]
    ) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        ...

    def error(self, error: DomainError) -> Mapping[str, object]:
        """The body of an answer."""
        ...

    def error_event(self, error: DomainError) -> str:
        """The last event of a stream."""
        ...


class Counting(Surface, Protocol):
    def read_count(self, body: bytes) -> SurfaceRequest:
        """Raises DomainError."""
        ...
