"""States of a turn:

    new -> starting -> waiting -> sampling -> recording -> finished

    sampling -> waiting                 the engine's request was lost
    sampling -> moving -> waiting       another version is active
    waiting, moving -> recording        the attempt ended without the engine, or while it moved
    finished -> starting                another attempt

- *starting*: the attempt has begun, but its task has not run yet.
- *waiting*: weights are being switched, or the engine has not yet taken the request. An abort here ends
  the turn with the tokens it has.
- *sampling*: each delta is appended to the trajectory's record first and offered to subscribers second.
  Tokens of an unconfirmed weight version are withheld until it is confirmed. If the version fails its
  probe, the turn ends ABORTED at the last token before it. If the pool loses the engine that worked on the
  request, the turn waits again and requests the rest from the exact token.
- *moving*: a turn that an adapter samples moves to another version. The engine's request ends, and a new
  one begins at the exact token under the version that is active by then. Callers only see a new segment.
- *recording*: the engine no longer works on the turn. It ends for its callers once the journal has its
  outcome.
- *finished*: STOP, LENGTH or ABORTED, or failed with a reason. A turn that ended ABORTED or failed keeps
  its tokens and can be resumed. That is a new attempt with its own request id and the rest of the turn's
  budget. A turn whose budget is spent finishes with LENGTH; the engine is never asked for zero tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import Finish, Sampling
from penstock.server.text.renderer import Written
from penstock.v1 import trajectory_pb2

FINISH_REASONS = {
    Finish.STOP: trajectory_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: trajectory_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: trajectory_pb2.FINISH_REASON_ABORTED,
}


class TurnState(Enum):
    NEW = "new"
    STARTING = "starting"
    WAITING = "waiting"
    SAMPLING = "sampling"
    MOVING = "moving"
    RECORDING = "recording"
    FINISHED = "finished"

    @property
    def in_flight(self) -> bool:
        return self not in (TurnState.NEW, TurnState.FINISHED)

    @property
    def in_engine(self) -> bool:
        """Whether the engine has the turn's request or is just being given it."""
        return self in (TurnState.SAMPLING, TurnState.MOVING)


TRANSITIONS: Mapping[TurnState, frozenset[TurnState]] = {
    TurnState.NEW: frozenset({TurnState.STARTING}),
    TurnState.STARTING: frozenset({TurnState.WAITING}),
    TurnState.WAITING: frozenset({TurnState.SAMPLING, TurnState.RECORDING}),
    TurnState.SAMPLING: frozenset({TurnState.WAITING, TurnState.MOVING, TurnState.RECORDING}),
    TurnState.MOVING: frozenset({TurnState.WAITING, TurnState.RECORDING}),
    TurnState.RECORDING: frozenset({TurnState.FINISHED}),
    TurnState.FINISHED: frozenset({TurnState.STARTING}),
}


@dataclass(frozen=True, slots=True)
class TurnSampling(Sampling):
    max_tokens: int = 0
    """Zero means up to the context's limit."""

    def attempt(self, number: int, max_tokens: int) -> Sampling:
        """Each attempt of a seeded turn has its own seed, because the engine's generator restarts with
        it."""
        seed = None if self.seed is None else (self.seed + number) % 2**63
        return replace(self, max_tokens=max_tokens, seed=seed)


@dataclass(slots=True, eq=False)
class TurnAttempt:
    started_version: int | None = None
    """The version that was active when it was admitted."""
    finish: Finish | None = None
    error: DomainError | None = None
    policy_token_count: int = 0
    """Policy tokens of the turn when the attempt ended, including those of earlier attempts."""
    record_end: tuple[int, int] = (0, 0)
    """Segments of the record when the attempt ended, and tokens in the last of them."""
    cached_token_count: int = 0
    written: Written | None = None
    """In a conversation, what the policy wrote in the turn up to its end."""
    recorded: Awaitable[object] | None = None
    """Await this before reporting that the attempt began."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: Broadcast = field(default_factory=Broadcast)
    """Notified of new tokens, of the admission and of the end."""

    @property
    def finish_reason(self) -> trajectory_pb2.FinishReason.ValueType:
        """Unspecified until it stops. ABORTED if it failed, because the turn can be continued."""
        if self.finish is None and self.error is None:
            return trajectory_pb2.FINISH_REASON_UNSPECIFIED
        return FINISH_REASONS[self.finish or Finish.ABORTED]
