"""A small server with scripted faults: on command it breaks streams, refuses calls and forgets
tokens.

Its policy writes the token `100 * turn + position`, so that a lost or duplicated token shows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from penstock.client import Task
from penstock.client.tasks import write_task
from penstock.v1 import rollout_service_pb2 as rollout
from penstock.v1 import task_service_pb2 as tasks
from penstock.v1 import trajectory_pb2 as trajectory
from penstock.wire import codec
from penstock.wire.channel import server_options
from penstock.wire.reasons import DOMAIN

VERSION = 3


def status(code: grpc.StatusCode, reason: str, retry_after: float | None = None) -> grpc.Status:
    """A status with ErrorInfo, as in the error table."""
    message = status_pb2.Status(code=code.value[0], message=f"scripted {reason}")
    details = [error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata={"key": "value"})]
    if retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        message.details.append(packed)

    class Status(grpc.Status):
        pass

    result = Status()
    result.code, result.details = code, message.message
    result.trailing_metadata = (("grpc-status-details-bin", message.SerializeToString()),)
    return result


UNAVAILABLE = status(grpc.StatusCode.UNAVAILABLE, "")
TRAJECTORY_UNKNOWN = status(grpc.StatusCode.NOT_FOUND, "TRAJECTORY_UNKNOWN")


@dataclass
class Record:
    """A trajectory: the policy's tokens by turn, and the state of the last turn."""

    turns: list[list[int]] = field(default_factory=list)
    finish: int = trajectory.FINISH_REASON_UNSPECIFIED
    outcome: trajectory.Outcome | None = None

    def finished(self) -> rollout.TurnFinished:
        """The end of the last turn."""
        written = self.turns[-1]
        return rollout.TurnFinished(
            finish_reason=self.finish,
            policy_token_count=len(written),
            cached_token_count=4,
            text=" ".join(map(str, written)),
        )


@dataclass
class Script:
    """The faults, and the tasks to lease."""

    length: int = 10
    """Tokens per turn."""
    break_after: deque[int] = field(default_factory=deque)
    """Each turn's stream breaks after this many tokens. The record keeps growing."""
    in_flight_answers: int = 0
    """This many answers of GetTrajectory report a turn in flight."""
    forgets: deque[int] = field(default_factory=deque)
    """Each resumed turn starts this many tokens before the position that GetTrajectory reported."""
    unsent: int = 0
    """Tokens that are recorded but never sent when a stream breaks."""
    abort_after: deque[int] = field(default_factory=deque)
    """Each turn's stream ends ABORTED after this many tokens."""
    refuse: dict[str, deque[grpc.Status]] = field(default_factory=dict)
    """Method to the statuses that its next calls fail with."""
    tasks: deque[tasks.LeaseTasksResponse] = field(default_factory=deque)
    break_lease_stream: asyncio.Event = field(default_factory=asyncio.Event)
    expired: set[str] = field(default_factory=set)
    hold_turns: asyncio.Event | None = None
    """Turns wait for this event after their first token."""
    max_attempts: int = 3


