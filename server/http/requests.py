"""What the compatible endpoints have in common in reading a request: parameters, messages, tools.

A parameter is one of three things: it is read; it is accepted because it changes nothing of what is sampled
(who the user is, how an answer is stored), or has the one value that says what happens anyway; or it is
refused with FIELD_INVALID, which names it. None is ignored that the agent would miss.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.exceptions import VLLMClientError

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.text.renderer import Message, Tool, ToolCall
from penstock.server.turns.requests import MAX_MESSAGES, identifier
from penstock.v1 import rollout_service_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)

SamplingParams = twin(rollout_service_pb2.SamplingParams)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# Parts of a message that are text, by their type, and where it is.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
JsonObject = dict[str, Any]
UNFIT = (VLLMClientError, ValueError, TypeError, LookupError, AttributeError)
"""What vLLM's models and converters raise for a body that they were not written for: some look into it
before they know what it is."""
Neutral = Mapping[str, Collection[object] | None]
"""Parameters that change nothing, and the values of them that are accepted; None for any."""


@dataclass(frozen=True, slots=True)
class Previous:
    """An answer that a request goes on with, by name instead of by its messages."""

    parameter: str
    """Of the request that names it."""
    answer_id: str
    instructions: Message | None
    """What the conversation is to begin with, as the request says; None where it does not."""


def read_object(body: bytes) -> JsonObject:
    """The JSON object that a body is. Raises MALFORMED_MESSAGE."""
    try:
        text = body.decode("utf-8-sig")
        found: object = json.loads(text)
        if "\\u" in text:
            # Half of a surrogate pair can be written so, and is no text.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DomainError(Reason.MALFORMED_MESSAGE, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DomainError(Reason.MALFORMED_MESSAGE, "the body is not a JSON object")
    return cast("JsonObject", found)


def objects(body: JsonObject, name: str) -> list[JsonObject]:
    """The objects that a parameter is a list of; none where it is not given. Raises FIELD_INVALID."""
    found: object = body.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise FieldInvalid(name, "must be a list")
    for index, item in enumerate(cast("list[object]", found)):
        if not isinstance(item, dict):
            raise FieldInvalid(f"{name}[{index}]", "must be an object")
    return cast("list[JsonObject]", found)


def check_parameters(body: Mapping[str, object], read: Collection[str], neutral: Neutral) -> None:
    """Refuses a parameter that is neither read nor neutral. An explicit null is one that is not given."""
    for name, value in body.items():
        if value is None or name in read:
            continue
        if name not in neutral:
            raise FieldInvalid(name, "is not supported here")
        accepted = neutral[name]
        if accepted is not None and value not in accepted:
            allowed = " or ".join(json.dumps(item) for item in accepted)
            raise FieldInvalid(name, f"is not supported but for {allowed}", value)


def check_tool_choice(body: Mapping[str, object], none: object) -> None:
    """Refuses the choice of no tool, but where there is none to choose. Raises FIELD_INVALID."""
    if body.get("tools") and body.get("tool_choice") == none:
        raise FieldInvalid("tool_choice", "is not supported where there are tools", none)


def validated(model: type[Model], body: JsonObject) -> Model:
    """The body as one of vLLM's models. Raises FIELD_INVALID, naming what does not fit."""
    from pydantic import ValidationError

    given = {name: value for name, value in body.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # Beyond the name come the alternatives that were tried.
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise FieldInvalid(where, str(first["msg"]).removeprefix("Value error, ")) from None
    except UNFIT as error:
        # vLLM's own, of which some name the parameter.
        name = str(getattr(error, "parameter", None) or "body")
        raise unfit(name, error) from None


def unfit(name: str, error: Exception) -> FieldInvalid:
    """The refusal of a field for one of UNFIT."""
    # Without the parameter and the value, which vLLM's own put after what they say.
    return FieldInvalid(name, f"cannot be read: {error.args[0] if error.args else error}")


def sampling_of(body: Mapping[str, Any], names: Mapping[str, str]) -> JsonObject:
    """The sampling parameters that a body gives, by their names in SamplingParams. Raises FIELD_INVALID."""
    found: JsonObject = {}
    for name, ours in names.items():
        value: Any = body.get(name)
        if value is None:
            continue
        if ours in ("stop", "stop_token_ids") and isinstance(value, str):
            value = [value]
        try:
            if ours == "max_tokens" and value < 1:
                raise FieldInvalid(name, "must be at least 1", value)
            if ours == "top_k":
                # What says that there is no bound.
                value = max(value, 0)
            if ours == "seed":
                value %= 2**63
            SamplingParams(**{ours: value})
        except (TypeError, ValueError) as error:
            raise FieldInvalid(name, f"does not fit: {error}", value) from None
        found[ours] = value
    return found


def read_messages(messages: Sequence[Any], where: str = "messages") -> list[Message]:
    """Messages in OpenAI's form. Raises FIELD_INVALID."""
    if not messages:
        raise FieldInvalid(where, "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise FieldInvalid(where, f"must hold at most {MAX_MESSAGES}", len(messages))
    return [_message(dict(message), f"{where}[{i}]") for i, message in enumerate(messages)]


def check_end(messages: Sequence[Message], where: str) -> None:
    """Refuses a conversation that ends in words of the assistant's: they would be closed, and a second
    message opened behind them. `where` is that message. Raises FIELD_INVALID."""
    if messages[-1].role == "assistant":
        raise FieldInvalid(
            where, "must not be the last: the assistant's words are not gone on with"
        )


def _message(message: JsonObject, where: str) -> Message:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise FieldInvalid(f"{where}.role", "is unknown", message.get("role"))
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise FieldInvalid(f"{where}.{name}", "is not supported here")
    # Of a tool it says again which one the call was to.
    if message.get("name") is not None and role != "tool":
        raise FieldInvalid(
            f"{where}.name", "is not supported: the chat template has no place for it"
        )
    calls = _list(message.get("tool_calls") or (), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise FieldInvalid(f"{where}.tool_calls", "may only be given by the assistant")
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return Message(
        role,
        read_text(message.get("content") or message.get("refusal"), f"{where}.content"),
        tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        str(message.get("tool_call_id") or ""),
        str(reasoning),
    )


def _list(found: object, where: str) -> list[object]:
    if not isinstance(found, Iterable):
        raise FieldInvalid(where, "must be a list")
    return list(cast("Iterable[object]", found))


def _object(found: object, where: str) -> JsonObject:
    if not isinstance(found, dict):
        raise FieldInvalid(where, "must be an object")
    return cast("JsonObject", found)


def _call(said: object, where: str) -> ToolCall:
    call = _object(said, where)
    kind = call.get("type", "function")
    if kind != "function":
        raise FieldInvalid(f"{where}.type", 'must be "function"', kind)
    function = _object(call.get("function") or {}, f"{where}.function")
    return ToolCall(
        str(call.get("id") or ""), str(function.get("name", "")), str(function.get("arguments", ""))
    )


def read_text(content: object, where: str) -> str:
    """A text, or the parts of one. Raises FIELD_INVALID for what is none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, said in enumerate(_list(content, where)):
        if isinstance(said, str):
            texts.append(said)
            continue
        part = _object(said, f"{where}[{index}]")
        key = _TEXTS.get(str(part.get("type")))
        if key is None or not isinstance(part.get(key), str):
            raise FieldInvalid(
                f"{where}[{index}].type", "is not supported: only text is", part.get("type")
            )
        texts.append(part[key])
    return "".join(texts)


def read_tools(tools: Iterable[Mapping[str, Any]], where: str = "tools") -> list[Tool]:
    """Functions: their names, descriptions and JSON Schemas. Raises FIELD_INVALID."""
    return [
        Tool(
            identifier(f"{where}[{index}].name", str(tool.get("name") or "")),
            str(tool.get("description") or ""),
            cast("Mapping[str, object]", tool.get("parameters") or {}),
        )
        for index, tool in enumerate(tools)
    ]
