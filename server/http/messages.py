"""Anthropic's messages, `POST .../v1/messages`, with vLLM's models and its converters from chat."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.http import chat as http_chat
from penstock.server.http import errors as http_errors
from penstock.server.http import requests
from penstock.server.vllm.api import AnthropicMessagesRequest, AnthropicServingMessages

if TYPE_CHECKING:
    from penstock.server.http.reply import Reply, ReplyPart

SAMPLING = {**requests.SAMPLING, "max_tokens": "max_tokens", "stop_sequences": "stop"}
READ = {*SAMPLING, "model", "messages", "system", "tools", "stream"}
NEUTRAL: requests.Neutral = {
    # The caller's own bookkeeping, and hints for a different kind of cache.
    **dict.fromkeys(("metadata", "cache_control")),
    "service_tier": ("auto", "standard_only"),
    "thinking": ({"type": "adaptive"},),
    "tool_choice": (
        {"type": "auto"},
        {"type": "auto", "disable_parallel_tool_use": False},
        {"type": "none"},
    ),
}
# Fields of a tool that vLLM's model drops, although the policy would have to know them.
_LEFT_OUT = ("defer_loading", "input_examples")
# The blocks that a message of each role may have. vLLM's converter drops others or makes text of them.
_BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}


class Messages:
    """The `surface.Surface` of Anthropic's messages."""

    def __init__(self) -> None:
        # Without `__init__`: the converters need no engine. Parts of the class are untyped.
        self._converters: Any = object.__new__(AnthropicServingMessages)

    def read(self, body: bytes) -> requests.AgentRequest:
        found = requests.read_object(body)
        request = self._read(found)
        said = [str(message.get("role")) for message in requests.objects(found, "messages")]
        # An empty message after it may have been dropped.
        last = max((at for at, role in enumerate(said) if role == "assistant"), default=0)
        requests.check_end(request.messages, f"messages[{last}]")
        return request

    def read_count(self, body: bytes) -> requests.AgentRequest:
        """The last message may be the assistant's. Raises DomainError."""
        return self._read({"max_tokens": 1, **requests.read_object(body)})

    def _read(self, found: requests.JsonObject) -> requests.AgentRequest:
        requests.check_parameters(found, READ, NEUTRAL)
        for index, tool in enumerate(requests.objects(found, "tools")):
            if tool.get("type") not in (None, "custom"):
                raise FieldInvalid(f"tools[{index}].type", 'must be "custom"', tool["type"])
            for name in _LEFT_OUT:
                if tool.get(name):
                    raise FieldInvalid(f"tools[{index}].{name}", "is not supported here")
        requests.check_tool_choice(found, {"type": "none"})
        _check_blocks(found)
        request = requests.validated(AnthropicMessagesRequest, found)
        _read_results(request)
        messages: list[dict[str, Any]] = []
        try:
            # vLLM's chat model is skipped, because it would return its lists as iterators.
            self._converters._convert_system_message(request, messages)
            self._converters._convert_messages(request.messages, messages)
        except requests.UNFIT as error:
            raise requests.unfit("messages", error) from None
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in request.tools or ()
        ]
        return requests.AgentRequest(
            requests.read_messages(messages),
            requests.read_tools(tools),
            requests.sampling_of(found, SAMPLING),
            bool(request.stream),
        )

    def whole(self, request: requests.AgentRequest, reply: Reply) -> str:
        answer = self._converters.messages_full_converter(http_chat.whole(reply))
        answer.id = f"msg_{reply.answer_id}"
        told = answer.model_dump(mode="json", exclude_none=True)
        # Anthropic's answers always have this field, even if it is null.
        return json.dumps({**told, "stop_sequence": answer.stop_sequence, **reply.extra})

    async def events(
        self, request: requests.AgentRequest, reply: Reply, deltas: AsyncGenerator[ReplyPart]
    ) -> AsyncGenerator[str]:
        failed: list[DomainError] = []

        async def chat() -> AsyncGenerator[str]:
            try:
                async with contextlib.aclosing(http_chat.chunks(reply, deltas)) as chunks:
                    async for chunk in chunks:
                        chunk.id = f"msg_{reply.answer_id}"
                        yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
                yield "data: [DONE]\n\n"
            except DomainError as error:
                # The converter would report it in its own format.
                failed.append(error)

        async with contextlib.aclosing(self._converters.message_stream_converter(chat())) as events:
            async for event in events:
                kind = event.partition("\n")[0]
                if kind == "event: content_block_start" or (
                    reply.extra and kind == "event: message_delta"
                ):
                    event = _completed(event, reply)
                yield event
        if failed:
            raise failed[0]

    def error(self, error: DomainError) -> dict[str, object]:
        return http_errors.anthropic_body(error)

    def error_event(self, error: DomainError) -> str:
        return f"event: error\ndata: {json.dumps(self.error(error))}\n\n"


def _check_blocks(body: requests.JsonObject) -> None:
    """Refuses blocks that the converter would drop. Raises FIELD_INVALID."""
    said: list[tuple[str, str, object]] = [("system", "system", body.get("system"))]
    for index, message in enumerate(requests.objects(body, "messages")):
        said.append(
            (f"messages[{index}].content", str(message.get("role")), message.get("content"))
        )
    for where, role, content in said:
        if role not in _BLOCKS or not isinstance(content, list):
            # A plain text, or something that vLLM's model refuses.
            continue
        for index, block in enumerate(cast("list[object]", content)):
            kind = (
                cast("requests.JsonObject", block).get("type") if isinstance(block, dict) else None
            )
            if kind not in _BLOCKS[role]:
                allowed = " or ".join(json.dumps(name) for name in _BLOCKS[role])
                raise FieldInvalid(f"{where}[{index}].type", f"must be {allowed} here", kind)


def _read_results(request: AnthropicMessagesRequest) -> None:
    """Marks failed results in their text, because templates have no other place. Raises FIELD_INVALID."""
    for i, message in enumerate(request.messages):
        blocks = message.content if isinstance(message.content, list) else []
        for j, block in enumerate(blocks):
            parts = block.content if isinstance(block.content, list) else []
            for k, part in enumerate(parts):
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    where = f"messages[{i}].content[{j}].content[{k}].type"
                    raise FieldInvalid(where, "is not supported: only text is", part.get("type"))
            if block.type == "tool_result" and block.is_error:
                # Joined in the same way as vLLM's converter does.
                text = "\n".join(part["text"] for part in parts) if parts else block.content
                block.content = f"Error: {text}" if text else "Error"


def _completed(event: str, reply: Reply) -> str:
    """Adds fields that vLLM omits to the beginning of a block, or to the end of a message."""
    head, data = event.split("data: ", 1)
    told = json.loads(data)
    block = told.get("content_block")
    if block is None:
        told["delta"] |= reply.extra
    elif block["type"] == "thinking":
        # Empty here, because the signature follows at the end of the block.
        block.setdefault("signature", "")
    return f"{head}data: {json.dumps(told)}\n\n"