class ScriptedServer:
    """The services over a Script, on their own port."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.records: dict[str, Record] = {}
        self.calls: list[str] = []
        self.requests: list[object] = []
        self.metadata: dict[str, str] = {}
        self.outcomes: list[tuple[str, trajectory.Outcome]] = []
        self.renewed: list[str] = []
        self.leased: dict[str, tasks.LeaseTasksResponse] = {}
        self.retried: set[str] = set()
        self.in_flight_peak = 0
        self.changed = asyncio.Condition()
        self.address = ""

    async def __aenter__(self) -> ScriptedServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self.server = grpc.aio.server(options=server_options())
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        for service, handlers in {
            "RolloutService": {
                "Generate": (stream, self.generate, rollout.GenerateRequest),
                "Continue": (stream, self.continue_turn, rollout.ContinueRequest),
                "Abort": (unary, self.abort, rollout.AbortRequest),
                "GetTrajectory": (unary, self.get_trajectory, rollout.GetTrajectoryRequest),
                "GetServerInfo": (unary, self.get_server_info, rollout.GetServerInfoRequest),
            },
            "TaskService": {
                "SubmitTasks": (unary, self.submit_tasks, tasks.SubmitTasksRequest),
                "LeaseTasks": (stream, self.lease_tasks, tasks.LeaseTasksRequest),
                "RenewLease": (unary, self.renew_lease, tasks.RenewLeaseRequest),
                "CompleteTrajectory": (unary, self.complete, tasks.CompleteTrajectoryRequest),
            },
        }.items():
            self.server.add_generic_rpc_handlers(
                (
                    grpc.method_handlers_generic_handler(
                        f"penstock.v1.{service}",
                        {
                            name: kind(
                                handler,
                                request_deserializer=request.FromString,
                                response_serializer=codec.encode,
                            )
                            for name, (kind, handler, request) in handlers.items()
                        },
                    ),
                )
            )
        port = self.server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    def add_task(self, task: Task, sample_index: int = 0, retry_count: int = 0) -> None:
        self.script.tasks.append(
            tasks.LeaseTasksResponse(
                task=tasks.Task.FromString(codec.encode(write_task(task))),
                trajectory_id=f"{task.task_id}-{sample_index}-{retry_count}",
                group_id=f"group of {task.task_id}",
                sample_index=sample_index,
                retry_count=retry_count,
                lease=duration_pb2.Duration(nanos=300_000_000),
            )
        )

    async def lease_later(self, task: Task) -> None:
        """Add a task while lease streams are open."""
        self.add_task(task)
        async with self.changed:
            self.changed.notify_all()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _note(self, method: str, request: object, context: grpc.aio.ServicerContext) -> None:
        self.calls.append(method)
        self.requests.append(request)
        self.metadata = {k: v for k, v in context.invocation_metadata() if isinstance(v, str)}
        async with self.changed:
            self.changed.notify_all()
        if refusals := self.script.refuse.get(method):
            await context.abort_with_status(refusals.popleft())

    async def generate(self, request, context) -> AsyncIterator[rollout.GenerateResponse]:
        await self._note("Generate", request, context)
        if request.trajectory_id in self.records:
            await context.abort_with_status(
                status(grpc.StatusCode.ALREADY_EXISTS, "TRAJECTORY_EXISTS")
            )
        record = self.records[request.trajectory_id] = Record([[]])
        async for event in self._turn(record, context, rollout.GenerateResponse):
            yield event

    async def continue_turn(self, request, context) -> AsyncIterator[rollout.ContinueResponse]:
        await self._note("Continue", request, context)
        record = self.records.get(request.trajectory_id)
        if record is None:
            await context.abort_with_status(TRAJECTORY_UNKNOWN)
            return
        resumes = request.WhichOneof("observation") is None
        if resumes and record.finish != trajectory.FINISH_REASON_ABORTED:
            await context.abort_with_status(
                status(grpc.StatusCode.FAILED_PRECONDITION, "NOTHING_TO_RESUME")
            )
        if not resumes:
            record.turns.append([])
        elif self.script.forgets:
            record.turns[-1] = record.turns[-1][: -self.script.forgets.popleft()]
        async for event in self._turn(record, context, rollout.ContinueResponse):
            yield event

    async def _turn(self, record: Record, context, response) -> AsyncIterator:
        script, written = self.script, record.turns[-1]
        index = len(record.turns) - 1
        record.finish = trajectory.FINISH_REASON_ABORTED
        break_at = script.break_after.popleft() if script.break_after else None
        abort_at = script.abort_after.popleft() if script.abort_after else None
        yield response(
            started=rollout.TurnStarted(
                turn_index=index, context_token_count=5, weight_version=VERSION
            )
        )
        sent = 0
        while len(written) < script.length:
            if break_at == sent:
                for _ in range(script.unsent):
                    written.append(100 * index + len(written))
                if len(written) == script.length:
                    record.finish = trajectory.FINISH_REASON_STOP
                await context.abort_with_status(UNAVAILABLE)
            if abort_at == sent:
                break
            written.append(100 * index + len(written))
            sent += 1
            yield response(segment=self._segment(index, written[-1:]))
            if script.hold_turns is not None:
                await script.hold_turns.wait()
        if len(written) == script.length:
            record.finish = trajectory.FINISH_REASON_STOP
        yield response(finished=record.finished())

    def _segment(self, index: int, tokens: list[int]) -> trajectory.Segment:
        return trajectory.Segment(
            author=trajectory.AUTHOR_POLICY,
            token_ids=tokens,
            logprobs=[-token / 8 for token in tokens],
            weight_version=VERSION,
            turn_index=index,
            temperature=1.0,
        )

    async def abort(self, request, context) -> rollout.AbortResponse:
        await self._note("Abort", request, context)
        return rollout.AbortResponse()

    async def get_trajectory(self, request, context) -> rollout.GetTrajectoryResponse:
        await self._note("GetTrajectory", request, context)
        record = self.records.get(request.trajectory_id)
        if record is None:
            await context.abort_with_status(TRAJECTORY_UNKNOWN)
            raise AssertionError
        in_flight = self.script.in_flight_answers > 0
        self.script.in_flight_answers -= in_flight
        segments = [self._segment(i, tokens) for i, tokens in enumerate(record.turns) if tokens]
        return rollout.GetTrajectoryResponse(
            trajectory=trajectory.Trajectory(
                trajectory_id=request.trajectory_id,
                segments=segments,
                finish_reason=record.finish,
                turn_count=len(record.turns),
                outcome=record.outcome,
            ),
            open=record.outcome is None,
            last_turn=None if in_flight else record.finished(),
        )

    async def get_server_info(self, request, context) -> rollout.GetServerInfoResponse:
        await self._note("GetServerInfo", request, context)
        return rollout.GetServerInfoResponse(model="scripted", active_weight_version=VERSION)

    async def submit_tasks(self, request, context) -> tasks.SubmitTasksResponse:
        await self._note("SubmitTasks", request, context)
        return tasks.SubmitTasksResponse(accepted_count=len(request.tasks))

    async def lease_tasks(self, request, context) -> AsyncIterator[tasks.LeaseTasksResponse]:
        await self._note("LeaseTasks", request, context)
        held: set[str] = set()
        breaking = asyncio.create_task(self.script.break_lease_stream.wait())
        breaking.add_done_callback(lambda _: self._wake())
        try:
            while True:
                held = {i for i in held if i in self.leased}
                if breaking.done():
                    await context.abort_with_status(UNAVAILABLE)
                if self.script.tasks and len(held) < request.concurrency:
                    lease = self.script.tasks.popleft()
                    self.leased[lease.trajectory_id] = lease
                    held.add(lease.trajectory_id)
                    self.in_flight_peak = max(self.in_flight_peak, len(self.leased))
                    yield lease
                    continue
                async with self.changed:
                    await self.changed.wait()
        finally:
            breaking.cancel()

    def _wake(self) -> None:
        async def notify() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._waker = asyncio.ensure_future(notify())

    async def renew_lease(self, request, context) -> tasks.RenewLeaseResponse:
        await self._note("RenewLease", request, context)
        self.renewed += request.trajectory_ids
        gone = [i for i in request.trajectory_ids if i in self.script.expired]
        for trajectory_id in gone:
            self.leased.pop(trajectory_id, None)
        return tasks.RenewLeaseResponse(expired_trajectory_ids=gone)

    async def complete(self, request, context) -> tasks.CompleteTrajectoryResponse:
        await self._note("CompleteTrajectory", request, context)
        if request.trajectory_id in self.script.expired:
            await context.abort_with_status(
                status(grpc.StatusCode.FAILED_PRECONDITION, "LEASE_EXPIRED")
            )
        if record := self.records.get(request.trajectory_id):
            record.outcome = request.outcome
        self.outcomes.append((request.trajectory_id, request.outcome))
        lease = self.leased.pop(request.trajectory_id, None)
        failed = request.outcome.HasField("failure")
        if lease is not None and failed and lease.retry_count + 1 < self.script.max_attempts:
            self.retried.add(request.trajectory_id)
            retry = tasks.LeaseTasksResponse()
            retry.CopyFrom(lease)
            retry.retry_count += 1
            retry.trajectory_id = f"{lease.trajectory_id[:-1]}{retry.retry_count}"
            self.script.tasks.appendleft(retry)
        async with self.changed:
            self.changed.notify_all()
        return tasks.CompleteTrajectoryResponse(
            group_completed=True, retried=request.trajectory_id in self.retried
        )


def expected_tokens(turn: int, length: int = 10) -> list[int]:
    return [100 * turn + position for position in range(length)]


def assert_turn(turn, index: int, length: int = 10) -> None:
    """Check that a turn holds every token once, with its log-probability."""
    np.testing.assert_array_equal(turn.token_ids, expected_tokens(index, length))
    np.testing.assert_array_equal(turn.logprobs, -turn.token_ids.astype(np.float32) / 8)
    assert turn.index == index
