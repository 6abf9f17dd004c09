"""Turns: each runs as one task of the server, and calls only subscribe to it.

States of a turn:

    waiting -> sampling -> finished (STOP | LENGTH | ABORTED, or failed with a reason)

- *waiting*: weights are being switched, or the engine has not yet taken the request. An abort here
  ends the turn with the tokens it has.
- *sampling*: each delta is appended to the trajectory's record first and offered to subscribers second.
  Tokens of an unconfirmed weight version are withheld until it is confirmed. If the version fails its
  probe, the turn ends ABORTED at the last token before it.
- *moving*: a turn that an adapter samples can move to another version. The engine's request ends, and a new
  one begins at the exact token under the version that is active by then. Callers only see a new segment.
- *placed again*: if the pool loses the engine that worked on a request, the turn requests the rest again
  from the exact token. A turn that is lost `MOST_LOST` times in a row without a new token has failed.
- *recorded*: the engine no longer works on the turn. It ends for its callers once the journal has its
  outcome.
- *finished*: a turn that ended ABORTED can be resumed. That is a new attempt with its own request id and
  the rest of the turn's budget. A turn whose budget is spent finishes with LENGTH; the engine is never
  asked for zero tokens. A turn that failed (the engine died, weights cannot be trusted) keeps its tokens
  and can be resumed too.

A subscriber holds a cursor into the record and has no queue: a slow one costs nothing, and a lost one
loses nothing. Subscribers and aborts report on the attempt they belong to: how it ended, and after how many
tokens. That holds even if another caller has resumed the turn before they looked.
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
"""Requests of a turn lost in a row, none of which sampled a token, after which the turn fails. The turn may
be what kills its engines."""

FINISH_REASONS = {
    Finish.STOP: trajectory_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: trajectory_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: trajectory_pb2.FINISH_REASON_ABORTED,
}


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """How a turn samples over all its attempts. `max_tokens` of zero means up to the context's limit."""

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

        Each attempt of a seeded turn has its own seed, because the engine's generator restarts with each.
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
    """The version that was active when it was admitted."""
    finish: Finish | None = None
    error: DomainError | None = None
    policy_token_count: int = 0
    """Policy tokens of the turn when the attempt ended, including those of earlier attempts."""
    record_end: tuple[int, int] = (0, 0)
    """Segments of the record when the attempt ended, and tokens in the last of them."""
    cached_token_count: int = 0
    written: Written | None = None
    """What the policy wrote in the turn up to its end, if the turn is part of a conversation."""
    recorded: Awaitable[object] | None = None
    """Await this before reporting that the attempt began."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: Broadcast = field(default_factory=Broadcast)
    """Notified of new tokens, of the admission and of the end."""

    @property
    def finish_reason(self) -> trajectory_pb2.FinishReason.ValueType:
        """Why it stopped; unspecified until then. ABORTED if it failed, since the turn can be continued."""
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
    """Maximum policy tokens of the turn, bounded by the context."""
    context_token_count: int
    """Tokens before the first one that the policy writes in this turn."""
    span: Span
    trace_headers: dict[str, str]
    stream_interval: int
    policy_token_count: int = 0
    finish_reason_before: trajectory_pb2.FinishReason.ValueType = (
        trajectory_pb2.FINISH_REASON_UNSPECIFIED
    )
    """If the context was full when this turn began: why the last turn that had room stopped."""
    attempts: int = 0
    """Requests made to the engine so far."""
    attempt: TurnAttempt = field(default_factory=TurnAttempt)
    """The attempt under way, or the last one."""
    request_id: str | None = None
    """Id of the engine's request while there is one."""
    adapter_version: int | None = None
    """The adapter that samples the request; None if only the full weights do."""
    moving: bool = False
    """Whether the request was ended so that the turn continues under the active version."""
    begun: bool = False
    """Whether the attempt's task has run at all. Before that it cannot be cancelled cleanly."""
    abort_requested: bool = False
    over: bool = False
    """Whether the engine is done with the attempt and only the recording is left."""
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
        """Why the last turn that had room stopped: this one or an earlier one."""
        # Records of older servers lack the earlier turn's reason.
        return (not self.budget and self.finish_reason_before) or self.finish_reason

    @property
    def resumable(self) -> bool:
        """Whether Continue without an observation resumes this turn."""
        return not self.in_flight and (
            self.attempt.error is not None or self.attempt.finish is Finish.ABORTED
        )

    def policy_tokens(self, count: int) -> NDArray[np.int32]:
        """The first tokens the policy wrote in this turn, shape [count]."""
        start = self.context_token_count
        return self.record.token_array()[start : start + count]


