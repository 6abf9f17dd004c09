"""Turns requests into records, prompts and started turns.

Order of a first turn: check the fields -> render the prompt -> join the lease or group -> open the record
-> start the turn. Every refusal precedes the opening, so the caller can retry with the same id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from penstock.common import telemetry
from penstock.server.config.settings import StreamingSection
from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.engine.protocol import WHOLE, EngineDescription
from penstock.server.groups.attempts import Attempt, group_changed
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal
from penstock.server.rollouts.unleased import OwnTrajectories
from penstock.server.turns import requests
from penstock.server.turns.prompts import Prompts, Said
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore, unknown_trajectory
from penstock.server.turns.trajectory import BYTES_PER_TOKEN, TrajectoryRecord, Turn
from penstock.server.turns.turn import TurnSampling
from penstock.server.weights.switch import WeightSwitch
from penstock.v1 import rollout_service_pb2
from penstock.wire.reasons import Reason

# Bytes that a turn takes in the journal in addition to its tokens.
TURN_RECORD_BYTES = 8192
MAX_DEPTH = 1_024
"""Branches of branches: how deep they may be nested. Each level makes reading a context slower."""

tracer = trace.get_tracer("penstock.server")


@dataclass(frozen=True, slots=True)
class StreamWish:
    flush_seconds: float
    final_only: bool
    detach: bool
    interval: int
    """Number of tokens the engine collects before it returns them."""


@dataclass(eq=False)
class Opening:
    description: EngineDescription
    streaming: StreamingSection
    prompts: Prompts
    store: TrajectoryStore
    queue: TaskQueue
    turns: TurnRunner
    switch: WeightSwitch
    journal: Journal
    own: OwnTrajectories
    check_room: Callable[[int], None]
    """Checks that the current caller may begin a turn that takes this many bytes. Raises CALLER_LIMIT,
    MEMORY_BUDGET and DISK_FULL."""
    _draining: DomainError | None = None

    def drain(self, refusal: DomainError) -> None:
        self._draining = refusal

    def _check_not_draining(self) -> None:
        if self._draining is not None:
            raise self._draining

    async def open(
        self,
        request: rollout_service_pb2.GenerateRequest,
        context: Context,
        said: Said | None = None,
    ) -> tuple[Turn, StreamWish]:
        """Open a trajectory and start its first turn; `said` replaces the request's prompt."""
        self._check_not_draining()
        trajectory_id = requests.identifier("trajectory_id", request.trajectory_id)
        if (required := request.required_weight_version) < 0:
            raise FieldInvalid("required_weight_version", "must not be negative", required)
        how = self.how(request.stream_options)
        attempt, parent = self._owners(request)
        task = None if attempt is None else attempt.group.task
        if attempt is None and parent is None:
            requests.group(request)
        if request.single_turn and (request.group_id or attempt is not None or parent is not None):
            raise FieldInvalid("single_turn", "may not be set with a group, a lease or a parent")
        params, source = request.sampling_params, request
        if task is not None and not request.HasField("sampling_params"):
            params = task.sampling_params
        sampling = self.sampling(params)
        if task is not None and request.WhichOneof("prompt") is None:
            source = task
        prompt = await self.prompts.first(source, parent, said)
        self._check_length(len(prompt.token_ids))
        # The await above may have invalidated these checks. Nothing below awaits before the turn starts.
        self._check_not_draining()
        attempt, parent = self._owners(request)
        self._check_required(required)
        record = TrajectoryRecord(
            trajectory_id,
            prompt.kind,
            sampling,
            priority=request.priority,
            required_weight_version=required,
            traceparent=telemetry.traceparent(context),
            history=prompt.history,
            single_turn=request.single_turn,
        )
        count = len(prompt.token_ids)
        self._check_tokens(count + self._budget(count, sampling))
        shared = 0 if parent is None else parent.shared_with(prompt.token_ids)
        self._place(record, request, attempt, parent, shared)
        record.append_context(prompt.token_ids[shared:], 0)
        return self._begin_turn(record, 0, sampling, how, context), how

    def _owners(
        self, request: rollout_service_pb2.GenerateRequest
    ) -> tuple[Attempt | None, TrajectoryRecord | None]:
        """The attempt and the parent of a trajectory that is about to be opened. Raises LEASE_EXPIRED,
        TRAJECTORY_EXISTS, QUEUE_FULL and what `_parent` raises."""
        attempt = self.queue.attempt_of(request.trajectory_id)
        self.store.check_new(request.trajectory_id)
        return attempt, self._parent(request)

    def _check_required(self, required: int) -> None:
        """Raise WEIGHT_VERSION_NOT_ACTIVE if another version than the required one is active. During a
        weight switch the turn waits, and this is checked again when it is admitted."""
        active = self.switch.active_version
        if required not in (0, active) and not self.switch.changing:
            raise DomainError(
                Reason.WEIGHT_VERSION_NOT_ACTIVE,
                f"weight version {required} is required, {active} is active",
                {"required": required, "active": active},
            )

    def _parent(self, request: rollout_service_pb2.GenerateRequest) -> TrajectoryRecord | None:
        if not request.parent_trajectory_id:
            return None
        parent_id = requests.identifier("parent_trajectory_id", request.parent_trajectory_id)
        self.queue.attempt_of(parent_id)
        parent = self.store.get(parent_id)
        # The parent's own turn may be in flight, because agents that work in parallel branch from it.
        _check_open(parent)
        if request.group_id not in ("", parent.group_id):
            raise FieldInvalid("group_id", "must be the parent's, or unset", request.group_id)
        if (depth := parent.depth + 1) > MAX_DEPTH:
            raise FieldInvalid(
                "parent_trajectory_id",
                f"is itself a branch of a branch, {depth - 1} deep, which is the most",
                parent_id,
            )
        return parent

    def _place(
        self,
        record: TrajectoryRecord,
        request: rollout_service_pb2.GenerateRequest,
        attempt: Attempt | None,
        parent: TrajectoryRecord | None,
        shared: int,
    ) -> None:
        """Attach the record to its lease, its parent's attempt or its caller's group, if any."""
        if parent is not None:
            record.branch_from(parent, shared)
            root = self.store.root_of(parent)
            branched = None if root is None else self.queue.attempt_of(root.trajectory_id)
            if branched is not None:
                branched.branches.add(record.trajectory_id)
        elif attempt is not None:
            group = attempt.group
            given = (request.group_id, request.group_size, request.sample_index)
            if any(given) and given != (group.group_id, group.size, attempt.sample_index):
                raise FieldInvalid(
                    "group_id", "(or group_size, sample_index) differs from the lease", given
                )
            record.group_id, record.sample_index = group.group_id, attempt.sample_index
        elif request.group_id:
            self.queue.join(
                request.group_id,
                request.group_size,
                request.sample_index,
                record.trajectory_id,
                self.switch.active_version,
            )
            record.group_id, record.sample_index = request.group_id, request.sample_index
            # Queued before the trajectory's own record, for which the caller waits.
            joined = self.queue.attempt_of(record.trajectory_id)
            assert joined is not None
            self.journal.append([group_changed(joined.group)])
        self.store.add(record)
        if attempt is None and parent is None and not (request.group_id or record.single_turn):
            self.own.opened(record)

    def _check_length(self, count: int) -> None:
        limit = self.description.max_context_length
        if count == 0:
            raise FieldInvalid("prompt", "must hold at least one token")
        if count + 1 > limit:
            raise DomainError(
                Reason.PROMPT_TOO_LONG,
                f"the prompt has {count} tokens; with one more it exceeds the context of {limit}",
                {"token_count": count, "max_context_length": limit},
            )

    async def extend(
        self,
        request: rollout_service_pb2.ContinueRequest,
        context: Context,
        said: Said | None = None,
    ) -> tuple[Turn, StreamWish]:
        """Start the next turn, or resume the last one. `said` replaces the request's observation."""
        self._check_not_draining()
        trajectory_id = requests.identifier("trajectory_id", request.trajectory_id)
        how = self.how(request.stream_options)
        self.queue.attempt_of(trajectory_id)
        record = self.store.get(trajectory_id)
        _check_open(record)
        check_idle(record)
        sampling = record.sampling
        if request.HasField("sampling_params"):
            sampling = self.sampling(request.sampling_params)
        if said is None and request.WhichOneof("observation") is None:
            return self._resume(record, request, sampling, how, context), how
        seen = record.turn and (record.turn, record.turn.attempt)
        observation, messages = await self.prompts.next(request, record, said)
        self._check_not_draining()
        self.queue.attempt_of(trajectory_id)
        if self.store.get(trajectory_id) is not record:
            raise unknown_trajectory(trajectory_id)
        _check_open(record)
        check_idle(record)
        if seen != (record.turn and (record.turn, record.turn.attempt)):
            raise _in_flight(record, "another turn was taken meanwhile")
        last = record.turn
        # A turn that found the context full does not count, and may be requested again.
        index = 0 if last is None else last.index + (last.budget > 0)
        room = self.description.max_context_length - record.token_count
        if len(observation) + 1 > room:
            # The context is full, so the observation is not appended: no turn would see it.
            record.sampling = sampling
            return self._begin_turn(record, index, sampling, how, context, full=True), how
        count = len(observation)
        self._check_tokens(count + self._budget(record.token_count + count, sampling))
        record.sampling = sampling
        record.append_context(observation, index)
        if record.history is not None:
            record.history.add_observation(messages, record.token_count)
        return self._begin_turn(record, index, sampling, how, context), how

    def sampling(self, params: rollout_service_pb2.SamplingParams) -> TurnSampling:
        """Check the parameters and apply all defaults. Raises FIELD_INVALID and TOKEN_OUT_OF_RANGE."""
        return requests.sampling("sampling_params", params, self.description.vocab_size)

    def _resume(
        self,
        record: TrajectoryRecord,
        request: rollout_service_pb2.ContinueRequest,
        sampling: TurnSampling,
        how: StreamWish,
        context: Context,
    ) -> Turn:
        turn = record.turn
        if turn is None or not turn.resumable:
            raise DomainError(
                Reason.NOTHING_TO_RESUME,
                "the last turn was not aborted; continue it with an observation",
                {"trajectory_id": record.trajectory_id},
            )
        budget = turn.budget
        # A turn that found the context full keeps no budget, because its observation was not appended.
        if turn.budget and request.HasField("sampling_params"):
            budget = self._budget(turn.context_token_count, sampling)
        # The reservation for its remaining tokens was released when it was aborted.
        self._check_tokens(max(0, budget - turn.policy_token_count))
        turn.budget = budget
        if request.HasField("sampling_params"):
            record.sampling = turn.sampling = sampling
        # A turn that found the context full wrote no message.
        if record.history is not None and turn.budget:
            record.history.drop_written()
        turn.stream_interval = how.interval
        turn.span, turn.trace_headers = _start_span(
            record, turn.index, self.description.model, context
        )
        self.turns.start(turn)
        return turn

    def _begin_turn(
        self,
        record: TrajectoryRecord,
        index: int,
        sampling: TurnSampling,
        how: StreamWish,
        context: Context,
        *,
        full: bool = False,
    ) -> Turn:
        """With `full`, a turn that samples nothing and reports that the context is full."""
        span, headers = _start_span(record, index, self.description.model, context)
        turn = Turn(
            record=record,
            index=index,
            sampling=sampling,
            budget=0 if full else self._budget(record.token_count, sampling),
            context_token_count=record.token_count,
            span=span,
            trace_headers=headers,
            stream_interval=how.interval,
        )
        if not full:
            record.turn_count = index + 1
        elif record.turn is not None:
            turn.finish_reason_before = record.turn.last_finish_reason
        record.turn = turn
        self.turns.start(turn)
        return turn

    def _check_tokens(self, token_count: int) -> None:
        """Check that there is room for a turn that may add `token_count` tokens."""
        self.check_room(token_count * BYTES_PER_TOKEN + TURN_RECORD_BYTES)

    def _budget(self, context_token_count: int, sampling: TurnSampling) -> int:
        room = self.description.max_context_length - context_token_count
        return min(room, sampling.max_tokens or room)

    def how(self, options: rollout_service_pb2.StreamOptions) -> StreamWish:
        """Apply the defaults. Raises FIELD_INVALID."""
        rules = self.streaming
        if options.final_only:
            return StreamWish(0.0, True, options.detach, WHOLE)
        if not options.HasField("flush_interval"):
            return StreamWish(rules.flush_seconds, False, options.detach, rules.interval)
        seconds = requests.duration_seconds("stream_options.flush_interval", options.flush_interval)
        interval = rules.interval if seconds >= rules.flush_seconds else 1
        return StreamWish(seconds, False, options.detach, interval)


