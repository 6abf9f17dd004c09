"""Agents with random conversations through each SDK, over the compatible endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import openai

from tests.support.random_agents import DESCRIPTION, MAX_TOKENS, NAME, SCHEMA, Call, Held, Line
from tests.support.writing_engine import TurnName, WritingEngine

INTERRUPTED = 0.15
RETRY = {"x-stainless-retry-count": "1"}


class Http:
    """Sends whole conversations to its attempt's URL, streamed or not, and retries after an
    interruption. Each SDK has a subclass."""

    def __init__(self, client: Any, engine: WritingEngine, draw: random.Random) -> None:
        """`client` is the SDK's client for the attempt's URL."""
        self._client = client
        self._engine = engine
        self._draw = draw
        self.interrupted = 0

    def line(self, role: str, text: str, call_id: str = "") -> Line:
        message = {"role": role, "content": text}
        return Line(role, [message | ({"tool_call_id": call_id} if call_id else {})], text)

    async def answer(self, held: Held) -> Line:
        body, stream = self._body(held), self._draw.random() < 0.5
        if self._draw.random() < INTERRUPTED:
            line = await self._begin(body, stream, self._draw.randrange(1, 20))
            # SDKs retry this way after a lost connection.
            line = line or await self._send({**body, "extra_headers": RETRY}, stream)
        else:
            line = await self._send(body, stream)
        assert line.turn is not None
        held.trajectory_id = line.turn[0]
        return line

    async def _begin(self, body: dict[str, Any], stream: bool, count: int) -> Line | None:
        """Disconnect once the engine has written `count` more tokens, for any agent. Returns None
        after a disconnect, or the answer if it arrived first."""
        sending = asyncio.create_task(self._send(body, stream))
        waiting = asyncio.create_task(self._engine.written(count))
        await asyncio.wait([sending, waiting], return_when=asyncio.FIRST_COMPLETED)
        whole = sending.done()
        for task in (sending, waiting):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        if whole:
            return sending.result()
        self.interrupted += 1
        with contextlib.suppress(asyncio.CancelledError):
            return await sending
        return None

    def _body(self, held: Held) -> dict[str, Any]:
        """The request, as keyword arguments of the SDK's call."""
        raise NotImplementedError

    async def _send(self, body: dict[str, Any], stream: bool) -> Line:
        """Send the request; parse the SDK's answer."""
        raise NotImplementedError


class Chat(Http):
    """OpenAI's chat completions. Does not always send back the reasoning it received."""

    def _body(self, held: Held) -> dict[str, Any]:
        function = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
        tools = {"tools": [{"type": "function", "function": function}]} if held.with_tools else {}
        return {"model": "m", "messages": held.natives, "max_tokens": MAX_TOKENS, **tools}

    async def _send(self, body: dict[str, Any], stream: bool) -> Line:
        if stream:
            async with self._client.chat.completions.stream(**body) as events:
                await events.until_done()
                # The SDK refuses to return a final completion that ended because of its length.
                answer: Any = events.current_completion_snapshot
        else:
            answer = await self._client.chat.completions.create(**body)
        choice = answer.choices[0]
        message = choice.message
        said = message.model_dump(exclude_none=True, exclude={"parsed"})
        if self._draw.random() < 0.3:
            said.pop("reasoning", None)
        return Line(
            "assistant",
            [said],
            message.content or "",
            tuple(
                Call(call.id, call.function.name, call.function.arguments)
                for call in message.tool_calls or ()
            ),
            _turn_name(answer.id),
            getattr(message, "reasoning", None) or "",
            _error(choice),
        )


class Responses(Http):
    """OpenAI's responses: sends all items, or only the new ones with the previous answer's id."""

    def line(self, role: str, text: str, call_id: str = "") -> Line:
        if not call_id:
            return super().line(role, text)
        item = {"type": "function_call_output", "call_id": call_id, "output": text}
        return Line(role, [item], text)

    def _body(self, held: Held) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "max_output_tokens": MAX_TOKENS}
        if held.with_tools:
            tool = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
            body["tools"] = [{"type": "function", **tool}]
        if held.ends and self._draw.random() < 0.3:
            trajectory_id, index = held.lines[held.ends[-1]].turn or ("", 0)
            body["previous_response_id"] = f"resp_{trajectory_id}-{index}"
            return {**body, "input": [part for line in held.new for part in line.native]}
        return {**body, "input": held.natives}

    async def _send(self, body: dict[str, Any], stream: bool) -> Line:
        if stream:
            async with self._client.responses.stream(**body) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await self._client.responses.create(**body)
        found: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        said: list[Any] = []
        for item in answer.output:
            found[item.type].append(item)
            fields = {"type", "call_id", "name", "arguments"}
            only = {"include": fields} if item.type == "function_call" else {}
            said.append(item.model_dump(exclude_none=True, **only))
        return Line(
            "assistant",
            said,
            answer.output_text,
            tuple(Call(call.call_id, call.name, call.arguments) for call in found["function_call"]),
            _turn_name(answer.id),
            "".join(item.content[0].text for item in found["reasoning"]),
            _error(answer),
        )


class Messages(Http):
    """Uses Anthropic's messages endpoint."""

    def line(self, role: str, text: str, call_id: str = "") -> Line:
        if not call_id:
            return super().line(role, text)
        result = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        return Line(role, [{"role": "user", "content": [result]}], text)

    def _body(self, held: Held) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "max_tokens": MAX_TOKENS}
        if held.with_tools:
            tool = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}
            body["tools"] = [tool]
        first, rest = held.natives[0], held.natives[1:]
        if first["role"] == "system":
            return {**body, "system": first["content"], "messages": rest}
        return {**body, "messages": [first, *rest]}

    async def _send(self, body: dict[str, Any], stream: bool) -> Line:
        if stream:
            async with self._client.messages.stream(**body) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await self._client.messages.create(**body)
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        return Line(
            "assistant",
            [{"role": "assistant", "content": blocks}] if blocks else [],
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            tuple(
                Call(block["id"], block["name"], str(block["input"]))
                for block in blocks
                if block["type"] == "tool_use"
            ),
            _turn_name(answer.id),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            _error(answer),
        )


HTTP_SURFACES: Sequence[tuple[type[Http], Callable[..., Any]]] = (
    (Chat, openai.AsyncOpenAI),
    (Responses, openai.AsyncOpenAI),
    (Messages, anthropic.AsyncAnthropic),
)
"""Each surface with its SDK's client."""


def _turn_name(answer_id: str) -> TurnName:
    """The turn named by an answer's id, without the prefix that each endpoint adds."""
    trajectory_id, _, index = answer_id.removeprefix("chatcmpl-").rpartition("-")
    for prefix in ("resp_", "msg_"):
        trajectory_id = trajectory_id.removeprefix(prefix)
    return trajectory_id, int(index)


def _error(found: Any) -> str:
    """Why a call is invalid. The SDK does not declare this field, so
    it is among the extra fields."""
    return str((found.model_extra or {}).get("tool_call_error", ""))
