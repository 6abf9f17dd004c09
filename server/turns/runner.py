"""Runs turns: each is one task of the server, and calls only subscribe to it. `turn` has their states.

Subscribers and aborts report on the attempt they belong to: how it ended, and after how many tokens. That
holds even if another caller has resumed the turn before they looked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.server.core.aio import Broadcast, OwnTasks
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import (
    Delta,
    Engine,
    EngineLost,
    EngineRequest,
    Finish,
    RequestLost,
)
from penstock.server.turns.records import TurnRecorder
from penstock.server.turns.trajectory import Turn
from penstock.server.turns.turn import TurnAttempt, TurnSampling, TurnState
from penstock.v1 import trajectory_pb2
from penstock.wire.reasons import Reason

Decode = Callable[[Iterable[int]], str]

logger = logging.getLogger(__name__)

MOST_LOST = 8
"""Engine requests that a turn may lose in a row without a new token before it fails. The turn may be what
kills its engines."""


class Switch(Protocol):
    @property
    def unconfirmed_version(self) -> int | None:
        """The version whose tokens are withheld while its probe is scored, else None."""
        ...

    @property
    def active_adapter(self) -> int | None:
        """The active version if it is an adapter, else None."""
        ...

    async def confirmed(self) -> bool:
        """Wait for the verdict on `unconfirmed_version`. If False, its tokens must be discarded."""
        ...

    def admission(self, *, pinned: bool = False) -> AbstractAsyncContextManager[int]:
        """Wait while weights switch; inside, the yielded version stays the active one. `pinned` marks a
        turn that requires one version."""
        ...


@dataclass(eq=False)
class TurnRunner:
    engine: Engine
    switch: Switch
    decode: Decode
    """Converts tokens to text, to find stop strings."""
    recorder: TurnRecorder
    on_tokens: Callable[[int, int], None] = lambda count, version: None
    """Called with the count and the weight version of sampled tokens, for metrics."""
    on_started: Callable[[Turn], None] = lambda turn: None
    """Called when an attempt at a turn has begun, inside the call that requested it."""
    on_ended: Callable[[Turn, TurnAttempt], Awaitable[None]] | None = None
    """Called when the engine no longer works on an attempt, before it is recorded."""
    on_left: Callable[[], None] = lambda: None
    """Called when an engine's request has ended and no longer needs its adapter."""

    def __post_init__(self) -> None:
        self._in_flight: dict[str, Turn] = {}
        self._background = OwnTasks()
        self._ended = Broadcast()

    @property
    def in_flight(self) -> list[Turn]:
        return list(self._in_flight.values())

    @property
    def sampling(self) -> list[Turn]:
        """Turns that the engine has or is just being given."""
        return [turn for turn in self._in_flight.values() if turn.state.in_engine]

    def start(self, turn: Turn) -> None:
        """Begin an attempt at a turn, which must not be in flight."""
        turn.attempt = TurnAttempt()
        turn.abort_requested = False
        turn.attempts += 1
        turn.to(TurnState.STARTING)
        self._in_flight[turn.record.trajectory_id] = turn
        turn.task = asyncio.create_task(self._run(turn), name=f"turn {turn.record.trajectory_id}")
        turn.attempt.recorded = self.recorder.record(turn.record)
        self.on_started(turn)

    async def _run(self, turn: Turn) -> None:
        turn.to(TurnState.WAITING)
        attempt = turn.attempt
        try:
            await self._engage(turn, attempt)
            attempt.policy_token_count = turn.policy_token_count
            attempt.record_end = turn.record.end
            if self.on_ended is not None:
                await self.on_ended(turn, attempt)
            await self.recorder.record(turn.record)
        except DomainError as error:
            attempt.error = error
        finally:
            turn.to(TurnState.FINISHED)
            turn.task = None
            if self._in_flight.get(turn.record.trajectory_id) is turn:
                del self._in_flight[turn.record.trajectory_id]
            _end_span(turn)
            attempt.ended.set()
            attempt.changed.notify()
            self._ended.notify()

    async def _engage(self, turn: Turn, attempt: TurnAttempt) -> None:
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
            turn.to(TurnState.RECORDING)
            self.on_left()
            self._ended.notify()

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
                moves = turn.state is TurnState.MOVING and not turn.abort_requested
                if finish is not Finish.ABORTED or not moves:
                    return finish
            turn.to(TurnState.WAITING)
            self._ended.notify()
            self.on_left()
            turn.attempts += 1

    def _has_stopped(self, turn: Turn) -> bool:
        """Whether the policy's tokens end the turn, and only the engine's report of it was lost."""
        written, sampling = turn.policy_tokens(turn.policy_token_count), turn.sampling
        if not len(written):
            return False
        if int(written[-1]) in self._stop_tokens(sampling):
            return True
        return self._has_stop(written.tolist(), sampling)

    def _has_stop(self, written: list[int], sampling: TurnSampling) -> bool:
        text = self.decode(written) if sampling.stop else ""
        return any(stop in text for stop in sampling.stop)

    def _stop_tokens(self, sampling: TurnSampling) -> set[int]:
        own = set(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | set(self.engine.description.eos_token_ids)

    def lets_stand(self, turn: Turn, sampling: TurnSampling) -> bool:
        """Whether nothing that the turn has written would have ended it earlier under `sampling`."""
        written = turn.policy_tokens(turn.policy_token_count).tolist()
        if 0 < sampling.max_tokens < len(written):
            return False
        if not self._stop_tokens(sampling).isdisjoint(written):
            return False
        return not self._has_stop(written, sampling)

    async def _sample(self, turn: Turn) -> Finish:
        if turn.abort_requested:
            return Finish.ABORTED
        remaining = turn.budget - turn.policy_token_count
        if remaining <= 0:
            if turn.attempt.started_version is None:
                async with self.switch.admission() as version:
                    turn.attempt.started_version = version
            return Finish.LENGTH
        deltas = await self._admit(turn, remaining)
        stop_check = StopAcrossResume(
            turn.sampling.stop, turn.policy_tokens(turn.policy_token_count), self.decode
        )
        async with contextlib.aclosing(deltas):
            if turn.abort_requested or turn.state is TurnState.MOVING:
                # The abort or move came while the engine was taking the request.
                assert turn.request_id is not None
                await self.engine.abort([turn.request_id])
            async for delta in deltas:
                if (
                    delta.weight_version == self.switch.unconfirmed_version
                    and not await self.switch.confirmed()
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
        """Submit the attempt under the version that is active at that moment."""
        record = turn.record
        required = record.required_weight_version
        async with self.switch.admission(pinned=required > 0) as version:
            if required and required != version:
                raise DomainError(
                    Reason.WEIGHT_VERSION_NOT_ACTIVE,
                    f"weight version {required} is required, {version} is active",
                    {"required": required, "active": version},
                )
            # From here on an abort goes through the engine, which may already have the request.
            turn.to(TurnState.SAMPLING)
            turn.request_id = f"{record.trajectory_id}/{turn.index}/{turn.attempts}"
            turn.adapter_version = self.switch.active_adapter
            deltas = await self.engine.generate(
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
        self.on_tokens(count, delta.weight_version)
        turn.attempt.changed.notify()

    async def abort(self, turns: Iterable[Turn]) -> list[tuple[Turn, TurnAttempt]]:
        """Stop turns. Returns the attempts that were under way, once the engine works on none of them. An
        attempt that ended before the abort reached it has its own `finish`."""
        # Taken now: a caller that continues at once gives the turn another attempt.
        stopping = [(turn, turn.attempt) for turn in turns if turn.in_flight]
        request_ids: list[str] = []
        for turn, _ in stopping:
            turn.abort_requested = True
            if turn.request_id is not None:
                request_ids.append(turn.request_id)
            elif turn.task is not None and turn.state is TurnState.WAITING:
                # One that is starting is not cancelled, because its task could not clean up. It sees the
                # request itself.
                turn.task.cancel()
        if request_ids:
            await self.engine.abort(request_ids)
        for _, attempt in stopping:
            await attempt.ended.wait()
        return stopping

    async def move(self, turns: Iterable[Turn]) -> None:
        """Make turns continue under the version that is active when they are admitted again. Returns once
        the engine no longer works on them under the previous version. A turn that is being aborted or ends
        by itself is not moved."""
        request_ids: list[str] = []
        for turn in turns:
            if turn.request_id is not None and not turn.abort_requested:
                if turn.state is TurnState.SAMPLING:
                    turn.to(TurnState.MOVING)
                request_ids.append(turn.request_id)
        await self.engine.abort(request_ids)

    def abort_soon(self, turn: Turn) -> None:
        """Stop a turn whose caller is lost, without waiting for it."""
        self._background.start(self.abort([turn]), f"abort of {turn.record.trajectory_id}")

    async def wait_idle(self) -> None:
        """Return when the engine works on no turn; turns may still wait for admission."""
        while self.sampling:
            await self._ended.wait()


class Subscription:
    """New tokens of one attempt at a turn, for one call.

    Created before the attempt's task first runs, so that it misses nothing. It reads the record and has no
    queue, so a slow caller costs nothing. It stops where the attempt ended: such a caller does not receive
    what a later attempt has added since.
    """

    def __init__(self, turn: Turn, *, flush_seconds: float, final_only: bool) -> None:
        self.turn, self.attempt = turn, turn.attempt
        self._record = turn.record
        self._flush_seconds, self._final_only = flush_seconds, final_only
        self._taken = self._record.end
        """A cursor into the record: up to here it has been yielded."""

    @property
    def overtaken(self) -> bool:
        """Whether another call has continued the trajectory since this attempt ended."""
        return self._record.turn is not self.turn or self.turn.attempt is not self.attempt

    async def admitted(self) -> None:
        """Wait until the attempt is admitted. Raises its error if it fails before."""
        while self.attempt.started_version is None:
            if self.attempt.ended.is_set():
                if self.attempt.error is not None:
                    raise self.attempt.error
                return
            await self.attempt.changed.wait()

    async def segments(self) -> AsyncGenerator[trajectory_pb2.Segment]:
        """Yield twin Segments, one per weight version and flush, until the attempt has ended. Raises the
        attempt's error after everything it sampled."""
        ended = self.attempt.ended
        while True:
            if self._final_only:
                await ended.wait()
            else:
                while not ended.is_set() and self._taken == self._record.end:
                    await self.attempt.changed.wait()
                if self._flush_seconds and not ended.is_set():
                    # The flush must not delay the end of the attempt.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._flush_seconds):
                            await ended.wait()
            finished = ended.is_set()
            end = self.attempt.record_end if finished else self._record.end
            for segment in self._record.segments_between(self._taken, end):
                yield segment
            self._taken = end
            if finished:
                if self.attempt.error is not None:
                    raise self.attempt.error
                return


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


class StopAcrossResume:
    """Finds a stop string that began before an abort and ends after the resume. To the engine, everything
    before the resume is prompt, and it looks for stop strings only in the tokens it samples itself."""

    def __init__(self, stop: tuple[str, ...], before: NDArray[np.int32], decode: Decode) -> None:
        """`before` is what the policy has written in this turn so far."""
        self._decode = decode
        self._stop = stop if len(before) else ()
        self._longest = max((len(text) for text in self._stop), default=0)
        self._written: list[int] = []
        self._before: list[int] = []
        if self._stop:
            # A token is at least one byte and a character at most four.
            self._before = [int(token) for token in before[-4 * self._longest :]]

    def cut(self, delta: Delta) -> tuple[Delta, bool]:
        """Cut the delta after the token that completes such a stop string; also return whether one did."""
        if not self._stop:
            return delta, False
        start = len(self._decode(self._before))
        for position, token in enumerate(delta.token_ids):
            self._written.append(int(token))
            text = self._decode([*self._before, *self._written])
            if any(text.find(stop, max(0, start - len(stop) + 1)) >= 0 for stop in self._stop):
                end = position + 1
                return Delta(
                    delta.token_ids[:end], delta.logprobs[:end], delta.weight_version
                ), True
            if len(text) - start >= self._longest:
                # From here on the engine sees every stop string in full.
                self._stop = ()
                return delta, False
        return delta, False
