"""What agents ask over HTTP: their requests, the answers, and which answer a request follows or repeats."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.server.core.errors import FieldInvalid
from penstock.server.http.requests import AgentRequest, Previous
from penstock.server.rollouts.start import StreamWish
from penstock.server.turns.history import hold, tools_digest
from penstock.server.turns.matching import Match, match_after
from penstock.server.turns.trajectory import Answered, TrajectoryRecord, Turn
from penstock.v1 import rollout_service_pb2

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from penstock.server.text.messages import Tool

MAX_REFUSED = 4_096
"""Most refused requests to remember. Their agents retry within seconds."""


@dataclass(frozen=True, slots=True)
class Asked:
    attempt_id: str
    """From the URL; empty for a request without an attempt."""
    request: AgentRequest
    digest: bytes
    """Digest of the request as received."""
    says_retry: bool
    trace: Context = field(repr=False)


@dataclass(slots=True, eq=False)
class Answer:
    """One turn, as delivered to one request."""

    turn: Turn
    how: StreamWish
    trace: Context = field(repr=False)
    note: Answered
    finished: rollout_service_pb2.TurnFinished | None = None
    """Set when the turn is whole."""

    @property
    def answer_id(self) -> str:
        """Id of the turn. All requests that receive this turn share it."""
        return f"{self.turn.record.trajectory_id}-{self.turn.index}"

    @property
    def tools(self) -> Sequence[Tool]:
        history = self.turn.record.history
        return () if history is None else history.tools


class RefusedRequests:
    """Counts, by digest, requests that were refused before a turn began. Keeps the newest."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def add(self, digest: bytes) -> None:
        self._counts[digest] = self._counts.pop(digest, 0) + 1
        if len(self._counts) > MAX_REFUSED:
            self._counts.popitem(last=False)

    def take(self, digest: bytes) -> bool:
        """Consumes one count and returns whether a retry can belong to a refused request."""
        count = self._counts.pop(digest, 0)
        if count > 1:
            self._counts[digest] = count - 1
        return count > 0


def named(records: Sequence[TrajectoryRecord], previous: Previous, asked: AgentRequest) -> Match:
    """Matches a request that names the answer it follows. Raises FIELD_INVALID."""
    trajectory_id, _, index = previous.answer_id.rpartition("-")
    for record in records:
        if record.trajectory_id != trajectory_id or index not in map(str, range(record.turn_count)):
            continue
        found = match_after(record, int(index), asked.messages)
        if found is None or record.history is None:
            break
        if asked.messages[0].role == "assistant":
            raise FieldInvalid("input", "must answer what the policy wrote")
        # The server only has digests of earlier messages. Changing them needs the whole conversation.
        if asked.tools and tools_digest(asked.tools) != record.history.digest:
            raise FieldInvalid("tools", f"{_DIFFER} {previous.parameter}")
        if previous.instructions is not None:
            wanted, first = hold(previous.instructions, 0), record.history.messages[0]
            if not first.is_meant_by(wanted.meaning, wanted.reasoning):
                raise FieldInvalid("instructions", f"{_DIFFER} {previous.parameter}")
        return found
    raise no_answer(previous)


_DIFFER = "differs from the earlier request: send the whole conversation, without"


def no_answer(previous: Previous) -> FieldInvalid:
    return FieldInvalid(
        previous.parameter, "does not name a complete answer of this attempt", previous.answer_id
    )
