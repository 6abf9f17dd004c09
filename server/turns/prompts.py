"""Encodes prompts and observations as tokens, and keeps the messages that they came from.

The chat template renders the first turn of a conversation, including tools. After that only new messages
are encoded. The same holds in a branch, after the part it shares with the parent's conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.server.core.errors import FieldInvalid
from penstock.server.text.messages import Message, Tool
from penstock.server.text.renderer import Renderer
from penstock.server.turns import requests
from penstock.server.turns.history import History
from penstock.server.turns.matching import kept_prefix
from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord
from penstock.v1 import rollout_service_pb2, task_service_pb2

# Longer texts are tokenized off the event loop.
LONG_TEXT = 16_384


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: PromptKind
    token_ids: NDArray[np.int32] = field(repr=False)
    history: History | None = None
    """A conversation's messages up to the policy's turn."""


@dataclass(frozen=True, slots=True)
class Said:
    """Messages passed alongside a request. Inside it, a tool's schema would be a Struct and lose its key
    order."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list[Tool])
    after: int | None = None
    """In a branch, the number of the parent's messages that these follow. None if these are the whole
    conversation: the shared prefix is then determined from it."""


class Prompts:
    def __init__(self, renderer: Renderer, vocab_size: int) -> None:
        self._renderer = renderer
        self._vocab_size = vocab_size

    async def first(
        self,
        source: rollout_service_pb2.GenerateRequest | task_service_pb2.Task,
        parent: TrajectoryRecord | None,
        said: Said | None = None,
    ) -> Prompt:
        """Raises FIELD_INVALID."""
        if said is not None:
            return await self._conversation(said.messages, said.tools, parent, said.after)
        kind = source.WhichOneof("prompt")
        if kind == "tokens":
            token_ids = requests.tokens("tokens", source.tokens, self._vocab_size)
            return Prompt(PromptKind.TOKENS, token_ids)
        if kind == "text":
            return Prompt(PromptKind.TEXT, await self._text(source.text, first=True))
        if kind == "conversation":
            messages, tools = requests.messages("conversation", source.conversation, first=True)
            return await self._conversation(messages, tools, parent)
        raise FieldInvalid("prompt", "must be set, here or in the leased task")

    async def _conversation(
        self,
        messages: list[Message],
        tools: list[Tool],
        parent: TrajectoryRecord | None,
        after: int | None = None,
    ) -> Prompt:
        """Encode a conversation from its start, or after the part shared with the parent's."""
        token_count, message_count, new = 0, 0, messages
        if parent is not None and parent.history is not None and after is not None:
            token_count, message_count = parent.history.messages[after - 1].token_end, after
        elif parent is not None:
            token_count, message_count = kept_prefix(parent, messages, tools)
            new = messages[message_count:]
        length = sum(len(message.content) for message in new)
        history = History(tuple(tools))
        if parent is None or parent.history is None or not message_count:
            tokens = await _off_loop(length, lambda: self._renderer.render(messages, tools))
        else:
            history = parent.history.branch(message_count)
            kept = parent.token_array(0, token_count)
            last = int(kept[-1]) if len(kept) else None
            suffix = await _off_loop(length, lambda: self._renderer.render_next(new, last))
            tokens = np.concatenate([kept, suffix])
        history.add_context(new, len(tokens))
        return Prompt(PromptKind.CONVERSATION, tokens, history)

    async def next(
        self,
        request: rollout_service_pb2.ContinueRequest,
        record: TrajectoryRecord,
        said: Said | None = None,
    ) -> tuple[NDArray[np.int32], list[Message]]:
        """Encode an observation; also return its messages. Raises FIELD_INVALID."""
        if said is not None:
            return await self._next_messages(said.messages, record), said.messages
        kind = request.WhichOneof("observation")
        if kind == "tokens":
            return requests.tokens("tokens", request.tokens, self._vocab_size), []
        if kind == "text":
            return await self._text(request.text, first=False), []
        if record.kind is not PromptKind.CONVERSATION:
            raise FieldInvalid(
                "conversation", "may only extend a trajectory opened with a conversation"
            )
        messages, _ = requests.messages("conversation", request.conversation, first=False)
        return await self._next_messages(messages, record), messages

    async def _text(self, text: str, *, first: bool) -> NDArray[np.int32]:
        return await _off_loop(len(text), lambda: self._renderer.encode_text(text, first=first))

    async def _next_messages(
        self, messages: list[Message], record: TrajectoryRecord
    ) -> NDArray[np.int32]:
        tokens = record.token_array(record.token_count - 1)
        last = int(tokens[-1]) if len(tokens) else None
        length = sum(len(message.content) for message in messages)
        return await _off_loop(length, lambda: self._renderer.render_next(messages, last))


async def _off_loop(length: int, encode: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
    if length < LONG_TEXT:
        return encode()
    return await asyncio.to_thread(encode)
