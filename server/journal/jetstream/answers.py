"""Answers and errors of a NATS JetStream stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class JetStreamError(Exception):
    """The stream refused a request or cannot be reached. The message is shown to the user."""


class Unreachable(JetStreamError):
    """NATS did not answer within the patience of the connection."""


class Fenced(JetStreamError):
    """Another server writes to the stream."""


class StreamRefused(JetStreamError):
    """The NATS server refused a request, or is not configured as required. `code` is zero without one."""

    def __init__(self, description: str, code: int) -> None:
        super().__init__(description)
        self.code = code


@dataclass(frozen=True, slots=True)
class StreamState:
    first: int
    last: int
    """Sequence of the newest message ever stored, even if it was removed since."""
    byte_count: int
    config: dict[str, Any]
    leader: str
    """Name of the NATS server that keeps it; empty if the answer does not include it."""


@dataclass(frozen=True, slots=True)
class Fetched:
    sequence: int
    subject: str
    message_id: str
    body: bytes


def state_in(table: dict[str, Any]) -> StreamState:
    state = table["state"]
    cluster: dict[str, Any] = table.get("cluster") or {}
    return StreamState(
        int(state["first_seq"]),
        int(state["last_seq"]),
        int(state["bytes"]),
        table["config"],
        str(cluster.get("leader", "")),
    )
