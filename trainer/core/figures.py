"""Figures: the numbers that describe a step, each declared once, with its rule, unit and description.

    declaration, a field of a dataclass -> line, the figures of one step by name -> point, those of several
    steps together, each by its rule -> the display, TensorBoard, trackers

A part of a step, such as what its batch was like, is a dataclass of its own, and a field of the whole:
names are flat all the same, and each is there once. A line holds every figure; `metrics.jsonl` is
lines. A breakdown is a figure for each of several keys, such as the reward of each data source.

The rules are closed: a point is a line, and the point of points is that of all their lines, however the
steps were cut, for figures that every step has or none. For that a mean is weighted by a figure that is
itself a sum. What has no weight at all, such as the entropy of steps that trained nothing, is in no point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")

Number = bool | int | float
Value = Number | None | Mapping[str, Number]
Line = Mapping[str, Value]

FIGURE = "penstock.figure"


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a figure over several steps."""

    kind: Literal["sum", "min", "max", "last", "weighted"]
    by: str = ""
    """Figure that a mean is weighted by, whose own rule is the sum; for a breakdown it may be one too."""

    def __str__(self) -> str:
        if self.kind != "weighted":
            return self.kind
        return "mean" if self.by == STEPS else f"mean, weighted by `{self.by}`"


STEPS = "steps"
SUM, MIN, MAX, LAST = Rule("sum"), Rule("min"), Rule("max"), Rule("last")


def weighted(by: str) -> Rule:
    """The mean, weighted by another figure."""
    return Rule("weighted", by)


MEAN = weighted(STEPS)

MOMENT = "unix s"
"""Unit of a time of day, which is for `metrics.jsonl` alone."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What is declared of a figure."""

    name: str
    rule: Rule
    unit: str
    """Of one value; empty for a plain number."""
    description: str
    is_breakdown: bool = False


def figure(default: T, rule: Rule, unit: str, description: str) -> T:
    """A field that is a figure."""
    return field(default=default, metadata={FIGURE: (rule, unit, description)})


def breakdown(rule: Rule, unit: str, description: str) -> Mapping[str, object]:
    """Metadata of a field that is a figure for each of its keys."""
    return {FIGURE: (rule, unit, description, True)}


def declared(record: type) -> tuple[Figure, ...]:
    """The figures of a dataclass and of its parts, in their order."""
    found: list[Figure] = []
    for part in _fields(record):
        if FIGURE in part.metadata:
            found.append(Figure(part.name, *part.metadata[FIGURE]))
        elif is_dataclass(part.default_factory):
            found += declared(cast("type", part.default_factory))
    return tuple(found)


def line_of(record: object) -> dict[str, Value]:
    """Every figure of an instance and of its parts."""
    line: dict[str, Value] = {}
    for part in _fields(type(record)):
        value: Any = getattr(record, part.name)
        if FIGURE in part.metadata:
            line[part.name] = value
        elif is_dataclass(value):
            line |= line_of(value)
    return line


def aggregate(figures: Iterable[Figure], lines: Sequence[Line]) -> dict[str, Value]:
    """The point of some lines, oldest first; a figure is None where no line has it, or none with a
    weight."""
    point: dict[str, Value] = {}
    for each in figures:
        if each.is_breakdown:
            point[each.name] = _aggregate_keys(each, lines)
        else:
            values = [(_number(line.get(each.name)), _weight(line, each.rule)) for line in lines]
            point[each.name] = _combine(each.rule, values)
    return point


def scalars(figures: Iterable[Figure], point: Line) -> dict[str, float]:
    """What of a point is sent on: flat, each key of a breakdown by itself, without times of day."""
    sent: dict[str, float] = {}
    for each in figures:
        value = point.get(each.name)
        if each.unit == MOMENT or value is None:
            continue
        if isinstance(value, Mapping):
            sent |= {f"{each.name}/{key}": float(part) for key, part in value.items()}
        else:
            sent[each.name] = float(value)
    return sent


def as_json(line: Line) -> dict[str, object]:
    """The line as any reader of JSON takes it: what is not finite is null."""
    return {
        name: {key: _finite(part) for key, part in value.items()}
        if isinstance(value, Mapping)
        else _finite(value)
        for name, value in line.items()
    }


def _fields(record: type) -> Iterator[Field[Any]]:
    yield from fields(record)


def _finite(value: Number | None) -> Number | None:
    return value if value is None or math.isfinite(value) else None


def _number(value: Value) -> Number | None:
    return None if isinstance(value, Mapping) else value


def _weight(line: Line, rule: Rule, key: str = "") -> float:
    """How much of a mean this line is."""
    if rule.kind != "weighted":
        return 1.0
    by = line.get(rule.by)
    if isinstance(by, Mapping):
        by = by.get(key)
    return float(by or 0.0)


def _aggregate_keys(each: Figure, lines: Sequence[Line]) -> dict[str, Number]:
    parts = [(line, cast("Mapping[str, Number]", line.get(each.name) or {})) for line in lines]
    keys = dict.fromkeys(key for _, part in parts for key in part)
    combined = {
        key: _combine(
            each.rule, [(part.get(key), _weight(line, each.rule, key)) for line, part in parts]
        )
        for key in keys
    }
    return {key: value for key, value in combined.items() if value is not None}


def _combine(rule: Rule, values: Sequence[tuple[Number | None, float]]) -> Number | None:
    """One value for those of several steps, each with its weight."""
    known = [(value, weight) for value, weight in values if value is not None and weight]
    if not known:
        return None
    plain = [value for value, _ in known]
    match rule.kind:
        case "sum":
            return sum(plain)
        case "last":
            return plain[-1]
        case "min":
            return _unless_nan(min(plain), plain)
        case "max":
            return _unless_nan(max(plain), plain)
        case "weighted":
            if len(known) == 1:
                return plain[0]  # To the last bit.
            total = sum(weight for _, weight in known)
            return sum(value * weight for value, weight in known) / total


def _unless_nan(value: Number, values: Sequence[Number]) -> Number:
    """Comparisons with what is not a number depend on the order."""
    return math.nan if any(math.isnan(each) for each in values) else value
