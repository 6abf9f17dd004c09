"""Converts requests to domain values. Every field is checked here, before any state changes.

Raises FieldInvalid (INVALID_ARGUMENT with BadRequest), TOKEN_OUT_OF_RANGE or MALFORMED_MESSAGE.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from google.protobuf import duration_pb2, json_format, struct_pb2

from penstock.server.core.errors import MAX_ID_LENGTH, DomainError, FieldInvalid
from penstock.server.engine.protocol import Sampling
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.turns.turn import TurnSampling
from penstock.v1 import conversation_pb2, rollout_service_pb2, task_service_pb2, trajectory_pb2
from penstock.wire.codec import MalformedMessage, token_ids, twin
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SamplingParams = twin(rollout_service_pb2.SamplingParams)

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

ROLES = {
    conversation_pb2.ROLE_SYSTEM: "system",
    conversation_pb2.ROLE_USER: "user",
    conversation_pb2.ROLE_ASSISTANT: "assistant",
    conversation_pb2.ROLE_TOOL: "tool",
}


class HasSequence(Protocol):
    @property
    def tokens(self) -> trajectory_pb2.TokenSequence: ...


def identifier(field: str, value: str) -> str:
    """Check an id of 1 to 256 characters."""
    if not value:
        raise FieldInvalid(field, "must be set")
    if len(value) > MAX_ID_LENGTH:
        raise FieldInvalid(field, f"must have at most {MAX_ID_LENGTH} characters", value)
    return value


def identifiers(field: str, values: Iterable[str]) -> list[str]:
    """Check a list of at most MAX_SELECTED ids."""
    found = [identifier(f"{field}[{index}]", value) for index, value in enumerate(values)]
    if len(found) > MAX_SELECTED:
        raise FieldInvalid(field, f"must name at most {MAX_SELECTED}", len(found))
    return found


def tokens(field: str, holder: HasSequence, vocab_size: int) -> NDArray[np.int32]:
    """Return the tokens, of shape [n], checked to be within the vocabulary."""
    try:
        found = token_ids(holder.tokens)
    except MalformedMessage as error:
        raise DomainError(
            Reason.MALFORMED_MESSAGE, f"{field}: {error}", {"field": field}
        ) from error
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= vocab_size):
        outside = (found < 0) | (found >= vocab_size)
        position = int(outside.argmax())
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
    if not (temperature == 0 or _MIN_TEMPERATURE_ARRIVING <= temperature <= MAX_TEMPERATURE):
        raise FieldInvalid(
            f"{field}.temperature",
            f"must be 0 (greedy) or from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
            temperature,
        )
    if not 0 < top_p <= 1:
        raise FieldInvalid(f"{field}.top_p", "must be above 0 and at most 1", top_p)
    if not 0 <= params.top_k <= vocab_size:
        raise FieldInvalid(
            f"{field}.top_k", "must be from 0 to the vocabulary's size", params.top_k
        )
    if params.max_tokens < 0:
        raise FieldInvalid(f"{field}.max_tokens", "must not be negative", params.max_tokens)
    if len(params.stop_token_ids) > MAX_STOPS or len(params.stop) > MAX_STOPS:
        raise FieldInvalid(f"{field}.stop", f"must name at most {MAX_STOPS} each")
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise DomainError(
                Reason.TOKEN_OUT_OF_RANGE,
                f"{field}.stop_token_ids holds {token}, the vocabulary has {vocab_size} tokens",
                {"field": f"{field}.stop_token_ids", "got": token, "vocab": vocab_size},
            )
    for text in params.stop:
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise FieldInvalid(
                f"{field}.stop", f"must have 1 to {MAX_STOP_LENGTH} characters each", text
            )
    return TurnSampling(
        temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        top_p=top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        seed=params.seed % 2**63 if params.HasField("seed") else None,
        ignore_eos=params.ignore_eos,
    )


def sampling_message(sampling: TurnSampling | Sampling) -> rollout_service_pb2.SamplingParams:
    return _SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
    )


def duration_seconds(field: str, duration: duration_pb2.Duration) -> float:
    """Return seconds, checked to be at most a minute."""
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0 <= seconds <= MAX_FLUSH_SECONDS or math.isnan(seconds):
        raise FieldInvalid(field, f"must be from 0 to {MAX_FLUSH_SECONDS:.0f} s", seconds)
    return seconds


def messages(
    field: str, conversation: conversation_pb2.Conversation, *, first: bool
) -> tuple[list[Message], list[Tool]]:
    """Check a conversation. `first` means that it opens a trajectory."""
    if not conversation.messages:
        raise FieldInvalid(f"{field}.messages", "must hold at least one message")
    if len(conversation.messages) > MAX_MESSAGES:
        raise FieldInvalid(
            f"{field}.messages", f"must hold at most {MAX_MESSAGES}", len(conversation.messages)
        )
    if conversation.tools and not first:
        raise FieldInvalid(f"{field}.tools", "may only be given on the first turn")
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
    if not first and found[0].role == "assistant":
        raise FieldInvalid(f"{field}.messages[0].role", "must not be the assistant again")
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
    """NaN and infinity are refused."""
    check_depth(field, value)
    try:
        return json_format.MessageToDict(value)
    except (ValueError, json_format.Error) as error:
        raise FieldInvalid(field, "must hold finite numbers only") from error


def group(request: rollout_service_pb2.GenerateRequest) -> None:
    if not request.group_id:
        if request.group_size or request.sample_index:
            raise FieldInvalid("group_id", "must be set if group_size or sample_index is")
        return
    identifier("group_id", request.group_id)
    if not 1 <= request.group_size <= MAX_GROUP_SIZE:
        raise FieldInvalid("group_size", f"must be from 1 to {MAX_GROUP_SIZE}", request.group_size)
    if not 0 <= request.sample_index < request.group_size:
        raise FieldInvalid("sample_index", "must be within the group", request.sample_index)


def purpose(field: str, value: int) -> trajectory_pb2.Purpose.ValueType:
    """Unspecified is accepted."""
    for known in (
        trajectory_pb2.PURPOSE_UNSPECIFIED,
        trajectory_pb2.PURPOSE_TRAIN,
        trajectory_pb2.PURPOSE_EVAL,
    ):
        if value == known:
            return known
    raise FieldInvalid(field, "is unknown", value)


def task(field: str, value: task_service_pb2.Task, vocab_size: int) -> None:
    """The prompt is rendered later, when a trajectory is opened for the task."""
    identifier(f"{field}.task_id", value.task_id)
    check_depth(f"{field}.metadata", value.metadata)
    purpose(f"{field}.purpose", value.purpose)
    if not 1 <= value.group_size <= MAX_GROUP_SIZE:
        raise FieldInvalid(
            f"{field}.group_size", f"must be from 1 to {MAX_GROUP_SIZE}", value.group_size
        )
    if not 0 <= value.finish_count <= value.group_size:
        raise FieldInvalid(
            f"{field}.finish_count", "must be from 0 to group_size", value.finish_count
        )
    kind = value.WhichOneof("prompt")
    if kind == "tokens":
        tokens(f"{field}.tokens", value, vocab_size)
    elif kind == "conversation":
        messages(f"{field}.conversation", value.conversation, first=True)
    sampling(f"{field}.sampling_params", value.sampling_params, vocab_size)
