"""Turns: one server-owned task each; a call only subscribes to it.

States of a turn:

    waiting -> sampling -> finished (STOP | LENGTH | ABORTED, or failed with a reason)

- *waiting*: weights are being switched, or the engine has not yet taken the request. An abort here
  ends the turn with the tokens it has.
- *sampling*: each delta is appended to the trajectory's record first and offered to subscribers second.
  What a weight version sampled that is not confirmed yet is withheld until it is: with a version that
  fails its probe, the turn ends ABORTED at the token before.
- *moving*: a turn that an adapter samples can be moved on: the engine's request ends, and another begins at
  the exact token under the version that is active by then. Its callers see a new segment and no more.
- *placed again*: a request that nobody works on any more, because its place in a pool was lost, is made
  again from the exact token, as often as it takes; but a turn that is lost again and again (`MOST_LOST`)
  before a token is sampled has failed.
- *recorded*: the engine no longer works on it; it ends, for everybody who waits, once the journal has
  what it came to.
- *finished*: a turn that ended ABORTED can be resumed: a new attempt with a request id of its own and
  what is left of the turn's budget. A budget that is spent finishes with LENGTH; the engine is never
  asked for zero tokens. A turn that failed (the engine died, weights cannot be trusted) keeps what it
  has and can be resumed too.

A subscriber holds a cursor into the record and no queue: one that reads slowly costs nothing, and one
that is lost loses nothing. What it and an abort report is the attempt they belong to, how it ended and
how far it came, also where another caller has gone on with the turn before they looked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import (
    Delta,
    Engine,
    EngineLost,
    EngineRequest,
    Finish,
    RequestLost,
    Sampling,
)
from penstock.server.text.stop_strings import Decode, StopAcrossResume
from penstock.v1 import trajectory_pb2
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from opentelemetry.trace import Span

    from penstock.server.text.renderer import Written
    from penstock.server.turns.store import TrajectoryRecord

logger = logging.getLogger(__name__)

MOST_LOST = 8
"""Requests of a turn that are lost in a row, none of which sampled a token, before the turn has failed: it
may be what its engines die of."""

FINISH_REASONS = {
    Finish.STOP: trajectory_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: trajectory_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: trajectory_pb2.FINISH_REASON_ABORTED,
}


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """How a turn samples over all its attempts; `max_tokens` zero means as the context allows."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def attempt(self, number: int, max_tokens: int) -> Sampling:
        """The sampling of one attempt.

        A seeded attempt draws from a seed of its own: the engine's generator starts anew with each.
        """
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            seed=None if self.seed is None else (self.seed + number) % 2**63,
            ignore_eos=self.ignore_eos,
        )


@dataclass(slots=True, eq=False)
class TurnAttempt:
    """One attempt at a turn, from its start to its end."""

    started_version: int | None = None
    """The version it was admitted under."""
    finish: Finish | None = None
    error: DomainError | None = None
    policy_token_count: int = 0
    """Policy tokens of the turn when it ended, those of earlier attempts among them."""
    record_end: tuple[int, int] = (0, 0)
    """Segments of the record when it ended, and tokens in the last of them."""
    cached_token_count: int = 0
    written: Written | None = None
    """What the policy wrote in the turn up to its end, where it is a conversation's."""
    recorded: Awaitable[object] | None = None
    """To be awaited before anybody is told that it began."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: Broadcast = field(default_factory=Broadcast)
    """Of its tokens, its admission and its end."""

    @property
    def finish_reason(self) -> trajectory_pb2.FinishReason.ValueType:
        """Why it stopped, as far as it has; ABORTED where it failed, since the turn can be continued."""
        if self.finish is None and self.error is None:
            return trajectory_pb2.FINISH_REASON_UNSPECIFIED
        return FINISH_REASONS[self.finish or Finish.ABORTED]


@dataclass(slots=True, eq=False)
class Turn:
    """One turn of the policy, over all its attempts."""

    record: TrajectoryRecord
    index: int
    sampling: TurnSampling
    budget: int
    """Most policy tokens of the turn, bounded by the context."""
    context_token_count: int
    """Tokens the policy sees before it writes."""
    span: Span
    trace_headers: dict[str, str]
    stream_interval: int
    policy_token_count: int = 0
    finish_reason_before: trajectory_pb2.FinishReason.ValueType = (
        trajectory_pb2.FINISH_REASON_UNSPECIFIED
    )
    """Of one that found the context full: why the last one before it stopped that had room."""
    attempts: int = 0
    """The engine's requests so far."""
    attempt: TurnAttempt = field(default_factory=TurnAttempt)
    """The one under way, or the last one."""
    request_id: str | None = None
    """The engine's request while it has one."""
    adapter_version: int | None = None
    """The adapter that samples that request; None for the full weights alone."""
    moving: bool = False
    """Whether that request was ended so that the turn goes on under the active version."""
    begun: bool = False
    """Whether the attempt's task has run at all: one that has not cannot be cancelled cleanly."""
    abort_requested: bool = False
    over: bool = False
    """Whether the engine is done with the attempt, which is only being recorded."""
    task: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> bool:
        """Whether an attempt is under way."""
        return self.task is not None

    @property
    def finish_reason(self) -> trajectory_pb2.FinishReason.ValueType:
        """Why the last attempt stopped; unspecified while one is in flight."""
        if self.in_flight:
            return trajectory_pb2.FINISH_REASON_UNSPECIFIED
        return self.attempt.finish_reason

    @property
    def last_finish_reason(self) -> trajectory_pb2.FinishReason.ValueType:
        """Why the last turn stopped that had room: this one, or the one before it."""
        # Older servers did not write down the one before.
        return (not self.budget and self.finish_reason_before) or self.finish_reason

    @property
    def resumable(self) -> bool:
        """Whether Continue without an observation goes on with it."""
        return not self.in_flight and (
            self.attempt.error is not None or self.attempt.finish is Finish.ABORTED
        )

    def policy_tokens(self, count: int) -> NDArray[np.int32]:
        """The first tokens the policy wrote in this turn, shape [count]."""
        start = self.context_token_count
        return self.record.token_array()[start : start + count]


