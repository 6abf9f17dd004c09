"""Parsing shared by the compatible endpoints: parameters, messages and tools.

A request parameter is read, accepted as neutral, or refused. A neutral parameter does not affect sampling,
such as the user's name, or it has the value that describes the server's behaviour anyway. All others are
refused with FIELD_INVALID, so the server never silently ignores a parameter that an agent depends on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.turns.requests import MAX_MESSAGES, identifier
from penstock.server.vllm.api import VLLMClientError
from penstock.wire.messages import SamplingParams
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)


ROLES = {"developer": "system"} | {name: name for name in ("system", "user", "assistant", "tool")}
# Types of message parts that are text, and the key that holds it.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
JsonObject = dict[str, Any]
UNFIT = (VLLMClientError, ValueError, TypeError, LookupError, AttributeError)
"""What vLLM's models and converters raise for bad bodies. Some access fields before they check types."""
Neutral = Mapping[str, Collection[object] | None]
"""Parameters that change nothing, and their accepted values; None accepts any value."""
# Of any service. An SDK sends those that it lacks as extra ones.
SAMPLING = {
    name: name for name in ("temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos")
}


@dataclass(frozen=True, slots=True)
class Previous:
    """An earlier answer that a request continues, named by its id instead of sent as messages."""

    parameter: str
    """Parameter of the request that names the answer."""
    answer_id: str
    instructions: Message | None
    """What the request gives as the beginning of the conversation; None if it gives none."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request, independent of the endpoint it used."""

    messages: list[Message]
    tools: list[Tool]
    sampling: JsonObject
    """The sampling parameters that the request sets, by their names in SamplingParams."""
    stream: bool
    previous: Previous | None = None
    """The answer that the messages follow, if they are not the whole conversation."""


def read_object(body: bytes) -> JsonObject:
    """Raises MALFORMED_MESSAGE."""
    try:
        text = body.decode("utf-8-sig")
        found: object = json.loads(text)
        if "\\u" in text:
            # An escape can encode an unpaired surrogate, which is not valid text.
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DomainError(Reason.MALFORMED_MESSAGE, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DomainError(Reason.MALFORMED_MESSAGE, "the body is not a JSON object")
    return cast("JsonObject", found)


def objects(body: JsonObject, name: str) -> list[JsonObject]:
    """Empty if the parameter is absent. Raises FIELD_INVALID."""
    found: object = body.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise FieldInvalid(name, "must be a list")
    items = cast("list[object]", found)
    return [_object(item, f"{name}[{index}]") for index, item in enumerate(items)]


def check_parameters(body: Mapping[str, object], read: Collection[str], neutral: Neutral) -> None:
    """Refuses a parameter that is neither read nor neutral. An explicit null counts as absent."""
    for name, value in body.items():
        if value is None or name in read:
            continue
        if name not in neutral:
            raise FieldInvalid(name, "is not supported here")
        accepted = neutral[name]
        if accepted is not None and value not in accepted:
            allowed = " or ".join(json.dumps(item) for item in accepted)
            raise FieldInvalid(name, f"is not supported except for {allowed}", value)


def check_tool_choice(body: Mapping[str, object], none: object) -> None:
    """Refuses the choice to call no tool, if there are tools. Raises FIELD_INVALID."""
    if body.get("tools") and body.get("tool_choice") == none:
        raise FieldInvalid("tool_choice", "is not supported if there are tools", none)


def validated(model: type[Model], body: JsonObject) -> Model:
    """`model` is one of vLLM's. Raises FIELD_INVALID with the field's name."""
    from pydantic import ValidationError

    given = {name: value for name, value in body.items() if value is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # After the name, `loc` lists the alternatives that were tried.
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise FieldInvalid(where, str(first["msg"]).removeprefix("Value error, ")) from None
    except UNFIT as error:
        # vLLM's own exceptions; some of them name the parameter.
        name = str(getattr(error, "parameter", None) or "body")
        raise unfit(name, error) from None


def unfit(name: str, error: Exception) -> FieldInvalid:
    """`error` is one of UNFIT."""
    # args[0] omits the parameter and value that vLLM's exceptions append to their text.
    return FieldInvalid(name, f"cannot be read: {error.args[0] if error.args else error}")


def sampling_of(body: Mapping[str, Any], names: Mapping[str, str]) -> JsonObject:
    """By their names in SamplingParams. Raises FIELD_INVALID."""
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
                # Negative values mean that there is no limit.
                value = max(value, 0)
            if ours == "seed":
                value %= 2**63
            SamplingParams(**{ours: value})
        except (TypeError, ValueError) as error:
            raise FieldInvalid(name, f"is invalid: {error}", value) from None
        found[ours] = value
    return found


def read_messages(messages: Sequence[Any], where: str = "messages") -> list[Message]:
    """`messages` are in OpenAI's format. Raises FIELD_INVALID."""
    if not messages:
        raise FieldInvalid(where, "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise FieldInvalid(where, f"must hold at most {MAX_MESSAGES}", len(messages))
    return [_message(dict(message), f"{where}[{i}]") for i, message in enumerate(messages)]


def check_end(messages: Sequence[Message], where: str) -> None:
    """The template would close a final assistant message and open another. Raises FIELD_INVALID."""
    if messages[-1].role == "assistant":
        raise FieldInvalid(
            where, "must not be the last: the server does not continue an assistant message"
        )


def _message(message: JsonObject, where: str) -> Message:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise FieldInvalid(f"{where}.role", "is unknown", message.get("role"))
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise FieldInvalid(f"{where}.{name}", "is not supported here")
    # For a tool message, the name repeats which function the call was for.
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
    """Joins a list of text parts. Raises FIELD_INVALID for other types."""
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
    """Raises FIELD_INVALID."""
    return [
        Tool(
            identifier(f"{where}[{index}].name", str(tool.get("name") or "")),
            str(tool.get("description") or ""),
            cast("Mapping[str, object]", tool.get("parameters") or {}),
        )
        for index, tool in enumerate(tools)
    ]
