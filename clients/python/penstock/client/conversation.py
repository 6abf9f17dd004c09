"""Prompts and observations: text, messages or tokens, and their form on the wire."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from penstock.client.values import Json, from_struct, to_struct
from penstock.v1 import conversation_pb2
from penstock.wire import codec, messages
from penstock.wire.words import ROLES

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

_ROLE_NAMES: dict[int, Role] = {int(number): cast("Role", name) for name, number in ROLES.items()}


@dataclass(frozen=True, slots=True)
class ToolCall:
    tool_call_id: str
    name: str
    arguments_json: str
    """As the policy wrote them; may be invalid JSON."""

    @property
    def arguments(self) -> dict[str, Json]:
        """The parsed arguments. Raises ValueError if the policy did not write a JSON object."""
        arguments: object = json.loads(self.arguments_json)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {self.name} are not a JSON object")
        return cast("dict[str, Json]", arguments)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message: `Message("user", "What is 2 + 3?")`."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Id of the call that a tool's message answers."""
    reasoning: str = ""
    """The assistant's reasoning, if the model separates it."""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """JSON Schema of the arguments."""


MessageLike: TypeAlias = Message | Mapping[str, str]
"""A Message, or a mapping with `role` and `content` (and `tool_call_id`)."""

Observation: TypeAlias = (
    str | MessageLike | Sequence[MessageLike] | Sequence[int] | NDArray[np.int32]
)


class PromptKind(Enum):
    """The form in which a trajectory was opened. Its turns are returned in the same form.

    A value is the name of the form in the wire's oneof.
    """

    TEXT = "text"
    MESSAGES = "conversation"
    TOKENS = "tokens"


def prompt_kind(shown: Observation | None) -> PromptKind | None:
    """Returns the form of a prompt; None if it is missing or an empty list."""
    if isinstance(shown, str):
        return PromptKind.TEXT
    if isinstance(shown, Message | Mapping):
        return PromptKind.MESSAGES
    if isinstance(shown, np.ndarray):
        return PromptKind.TOKENS
    if shown is None or not len(shown):
        return None
    return PromptKind.TOKENS if isinstance(shown[0], int | np.integer) else PromptKind.MESSAGES


def write_prompt(
    shown: Observation | None, tools: Sequence[Tool] = (), *, chat: bool = False
) -> dict[str, Any]:
    """Converts a prompt or observation to its wire form: the field to set, by its name. Empty if there
    is none.

    With `chat`, a plain str becomes a user's message, because raw text would break the chat
    template of a conversation. Raises TypeError for anything but text, messages or tokens.
    """
    if isinstance(shown, str):
        if not chat and not tools:
            return {"text": shown}
        shown = Message("user", shown)
    if isinstance(shown, Message | Mapping):
        shown = [shown]
    if prompt_kind(shown) is PromptKind.TOKENS:
        if tools:
            raise TypeError("tools require messages and cannot be combined with tokens")
        ids = np.asarray(shown)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(
                f"tokens must be a one-dimensional array of integers, not {ids.dtype} {ids.shape}"
            )
        return {"tokens": messages.TokenSequence(token_ids=codec.array_bytes(ids))}
    if shown is None and not tools:
        return {}
    chat_messages = [_as_message(message) for message in cast("Sequence[object]", shown or ())]
    conversation = messages.Conversation(
        messages=[_write_message(message) for message in chat_messages],
        tools=[
            messages.Tool(
                name=t.name, description=t.description, parameters=to_struct(t.parameters)
            )
            for t in tools
        ],
    )
    return {"conversation": conversation}


def read_message(message: conversation_pb2.ChatMessage) -> Message:
    calls = tuple(ToolCall(c.tool_call_id, c.name, c.arguments_json) for c in message.tool_calls)
    return Message(
        _ROLE_NAMES.get(message.role, "assistant"),
        message.content,
        calls,
        message.tool_call_id,
        message.reasoning,
    )


def read_tool(tool: conversation_pb2.Tool) -> Tool:
    return Tool(tool.name, tool.description, from_struct(tool.parameters))


def _as_message(message: object) -> Message:
    if isinstance(message, Message):
        return message
    if isinstance(message, Mapping):
        given = cast("Mapping[str, str]", message)
        role = given.get("role", "user")
        if role not in ROLES:
            raise TypeError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
        unknown = set(given) - {"role", "content", "tool_call_id", "reasoning"}
        if unknown:
            raise TypeError(
                f"a message mapping cannot have {', '.join(sorted(unknown))}: use Message"
            )
        return Message(**cast("Any", {"role": role, **given}))
    raise TypeError(f"expected text, messages or tokens, got {type(message).__name__}")


def write_chat_message(message: Message) -> dict[str, Any]:
    """Converts a message to the format of OpenAI's chat completions, without its reasoning."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.tool_call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
    return written


def write_chat_tool(tool: Tool) -> dict[str, Any]:
    """Converts a tool to the format of OpenAI's chat completions."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _write_message(message: Message) -> conversation_pb2.ChatMessage:
    return messages.ChatMessage(
        role=ROLES[message.role],
        content=message.content,
        tool_calls=[
            messages.ToolCall(
                tool_call_id=c.tool_call_id, name=c.name, arguments_json=c.arguments_json
            )
            for c in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )
