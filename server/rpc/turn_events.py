"""The events of a turn, as a caller receives them: started, segments, finished.

A call on a turn only subscribes to it. The turn belongs to the server: `rollouts.start` starts it,
`turns.runner` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TypedDict

from opentelemetry.context import Context

from penstock.server.core.aio import OwnTasks
from penstock.server.core.errors import DomainError
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import trajectories_forgotten
from penstock.server.rollouts.start import StreamWish
from penstock.server.rollouts.unleased import OwnTrajectories
from penstock.server.rpc.leases import CallLeases
from penstock.server.text.messages import Message
from penstock.server.text.renderer import Renderer
from penstock.server.turns.policy_messages import PolicyMessages
from penstock.server.turns.runner import Subscription, TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.server.turns.trajectory import PromptKind, Turn
from penstock.server.turns.turn import TurnAttempt
from penstock.v1 import conversation_pb2, rollout_service_pb2, trajectory_pb2
from penstock.wire.messages import ChatMessage, ToolCall, TurnFinished, TurnStarted


class EventFields(TypedDict, total=False):
    """The field of an event that is set, as a keyword argument of the response."""

    started: rollout_service_pb2.TurnStarted
    segment: trajectory_pb2.Segment
    finished: rollout_service_pb2.TurnFinished


@dataclass(eq=False)
class TurnEvents:
    renderer: Renderer
    messages: PolicyMessages
    store: TrajectoryStore
    turns: TurnRunner
    journal: Journal
    own: OwnTrajectories
    leases: CallLeases
    _forgetting: OwnTasks = field(default_factory=OwnTasks)

    async def stream(
        self, turn: Turn, how: StreamWish, context: Context
    ) -> AsyncGenerator[EventFields]:
        """Yield started, segments, finished. If the caller leaves before the end, the turn is aborted,
        unless it asked to detach."""
        subscription = Subscription(
            turn, flush_seconds=how.flush_seconds, final_only=how.final_only
        )
        ended = False
        with self.leases.open_call(turn.record):
            try:
                await subscription.admitted()
                if subscription.attempt.recorded is not None:
                    # Other readers of the turn wait for it too.
                    await asyncio.shield(subscription.attempt.recorded)
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
                    self.turns.abort_soon(turn)
            yield {"finished": await self.finished(turn, subscription.attempt)}

    def forget_soon(self, turn: Turn) -> None:
        """Abort the turn of a trajectory that will not be called again, then forget the trajectory."""
        trajectory_id = turn.record.trajectory_id

        async def forget() -> None:
            await self.turns.abort([turn])
            self.store.forget(trajectory_id)
            if not turn.record.single_turn:
                await self.journal.append([trajectories_forgotten([trajectory_id])])

        if turn.record.single_turn and not turn.in_flight:
            self.store.forget(trajectory_id)
        else:
            self._forgetting.start(forget(), f"forgetting {trajectory_id}")

    def _withdraw(self, turn: Turn) -> None:
        """Forget a trajectory whose first turn failed before its first token."""
        record = turn.record
        if self.store.find(record.trajectory_id) is not record:
            # Another reader of the turn did so.
            return
        grouped = bool(record.group_id) and self.leases.attempt_of(record) is None
        # Keep it if another trajectory branched from it meanwhile, which shares its tokens.
        unused = turn.index == 0 and not turn.policy_token_count and not record.children
        if unused and not grouped:
            parent = self.store.find(record.parent_trajectory_id)
            if parent is not None:
                parent.children.remove(record)
                attempt = self.leases.attempt_of(parent)
                if attempt is not None:
                    attempt.branches.discard(record.trajectory_id)
            self.store.forget(record.trajectory_id)
            self.own.withdrawn(record.trajectory_id)
            if not record.single_turn:
                self.journal.append([trajectories_forgotten([record.trajectory_id])])

    async def finished(self, turn: Turn, attempt: TurnAttempt) -> rollout_service_pb2.TurnFinished:
        finished = TurnFinished(
            finish_reason=attempt.finish_reason,
            policy_token_count=attempt.policy_token_count,
            # For a resumed turn, the engine also counts the tokens that the turn had sampled before.
            cached_token_count=min(attempt.cached_token_count, turn.context_token_count),
        )
        kind = turn.record.kind
        if kind is PromptKind.TEXT:
            finished.text = self.renderer.decode(turn.policy_tokens(attempt.policy_token_count))
        elif kind is PromptKind.CONVERSATION:
            written = attempt.written
            if written is None:
                # The turn ended on a previous server.
                written = await self.messages.read(turn, attempt.policy_token_count)
            finished.message.CopyFrom(_chat_message(written.message))
            finished.tool_call_error = written.tool_call_error
        return finished


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
