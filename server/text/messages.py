from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    tool_call_id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Message:
    """`role` is the template's name: system, user, assistant or tool."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """`parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: Mapping[str, object]
