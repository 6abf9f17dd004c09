"""Requests of every rpc, generated from its descriptor.

Some are absurd, some are valid with something absurd in them, and some are bytes that hardly parse.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from tests.server.rpc.test_wire_errors import (
    KNOWN_IDS,
    TEXTS,
    extremes,
    own_name,
    put,
    scalar_fields,
    valid,
)
from tests.support.harness import ExchangeRequest, UpdateWeightsRequest, header
from tests.support.harness import messages as upload_messages

MOST_DEEP = 5
SEEDS = itertools.count(1_100_000)
"""A distinct number for each valid request, because ids, epochs and versions are used up. All have
the same length, so that hypothesis' draws do not depend on the number.
"""
OWN_TRAJECTORY = ("Continue", "CompleteTrajectory", "GetTrajectory")
"""Methods whose valid request refers to a trajectory opened for it."""


@dataclass(frozen=True)
class Bodies:
    """The messages that one call sends."""

    bodies: tuple[bytes, ...]
    seed: int
    """The number of the valid request it started from; 0 without one."""


@cache
def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values of a scalar field: extremes and arbitrary ones."""
    found = st.sampled_from(extremes(field))
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return found
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return found | st.integers(-3, 12)
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        return found | st.integers(-3, 600)
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return found | st.integers(0, 600)
    if kind == FieldDescriptor.CPPTYPE_FLOAT:
        return found | st.floats(width=32)
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return found | st.floats()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return found | st.binary(max_size=24)
    return found | st.text(max_size=6) | st.sampled_from((*KNOWN_IDS, *TEXTS))


@st.composite
def filled(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with arbitrary fields set to arbitrary values."""
    message = GetMessageClass(descriptor)()
    fields = descriptor.fields
    chosen = draw(st.integers(0, (1 << len(fields)) - 1)) if fields else 0
    for index, field in enumerate(fields):
        if not chosen >> index & 1:
            continue
        holder, kind = getattr(message, field.name), field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            value = kind.fields_by_name["value"]
            for key in draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2)):
                if value.message_type is None:
                    holder[key] = draw(values(value))
                elif depth < MOST_DEEP:
                    holder[key].CopyFrom(draw(filled(value.message_type, depth + 1)))
        elif kind is not None:
            if depth >= MOST_DEEP:
                continue
            if field.is_repeated:
                for _ in range(draw(st.integers(1, 3))):
                    holder.add().CopyFrom(draw(filled(kind, depth + 1)))
            else:
                holder.SetInParent()
                holder.CopyFrom(draw(filled(kind, depth + 1)))
        elif field.is_repeated:
            holder.extend(draw(st.lists(values(field), min_size=1, max_size=3)))
        else:
            setattr(message, field.name, draw(values(field)))
    return message


@cache
def ways(descriptor: Descriptor) -> tuple[tuple[FieldDescriptor, ...], ...]:
    """The path to each scalar field below a message."""
    return tuple(scalar_fields(descriptor))


def valid_of_its_own(method: MethodDescriptor, seed: int) -> Any:
    """A valid request. If the method needs a trajectory, it names one opened for this request."""
    request: Any = valid(method, seed)
    if method.name in OWN_TRAJECTORY:
        request.trajectory_id = own_name(seed)
    return request


@st.composite
def spoiled(draw: st.DrawFn, method: MethodDescriptor, seed: int) -> Message:
    """A valid request in which up to three fields have arbitrary values."""
    request = valid_of_its_own(method, seed)
    for _ in range(draw(st.integers(0, 3))):
        found = ways(method.input_type)
        if found:
            way = draw(st.sampled_from(found))
            put(request, way, draw(values(way[-1])))
    return request


PLACES = 1 << 16


@st.composite
def mangled(draw: st.DrawFn, body: bytes) -> bytes:
    """The bytes of a message, some of them removed, changed, repeated or added. The draws do not
    depend on the message.
    """
    data = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, PLACES - 1)) * len(data) // PLACES
        change, size, bit = (
            draw(st.integers(0, 3)),
            draw(st.integers(1, 40)),
            draw(st.integers(0, 7)),
        )
        if change == 0 and data:
            data[at] ^= 1 << bit
        elif change == 1:
            del data[at : at + size]
        elif change == 2:
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            data[at:at] = data[at : at + size]
    return bytes(data)


def leave_room(message: Message, seed: int) -> None:
    """Limit the epoch. After the greatest possible epoch, no later trainer could connect."""
    for name, most in (("hello", seed + 1), ("header", 1 << 62)):
        if name in message.DESCRIPTOR.fields_by_name and message.HasField(name):
            part = getattr(message, name)
            part.trainer_epoch = min(part.trainer_epoch, most)


@st.composite
def messages(draw: st.DrawFn, method: MethodDescriptor) -> Bodies:
    """Messages of a method: one, or several for a stream."""
    seed = next(SEEDS)
    begin = draw(st.integers(0, 2))
    first = draw(filled(method.input_type) if begin == 0 else spoiled(method, seed))
    leave_room(first, seed)
    bodies = [first.SerializeToString()]
    if method.name == "UpdateWeights" and begin == 2:
        bodies = draw(uploads(seed))
    elif method.client_streaming:
        likely = EXCHANGED if method.name == "Exchange" else st.nothing()
        later = likely | filled(method.input_type)
        bodies += [m.SerializeToString() for m in draw(st.lists(later, max_size=4))]
    return Bodies(tuple(bodies), seed if begin else 0)


@st.composite
def uploads(draw: st.DrawFn, seed: int) -> list[bytes]:
    """A whole upload in which up to two messages are missing, repeated or changed."""
    head, data = header(seed, staged=draw(st.booleans()))
    requests = upload_messages(head, data, 1_024)
    descriptor = UpdateWeightsRequest.DESCRIPTOR
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, PLACES - 1)) * len(requests) // PLACES
        change = draw(st.integers(0, 2))
        if change == 0:
            del requests[at : at + 1]
        elif change == 1:
            requests[at:at] = requests[at : at + 1]
        else:
            other = draw(filled(descriptor)).SerializeToString()
            requests[at : at + 1] = [UpdateWeightsRequest.FromString(other)]
    return [request.SerializeToString() for request in requests]


def exchanged(**fields: Any) -> Message:
    """One message of the trainer's stream."""
    return ExchangeRequest(**fields)


NUMBERS = st.integers(0, 4)
EXCHANGED: st.SearchStrategy[Message] = st.one_of(
    NUMBERS.map(lambda n: exchanged(demand={"group_count": n, "purpose": n % 3})),
    st.tuples(NUMBERS, NUMBERS).map(
        lambda pair: exchanged(receipt={"delivery_ids": [pair[0]], "step": pair[1]})
    ),
    NUMBERS.map(lambda n: exchanged(checkpoint={"step": n})),
    NUMBERS.map(lambda n: exchanged(switch_weights={"weight_version": n, "in_flight": n})),
)
"""Plausible messages of the trainer's stream."""


@st.composite
def raw(draw: st.DrawFn, method: MethodDescriptor) -> Bodies:
    """Raw bytes sent to a method instead of messages."""
    seed = next(SEEDS)
    if draw(st.booleans()):
        return Bodies((draw(st.binary(max_size=200)),), 0)
    body = valid_of_its_own(method, seed).SerializeToString()
    bodies = [draw(mangled(body))]
    if method.client_streaming and draw(st.booleans()):
        bodies = [body, draw(mangled(body))]
    return Bodies(tuple(bodies), seed)
