"""Decodes token and log-probability arrays without a Python object per token.

On the wire, packed `repeated sfixed32` and `repeated float` are a length-delimited little-endian array. A
`bytes` field looks the same. So each message of `penstock.v1` has a *twin*: the same message, field for
field, except that `token_ids` and `logprobs` are declared as `bytes`. The twins are made at import from the
generated descriptors. They parse and serialize the same bytes as the typed messages, and their arrays are
read with `numpy.frombuffer`.

    raw = twin(Segment)(author=AUTHOR_POLICY, token_ids=ids.tobytes()).SerializeToString()
    token_ids(decode(Segment, raw))     # a read-only numpy view, int32

A peer may legally send such a field unpacked, or packed in several pieces; protobuf would lose part of
it in a `bytes` field. `decode` detects this: the message then differs in length from its input, or has
unknown fields. It parses such a message through the typed class once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from penstock.v1 import (
    conversation_pb2,
    journal_pb2,
    rejection_pb2,
    rollout_service_pb2,
    task_service_pb2,
    trainer_service_pb2,
    trajectory_pb2,
    weights_pb2,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

M = TypeVar("M", bound=Message)

ARRAY_FIELDS = {
    "penstock.v1.Segment": ("token_ids", "logprobs"),
    "penstock.v1.TokenSequence": ("token_ids",),
    "penstock.v1.WeightProbe": ("token_ids", "logprobs"),
}
TWIN_PACKAGE = "penstock.v1twin"
TOKEN = np.dtype("<i4")
LOGPROB = np.dtype("<f4")

# Ordered so that each file comes after its imports.
MODULES = (
    rejection_pb2,
    conversation_pb2,
    trajectory_pb2,
    weights_pb2,
    rollout_service_pb2,
    task_service_pb2,
    trainer_service_pb2,
    journal_pb2,
)


class MalformedMessage(ValueError):
    """The bytes are not a message of the expected type, or its arrays are inconsistent."""


def _register_twins() -> None:
    pool = descriptor_pool.Default()
    for module in MODULES:
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            for name in ARRAY_FIELDS.get(f"penstock.v1.{message.name}", ()):
                field = next(field for field in message.field if field.name == name)
                field.label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
        del file.service[:]
        _rename(file)
        pool.AddSerializedFile(file.SerializeToString())


def _rename(file: descriptor_pb2.FileDescriptorProto) -> None:
    file.package = TWIN_PACKAGE
    file.name = file.name.replace("penstock/v1/", "penstock/v1twin/")
    for index, name in enumerate(file.dependency):
        file.dependency[index] = name.replace("penstock/v1/", "penstock/v1twin/")
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        pending.extend(message.nested_type)
        for field in message.field:
            # A scalar has no type name; an empty one must not be set.
            if field.type_name:
                field.type_name = field.type_name.replace(".penstock.v1.", f".{TWIN_PACKAGE}.")


_register_twins()


def twin(typed: type[M]) -> type[M]:
    """The twin class of a generated class of `penstock.v1`.

    Its declared type is the typed class, because it has the same fields. Only `token_ids` and `logprobs`
    differ: they hold bytes. Read them with the functions `token_ids` and `logprobs` of this module.
    """
    return cast("type[M]", _twin_class(typed))


@cache
def _twin_class(typed: type[Message]) -> type[Message]:
    full_name = typed.DESCRIPTOR.full_name.replace("penstock.v1.", f"{TWIN_PACKAGE}.", 1)
    return message_factory.GetMessageClass(
        descriptor_pool.Default().FindMessageTypeByName(full_name)
    )


@cache
def _holds_arrays(full_name: str) -> bool:
    """Whether a message of `penstock.v1` can contain an array, directly or nested."""
    if full_name in ARRAY_FIELDS:
        return True
    descriptor = descriptor_pool.Default().FindMessageTypeByName(full_name)
    return any(
        _holds_arrays(field.message_type.full_name)
        for field in descriptor.fields
        # Other packages' messages contain none, and Struct is recursive.
        if field.message_type is not None
        and field.message_type.full_name.startswith("penstock.v1.")
        and field.message_type.full_name != full_name
    )


def decode(typed: type[M], data: bytes) -> M:
    """Parses `data` as the twin of `typed`.

    Raises MalformedMessage if the bytes are not such a message. Array lengths are checked later: reading an
    array fails unless its length is a multiple of four bytes. Readers of segments check that the arrays
    match in length.
    """
    try:
        message = twin(typed).FromString(data)
        if not _holds_arrays(typed.DESCRIPTOR.full_name):
            return message
        message.DiscardUnknownFields()
        if message.ByteSize() != len(data):
            # Unpacked or split arrays, an unknown field, or merely another legal encoding.
            canonical = typed.FromString(data)
            canonical.DiscardUnknownFields()
            message = twin(typed).FromString(canonical.SerializeToString())
    except DecodeError as error:
        raise MalformedMessage(f"not a {typed.DESCRIPTOR.full_name}") from error
    return message


def decoder(typed: type[M]) -> Callable[[bytes], M]:
    """`decode` of one message type, as a deserializer for gRPC."""
    return partial(decode, typed)


def encode(message: Message) -> bytes:
    """Serializes a message, typed or twin; a serializer for gRPC."""
    return message.SerializeToString()


def token_ids(
    holder: trajectory_pb2.Segment | trajectory_pb2.TokenSequence | weights_pb2.WeightProbe,
) -> NDArray[np.int32]:
    """Tokens of a twin: int32, shape [n], a read-only view into the message."""
    return _view(holder.token_ids, TOKEN)


def logprobs(holder: trajectory_pb2.Segment | weights_pb2.WeightProbe) -> NDArray[np.float32]:
    """Log-probabilities of a twin: float32, shape [n] or [0], a read-only view into the message."""
    return _view(holder.logprobs, LOGPROB)


def _view(field: Iterable[object], dtype: np.dtype[Any]) -> NDArray[Any]:
    data = cast("bytes", field)
    if len(data) % dtype.itemsize:
        raise MalformedMessage(f"an array of {len(data)} bytes is not a whole number of elements")
    return np.frombuffer(data, dtype)


def array_bytes(array: NDArray[Any], dtype: np.dtype[Any] = TOKEN) -> Any:
    """An array as little-endian bytes, for a twin's field."""
    return np.ascontiguousarray(array, dtype).tobytes()
