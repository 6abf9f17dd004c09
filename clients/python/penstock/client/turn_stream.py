"""One turn over as many streams, and servers, as it takes.

    asked for ──► streaming ──► finished
        ▲             │ stream lost, server away or gone
        │             ▼
        └── where does it stand? ──► finished, while nobody heard it

A stream that is lost is taken up again. The order: wait for the server, longer each time and within a
bound -> abort, because it may still be sampling for the lost caller -> GetTrajectory -> by what it holds:

| the server has | then |
|---|---|
| the turn, ended otherwise than ABORTED | it is finished |
| the turn, ABORTED | `Continue` without an observation: on at the exact token |
| the trajectory without the turn | it never arrived: the same request again |
| no trajectory, and nothing of it had come | the same, unless its lease is gone: LEASE_EXPIRED |
| no trajectory, and something of it had come | TRAJECTORY_UNKNOWN |
| fewer tokens of earlier turns than it had finished | DATA_LOSS |
| the trajectory, closed | TRAJECTORY_CLOSED |

What the server holds is the turn. A server that was killed and started again over its journal may hold
fewer tokens than it had streamed, for only a turn that is `finished` is durable as a whole: what was
streamed beyond that is discarded here, and sampled again. A request that is sent again may meet its own
first copy, which had arrived after all; then the server is asked anew. So it is where a turn ends with
another number of tokens than arrived: between the answer to GetTrajectory and the `Continue` that follows
from it the server may be killed, too, and go on from fewer tokens than it had told.
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

# Resumes in a row that brought no token, after which an aborted turn is given to the caller.
_FRUITLESS_RESUMES = 8
# What a request is refused with whose first copy, though its stream was lost, did arrive.
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
        """`resume_aborted` is asked whenever the turn was aborted; `leased` is whether the trajectory is a
        lease's own; `policy_count_before` counts the tokens of the turns before this one."""
        self._calls = calls
        self._trajectory_id = trajectory_id
        self._progress = progress
        self._resume = resume
        self._kind = kind
        self._resume_aborted = resume_aborted
        self._leased = leased
        self._policy_count_before = policy_count_before

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
                if not self._goes_on(fruitless):
                    return
                progress.finished = None
                request = self._resume

    def _goes_on(self, fruitless: int) -> bool:
        turn = self._progress.finished
        aborted = turn is not None and turn.aborted
        return aborted and self._resume_aborted() and fruitless < _FRUITLESS_RESUMES

    async def _stand(self, timeout: float | None) -> _Stand:
        """Where a turn stands whose stream was lost; the module says what follows."""
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
                f"no answer from {self._calls.address} within the turn's time",
                code=grpc.StatusCode.DEADLINE_EXCEEDED,
            ) from error
        record = read_trajectory(held.trajectory, is_open=held.open)
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
        """Raises NotAllowedNow where the server that is there now never leased this attempt, or no longer
        does: it would take the request for a trajectory of its own."""
        if not self._leased:
            return
        request = codec.twin(task_service_pb2.RenewLeaseRequest)(
            trajectory_ids=[self._trajectory_id]
        )
        response = await self._calls.renew_lease(request, patient=True)
        if self._trajectory_id in response.expired_trajectory_ids:
            raise NotAllowedNow(
                f"the lease of {self._trajectory_id} is gone",
                code=grpc.StatusCode.FAILED_PRECONDITION,
                reason=Reason.LEASE_EXPIRED,
                metadata={"trajectory_id": self._trajectory_id},
            )

    def _check_extensible(self, record: TrajectoryRecord) -> None:
        """Raises where the record cannot be gone on with."""
        if not record.open:
            raise NotAllowedNow(
                f"trajectory {self._trajectory_id} is closed",
                code=grpc.StatusCode.FAILED_PRECONDITION,
                reason=Reason.TRAJECTORY_CLOSED,
                metadata={"trajectory_id": self._trajectory_id},
            )
        held = record.policy_count_before(self._progress.index)
        if held < self._policy_count_before:
            raise PenstockError(
                f"the server came back with {held} of {self._policy_count_before} tokens of the turns of "
                f"{self._trajectory_id} that were finished: it keeps no journal, or lost part of it",
                code=grpc.StatusCode.DATA_LOSS,
                metadata={"trajectory_id": self._trajectory_id},
            )

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
    """The tokens of one stream. Raises ServerUnavailable where it ends before its turn, or another one than
    what arrived is the beginning of."""
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
                            f"{progress.said_of(event.finished)}: where it stands is asked anew",
                            code=grpc.StatusCode.UNAVAILABLE,
                        )
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


async def get_trajectory(
    calls: Calls, trajectory_id: str, *, patient: bool = False
) -> TrajectoryRecord:
    """A trajectory as the server holds it; `patient` waits for a lost server."""
    response = await _ask_trajectory(calls, trajectory_id, patient=patient)
    return read_trajectory(response.trajectory, is_open=response.open)


async def get_turns(calls: Calls, trajectory_id: str) -> list[Turn]:
    """The turns of an open trajectory that were taken elsewhere; none where it was never opened.

    The server holds the text of the last one alone, and how it ended.
    """
    try:
        held = await _ask_trajectory(calls, trajectory_id, patient=True)
    except NotFound:
        return []
    record = read_trajectory(held.trajectory, is_open=held.open)
    turns = [
        Turn(index, tuple(record.policy_segments(index)), FinishReason.STOP)
        for index in range(record.turn_count)
    ]
    if turns and held.HasField("last_turn"):
        turns[-1] = replace(turns[-1], finish_reason=record.finish_reason or FinishReason.STOP)
        last = held.last_turn
        # It may be one after it, which found the context full.
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
