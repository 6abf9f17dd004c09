"""One turn across as many streams and server restarts as needed.

    requested ──► streaming ──► finished
        ▲             │ stream lost, or server away
        │             ▼
        └── ask where it stands ──► finished while the stream was lost

After a lost stream, the client waits for the server, with growing delays up to a bound. It then
aborts the turn, because the server may still be sampling for the lost stream. It then calls
GetTrajectory and acts on what the server holds:

- The turn, ended other than ABORTED: it is finished.
- The turn, ABORTED: `Continue` without an observation resumes it at the exact token.
- The trajectory without the turn: the request never arrived and is sent again.
- No trajectory, and no tokens had arrived: the same, unless its lease is gone (LEASE_EXPIRED).
- No trajectory, but tokens had arrived: TRAJECTORY_UNKNOWN.
- Fewer tokens of earlier turns than it had finished: DATA_LOSS.
- The closed trajectory: TRAJECTORY_CLOSED.

The server's record is authoritative. A server that was killed and recovered from its journal may
hold fewer tokens than it streamed, because only a `finished` turn is durable as a whole. The client
discards streamed tokens beyond the record, and they are sampled again.

A repeated request may find that its first copy arrived after all. Then the client asks the server
again. It also asks again if a turn ends with a different number of tokens than arrived. The server
may have been killed between the answer to GetTrajectory and the following `Continue`, and then
resume from fewer tokens than it had reported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, replace

import grpc
from opentelemetry import trace

from penstock.client.calls import Backoff, Calls, TurnEvent, TurnRequest, outlasts
from penstock.client.conversation import PromptKind, read_message
from penstock.client.errors import (
    DeadlineExceeded,
    NotAllowedNow,
    NotFound,
    Overloaded,
    PenstockError,
    ServerUnavailable,
)
from penstock.client.turns import (
    FinishReason,
    SegmentView,
    TrajectoryRecord,
    Turn,
    TurnProgress,
    read_finish_reason,
    read_segment,
    read_trajectory,
)
from penstock.common import telemetry
from penstock.v1 import rollout_service_pb2, task_service_pb2
from penstock.wire import codec
from penstock.wire.reasons import Reason

# Consecutive resumes without a new token, after which the caller receives the aborted turn.
_FRUITLESS_RESUMES = 8
# Reasons that refuse a repeated request if its first copy did arrive.
_ARRIVED_AFTER_ALL = (Reason.TRAJECTORY_EXISTS, Reason.TURN_IN_FLIGHT, Reason.NOTHING_TO_RESUME)

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
        resume_aborted: Callable[[], bool],
        leased: bool,
        policy_count_before: int,
    ) -> None:
        """`resume_aborted` is called whenever the turn was aborted. `leased` is whether the trajectory
        belongs to a lease. `policy_count_before` counts the policy's tokens in earlier turns."""
        self._calls = calls
        self._trajectory_id = trajectory_id
        self._progress = progress
        self._resume = resume
        self._kind = kind
        self._resume_aborted = resume_aborted
        self._leased = leased
        self._policy_count_before = policy_count_before

    async def segments(self, known: bool, timeout: float | None) -> AsyncGenerator[SegmentView]:
        """Runs the turn to its end. Unless its state is `known`, it first asks the server."""
        progress = self._progress
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        lost = Backoff(self._calls.patience.reconnect_seconds)
        overload = Backoff(self._calls.patience.overload_seconds)
        request = progress.request if known else None
        fruitless, asked = 0, False
        with self._span() as metadata:
            while True:
                before = progress.token_count
                remaining = None if deadline is None else deadline - clock()
                try:
                    if request is None:
                        stand = await self._stand(remaining)
                        request, asked = stand.request, True
                        for segment in stand.missing:
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
                except NotAllowedNow as refused:
                    again = asked and refused.reason in _ARRIVED_AFTER_ALL
                    if not again or not await lost.wait():
                        raise
                    request = None
                    continue
                except Overloaded as full:
                    if not await outlasts(overload, full):
                        raise
                    request = None if progress.started else request
                    continue
                fruitless = 0 if progress.token_count > before else fruitless + 1
                aborted = progress.finished is not None and progress.finished.aborted
                if not (aborted and self._resume_aborted() and fruitless < _FRUITLESS_RESUMES):
                    return
                progress.finished = None
                request = self._resume

    async def _stand(self, timeout: float | None) -> _Stand:
        """The module docstring lists the cases."""
        progress = self._progress
        try:
            async with asyncio.timeout(timeout):
                await abort_turn(self._calls, self._trajectory_id, "stream lost", patient=True)
                held = await _ask_trajectory(self._calls, self._trajectory_id, patient=True)
        except NotFound:
            if progress.index or progress.token_count:
                raise
            await self._check_lease()
            progress.forget()
            return _Stand([], progress.request)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer from {self._calls.address} within the turn's timeout",
                code=grpc.StatusCode.DEADLINE_EXCEEDED,
            ) from error
        record = read_trajectory(held)
        self._check_extensible(record)
        if record.turn_count <= progress.index:
            progress.forget()
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

    async def _check_lease(self) -> None:
        """Without a lease, the server would treat the request as an unleased trajectory."""
        if not self._leased:
            return
        request = codec.twin(task_service_pb2.RenewLeaseRequest)(
            trajectory_ids=[self._trajectory_id]
        )
        response = await self._calls.renew_lease(request, patient=True)
        if self._trajectory_id in response.expired_trajectory_ids:
            raise self._refusal(f"the lease of {self._trajectory_id} is gone", Reason.LEASE_EXPIRED)

    def _refusal(self, message: str, reason: Reason) -> NotAllowedNow:
        return NotAllowedNow(
            message,
            code=grpc.StatusCode.FAILED_PRECONDITION,
            reason=reason,
            metadata={"trajectory_id": self._trajectory_id},
        )

    def _check_extensible(self, record: TrajectoryRecord) -> None:
        if not record.open:
            raise self._refusal(
                f"trajectory {self._trajectory_id} is closed", Reason.TRAJECTORY_CLOSED
            )
        held = record.policy_count_before(self._progress.index)
        if held < self._policy_count_before:
            raise PenstockError(
                f"the server came back with {held} of {self._policy_count_before} tokens of the finished "
                f"turns of {self._trajectory_id}: it keeps no journal, or lost part of it",
                code=grpc.StatusCode.DATA_LOSS,
                metadata={"trajectory_id": self._trajectory_id},
            )

    @contextlib.contextmanager
    def _span(self) -> Generator[telemetry.Metadata]:
        """Yields the metadata that makes it the parent of the server's span.

        It is not the current span: the turn is a generator, and the code between two of its
        segments belongs to the caller.
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
    missing: list[SegmentView]
    """Tokens that the server holds but the client has not received."""
    request: TurnRequest | None
    """The next request; None if the turn has ended."""
    ended: rollout_service_pb2.TurnFinished | None = None
    """How the turn ended, if it ended while the stream was lost."""


async def _tokens(
    events: AsyncGenerator[TurnEvent], progress: TurnProgress
) -> AsyncGenerator[SegmentView]:
    """Raises ServerUnavailable if the stream ends before its turn, or if the turn that ends does
    not match the tokens that arrived."""
    async with contextlib.aclosing(events) as stream:
        async for event in stream:
            match event.WhichOneof("event"):
                case "started":
                    progress.start(event.started)
                case "segment":
                    yield progress.add(read_segment(event.segment))
                case "finished":
                    if not progress.is_all_of(event.finished):
                        raise ServerUnavailable(
                            f"{progress.said_of(event.finished)}: asking the server again",
                            code=grpc.StatusCode.UNAVAILABLE,
                        )
                    progress.finish(event.finished)
                case None:
                    pass
    if progress.finished is None:
        raise ServerUnavailable(
            "the stream ended before its turn did", code=grpc.StatusCode.UNAVAILABLE
        )


async def abort_turn(
    calls: Calls, trajectory_id: str, reason: str, *, patient: bool = False
) -> int:
    """Returns the number of kept tokens."""
    selector = codec.twin(rollout_service_pb2.TrajectorySelector)(trajectory_ids=[trajectory_id])
    request = codec.twin(rollout_service_pb2.AbortRequest)(trajectories=selector, reason=reason)
    response = await calls.abort(request, patient=patient)
    return sum(turn.policy_token_count for turn in response.aborted_turns)


async def get_trajectory(
    calls: Calls, trajectory_id: str, *, patient: bool = False
) -> TrajectoryRecord:
    """`patient` waits for a lost server."""
    return read_trajectory(await _ask_trajectory(calls, trajectory_id, patient=patient))


async def get_turns(calls: Calls, trajectory_id: str) -> list[Turn]:
    """Returns the turns that another process took; none if the trajectory was never opened.

    Only the last turn includes its text and finish reason, because the server holds no others.
    """
    try:
        held = await _ask_trajectory(calls, trajectory_id, patient=True)
    except NotFound:
        return []
    record = read_trajectory(held)
    turns = [
        Turn(index, tuple(record.policy_segments(index)), FinishReason.STOP)
        for index in range(record.turn_count)
    ]
    if turns and held.HasField("last_turn"):
        turns[-1] = replace(turns[-1], finish_reason=record.finish_reason or FinishReason.STOP)
        last = held.last_turn
        # The last turn may be a later one that found the context full.
        if last.policy_token_count == len(turns[-1].token_ids):
            message = read_message(last.message) if last.HasField("message") else None
            text = message.content if message else last.text
            turns[-1] = replace(turns[-1], text=text, message=message)
    return turns


async def _ask_trajectory(
    calls: Calls, trajectory_id: str, *, patient: bool = False
) -> rollout_service_pb2.GetTrajectoryResponse:
    request = codec.twin(rollout_service_pb2.GetTrajectoryRequest)(trajectory_id=trajectory_id)
    return await calls.get_trajectory(request, patient=patient)
