"""OpenAI's chat completions, `POST .../chat/completions`, with vLLM's models of requests and answers."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.http import errors as http_errors
from penstock.server.http import requests
from penstock.server.vllm import api

if TYPE_CHECKING:
    from penstock.server.http.reply import Reply, ReplyPart

SAMPLING = {
    **requests.SAMPLING,
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop",
}
READ = {*SAMPLING, "model", "messages", "tools", "stream", "stream_options"}
NEUTRAL: requests.Neutral = {
    # The caller's own bookkeeping.
    **dict.fromkeys(
        ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "request_id")
    ),
    **dict.fromkeys(("prompt_cache_retention", "prompt_cache_options", "session_id")),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "include_reasoning": (True,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(requests.AgentRequest):
    include_usage: bool


class ChatCompletions:
    """The `surface.Surface` of OpenAI's chat completions."""

    def read(self, body: bytes) -> ChatRequest:
        found = requests.read_object(body)
        requests.check_parameters(found, READ, NEUTRAL)
        tools = requests.objects(found, "tools")
        for index, tool in enumerate(tools):
            if tool.get("type", "function") != "function":
                raise FieldInvalid(f"tools[{index}].type", 'must be "function"', tool["type"])
        if not requests.objects(found, "messages"):
            raise FieldInvalid("messages", "must hold at least one message")
        requests.check_tool_choice(found, "none")
        # vLLM's model rejects a tool choice if there are no tools.
        nothing = not tools and found.get("tool_choice") in (None, "none", "auto")
        left_out = ("tools", "tool_choice") if nothing else ()
        # vLLM's model returns lists as iterators, so the messages are read from the body itself.
        given = {name: value for name, value in found.items() if name not in left_out}
        request = requests.validated(api.ChatCompletionRequest, given)
        options = request.stream_options
        messages = requests.read_messages(found["messages"])
        requests.check_end(messages, f"messages[{len(messages) - 1}]")
        return ChatRequest(
            messages,
            requests.read_tools([tool["function"] for tool in tools]),
            requests.sampling_of(found, SAMPLING),
            bool(request.stream),
            include_usage=options is not None and bool(options.include_usage),
        )

    def whole(self, request: ChatRequest, reply: Reply) -> str:
        return whole(reply).model_dump_json()

    async def events(
        self, request: ChatRequest, reply: Reply, deltas: AsyncGenerator[ReplyPart]
    ) -> AsyncGenerator[str]:
        async for chunk in chunks(reply, deltas):
            if chunk.choices:
                chunk.usage = None
            if chunk.choices or request.include_usage:
                yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        yield "data: [DONE]\n\n"

    def error(self, error: DomainError) -> dict[str, object]:
        return http_errors.openai_body(error)

    def error_event(self, error: DomainError) -> str:
        return f"data: {json.dumps(self.error(error))}\n\n"


def whole(reply: Reply) -> api.ChatCompletionResponse:
    message = reply.message
    calls = [
        api.ToolCall(
            id=call.tool_call_id,
            function=api.FunctionCall(name=call.name, arguments=call.arguments_json),
        )
        for call in message.tool_calls
    ]
    choice = api.ChatCompletionResponseChoice(
        index=0,
        message=api.ChatMessage(
            role="assistant",
            content=message.content if message.content or not calls else None,
            reasoning=message.reasoning or None,
            tool_calls=calls,
        ),
        finish_reason=finish_reason(reply),
        stop_reason=reply.stop_string,
    )
    return api.ChatCompletionResponse(
        id=f"chatcmpl-{reply.answer_id}",
        created=int(time.time()),
        model=reply.model,
        choices=[choice.model_copy(update=reply.extra)],
        usage=usage(reply),
    )


async def chunks(
    reply: Reply, deltas: AsyncIterator[ReplyPart]
) -> AsyncGenerator[api.ChatCompletionStreamResponse]:
    """The first and last chunk have the usage so far."""
    created = int(time.time())

    def chunk(
        delta: api.DeltaMessage, finish: str | None = None
    ) -> api.ChatCompletionStreamResponse:
        choice = api.ChatCompletionResponseStreamChoice(index=0, delta=delta, finish_reason=finish)
        if finish is not None:
            choice.stop_reason = reply.stop_string
            choice = choice.model_copy(update=reply.extra)
        return api.ChatCompletionStreamResponse(
            id=f"chatcmpl-{reply.answer_id}",
            object="chat.completion.chunk",
            created=created,
            model=reply.model,
            choices=[choice],
        )

    first = chunk(api.DeltaMessage(role="assistant", content=""))
    first.usage = usage(reply)
    yield first
    async for delta in deltas:
        yield chunk(delta_message(delta))
    yield chunk(api.DeltaMessage(), finish_reason(reply))
    last = chunk(api.DeltaMessage())
    last.choices, last.usage = [], usage(reply)
    yield last


def delta_message(delta: ReplyPart) -> api.DeltaMessage:
    message = api.DeltaMessage()
    if delta.content:
        message.content = delta.content
    if delta.reasoning:
        message.reasoning = delta.reasoning
    message.tool_calls = [
        api.DeltaToolCall(
            id=call.tool_call_id,
            type="function",
            index=index,
            function=api.DeltaFunctionCall(name=call.name, arguments=call.arguments_json),
        )
        for index, call in enumerate(delta.tool_calls)
    ]
    return message


def finish_reason(reply: Reply) -> str:
    if reply.length:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def usage(reply: Reply) -> api.UsageInfo:
    return api.UsageInfo(
        prompt_tokens=reply.prompt_token_count,
        completion_tokens=reply.policy_token_count,
        total_tokens=reply.prompt_token_count + reply.policy_token_count,
        prompt_tokens_details=api.PromptTokenUsageInfo(cached_tokens=reply.cached_token_count),
        completion_tokens_details=api.CompletionTokenUsageInfo(
            reasoning_tokens=reply.reasoning_token_count
        ),
    )