class Switch(Protocol):
    """The part of the weight switch that turns use."""

    @property
    def unconfirmed_version(self) -> int | None:
        """The version whose tokens are withheld while its probe is scored, else None."""
        ...

    @property
    def active_adapter(self) -> int | None:
        """The active version if it is an adapter, else None."""
        ...

    async def confirmed(self) -> bool:
        """Wait for the verdict on that version. False means that its tokens must be discarded."""
        ...

    def admission(self, *, pinned: bool = False) -> AbstractAsyncContextManager[int]:
        """Wait while weights switch; inside, the yielded version stays the active one. `pinned` marks a
        turn that requires one version."""
        ...


class Recorder(Protocol):
    """Writes turns to the journal."""

    def turn_began(self, record: TrajectoryRecord) -> Awaitable[object]:
        """Record that the last turn, or an attempt at it, began. Await the result before reporting it."""
        ...

    def turn_ended(self, record: TrajectoryRecord) -> Awaitable[object]:
        """Record how the last turn ended. Await the result before reporting it. Raises DomainError."""
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
        """Called with the count and the weight version of sampled tokens, for metrics."""
        self.on_started: Callable[[Turn], None] | None = None
        """Called when an attempt at a turn has begun, inside the call that requested it."""
        self.on_ended: Callable[[Turn, TurnAttempt], Awaitable[None]] | None = None
        """Called when the engine no longer works on an attempt, before the attempt is recorded."""
        self.on_left: Callable[[], None] | None = None
        """Called when an engine's request has ended and no longer needs its adapter."""

    @property
    def in_flight(self) -> list[Turn]:
        """Turns not yet finished."""
        return list(self._in_flight.values())

    @property
    def sampling(self) -> list[Turn]:
        """Turns that the engine has or is just being given."""
        return [turn for turn in self._in_flight.values() if turn.request_id is not None]

    def start(self, turn: Turn) -> None:
        """Begin an attempt at a turn, which must not be in flight."""
        turn.attempt = TurnAttempt()
        turn.abort_requested = turn.begun = turn.over = False
        turn.attempts += 1
        self._in_flight[turn.record.trajectory_id] = turn
        turn.task = asyncio.create_task(self._run(turn), name=f"turn {turn.record.trajectory_id}")
        turn.attempt.recorded = self._recorder.turn_began(turn.record)
        if self.on_started is not None:
            self.on_started(turn)

    async def record_again(self, turn: Turn) -> None:
        """Record what changed of a turn since it ended. Raises JOURNAL_FAILED."""
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
        """Run the attempt until the engine no longer works on it."""
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
            # The boundary of the turn: its callers get a status, the operator gets the traceback.
            logger.exception("turn %s of %s failed", turn.index, turn.record.trajectory_id)
            attempt.error = DomainError(Reason.INTERNAL_ERROR, "internal error")
        finally:
            turn.over = True
            self._leave(turn)
            self._ended.notify()

    def _leave(self, turn: Turn) -> None:
        """Note that the engine no longer has a request of this turn."""
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
        """Whether the policy's tokens end the turn and only the engine's report of it was lost."""
        written, sampling = turn.policy_tokens(turn.policy_token_count), turn.sampling
        if not len(written):
            return False
        if int(written[-1]) in self._stop_tokens(sampling):
            return True
        text = self._decode(written.tolist()) if sampling.stop else ""
        return any(stop in text for stop in sampling.stop)

    def _stop_tokens(self, sampling: TurnSampling) -> set[int]:
        own = set(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | set(self._engine.description.eos_token_ids)

    def lets_stand(self, turn: Turn, sampling: TurnSampling) -> bool:
        """Whether this turn could have come this far under `sampling`: nothing it has written would have
        ended it earlier."""
        written = turn.policy_tokens(turn.policy_token_count).tolist()
        if 0 < sampling.max_tokens < len(written):
            return False
        if not self._stop_tokens(sampling).isdisjoint(written):
            return False
        text = self._decode(written) if sampling.stop else ""
        return not any(stop in text for stop in sampling.stop)

    async def _sample(self, turn: Turn) -> Finish:
        """Run one request of the engine to its end."""
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
                # The abort or move came while the engine was taking the request.
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
        """Submit the attempt to the engine under the version that is active at that moment."""
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
                    # The salt is the version, so that the cache of other weights is never reused.
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
        """Stop turns. Returns the attempts that were under way, once the engine works on none of them.

        An attempt that ended before the abort reached it has its own `finish`.
        """
        # Taken now: a caller that continues at once gives the turn another attempt.
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
        """Make turns continue under the version that is active when they are admitted again.

        Returns once the engine no longer works on them under the previous version. A turn that is being
        aborted or ends on its own is not moved.
        """
        request_ids: list[str] = []
        for turn in turns:
            if turn.request_id is not None and not turn.abort_requested:
                turn.moving = True
                request_ids.append(turn.request_id)
        await self._engine.abort(request_ids)

    def abort_soon(self, turn: Turn) -> None:
        """Stop a turn whose caller is lost, without waiting for it."""
        task: asyncio.Task[object] = asyncio.create_task(self.abort([turn]))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def wait_idle(self) -> None:
        """Return when the engine works on no turn; turns may still wait for admission."""
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
