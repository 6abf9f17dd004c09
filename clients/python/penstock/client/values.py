"""Conversion between JSON values and `google.protobuf.Struct`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from google.protobuf import struct_pb2

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


def to_struct(values: Mapping[str, Json]) -> struct_pb2.Struct:
    """Converts to a Struct. Raises TypeError for a value that JSON cannot hold."""
    struct = struct_pb2.Struct()
    for key, value in values.items():
        struct.fields[key].CopyFrom(_to_value(value, key))
    return struct


def from_struct(struct: struct_pb2.Struct) -> dict[str, Json]:
    """Converts to a dict. A number without a fraction becomes an int."""
    return {key: _from_value(value) for key, value in struct.fields.items()}


def _to_value(value: Json, key: str) -> struct_pb2.Value:
    match value:
        case None:
            return struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)
        case bool():
            return struct_pb2.Value(bool_value=value)
        case int() | float():
            return struct_pb2.Value(number_value=value)
        case str():
            return struct_pb2.Value(string_value=value)
        case Mapping():
            return struct_pb2.Value(struct_value=to_struct(value))
        case Sequence():
            items = [_to_value(item, key) for item in value]
            return struct_pb2.Value(list_value=struct_pb2.ListValue(values=items))
        case _:
            raise TypeError(f"{key!r} holds a {type(value).__name__}, which JSON cannot represent")


def _from_value(value: struct_pb2.Value) -> Json:
    match value.WhichOneof("kind"):
        case "bool_value":
            return value.bool_value
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "struct_value":
            return from_struct(value.struct_value)
        case "list_value":
            return [_from_value(item) for item in value.list_value.values]
        case _:
            return None
