"""Messages and tools in the form that a chat template reads, with marks in place of control tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from penstock.server.text.messages import Message, Tool, ToolCall


class Guard:
    """Replaces control tokens in outside text by marks, and remembers which ones it replaced."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = marks
        self._found: dict[str, str] = {}

    def text(self, text: str) -> str:
        for token, mark in self._marks.items():
            if token in text:
                self._found[mark] = token
                text = text.replace(token, mark)
        return text

    def value(self, value: object) -> object:
        """Returns a JSON value with marks in its strings and keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            table = cast("Mapping[str, object]", value)
            return {self.text(key): self.value(item) for key, item in table.items()}
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[object]", value)]
        return value

    def found(self) -> list[tuple[str, str]]:
        """(mark, token) of every mark used, also in the form of a template that escapes its JSON."""
        escaped = [(json.dumps(mark)[1:-1], token) for mark, token in self._found.items()]
        return [*self._found.items(), *escaped]


def template_message(message: Message, guard: Guard) -> dict[str, object]:
    rendered: dict[str, object] = {"role": message.role, "content": guard.text(message.content)}
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call, guard) for call in message.tool_calls]
    if message.tool_call_id:
        rendered["tool_call_id"] = guard.text(message.tool_call_id)
    if message.reasoning:
        rendered["reasoning_content"] = guard.text(message.reasoning)
    return rendered


def _template_call(call: ToolCall, guard: Guard) -> dict[str, object]:
    try:
        # Guard after parsing: an escape in the text may stand for a character of a control token.
        arguments = guard.value(_arguments(call.arguments_json))
    except RecursionError:
        arguments = guard.text(call.arguments_json)
    return {
        "id": guard.text(call.tool_call_id),
        "type": "function",
        "function": {"name": guard.text(call.name), "arguments": arguments},
    }


def _arguments(text: str) -> object:
    """The form the template wants: an object, or the text if it is not JSON or cannot be encoded
    because an escape is an unpaired surrogate."""
    try:
        parsed: object = json.loads(text)
        json.dumps(parsed, ensure_ascii=False).encode()
    except ValueError:
        return text
    return parsed


def template_tool(tool: Tool, guard: Guard) -> dict[str, object]:
    return {
        "type": "function",
        "function": {
            "name": guard.text(tool.name),
            "description": guard.text(tool.description),
            "parameters": guard.value(tool.parameters),
        },
    }
