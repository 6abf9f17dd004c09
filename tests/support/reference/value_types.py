"""The type and the default of a setting, in words."""

from __future__ import annotations

import json
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.support.reference.markdown import bounded, choice, code, number

SIMPLE = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    object: "any value",
}
PLURALS = {
    "boolean": "booleans",
    "integer": "integers",
    "number": "numbers",
    "text": "texts",
    "path": "paths",
}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def type_words(field: FieldInfo) -> str:
    return _words(field.annotation, field.metadata)


def default_words(name: str, field: FieldInfo) -> str:
    """`name` is the field's; a size in bytes comes with its unit."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        made = field.default_factory()  # pyright: ignore[reportCallIssue]
        # Anything but an empty table depends on the machine.
        return code("{}") if made == {} else "computed"
    if field.default is None:
        return "unset"
    unit = _unit(field.default) if name.endswith("bytes") else ""
    return code(_toml(field.default)) + unit


def parts(annotation: Any) -> list[Any]:
    """The members of a union, without None; other annotations are their only part."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for part in get_args(annotation) if part is not types.NoneType]
    return [annotation]


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    found = parts(annotation)
    if len(found) > 1:
        return choice([_words(part, metadata) for part in found])
    (kind,) = found
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(arguments[0], [*metadata, *_constraints(arguments[1:])])
    if origin is Literal:
        return choice([code(json.dumps(value)) for value in arguments])
    if origin is tuple and arguments[-1] is ...:
        return f"list of {_plural(_words(arguments[0]))}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(map(_words, arguments))}"
    if origin is list:
        return f"list of {_plural(_words(arguments[0]))}"
    if origin is dict:
        values = _words(arguments[1])
        simple = values.split()[0] in PLURALS and " or " not in values
        return f"table of {_plural(values)}" if simple else "table"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    return bounded(SIMPLE[kind], **_bounds(metadata))


def _constraints(metadata: Iterable[Any]) -> list[Any]:
    """What `Field` and the constraints of `annotated_types` require."""
    return [
        one
        for each in metadata
        for one in (each.metadata if isinstance(each, FieldInfo) else [each])
    ]


def _bounds(metadata: Iterable[Any]) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for each in metadata:
        if isinstance(
            each, annotated_types.Gt | annotated_types.Ge | annotated_types.Lt | annotated_types.Le
        ):
            name = type(each).__name__.lower()
            found[BOUNDS[name]] = getattr(each, name)
    return found


def _plural(words: str) -> str:
    first, space, rest = words.partition(" ")
    return PLURALS.get(first, first) + space + rest


def _unit(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count and not count % (1 << power):
            return f" ({count >> power} {unit})"
    return ""


def _toml(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return json.dumps(str(value) if isinstance(value, Path) else value)
