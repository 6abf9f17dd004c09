"""What a stream of NATS JetStream answers, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class JetStreamError(Exception):
    """The stream refuses, or cannot be reached; the message is for a person."""


class Unreachable(JetStreamError):
    """Nobody answers for longer than is waited."""


class Fenced(JetStreamError):
    """Another server writes to the stream."""


class Refused(JetStreamError):
    """The server says no."""

    def __init__(self, description: str, code: int) -> None:
        super().__init__(description)
        self.code = code


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a stream holds."""

    first: int
    last: int
    """Place of the newest message that there ever was."""
    byte_count: int
    config: dict[str, Any]
    leader: str
    """Name of the server that keeps it; empty where that is not said."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A message that was read."""

    sequence: int
    subject: str
    message_id: str
    body: bytes


def state_in(table: dict[str, Any]) -> StreamState:
    """Of an answer that describes a stream."""
    state = table["state"]
    cluster: dict[str, Any] = table.get("cluster") or {}
    return StreamState(
        int(state["first_seq"]),
        int(state["last_seq"]),
        int(state["bytes"]),
        table["config"],
        str(cluster.get("leader", "")),
    )
