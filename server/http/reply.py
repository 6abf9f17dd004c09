"""A turn's tokens -> what an agent is told of it: text while it is written, its message at the end.

What is told must come back: the agent sends it with its next request, where it is compared with what the
trajectory holds. So the message is the one that the server's own parsers read in the whole turn, and every
stream comes to it: text is sent as it is written as far as it cannot become anything else, the rest, with
the tool calls, when the turn is whole. A stop string is the end of what is told and no part of it; its
tokens stay in the trajectory. Where what was told differs from what was read, the trajectory holds what was
told.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.server.text.renderer import Message, ToolCall
from penstock.v1 import rollout_service_pb2, trajectory_pb2

if TYPE_CHECKING:
    from penstock.server.http.turns import AgentTurns, Answer
    from penstock.server.text.streaming import TurnStream
    from penstock.server.turns.runner import Turn, TurnSampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Whole ones, all at the end."""


@dataclass(slots=True)
class Reply:
    """An answer as the surfaces write it."""

    answer_id: str
    model: str
    prompt_token_count: int
    budget: int
    """Most tokens of the turn."""
    sampling: TurnSampling
    message: Message = field(default_factory=lambda: Message("assistant", ""))
    """As it was told, once it is whole; like all below."""
    policy_token_count: int = 0
    cached_token_count: int = 0
    reasoning_token_count: int = 0
    """Of the policy's, as far as a parser counts them."""
    length: bool = False
    """Whether it ended for length."""
    stop_string: str | None = None
    """The stop string that ended it."""
    tool_call_error: str = ""
    """Why what begins as a tool call is none."""

    @property
    def extra(self) -> dict[str, str]:
        """Fields that are no surface's own; none where there is nothing to say."""
        return {"tool_call_error": self.tool_call_error} if self.tool_call_error else {}

    def finish(self, finished: rollout_service_pb2.TurnFinished, turn: Turn) -> None:
        """Takes up how the turn ended."""
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
    """Waits for the end of the turn. Raises as `AgentTurns.follow` does."""
    reply.finish(await turns.whole(answer), answer.turn)
    await turns.told(answer, reply.message)


async def tell(
    turns: AgentTurns,
    answer: Answer,
    reply: Reply,
    stream: TurnStream,
) -> AsyncGenerator[Delta]:
    """Yields what is new as it comes, and fills in the reply at the end. Raises as `follow` does."""
    stops = answer.turn.sampling.stop
    content = _Sent(max((len(stop) - 1 for stop in stops), default=0), stops)
    reasoning = _Sent(0, ())
    async with contextlib.aclosing(turns.follow(answer)) as pieces:
        async for token_ids in pieces:
            said, thought = stream.add(token_ids)
            delta = Delta(content.add(said), reasoning.add(thought))
            if delta.content or delta.reasoning:
                yield delta
    assert answer.finished is not None
    reply.finish(answer.finished, answer.turn)
    read = reply.message
    delta = Delta(content.rest(read.content), reasoning.rest(read.reasoning), read.tool_calls)
    if delta != Delta():
        yield delta
    reply.message = replace(read, content=content.sent, reasoning=reasoning.sent)
    await turns.told(answer, reply.message)


class _Sent:
    """What was sent of one text; characters in which a stop string may begin are held back."""

    def __init__(self, held: int, stops: Sequence[str]) -> None:
        self._text = ""
        self.sent = ""
        self._held = held
        self._stops = stops

    def add(self, text: str) -> str:
        """What more of the text lets be sent."""
        self._text += text
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        end = min(found, default=max(len(self.sent), len(self._text) - self._held))
        return self._send(self._text[len(self.sent) : end])

    def rest(self, whole: str) -> str:
        """What is left to send of the text as it was read at the end."""
        sent, start = self.sent, len(self.sent)
        if not whole.startswith(sent):
            # Parsers differ between a stream and a whole turn in what space they keep around a text.
            sent, space = sent.lstrip(), len(whole) - len(whole.lstrip())
            start = space + len(sent)
            if whole.strip().startswith(sent.rstrip()):
                return self._send(whole[start:])
            logger.warning(
                "a turn reads otherwise than it was streamed; %d characters were sent", start
            )
            return ""
        return self._send(whole[start:])

    def _send(self, text: str) -> str:
        self.sent += text
        return text
