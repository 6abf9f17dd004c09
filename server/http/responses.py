"""OpenAI's responses, `POST .../responses`, with vLLM's models, item parsing and streaming events.

An agent sends all its items with each request, as it sends messages to the other endpoints. Or it sends
only the new ones with `previous_response_id`, which names an answer of its attempt while that is open.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.http import chat as http_chat
from penstock.server.http import errors as http_errors
from penstock.server.http import requests
from penstock.server.text.messages import Message
from penstock.server.vllm import api

if TYPE_CHECKING:
    from penstock.server.http.reply import Reply, ReplyPart

PREVIOUS = "previous_response_id"
ID_PREFIX = "resp_"
SAMPLING = {**requests.SAMPLING, "max_output_tokens": "max_tokens", "stop": "stop"}
READ = {*SAMPLING, "model", "input", "instructions", "tools", "stream", PREVIOUS}
NEUTRAL: requests.Neutral = {
    # The caller's own bookkeeping.
    **dict.fromkeys(("user", "metadata", "store", "safety_identifier", "prompt_cache_key")),
    **dict.fromkeys(("prompt_cache_retention", "prompt_cache_options", "stream_options")),
    # For tools that the original service would run itself; this server has none.
    "max_tool_calls": None,
    "background": (False,),
    "include": ([],),
    "service_tier": ("auto", "default"),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest(requests.AgentRequest):
    request: api.ResponsesRequest
    """The vLLM model, parts of which the answer repeats."""


class Responses:
    """The `surface.Surface` of OpenAI's responses."""

    def read(self, body: bytes) -> ReadRequest:
        found = requests.read_object(body)
        requests.check_parameters(found, READ, NEUTRAL)
        for index, tool in enumerate(requests.objects(found, "tools")):
            if tool.get("type") != "function":
                raise FieldInvalid(f"tools[{index}].type", 'must be "function"', tool.get("type"))
        requests.check_tool_choice(found, "none")
        request = requests.validated(api.ResponsesRequest, {**found, "input": _read_input(found)})
        previous, instructions = _previous(request), request.instructions
        try:
            messages = api.construct_input_messages(
                request_instructions=None if previous else instructions, request_input=request.input
            )
            # Some items have their parts only as an iterator.
            read = requests.read_messages(cast("list[Any]", messages), "input")
        except requests.UNFIT as error:
            raise requests.unfit("input", error) from None
        requests.check_end(read, f"input[{len(request.input) - 1}]")
        return ReadRequest(
            read,
            requests.read_tools(requests.objects(found, "tools")),
            requests.sampling_of(found, SAMPLING),
            bool(request.stream),
            previous,
            request=request,
        )

    def whole(self, request: ReadRequest, reply: Reply) -> str:
        answer = _response(request.request, reply, int(time.time()), whole=True)
        return answer.model_dump_json(by_alias=True)

    async def events(
        self, request: ReadRequest, reply: Reply, deltas: AsyncGenerator[ReplyPart]
    ) -> AsyncGenerator[str]:
        number = 0

        def written(event: Any) -> str:
            nonlocal number
            event.sequence_number = number
            number += 1
            return f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"

        created = int(time.time())
        response = _response(request.request, reply, created, whole=False)
        begun: dict[str, Any] = {"sequence_number": -1, "response": response}
        yield written(api.ResponseCreatedEvent(type="response.created", **begun))
        yield written(api.ResponseInProgressEvent(type="response.in_progress", **begun))
        processor = api.SimpleStreamingEventProcessor(tools=request.request.tools)
        async for delta in deltas:
            for event in _events(processor, delta):
                yield written(event)
        for event in processor.close_current():
            yield written(event)
        answer = _response(request.request, reply, created, whole=True)
        api.reuse_streamed_item_ids(answer.output, processor.output_items)
        yield written(
            api.ResponseCompletedEvent(
                type="response.completed", sequence_number=-1, response=answer
            )
        )

    def error(self, error: DomainError) -> dict[str, object]:
        return http_errors.openai_body(error)

    def error_event(self, error: DomainError) -> str:
        body = cast("dict[str, object]", self.error(error)["error"])
        return f"event: error\ndata: {json.dumps({**body, 'type': 'error'})}\n\n"


def _read_input(body: requests.JsonObject) -> object:
    """Joins each assistant message's parts, because vLLM reads only the first. Raises FIELD_INVALID."""
    given: object = body.get("input")
    if not isinstance(given, list):
        return given
    items: list[Any] = []
    for index, said in enumerate(cast("list[Any]", given)):
        item = cast("requests.JsonObject", said) if isinstance(said, dict) else {}
        kind = item.get("type") or "message"
        if kind not in _ITEMS:
            raise FieldInvalid(f"input[{index}].type", "is not supported here", kind)
        if item.get("encrypted_content"):
            raise FieldInvalid(f"input[{index}].encrypted_content", "is not supported here")
        if item.get("role") == "assistant" and kind == "message":
            text = requests.read_text(item.get("content"), f"input[{index}].content")
            items.append({"role": "assistant", "content": text})
        else:
            items.append(said)
    return items


def _previous(request: api.ResponsesRequest) -> requests.Previous | None:
    if not request.previous_response_id:
        return None
    said = request.instructions
    return requests.Previous(
        PREVIOUS,
        request.previous_response_id.removeprefix(ID_PREFIX),
        Message("system", said) if said else None,
    )


def _events(processor: api.SimpleStreamingEventProcessor, delta: ReplyPart) -> Iterator[Any]:
    """Drives vLLM's event processor as vLLM's own server does."""
    for part in api.split_delta(http_chat.delta_message(delta)):
        state, call = processor.resolve_target_state(part)
        if processor.needs_transition(state, call):
            yield from processor.close_current()
            yield from processor.open(state, call)
        yield from processor.emit_delta(part, cast("Any", None))


def _response(
    request: api.ResponsesRequest, reply: Reply, created: int, *, whole: bool
) -> api.ResponsesResponse:
    """It has no output and no usage until it is whole."""
    message = reply.message
    calls = [
        api.FunctionCall(id=call.tool_call_id, name=call.name, arguments=call.arguments_json)
        for call in message.tool_calls
    ]
    usage = api.ResponseUsage(
        input_tokens=reply.prompt_token_count,
        output_tokens=reply.policy_token_count,
        total_tokens=reply.prompt_token_count + reply.policy_token_count,
        input_tokens_details=api.InputTokensDetails(
            cached_tokens=reply.cached_token_count, cache_write_tokens=0
        ),
        output_tokens_details=api.OutputTokensDetails(reasoning_tokens=reply.reasoning_token_count),
    )
    request.request_id = f"{ID_PREFIX}{reply.answer_id}"
    answer = api.ResponsesResponse.from_request(
        request,
        api.SamplingParams(
            temperature=reply.sampling.temperature,
            top_p=reply.sampling.top_p,
            # vLLM's model does not allow a turn without room for a token.
            max_tokens=max(1, reply.budget),
        ),
        model_name=reply.model,
        created_time=created,
        output=api.build_response_output_items(message.reasoning, message.content, calls)
        if whole
        else [],
        status=("incomplete" if reply.length else "completed") if whole else "in_progress",
        usage=usage if whole else None,
    )
    # vLLM's model lacks OpenAI's `error` field. It is always null: failures are reported as error answers.
    return answer.model_copy(update={"error": None, **reply.extra})
