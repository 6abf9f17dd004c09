"""One turn over as many streams as it takes.

A stream that is lost in mid-turn is taken up again: the server is asked what it holds, what did not
arrive is given out, and the turn goes on at the exact token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass

import grpc
from opentelemetry import trace

from penstock.client.calls import Backoff, Calls, TurnEvent, TurnRequest, outlasts
from penstock.client.conversation import PromptKind
from penstock.client.errors import (
    DeadlineExceeded,
    NotFound,
    Overloaded,
    PenstockError,
    ServerUnavailable,
)
from penstock.client.turns import (
    FinishReason,
    SegmentView,
    TrajectoryRecord,
    TurnProgress,
    read_finish_reason,
    read_segment,
    read_trajectory,
)
from penstock.v1 import rollout_service_pb2
from penstock.wire import codec, telemetry

# Resumes in a row that brought no token, after which an aborted turn is given to the caller.
_FRUITLESS_RESUMES = 8

tracer = trace.get_tracer("penstock.client")


class TurnStream:
    """Drives one turn and keeps its progress."""

    def __init__(
        self,
        calls: Calls,
        trajectory_id: str,
        progress: TurnProgress,
        resume: TurnRequest,
        *,
        kind: PromptKind | None,
        resume_aborted: bool,
    ) -> None:
        self._calls = calls
        self._trajectory_id = trajectory_id
        self._progress = progress
        self._resume = resume
        self._kind = kind
        self._resume_aborted = resume_aborted

    async def segments(self, known: bool, timeout: float | None) -> AsyncGenerator[SegmentView]:
        """Runs the turn to its end, over lost streams, full servers and, where asked to, aborts.

        Unless it is `known` where the turn stands, the server is asked first. `timeout` is for the
        turn as a whole.
        """
        progress = self._progress
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        lost = Backoff(self._calls.patience.reconnect_seconds)
        overload = Backoff(self._calls.patience.overload_seconds)
        request = progress.request if known else None
        fruitless = 0
        with self._span() as metadata:
            while True:
                before = progress.token_count
                remaining = None if deadline is None else deadline - clock()
                try:
                    if request is None:
                        stand = await self._stand(remaining)
                        request = stand.request
                        for segment in stand.missing:
                            progress.add(segment)
                            yield segment
                        if stand.ended is not None:
                            progress.finish(stand.ended)
                    if request is not None:
                        events = self._calls.turn_events(request, remaining, metadata)
                        async with contextlib.aclosing(_tokens(events, progress)) as segments:
                            async for segment in segments:
                                lost.reset()
                                yield segment
                except ServerUnavailable:
                    if not await lost.wait():
                        raise
                    request = None
                    continue
                except Overloaded as full:
                    if not await outlasts(overload, full):
                        raise
                    request = None if progress.started else request
                    continue
                fruitless = 0 if progress.token_count > before else fruitless + 1
                if not self._goes_on(fruitless):
                    return
                progress.finished = None
                request = self._resume

    def _goes_on(self, fruitless: int) -> bool:
        turn = self._progress.finished
        aborted = turn is not None and turn.aborted
        return aborted and self._resume_aborted and fruitless < _FRUITLESS_RESUMES

    async def _stand(self, timeout: float | None) -> _Stand:
        """Where a turn stands whose stream was lost.

        The abort comes first, because the server may still be sampling for the lost caller.
        """
        progress = self._progress
        try:
            async with asyncio.timeout(timeout):
                await abort_turn(self._calls, self._trajectory_id, "stream lost", patient=True)
                held = await _ask_trajectory(self._calls, self._trajectory_id, patient=True)
        except NotFound:
            if progress.index or progress.token_count:
                raise
            # It never arrived, or failed before its first token and was forgotten.
            progress.started = False
            return _Stand([], progress.request)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer from {self._calls.address} within the turn's time",
                code=grpc.StatusCode.DEADLINE_EXCEEDED,
            ) from error
        record = read_trajectory(held.trajectory, is_open=held.open)
        if record.turn_count <= progress.index:
            return _Stand([], progress.request)
        if not held.HasField("last_turn"):
            # The request was still on its way when the abort overtook it.
            raise ServerUnavailable(
                f"turn {progress.index} of {self._trajectory_id} is still in flight",
                code=grpc.StatusCode.UNAVAILABLE,
            )
        missing = progress.catch_up(record)
        if read_finish_reason(held.last_turn.finish_reason) is FinishReason.ABORTED:
            return _Stand(missing, self._resume)
        return _Stand(missing, None, held.last_turn)

    @contextlib.contextmanager
    def _span(self) -> Generator[telemetry.Metadata]:
        """A span for one turn, and the metadata that makes it the parent of the server's.

        It is not made the current span: the turn is a generator, and the code between two of its
        segments is the caller's.
        """
        progress = self._progress
        chat = self._kind is PromptKind.MESSAGES
        span = tracer.start_span("penstock.turn", kind=trace.SpanKind.CLIENT)
        span.set_attribute("gen_ai.operation.name", "chat" if chat else "text_completion")
        span.set_attribute("gen_ai.conversation.id", self._trajectory_id)
        span.set_attribute("penstock.turn_index", progress.index)
        span.set_attribute("server.address", self._calls.address)
        with trace.use_span(span):
            metadata = telemetry.outgoing()
        try:
            yield metadata
        except PenstockError as error:
            span.set_attribute("error.type", error.reason or error.code.name)
            span.set_status(trace.StatusCode.ERROR, error.message)
            raise
        finally:
            turn = progress.finished
            if turn is not None:
                span.set_attribute("gen_ai.response.finish_reasons", [turn.finish_reason.value])
                span.set_attribute("gen_ai.usage.input_tokens", turn.context_token_count)
                span.set_attribute("penstock.weight_versions", turn.weight_versions)
            span.set_attribute("gen_ai.usage.output_tokens", progress.token_count)
            span.end()


@dataclass(frozen=True, slots=True)
class _Stand:
    """Where the server stands with a turn."""

    missing: list[SegmentView]
    """Tokens that it holds and that did not arrive."""
    request: TurnRequest | None
    """What to ask next; None where the turn has ended."""
    ended: rollout_service_pb2.TurnFinished | None = None
    """How the turn ended, where it did while nobody heard it."""


async def _tokens(
    events: AsyncGenerator[TurnEvent], progress: TurnProgress
) -> AsyncGenerator[SegmentView]:
    """The tokens of one stream. Raises ServerUnavailable where it ends before its turn."""
    async with contextlib.aclosing(events) as stream:
        async for event in stream:
            match event.WhichOneof("event"):
                case "started":
                    progress.start(event.started)
                case "segment":
                    segment = read_segment(event.segment)
                    progress.add(segment)
                    yield segment
                case "finished":
                    progress.finish(event.finished)
                case None:
                    pass
    if progress.finished is None:
        raise ServerUnavailable(
            "the stream ended before its turn", code=grpc.StatusCode.UNAVAILABLE
        )


async def abort_turn(
    calls: Calls, trajectory_id: str, reason: str, *, patient: bool = False
) -> int:
    """Stops a trajectory's turn; returns the tokens it keeps."""
    selector = codec.twin(rollout_service_pb2.TrajectorySelector)(trajectory_ids=[trajectory_id])
    request = codec.twin(rollout_service_pb2.AbortRequest)(trajectories=selector, reason=reason)
    response = await calls.abort(request, patient=patient)
    return sum(turn.policy_token_count for turn in response.aborted_turns)


async def get_trajectory(calls: Calls, trajectory_id: str) -> TrajectoryRecord:
    """A trajectory as the server holds it."""
    response = await _ask_trajectory(calls, trajectory_id)
    return read_trajectory(response.trajectory, is_open=response.open)


async def _ask_trajectory(
    calls: Calls, trajectory_id: str, *, patient: bool = False
) -> rollout_service_pb2.GetTrajectoryResponse:
    request = codec.twin(rollout_service_pb2.GetTrajectoryRequest)(trajectory_id=trajectory_id)
    return await calls.get_trajectory(request, patient=patient)
