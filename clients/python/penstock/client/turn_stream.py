"""One turn across as many streams and server restarts as needed.

    requested ──► streaming ──► finished
        ▲             │ stream lost, or server away
        │             ▼
        └── ask where it stands ──► finished while the stream was lost

After a lost stream, the client waits for the server, with growing delays up to a bound. It then aborts the
turn, because the server may still be sampling for the lost stream, and acts on what GetTrajectory returns:

- The turn, ended other than ABORTED: it is finished.
- The turn, ABORTED: `Continue` without an observation resumes it at the exact token.
- The trajectory without the turn: the request never arrived and is sent again.
- No trajectory, and no tokens had arrived: the same, unless its lease is gone (LEASE_EXPIRED).
- No trajectory, but tokens had arrived: TRAJECTORY_UNKNOWN.
- Fewer tokens of earlier turns than it had finished: DATA_LOSS.
- The closed trajectory: TRAJECTORY_CLOSED.

The server's record is authoritative. A server that was killed and recovered from its journal may hold fewer
tokens than it streamed, because only a `finished` turn is durable as a whole. The client discards streamed
tokens beyond the record, and they are sampled again.

The client asks again if a repeated request finds that its first copy arrived after all, or if a turn ends
with a different number of tokens than arrived: the server may have been killed after its answer, and resume
from fewer tokens than it had reported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, replace

import grpc
from opentelemetry import trace

from penstock.client.calls import Backoff, Calls, TurnRequest, outlasts
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
from penstock.v1 import rollout_service_pb2 as rollout
from penstock.v1 import task_service_pb2 as tasks
from penstock.wire.reasons import Reason

# Consecutive resumes without a new token, after which the caller receives the aborted turn.
_FRUITLESS_RESUMES = 8
# Reasons that refuse a repeated request if its first copy did arrive.
_ARRIVED_AFTER_ALL = (Reason.TRAJECTORY_EXISTS, Reason.TURN_IN_FLIGHT, Reason.NOTHING_TO_RESUME)

tracer = trace.get_tracer("penstock.client")


@dataclass(frozen=True, kw_only=True)
class TurnStream:
    calls: Calls
    trajectory_id: str
    progress: TurnProgress
    resume: TurnRequest
    kind: PromptKind | None
    resume_aborted: Callable[[], bool]
    """Called whenever the turn was aborted."""
    leased: bool
    """Whether the trajectory belongs to a lease."""
    policy_count_before: int
    """The policy's tokens in earlier turns."""

    async def segments(self, known: bool, timeout: float | None) -> AsyncGenerator[SegmentView]:
        """Runs the turn to its end. Unless its state is `known`, it first asks the server."""
        progress = self.progress
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        lost = Backoff(self.calls.patience.reconnect_seconds)
        overload = Backoff(self.calls.patience.overload_seconds)
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
                        opens = request.DESCRIPTOR.name == "GenerateRequest"
                        response = rollout.GenerateResponse if opens else rollout.ContinueResponse
                        events = self.calls.stream(request, response, remaining, metadata)
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
                if not (aborted and self.resume_aborted() and fruitless < _FRUITLESS_RESUMES):
                    return
                progress.finished = None
                request = self.resume

    async def _stand(self, timeout: float | None) -> _Stand:
        """The module docstring lists the cases."""
        progress = self.progress
        try:
            async with asyncio.timeout(timeout):
                await abort_turn(self.calls, self.trajectory_id, "stream lost", patient=True)
                held = await _ask_trajectory(self.calls, self.trajectory_id, patient=True)
        except NotFound:
            if progress.index or progress.token_count:
                raise
            if self.leased:
                await self._check_lease()
            progress.forget()
            return _Stand([], progress.request)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer from {self.calls.address} within the turn's timeout",
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
                f"turn {progress.index} of {self.trajectory_id} is still in flight"
            )
        missing = progress.catch_up(record)
        if read_finish_reason(held.last_turn.finish_reason) is FinishReason.ABORTED:
            return _Stand(missing, self.resume)
        return _Stand(missing, None, held.last_turn)

    async def _check_lease(self) -> None:
        """Without a lease, the server would treat the request as an unleased trajectory."""
        request = tasks.RenewLeaseRequest(trajectory_ids=[self.trajectory_id])
        response = await self.calls.ask(request, tasks.RenewLeaseResponse, patient=True)
        if self.trajectory_id in response.expired_trajectory_ids:
            raise self._refusal(f"the lease of {self.trajectory_id} is gone", Reason.LEASE_EXPIRED)

    def _refusal(self, message: str, reason: Reason) -> NotAllowedNow:
        return NotAllowedNow(
            message,
            code=grpc.StatusCode.FAILED_PRECONDITION,
            reason=reason,
            metadata={"trajectory_id": self.trajectory_id},
        )

    def _check_extensible(self, record: TrajectoryRecord) -> None:
        if not record.open:
            raise self._refusal(
                f"trajectory {self.trajectory_id} is closed", Reason.TRAJECTORY_CLOSED
            )
        held = record.policy_count_before(self.progress.index)
        if held < self.policy_count_before:
            raise PenstockError(
                f"the server came back with {held} of {self.policy_count_before} tokens of the finished "
                f"turns of {self.trajectory_id}: it keeps no journal, or lost part of it",
                code=grpc.StatusCode.DATA_LOSS,
                metadata={"trajectory_id": self.trajectory_id},
            )

    @contextlib.contextmanager
    def _span(self) -> Generator[telemetry.Metadata]:
        """Yields the metadata that makes it the parent of the server's span.

        It is not the current span, because the code between two segments belongs to the caller.
        """
        progress = self.progress
        chat = self.kind is PromptKind.MESSAGES
        span = tracer.start_span("penstock.turn", kind=trace.SpanKind.CLIENT)
        span.set_attribute("gen_ai.operation.name", "chat" if chat else "text_completion")
        span.set_attribute("gen_ai.provider.name", "penstock")
        span.set_attribute("gen_ai.conversation.id", self.trajectory_id)
        span.set_attribute("penstock.turn_index", progress.index)
        span.set_attribute("server.address", self.calls.address)
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
    ended: rollout.TurnFinished | None = None
    """How the turn ended, if it ended while the stream was lost."""


async def _tokens(
    events: AsyncGenerator[rollout.GenerateResponse | rollout.ContinueResponse],
    progress: TurnProgress,
) -> AsyncGenerator[SegmentView]:
    """Raises ServerUnavailable if the stream ends before its turn, or lacks tokens of it."""
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
                            f"{progress.said_of(event.finished)}: asking the server again"
                        )
                    progress.finish(event.finished)
                case None:
                    pass
    if progress.finished is None:
        raise ServerUnavailable("the stream ended before its turn did")


async def abort_turn(
    calls: Calls, trajectory_id: str, reason: str, *, patient: bool = False
) -> int:
    """Returns the number of kept tokens."""
    request = rollout.AbortRequest(reason=reason)
    request.trajectories.trajectory_ids.append(trajectory_id)
    response = await calls.ask(request, rollout.AbortResponse, patient=patient)
    return sum(turn.policy_token_count for turn in response.aborted_turns)


async def get_trajectory(
    calls: Calls, trajectory_id: str, *, patient: bool = False
) -> TrajectoryRecord:
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
) -> rollout.GetTrajectoryResponse:
    request = rollout.GetTrajectoryRequest(trajectory_id=trajectory_id)
    return await calls.ask(request, rollout.GetTrajectoryResponse, patient=patient)
