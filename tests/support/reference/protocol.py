"""The page of the protocol, from the comments in proto/."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from tests.support.reference import markdown
from tests.support.reference.markdown import code, link, prose

OPENING = """After reading this page you know every service, rpc, message and field of `penstock.v1`.
[The contract](../../proto/README.md) explains how they work together."""
PACKAGE = ".penstock.v1."
# The contract first, then its parts, then what the server keeps on disk.
ORDER = (
    *("rollout_service", "task_service", "trainer_service"),
    *("trajectory", "conversation", "weights", "rejection", "journal"),
)
MESSAGES, ENUMS, SERVICES = (
    FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER,
    FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER,
    FileDescriptorProto.SERVICE_FIELD_NUMBER,
)
_Place = tuple[int, ...]


def page(folder: Path) -> str:
    """`folder` has penstock/v1/*.proto."""
    found = {Path(each.name).stem: each for each in compiled(folder).file}
    blocks: list[str] = []
    for name in sorted(found, key=ORDER.index):
        blocks += _File(found[name]).blocks()
    return markdown.page("The protocol", OPENING, *blocks)


def compiled(folder: Path) -> FileDescriptorSet:
    """The protocol with its comments."""
    sources = sorted(str(path) for path in folder.glob("penstock/v1/*.proto"))
    with tempfile.TemporaryDirectory() as out:
        path = Path(out) / "descriptors"
        includes = (f"-I{folder}", f"-I{files('grpc_tools') / '_proto'}")
        options = ("--include_source_info", f"--descriptor_set_out={path}")
        # The package has no types.
        if cast("Any", protoc).main(["protoc", *includes, *options, *sources]):
            raise RuntimeError(f"protoc cannot compile {folder}")
        return FileDescriptorSet.FromString(path.read_bytes())


class _File:
    """The services, messages and enums of one file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments: dict[_Place, str] = {
            tuple(each.path): each.leading_comments for each in file.source_code_info.location
        }

    def blocks(self) -> Iterator[str]:
        yield f"## {Path(self._file.name).name}"
        for index, service in enumerate(self._file.service):
            yield from self._service((SERVICES, index), service)
        for index, message in enumerate(self._file.message_type):
            yield from self._message((MESSAGES, index), message, message.name)
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum((ENUMS, index), enum, enum.name)

    def _service(self, place: _Place, service: ServiceDescriptorProto) -> Iterator[str]:
        yield f"### {service.name}"
        yield self._paragraphs(place)
        rows: list[tuple[str, str, str, str]] = []
        for index, rpc in enumerate(service.method):
            request = _stream(rpc.client_streaming) + _linked(rpc.input_type)
            response = _stream(rpc.server_streaming) + _linked(rpc.output_type)
            at = (*place, ServiceDescriptorProto.METHOD_FIELD_NUMBER, index)
            rows.append((code(rpc.name), request, response, self._line(at)))
        yield markdown.table(("rpc", "request", "response", "description"), rows)

    def _message(self, place: _Place, message: DescriptorProto, name: str) -> Iterator[str]:
        yield f"### {name}"
        yield self._paragraphs(place)
        maps = {f".{each.name}": each for each in message.nested_type if each.options.map_entry}
        rows: list[tuple[str, str, str, str]] = []
        begun: set[int] = set()
        for index, field in enumerate(message.field):
            shown = code(field.name)
            if field.HasField("oneof_index") and not field.proto3_optional:
                oneof = code(message.oneof_decl[field.oneof_index].name)
                if field.oneof_index not in begun:
                    begun.add(field.oneof_index)
                    at = (*place, DescriptorProto.ONEOF_DECL_FIELD_NUMBER, field.oneof_index)
                    rows.append(("", oneof, "one of", self._line(at)))
                shown = f"{shown} in {oneof}"
            at = (*place, DescriptorProto.FIELD_FIELD_NUMBER, index)
            entry = next((maps[end] for end in maps if field.type_name.endswith(end)), None)
            rows.append((str(field.number), shown, _type(field, entry), self._line(at)))
        if rows:
            yield markdown.table(("", "field", "type", "description"), rows)
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                at = (*place, DescriptorProto.NESTED_TYPE_FIELD_NUMBER, index)
                yield from self._message(at, nested, f"{name}.{nested.name}")
        for index, enum in enumerate(message.enum_type):
            at = (*place, DescriptorProto.ENUM_TYPE_FIELD_NUMBER, index)
            yield from self._enum(at, enum, f"{name}.{enum.name}")

    def _enum(self, place: _Place, enum: EnumDescriptorProto, name: str) -> Iterator[str]:
        yield f"### {name}"
        yield self._paragraphs(place)
        rows = [
            (
                str(value.number),
                code(value.name),
                self._line((*place, EnumDescriptorProto.VALUE_FIELD_NUMBER, index)),
            )
            for index, value in enumerate(enum.value)
        ]
        yield markdown.table(("", "value", "description"), rows)

    def _line(self, place: _Place) -> str:
        return prose(self._comments.get(place, ""))

    def _paragraphs(self, place: _Place) -> str:
        lines = self._comments.get(place, "").splitlines()
        return markdown.paragraphs("\n".join(line.removeprefix(" ") for line in lines))


def _stream(streams: bool) -> str:
    return "stream " if streams else ""


def _linked(type_name: str) -> str:
    name = type_name.removeprefix(PACKAGE)
    return link(name, name) if name != type_name else name.removeprefix(".")


def _type(field: FieldDescriptorProto, entry: DescriptorProto | None) -> str:
    if entry is not None:
        key, value = (_type(each, None) for each in entry.field)
        return f"map of {key} to {value}"
    words = _linked(field.type_name) or _scalar(field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {words}"
    return f"optional {words}" if field.proto3_optional else words


def _scalar(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
