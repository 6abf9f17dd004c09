"""Turns a turn's tokens into an agent's answer: text while it is written, the message at its end.

The agent sends the answer back with its next request, and the server compares it with the trajectory's
messages. So the final message is the one that the server's own parsers find in the whole turn, and every
stream ends up with the same message. Text is sent as soon as it can no longer become something else, the
rest and the tool calls when the turn is whole.

A stop string ends the answer and is not part of it; its tokens stay in the trajectory. If the streamed
text differs from the parsed message, the trajectory keeps what was sent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.server.text.messages import Message, ToolCall
from penstock.v1 import rollout_service_pb2, trajectory_pb2

if TYPE_CHECKING:
    from penstock.server.http.asked import Answer
    from penstock.server.http.turns import AgentTurns
    from penstock.server.text.streaming import TurnStream
    from penstock.server.turns.trajectory import Turn
    from penstock.server.turns.turn import TurnSampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplyPart:
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Complete calls, all sent at the end."""


@dataclass(slots=True)
class Reply:
    answer_id: str
    model: str
    prompt_token_count: int
    budget: int
    """Most tokens of the turn."""
    sampling: TurnSampling
    message: Message = field(default_factory=lambda: Message("assistant", ""))
    """The message as sent. This and all fields below are set once it is whole."""
    policy_token_count: int = 0
    cached_token_count: int = 0
    reasoning_token_count: int = 0
    """Reasoning tokens among the policy's, if the parser counts them."""
    length: bool = False
    stop_string: str | None = None
    tool_call_error: str = ""
    """Why text that begins like a tool call is not one."""

    @property
    def extra(self) -> dict[str, str]:
        """Additional fields that are not part of any service's format; often empty."""
        return {"tool_call_error": self.tool_call_error} if self.tool_call_error else {}

    def finish(self, finished: rollout_service_pb2.TurnFinished, turn: Turn) -> None:
        said, stops, written = finished.message, turn.sampling.stop, turn.attempt.written
        calls = tuple(
            ToolCall(call.tool_call_id, call.name, call.arguments_json) for call in said.tool_calls
        )
        content = said.content
        self.length = finished.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        found = [(at, stop) for stop in stops if (at := content.find(stop)) >= 0]
        if found and not self.length:
            at, self.stop_string = min(found)
            content = content[:at]
        self.message = Message("assistant", content, calls, reasoning=said.reasoning)
        self.tool_call_error = finished.tool_call_error
        self.policy_token_count = finished.policy_token_count
        self.cached_token_count = finished.cached_token_count
        self.reasoning_token_count = 0 if written is None else written.reasoning_token_count


async def tell_whole(turns: AgentTurns, answer: Answer, reply: Reply) -> None:
    """Raises what `AgentTurns.follow` raises."""
    async with contextlib.aclosing(turns.follow(answer)) as pieces:
        async for _ in pieces:
            pass
    assert answer.finished is not None
    reply.finish(answer.finished, answer.turn)
    await turns.told(answer, reply.message)


async def tell(
    turns: AgentTurns, answer: Answer, reply: Reply, stream: TurnStream
) -> AsyncGenerator[ReplyPart]:
    """Yields new parts and fills in the reply at the end. Raises what `AgentTurns.follow` raises."""
    stops = answer.turn.sampling.stop
    content = _Sent(max((len(stop) - 1 for stop in stops), default=0), stops)
    reasoning = _Sent(0, ())
    async with contextlib.aclosing(turns.follow(answer)) as pieces:
        async for token_ids in pieces:
            said, thought = stream.add(token_ids)
            delta = ReplyPart(content.add(said), reasoning.add(thought))
            if delta.content or delta.reasoning:
                yield delta
    assert answer.finished is not None
    reply.finish(answer.finished, answer.turn)
    read = reply.message
    delta = ReplyPart(content.rest(read.content), reasoning.rest(read.reasoning), read.tool_calls)
    if delta != ReplyPart():
        yield delta
    reply.message = replace(read, content=content.sent, reasoning=reasoning.sent)
    await turns.told(answer, reply.message)


@dataclass(slots=True, eq=False)
class _Sent:
    """The sent part of one text. Withholds characters in which a stop string may begin."""

    held: int
    stops: Sequence[str]
    text: str = ""
    sent: str = ""

    def add(self, text: str) -> str:
        """Returns what can be sent now."""
        self.text += text
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        end = min(found, default=max(len(self.sent), len(self.text) - self.held))
        return self._send(self.text[len(self.sent) : end])

    def rest(self, whole: str) -> str:
        """Returns the unsent rest of the text, given the final parse of the whole turn."""
        sent, start = self.sent, len(self.sent)
        if not whole.startswith(sent):
            # Between a stream and a whole turn, parsers differ in the white space they keep around a text.
            sent, space = sent.lstrip(), len(whole) - len(whole.lstrip())
            start = space + len(sent)
            if not whole.strip().startswith(sent.rstrip()):
                logger.warning(
                    "parsed turn differs from its stream; ending the stream after %d characters",
                    start,
                )
                return ""
        return self._send(whole[start:])

    def _send(self, text: str) -> str:
        self.sent += text
        return text
