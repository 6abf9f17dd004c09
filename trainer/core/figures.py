"""Figures: the numbers that describe a step, each declared with its rule, unit and description.

    declaration, a field of a dataclass -> line, the figures of one step by name -> point, the figures of
    several steps, each combined by its rule -> the display, TensorBoard, trackers

Part of a step, such as the figures of its batch, is a separate dataclass nested in a field. Names are
nevertheless flat and unique. `metrics.jsonl` consists of lines. A breakdown is a figure for each of
several keys, such as the reward of each data source.

A point is itself a line: the point of several points equals the point of all their lines, however the
steps were grouped. This holds for figures that either every step has or none has, and requires that a mean
is weighted by a figure whose own rule is the sum. A figure without any weight, such as the entropy of
steps that trained nothing, is in no point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np

T = TypeVar("T")

Number = bool | int | float
Value = Number | None | Mapping[str, Number]
Line = Mapping[str, Value]

FIGURE = "penstock.figure"


@dataclass(frozen=True, slots=True)
class Rule:
    """How the values of a figure from several steps are combined."""

    kind: Literal["sum", "min", "max", "last", "weighted"]
    by: str = ""
    """Figure that a mean is weighted by; its own rule is the sum. For a breakdown it may be a
    breakdown too."""

    def __str__(self) -> str:
        if self.kind != "weighted":
            return self.kind
        return "mean" if self.by == STEPS else f"mean, weighted by `{self.by}`"


STEPS = "steps"
SUM, MIN, MAX, LAST = Rule("sum"), Rule("min"), Rule("max"), Rule("last")


def weighted(by: str) -> Rule:
    return Rule("weighted", by)


MEAN = weighted(STEPS)

MOMENT = "unix s"
"""Unit of a point in time. Such figures appear only in `metrics.jsonl`."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    rule: Rule
    unit: str
    """Unit of one value; empty for a plain number."""
    description: str
    is_breakdown: bool = False


def figure(default: T, rule: Rule, unit: str, description: str) -> T:
    """Declares a dataclass field that is a figure."""
    return field(default=default, metadata={FIGURE: (rule, unit, description)})


def breakdown(rule: Rule, unit: str, description: str) -> dict[str, Any]:
    """Declares a dataclass field that holds one value for each of its keys."""
    return field(default_factory=dict[str, Any], metadata={FIGURE: (rule, unit, description, True)})


def declared(record: type) -> tuple[Figure, ...]:
    """Returns the figures of a dataclass and its nested parts, in order of declaration."""
    found: list[Figure] = []
    for part in fields(record):
        if FIGURE in part.metadata:
            found.append(Figure(part.name, *part.metadata[FIGURE]))
        elif is_dataclass(part.default_factory):
            found += declared(cast("type", part.default_factory))
    return tuple(found)


def line_of(record: object) -> dict[str, Value]:
    """Returns every figure of an instance and its nested parts."""
    line: dict[str, Value] = {}
    for part in fields(cast("Any", record)):
        value: Any = getattr(record, part.name)
        if FIGURE in part.metadata:
            line[part.name] = value
        elif is_dataclass(value):
            line |= line_of(value)
    return line


def aggregate(figures: Iterable[Figure], lines: Sequence[Line]) -> dict[str, Value]:
    """Combines lines, given oldest first, into a point. A figure is None if no line has a value
    with weight."""
    point: dict[str, Value] = {}
    for each in figures:
        if each.is_breakdown:
            point[each.name] = _aggregate_keys(each, lines)
        else:
            values = [(line.get(each.name), _weight(line, each.rule)) for line in lines]
            point[each.name] = _combine(each.rule, values)
    return point


def scalars(figures: Iterable[Figure], point: Line) -> dict[str, float]:
    """Flattens a point for trackers: each key of a breakdown separately, points in time left out."""
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
    """Returns the line as strict JSON: non-finite numbers become null."""
    return {
        name: {key: _finite(part) for key, part in value.items()}
        if isinstance(value, Mapping)
        else _finite(value)
        for name, value in line.items()
    }


def _finite(value: Number | None) -> Number | None:
    return value if value is None or math.isfinite(value) else None


def _weight(line: Line, rule: Rule, key: str = "") -> float:
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


def _combine(rule: Rule, values: Sequence[tuple[Value, float]]) -> Number | None:
    """Combines the values of several steps, each given with its weight."""
    known = [
        (value, weight)
        for value, weight in values
        if value is not None and not isinstance(value, Mapping) and weight
    ]
    if not known:
        return None
    plain = [value for value, _ in known]
    match rule.kind:
        case "sum":
            return sum(plain)
        case "last":
            return plain[-1]
        case "min":
            return np.min(plain).item()  # Unlike Python's, NaN if any is.
        case "max":
            return np.max(plain).item()
        case "weighted":
            if len(known) == 1:
                return plain[0]  # Exact to the last bit.
            total = sum(weight for _, weight in known)
            return sum(value * weight for value, weight in known) / total