def _check_open(record: TrajectoryRecord) -> None:
    if record.closed:
        raise DomainError(
            Reason.TRAJECTORY_CLOSED,
            f"trajectory {record.trajectory_id} is closed",
            {"trajectory_id": record.trajectory_id},
        )


def check_idle(record: TrajectoryRecord) -> None:
    """Raises TURN_IN_FLIGHT."""
    if record.growing:
        raise _in_flight(record, "a turn is in flight")


def _in_flight(record: TrajectoryRecord, problem: str) -> DomainError:
    return DomainError(
        Reason.TURN_IN_FLIGHT,
        f"trajectory {record.trajectory_id}: {problem}",
        {"trajectory_id": record.trajectory_id},
    )


def _start_span(
    record: TrajectoryRecord, index: int, model: str, context: Context
) -> tuple[trace.Span, dict[str, str]]:
    span = tracer.start_span(
        "penstock.turn",
        context,
        trace.SpanKind.SERVER,
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "penstock",
            "gen_ai.request.model": model,
            "penstock.trajectory_id": record.trajectory_id,
            "penstock.group_id": record.group_id,
            "penstock.turn_index": index,
        },
    )
    headers: dict[str, str] = {}
    propagate.inject(headers, trace.set_span_in_context(span, context))
    if not record.traceparent:
        record.traceparent = headers.get("traceparent", "")
    return span, headers
