"""RolloutService: turns and trajectories. Weight uploads are in `weight_uploads`.

A call on a turn only subscribes to it. The turn belongs to the server: `opening` starts it, `turns`
runs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import TypedDict

from opentelemetry.context import Context

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.core.own_tasks import OwnTasks
from penstock.server.engine.protocol import Finish
from penstock.server.groups.attempts import Attempt
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import trajectories_forgotten
from penstock.server.rollouts.start import Opening, StreamWish
from penstock.server.rollouts.unleased import OwnTrajectories
from penstock.server.text.renderer import Message, Renderer
from penstock.server.turns import requests
from penstock.server.turns.policy_messages import PolicyMessages
from penstock.server.turns.runner import Turn, TurnAttempt, TurnRunner
from penstock.server.turns.store import PromptKind, TrajectoryRecord, TrajectoryStore
from penstock.server.turns.subscription import Subscription
from penstock.v1 import conversation_pb2, rollout_service_pb2, trajectory_pb2
from penstock.wire.codec import twin

GenerateResponse = twin(rollout_service_pb2.GenerateResponse)
ContinueResponse = twin(rollout_service_pb2.ContinueResponse)
TurnStarted = twin(rollout_service_pb2.TurnStarted)
TurnFinished = twin(rollout_service_pb2.TurnFinished)
AbortResponse = twin(rollout_service_pb2.AbortResponse)
AbortedTurn = twin(rollout_service_pb2.AbortedTurn)
GetTrajectoryResponse = twin(rollout_service_pb2.GetTrajectoryResponse)
ChatMessage = twin(conversation_pb2.ChatMessage)
ToolCall = twin(conversation_pb2.ToolCall)


class _EventFields(TypedDict, total=False):
    """The field of an event that is set, as a keyword argument of the response."""

    started: rollout_service_pb2.TurnStarted
    segment: trajectory_pb2.Segment
    finished: rollout_service_pb2.TurnFinished


FindFinished = Callable[[str], Awaitable[trajectory_pb2.Trajectory | None]]


class RolloutServicer:
    def __init__(
        self,
        opening: Opening,
        renderer: Renderer,
        messages: PolicyMessages,
        store: TrajectoryStore,
        queue: TaskQueue,
        turns: TurnRunner,
        journal: Journal,
        own: OwnTrajectories,
        find_finished: FindFinished,
    ) -> None:
        """`find_finished` looks up a closed trajectory in its finished group, by id."""
        self._opening = opening
        self._renderer = renderer
        self._messages = messages
        self._store = store
        self._queue = queue
        self._turns = turns
        self._find_finished = find_finished
        self._journal = journal
        self._own = own
        self._forgetting = OwnTasks()

    # Generate and Continue

    async def generate(
        self, request: rollout_service_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.GenerateResponse]:
        """Open a trajectory and stream its first turn."""
        turn, how = await self._opening.open(request, context)
        try:
            async with contextlib.aclosing(self.events(turn, how, context)) as events:
                async for event in events:
                    yield GenerateResponse(**event)
        finally:
            if request.single_turn:
                self.forget_soon(turn)

    async def continue_(
        self, request: rollout_service_pb2.ContinueRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.ContinueResponse]:
        """Extend a trajectory, or resume its last turn, and stream the turn."""
        turn, how = await self._opening.extend(request, context)
        async with contextlib.aclosing(self.events(turn, how, context)) as events:
            async for event in events:
                yield ContinueResponse(**event)

    async def events(
        self, turn: Turn, how: StreamWish, context: Context
    ) -> AsyncGenerator[_EventFields]:
        """Subscribe to a turn: yields started, segments, finished.

        If the caller leaves before the end, the turn is aborted, unless it asked to detach.
        """
        subscription = Subscription(
            turn, flush_seconds=how.flush_seconds, final_only=how.final_only
        )
        ended = False
        with self._call(turn.record):
            try:
                await subscription.admitted()
                if subscription.attempt.recorded is not None:
                    await subscription.attempt.recorded
                yield {
                    "started": TurnStarted(
                        turn_index=turn.index,
                        context_token_count=turn.context_token_count,
                        weight_version=subscription.attempt.started_version or 0,
                    )
                }
                async with contextlib.aclosing(subscription.segments()) as segments:
                    async for segment in segments:
                        yield {"segment": segment}
                ended = True
            except DomainError:
                ended = True
                if not subscription.overtaken:
                    self._withdraw(turn)
                raise
            finally:
                if not ended and not how.detach and not subscription.overtaken:
                    self._turns.abort_soon(turn)
            yield {"finished": await self._finished(turn, subscription.attempt)}

    def forget_soon(self, turn: Turn) -> None:
        """Abort the turn of a trajectory that will not be called again, then forget the
        trajectory."""
        trajectory_id = turn.record.trajectory_id

        async def forget() -> None:
            await self._turns.abort([turn])
            self._store.forget(trajectory_id)
            if not turn.record.single_turn:
                await self._journal.append([trajectories_forgotten([trajectory_id])])

        if turn.record.single_turn and not turn.in_flight:
            self._store.forget(trajectory_id)
        else:
            self._forgetting.start(forget(), f"forgetting {trajectory_id}")

    def _withdraw(self, turn: Turn) -> None:
        """Forget a trajectory whose first turn failed before its first token."""
        record = turn.record
        grouped = bool(record.group_id) and self._attempt_of_root(record) is None
        # Keep it if another trajectory branched from it meanwhile, which shares its tokens.
        unused = turn.index == 0 and not turn.policy_token_count and not record.children
        if unused and not grouped:
            parent = self._store.find(record.parent_trajectory_id)
            if parent is not None:
                parent.children.remove(record)
                attempt = self._attempt_of_root(parent)
                if attempt is not None:
                    attempt.branches.discard(record.trajectory_id)
            self._store.forget(record.trajectory_id)
            self._own.withdrawn(record.trajectory_id)
            if not record.single_turn:
                self._journal.begin_append([trajectories_forgotten([record.trajectory_id])])

    def called(self, trajectory_id: str) -> None:
        """Renew a trajectory's lease: any call that names it, even a failing one, is a sign of
        life."""
        if self._queue.renew(trajectory_id):
            return
        record = self._store.find(trajectory_id)
        root = None if record is None else self._store.root_of(record)
        if root is not None and not self._queue.renew(root.trajectory_id):
            self._own.touch(root)

    def group_called(self, group_id: str, is_callers: Callable[[str], bool]) -> None:
        """Renew the leases of those attempts of a group that belong to the caller."""
        for trajectory_id in self._queue.leased_of(group_id):
            if is_callers(trajectory_id):
                self._queue.renew(trajectory_id)

    @contextlib.contextmanager
    def _call(self, record: TrajectoryRecord) -> Generator[None]:
        """Stop the lease while a call is open."""
        attempt = self._attempt_of_root(record)
        if attempt is None:
            yield
            return
        self._queue.leases.call_began(attempt)
        try:
            yield
        finally:
            self._queue.leases.call_ended(attempt)

    def _attempt_of_root(self, record: TrajectoryRecord) -> Attempt | None:
        root = self._store.root_of(record)
        return None if root is None else self._queue.attempt_of(root.trajectory_id)

    async def _finished(self, turn: Turn, attempt: TurnAttempt) -> rollout_service_pb2.TurnFinished:
        finished = TurnFinished(
            finish_reason=attempt.finish_reason,
            policy_token_count=attempt.policy_token_count,
            # For a resumed turn, the engine also counts the tokens that the turn had sampled
            # before.
            cached_token_count=min(attempt.cached_token_count, turn.context_token_count),
        )
        kind = turn.record.kind
        if kind is PromptKind.TEXT:
            finished.text = self._renderer.decode(turn.policy_tokens(attempt.policy_token_count))
        elif kind is PromptKind.CONVERSATION:
            written = attempt.written
            if written is None:
                # The turn ended on a previous server.
                written = await self._messages.read(turn, attempt.policy_token_count)
            finished.message.CopyFrom(_chat_message(written.message))
            finished.tool_call_error = written.tool_call_error
        return finished

    # Abort, GetTrajectory

    async def abort(
        self, request: rollout_service_pb2.AbortRequest
    ) -> rollout_service_pb2.AbortResponse:
        """Abort turns; returns once the engine no longer works on them."""
        selector = request.WhichOneof("selector")
        in_flight = self._turns.in_flight
        if selector == "trajectories":
            wanted = set(
                requests.identifiers(
                    "trajectories.trajectory_ids", request.trajectories.trajectory_ids
                )
            )
            chosen = [turn for turn in in_flight if turn.record.trajectory_id in wanted]
        elif selector == "groups":
            wanted = set(requests.identifiers("groups.group_ids", request.groups.group_ids))
            chosen = [turn for turn in in_flight if turn.record.group_id in wanted]
        elif selector == "all":
            chosen = in_flight
        else:
            raise FieldInvalid("selector", "must be set")
        stopped = await self._turns.abort(chosen)
        return AbortResponse(
            aborted_turns=[
                AbortedTurn(
                    trajectory_id=turn.record.trajectory_id,
                    policy_token_count=attempt.policy_token_count,
                )
                for turn, attempt in stopped
                if attempt.finish is Finish.ABORTED
            ]
        )

    async def get_trajectory(
        self, request: rollout_service_pb2.GetTrajectoryRequest
    ) -> rollout_service_pb2.GetTrajectoryResponse:
        """Return a trajectory as the server holds it, or as delivered with its group."""
        trajectory_id = requests.identifier("trajectory_id", request.trajectory_id)
        self._queue.attempt_of(trajectory_id)
        finished = await self._find_finished(trajectory_id)
        if finished is not None:
            return GetTrajectoryResponse(trajectory=finished, open=False)
        record = self._store.get(trajectory_id)
        response = GetTrajectoryResponse(trajectory=record.message(), open=not record.closed)
        if record.turn is not None and not record.turn.in_flight:
            response.last_turn.CopyFrom(await self._finished(record.turn, record.turn.attempt))
        return response


def _chat_message(message: Message) -> conversation_pb2.ChatMessage:
    return ChatMessage(
        role=conversation_pb2.ROLE_ASSISTANT,
        content=message.content,
        tool_calls=[
            ToolCall(
                tool_call_id=call.tool_call_id, name=call.name, arguments_json=call.arguments_json
            )
            for call in message.tool_calls
        ],
        reasoning=message.reasoning,
    )