class Switch(Protocol):
    """What a turn needs of the weight switch."""

    @property
    def unconfirmed_version(self) -> int | None:
        """The version whose tokens are withheld, while one is being probed."""
        ...

    @property
    def active_adapter(self) -> int | None:
        """The active version where it is an adapter."""
        ...

    async def confirmed(self) -> bool:
        """Waits for the verdict on that version; False where what it sampled must not be kept."""
        ...

    def admission(self, *, pinned: bool = False) -> AbstractAsyncContextManager[int]:
        """Waits while weights switch; inside, the version it yields stays the active one. `pinned` is a
        turn of one version only."""
        ...


class Recorder(Protocol):
    """Where turns are recorded."""

    def turn_began(self, record: TrajectoryRecord) -> Awaitable[object]:
        """What is awaited before anybody is told that the last turn, or an attempt at it, began."""
        ...

    def turn_ended(self, record: TrajectoryRecord) -> Awaitable[object]:
        """What is awaited before anybody is told how its last turn ended. Raises DomainError."""
        ...


class TurnRunner:
    """Runs turns on the engine and keeps track of those in flight."""

    def __init__(self, engine: Engine, switch: Switch, decode: Decode, recorder: Recorder) -> None:
        self._engine = engine
        self._switch = switch
        self._decode = decode
        self._recorder = recorder
        self._in_flight: dict[str, Turn] = {}
        self._background: set[asyncio.Task[object]] = set()
        self._ended = Broadcast()
        self.on_tokens: Callable[[int, int], None] | None = None
        """Called with the count and the weight version of tokens sampled, for metrics."""
        self.on_started: Callable[[Turn], None] | None = None
        """Called when an attempt at a turn has begun, within the call that asked for it."""
        self.on_ended: Callable[[Turn, TurnAttempt], Awaitable[None]] | None = None
        """Called when the engine no longer works on an attempt, before that is recorded."""
        self.on_left: Callable[[], None] | None = None
        """Called when an engine's request has ended, and no longer needs its adapter."""

    @property
    def in_flight(self) -> list[Turn]:
        """Turns not yet finished."""
        return list(self._in_flight.values())

    @property
    def sampling(self) -> list[Turn]:
        """Turns the engine has, or is just being given."""
        return [turn for turn in self._in_flight.values() if turn.request_id is not None]

    def start(self, turn: Turn) -> None:
        """Begins an attempt at a turn; the turn must not be in flight."""
        turn.attempt = TurnAttempt()
        turn.abort_requested = turn.begun = turn.over = False
        turn.attempts += 1
        self._in_flight[turn.record.trajectory_id] = turn
        turn.task = asyncio.create_task(self._run(turn), name=f"turn {turn.record.trajectory_id}")
        turn.attempt.recorded = self._recorder.turn_began(turn.record)
        if self.on_started is not None:
            self.on_started(turn)

    async def record_again(self, turn: Turn) -> None:
        """Has recorded what changed of a turn since it ended. Raises JOURNAL_FAILED."""
        await self._recorder.turn_ended(turn.record)

    async def _run(self, turn: Turn) -> None:
        turn.begun = True
        attempt = turn.attempt
        try:
            await self._engage(turn, attempt)
            attempt.policy_token_count = turn.policy_token_count
            attempt.record_end = turn.record.end
            if self.on_ended is not None:
                await self.on_ended(turn, attempt)
            await self._recorder.turn_ended(turn.record)
        except DomainError as error:
            attempt.error = error
        finally:
            turn.task = None
            del self._in_flight[turn.record.trajectory_id]
            _end_span(turn)
            attempt.ended.set()
            attempt.changed.notify()
            self._ended.notify()

    async def _engage(self, turn: Turn, attempt: TurnAttempt) -> None:
        """The attempt, up to where the engine no longer works on it."""
        try:
            attempt.finish = await self._attempt(turn)
        except asyncio.CancelledError:
            if not turn.abort_requested:
                raise
            attempt.finish = Finish.ABORTED
        except EngineLost as error:
            attempt.error = DomainError(Reason.ENGINE_LOST, f"the engine is lost: {error}")
        except DomainError as error:
            attempt.error = error
        except Exception:
            # The turn's own boundary: its callers get a status, the operator the traceback.
            logger.exception("turn %s of %s failed", turn.index, turn.record.trajectory_id)
            attempt.error = DomainError(Reason.INTERNAL_ERROR, "internal error")
        finally:
            turn.over = True
            self._leave(turn)
            self._ended.notify()

    def _leave(self, turn: Turn) -> None:
        """The engine has no request of this turn any more."""
        turn.request_id = turn.adapter_version = None
        turn.moving = False
        if self.on_left is not None:
            self.on_left()

    async def _attempt(self, turn: Turn) -> Finish:
        lost = 0
        while True:
            before = turn.policy_token_count
            try:
                finish = await self._sample(turn)
            except RequestLost as error:
                if turn.abort_requested:
                    return Finish.ABORTED
                if self._has_stopped(turn):
                    return Finish.STOP
                lost = 0 if turn.policy_token_count > before else lost + 1
                if lost == MOST_LOST:
                    raise DomainError(
                        Reason.INTERNAL_ERROR,
                        f"lost {lost} times in a row before a token of it was sampled: {error}",
                    ) from error
            else:
                if finish is not Finish.ABORTED or not turn.moving or turn.abort_requested:
                    return finish
            self._leave(turn)
            turn.attempts += 1

    def _has_stopped(self, turn: Turn) -> bool:
        """Whether what the policy has written ends the turn: only the word of that was lost."""
        written, sampling = turn.policy_tokens(turn.policy_token_count), turn.sampling
        if not len(written):
            return False
        if int(written[-1]) in self._stop_tokens(sampling):
            return True
        text = self._decode(written.tolist()) if sampling.stop else ""
        return any(stop in text for stop in sampling.stop)

    def _stop_tokens(self, sampling: TurnSampling) -> set[int]:
        """The tokens that end a turn."""
        own = set(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | set(self._engine.description.eos_token_ids)

    def lets_stand(self, turn: Turn, sampling: TurnSampling) -> bool:
        """Whether a turn under this sampling could have got as far as this one: nothing that it has written
        would have ended it."""
        written = turn.policy_tokens(turn.policy_token_count).tolist()
        if 0 < sampling.max_tokens < len(written):
            return False
        if not self._stop_tokens(sampling).isdisjoint(written):
            return False
        text = self._decode(written) if sampling.stop else ""
        return not any(stop in text for stop in sampling.stop)

    async def _sample(self, turn: Turn) -> Finish:
        """One request of the engine's, to its end."""
        if turn.abort_requested:
            return Finish.ABORTED
        remaining = turn.budget - turn.policy_token_count
        if remaining <= 0:
            if turn.attempt.started_version is None:
                async with self._switch.admission() as version:
                    turn.attempt.started_version = version
            return Finish.LENGTH
        deltas = await self._admit(turn, remaining)
        stop_check = StopAcrossResume(
            turn.sampling.stop, turn.policy_tokens(turn.policy_token_count), self._decode
        )
        async with contextlib.aclosing(deltas):
            if turn.abort_requested or turn.moving:
                # It came while the engine was taking the request.
                assert turn.request_id is not None
                await self._engine.abort([turn.request_id])
            async for delta in deltas:
                if (
                    delta.weight_version == self._switch.unconfirmed_version
                    and not await self._switch.confirmed()
                ):
                    return Finish.ABORTED
                kept, stopped = stop_check.cut(delta)
                self._append(turn, kept)
                if stopped:
                    return Finish.STOP
                if delta.finish is not None:
                    turn.attempt.cached_token_count = delta.cached_token_count
                    return delta.finish
        raise EngineLost("it ended a request without a reason")

    async def _admit(self, turn: Turn, remaining: int) -> AsyncGenerator[Delta]:
        """Hands the attempt to the engine, under the version that is active when it is taken."""
        record = turn.record
        required = record.required_weight_version
        async with self._switch.admission(pinned=required > 0) as version:
            if required and required != version:
                raise DomainError(
                    Reason.WEIGHT_VERSION_NOT_ACTIVE,
                    f"weight version {required} is required, {version} is active",
                    {"required": required, "active": version},
                )
            # From here on an abort goes through the engine, which may already have the request.
            turn.request_id = f"{record.trajectory_id}/{turn.index}/{turn.attempts}"
            turn.adapter_version = self._switch.active_adapter
            deltas = await self._engine.generate(
                EngineRequest(
                    request_id=turn.request_id,
                    token_ids=record.token_array(),
                    sampling=turn.sampling.attempt(turn.attempts - 1, remaining),
                    # Cache of other weights is never reused: the salt is the version.
                    cache_salt=str(version),
                    priority=record.priority,
                    stream_interval=turn.stream_interval,
                    trace_headers=turn.trace_headers,
                    adapter_version=turn.adapter_version,
                    trajectory_id=record.trajectory_id,
                    group_id=record.group_id,
                    required_weight_version=required,
                )
            )
            if turn.attempt.started_version is None:
                turn.attempt.started_version = version
            turn.attempt.changed.notify()
            return deltas

    def _append(self, turn: Turn, delta: Delta) -> None:
        count = len(delta.token_ids)
        if not count:
            return
        turn.record.append_policy(delta, turn.index, turn.sampling.temperature)
        turn.policy_token_count += count
        if self.on_tokens is not None:
            self.on_tokens(count, delta.weight_version)
        turn.attempt.changed.notify()

    async def abort(self, turns: Iterable[Turn]) -> list[tuple[Turn, TurnAttempt]]:
        """Stops turns; returns the attempts that were under way once the engine works on none of them.

        One that came to its own end first says so in its `finish`.
        """
        # Of now: a caller that goes on at once gives the turn another attempt.
        stopping = [(turn, turn.attempt) for turn in turns if turn.in_flight]
        request_ids: list[str] = []
        for turn, _ in stopping:
            turn.abort_requested = True
            if turn.request_id is not None:
                request_ids.append(turn.request_id)
            elif turn.task is not None and turn.begun and not turn.over:
                turn.task.cancel()
        if request_ids:
            await self._engine.abort(request_ids)
        for _, attempt in stopping:
            await attempt.ended.wait()
        return stopping

    async def move(self, turns: Iterable[Turn]) -> None:
        """Has turns go on under the version that is active when they are admitted again.

        Returns once the engine no longer works on them under the one before. One that is being aborted,
        or ends by itself, is not moved.
        """
        request_ids: list[str] = []
        for turn in turns:
            if turn.request_id is not None and not turn.abort_requested:
                turn.moving = True
                request_ids.append(turn.request_id)
        await self._engine.abort(request_ids)

    def abort_soon(self, turn: Turn) -> None:
        """Stops a turn whose caller is lost; nobody waits for it."""
        task: asyncio.Task[object] = asyncio.create_task(self.abort([turn]))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def wait_idle(self) -> None:
        """Returns when the engine works on no turn; those that still wait for admission may wait on."""
        while self.sampling:
            await self._ended.wait()


def _end_span(turn: Turn) -> None:
    span = turn.span
    span.set_attribute("gen_ai.usage.input_tokens", turn.context_token_count)
    span.set_attribute("gen_ai.usage.output_tokens", turn.policy_token_count)
    attempt = turn.attempt
    if attempt.error is not None:
        span.set_attribute("error.type", attempt.error.reason.value)
    elif attempt.finish is not None:
        span.set_attribute("gen_ai.response.finish_reasons", [attempt.finish.value])
    span.end()
