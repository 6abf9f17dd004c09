"""Converts requests to domain values. Every field is checked here, before any state changes.

Raises FieldInvalid (INVALID_ARGUMENT with BadRequest), TOKEN_OUT_OF_RANGE or MALFORMED_MESSAGE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
from google.protobuf import duration_pb2, json_format, struct_pb2
from numpy.typing import NDArray

from penstock.server.core.errors import MAX_ID_LENGTH, DomainError, FieldInvalid
from penstock.server.engine.protocol import Sampling
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.turns.turn import TurnSampling
from penstock.v1 import conversation_pb2, rollout_service_pb2, task_service_pb2, trajectory_pb2
from penstock.wire.codec import MalformedMessage, token_ids
from penstock.wire.messages import SamplingParams
from penstock.wire.reasons import Reason

MAX_GROUP_SIZE = 4_096
MAX_STOPS = 64
MAX_STOP_LENGTH = 256
MAX_TEMPERATURE = 2.0
# Between zero and this, the engine would silently sample at another temperature.
MIN_TEMPERATURE = 0.01
# The same after the wire: the field is a 32-bit float, which for this value is slightly smaller.
_MIN_TEMPERATURE_ARRIVING = float(np.float32(MIN_TEMPERATURE))
MAX_FLUSH_SECONDS = 60.0
MAX_CONCURRENCY = 65_536
MAX_SELECTED = 100_000
# Parsing the maximum blocks the event loop for a tenth of a second.
MAX_JSON_DEPTH = 24
MAX_MESSAGES = 16_384
_SAMPLING_FIELDS = [field.name for field in fields(Sampling)]

ROLES = {
    conversation_pb2.ROLE_SYSTEM: "system",
    conversation_pb2.ROLE_USER: "user",
    conversation_pb2.ROLE_ASSISTANT: "assistant",
    conversation_pb2.ROLE_TOOL: "tool",
}


def _check(holds: bool, field: str, description: str, got: object = None) -> None:
    if not holds:
        raise FieldInvalid(field, description, got)


def identifier(field: str, value: str) -> str:
    if not value:
        raise FieldInvalid(field, "must be set")
    if len(value) > MAX_ID_LENGTH:
        raise FieldInvalid(field, f"must have at most {MAX_ID_LENGTH} characters", value)
    return value


def identifiers(field: str, values: Iterable[str]) -> list[str]:
    found = [identifier(f"{field}[{index}]", value) for index, value in enumerate(values)]
    _check(len(found) <= MAX_SELECTED, field, f"must name at most {MAX_SELECTED}", len(found))
    return found


def tokens(
    field: str, sequence: trajectory_pb2.TokenSequence, vocab_size: int
) -> NDArray[np.int32]:
    """Return the tokens, of shape [n], checked to be within the vocabulary."""
    try:
        found = token_ids(sequence)
    except MalformedMessage as error:
        raise DomainError(
            Reason.MALFORMED_MESSAGE, f"{field}: {error}", {"field": field}
        ) from error
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= vocab_size):
        position = int(((found < 0) | (found >= vocab_size)).argmax())
        raise DomainError(
            Reason.TOKEN_OUT_OF_RANGE,
            f"{field}[{position}] is {found[position]}, the vocabulary has {vocab_size} tokens",
            {"field": field, "position": position, "got": found[position], "vocab": vocab_size},
        )
    return found


def sampling(
    field: str, params: rollout_service_pb2.SamplingParams, vocab_size: int
) -> TurnSampling:
    """Check the parameters and apply all defaults."""
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_p = params.top_p if params.HasField("top_p") else 1.0
    _check(
        temperature == 0 or _MIN_TEMPERATURE_ARRIVING <= temperature <= MAX_TEMPERATURE,
        f"{field}.temperature",
        f"must be 0 (greedy) or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
        temperature,
    )
    _check(0 < top_p <= 1, f"{field}.top_p", "must be above 0 and at most 1", top_p)
    top_k, most = params.top_k, params.max_tokens
    _check(
        0 <= top_k <= vocab_size, f"{field}.top_k", "must be from 0 to the vocabulary's size", top_k
    )
    _check(most >= 0, f"{field}.max_tokens", "must not be negative", most)
    stops = max(len(params.stop_token_ids), len(params.stop))
    _check(stops <= MAX_STOPS, f"{field}.stop", f"must name at most {MAX_STOPS} each")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise DomainError(
                Reason.TOKEN_OUT_OF_RANGE,
                f"{field}.stop_token_ids holds {token}, the vocabulary has {vocab_size} tokens",
                {"field": f"{field}.stop_token_ids", "got": token, "vocab": vocab_size},
            )
    for text in params.stop:
        fine = 0 < len(text) <= MAX_STOP_LENGTH
        _check(fine, f"{field}.stop", f"must have 1 to {MAX_STOP_LENGTH} characters each", text)
    return read_sampling(params)


def read_sampling(params: rollout_service_pb2.SamplingParams) -> TurnSampling:
    """Apply all defaults, without a check."""
    temperature = params.temperature if params.HasField("temperature") else 1.0
    return TurnSampling(
        # A temperature that travelled as 32-bit float may be slightly below the minimum.
        temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        seed=params.seed % 2**63 if params.HasField("seed") else None,
        ignore_eos=params.ignore_eos,
    )


def sampling_message(sampling: Sampling) -> rollout_service_pb2.SamplingParams:
    return SamplingParams(**{name: getattr(sampling, name) for name in _SAMPLING_FIELDS})


def as_duration(seconds: float) -> duration_pb2.Duration:
    """The message for a duration, for an answer."""
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


def duration_seconds(field: str, duration: duration_pb2.Duration) -> float:
    """Return seconds, checked to be at most a minute."""
    seconds = duration.seconds + duration.nanos / 1e9
    fine = 0 <= seconds <= MAX_FLUSH_SECONDS
    _check(fine, field, f"must be from 0 to {MAX_FLUSH_SECONDS:.0f} s", seconds)
    return seconds


def messages(
    field: str, conversation: conversation_pb2.Conversation, *, first: bool
) -> tuple[list[Message], list[Tool]]:
    """Check a conversation. `first` means that it opens a trajectory."""
    count = len(conversation.messages)
    _check(count > 0, f"{field}.messages", "must hold at least one message")
    _check(count <= MAX_MESSAGES, f"{field}.messages", f"must hold at most {MAX_MESSAGES}", count)
    late = bool(conversation.tools) and not first
    _check(not late, f"{field}.tools", "may only be given on the first turn")
    found: list[Message] = []
    for index, message in enumerate(conversation.messages):
        where = f"{field}.messages[{index}]"
        role = ROLES.get(message.role)
        if role is None:
            raise FieldInvalid(f"{where}.role", "is unspecified or unknown", message.role)
        if message.tool_calls and role != "assistant":
            raise FieldInvalid(f"{where}.tool_calls", "may only be given by the assistant")
        if message.tool_call_id and role != "tool":
            raise FieldInvalid(f"{where}.tool_call_id", "may only be given by a tool")
        calls = tuple(
            ToolCall(call.tool_call_id, call.name, call.arguments_json)
            for call in message.tool_calls
        )
        found.append(Message(role, message.content, calls, message.tool_call_id, message.reasoning))
    fine = first or found[0].role != "assistant"
    _check(fine, f"{field}.messages[0].role", "must not be the assistant again")
    tools = [
        Tool(
            identifier(f"{field}.tools[{index}].name", tool.name),
            tool.description,
            _json_object(f"{field}.tools[{index}].parameters", tool.parameters),
        )
        for index, tool in enumerate(conversation.tools)
    ]
    return found, tools


def check_depth(field: str, value: struct_pb2.Struct) -> None:
    """Raise FIELD_INVALID if a Struct is nested too deeply.

    Protobuf parses at most 100 nested messages, and each level of JSON takes three. A deeper Struct
    might parse in its request, but not in the messages that contain it later.
    """
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for outer in level for inner in _nested(outer)]
        if not level:
            return
    raise FieldInvalid(field, f"must be less than {MAX_JSON_DEPTH} levels deep")


def _nested(container: Any) -> Iterator[Any]:
    # Compared by name, because wire messages use twin classes.
    is_list = container.DESCRIPTOR.name == "ListValue"
    for value in container.values if is_list else container.fields.values():
        kind = value.WhichOneof("kind")
        if kind in ("struct_value", "list_value"):
            yield getattr(value, kind)


def _json_object(field: str, value: struct_pb2.Struct) -> dict[str, object]:
    check_depth(field, value)
    try:
        return json_format.MessageToDict(value)
    except (ValueError, json_format.Error) as error:
        raise FieldInvalid(field, "must hold finite numbers only") from error


def group(request: rollout_service_pb2.GenerateRequest) -> None:
    size, index = request.group_size, request.sample_index
    if not request.group_id:
        _check(not (size or index), "group_id", "must be set if group_size or sample_index is")
        return
    identifier("group_id", request.group_id)
    _check(1 <= size <= MAX_GROUP_SIZE, "group_size", f"must be from 1 to {MAX_GROUP_SIZE}", size)
    _check(0 <= index < size, "sample_index", "must be within the group", index)


def purpose(field: str, value: int) -> trajectory_pb2.Purpose.ValueType:
    """Unspecified is accepted."""
    for known in trajectory_pb2.Purpose.values():
        if value == known:
            return known
    raise FieldInvalid(field, "is unknown", value)


def task(field: str, value: task_service_pb2.Task, vocab_size: int) -> None:
    """The prompt is rendered later, when a trajectory is opened for the task."""
    identifier(f"{field}.task_id", value.task_id)
    check_depth(f"{field}.metadata", value.metadata)
    purpose(f"{field}.purpose", value.purpose)
    size, finish = value.group_size, value.finish_count
    fine = 1 <= size <= MAX_GROUP_SIZE
    _check(fine, f"{field}.group_size", f"must be from 1 to {MAX_GROUP_SIZE}", size)
    _check(0 <= finish <= size, f"{field}.finish_count", "must be from 0 to group_size", finish)
    kind = value.WhichOneof("prompt")
    if kind == "tokens":
        tokens(f"{field}.tokens", value.tokens, vocab_size)
    elif kind == "conversation":
        messages(f"{field}.conversation", value.conversation, first=True)
    sampling(f"{field}.sampling_params", value.sampling_params, vocab_size)
