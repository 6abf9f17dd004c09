"""Configuration as tables: a TOML file, overridden by settings such as `train.run.steps=5`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from penstock.common.suggestions import unreadable

Table = dict[str, object]
Place = tuple[str | int, ...]
"""Keys and indices that lead from a table to a value."""

_NOT_TOML = (".yaml", ".yml", ".json")


class SettingInvalid(ValueError):
    """A file or a setting cannot be used; the message has one line per mistake."""


@dataclass(frozen=True)
class Origins:
    """Where the values of a table come from, for messages."""

    path: Path | None = None
    text: str = ""
    """Content of the file."""
    options: Mapping[Place, str] = field(default_factory=dict[Place, str])
    """The option that gave a value, such as `--set train.lr`, in the order in which they apply."""

    def of(self, place: Place, said: str = "") -> str:
        """The option, or the file and the line, that gave the value at `place`. Empty if neither did.

        `said` is what is wrong with a whole table: options that gave it one of the named values are added
        to the file.
        """
        for key, option in reversed(list(self.options.items())):
            if place[: len(key)] == key:
                return option
        below = [o for key, o in self.options.items() if key[: len(place)] == place]
        line = line_of(self.text, place) if place else None
        if self.path is None or (place and line is None and below):
            return below[-1] if below and place else ""
        named = [o for o in below if o.rpartition(".")[2].rpartition(" ")[2] in said]
        where = f"{self.path}" if line is None else f"{self.path}:{line}"
        return f"{where} with {', '.join(named)}" if named else where

    def has(self, place: Place) -> bool:
        """Whether the file or an option gives a value at `place`."""
        return any(place[: len(k)] == k or k[: len(place)] == place for k in self.options) or (
            line_of(self.text, place) is not None
        )

    def named(self, place: Place, said: str = "", *, missing: bool = False) -> str:
        """Where a value comes from, and its name, unless that is the option's own.

        A `missing` one is looked for in the table that lacks it.
        """
        where, name = self.of(place[:-1] if missing else place, said), ".".join(map(str, place))
        if place in self.options and not missing:
            name = ""
        return ": ".join(part for part in (where, name) if part)


def read_table(path: Path) -> Table:
    """Reads a TOML file. Raises SettingInvalid."""
    return _read(path)[0]


def read_with_origins(
    path: Path | None, settings: Iterable[str], options: Mapping[str, tuple[str, str]] | None = None
) -> tuple[Table, Origins]:
    """A TOML file with settings applied over it, the last one winning, and where each value comes from.

    `options` apply last: for a dotted key, the command-line option that sets it and its text. Raises
    SettingInvalid.
    """
    table, text = ({}, "") if path is None else _read(path)
    given: dict[Place, str] = {}
    for setting in settings:
        names = apply_setting(table, setting)
        # Moved to the end, where the last one that applies is looked for.
        given.pop(names, None)
        given[names] = f"--set {'.'.join(names)}"
    for key, (option, value) in (options or {}).items():
        names = tuple(key.split("."))
        _put(table, names, value, option)
        given.pop(names, None)
        given[names] = option
    return table, Origins(path, text, given)


def apply_setting(table: Table, setting: str) -> tuple[str, ...]:
    """Sets one `section.key=value` in a table, replacing the old value. Returns its names.

    The value is parsed as TOML. Anything else is taken as a string, so `model.path=out/model` needs no
    quotes. Raises SettingInvalid.
    """
    key, separator, text = setting.partition("=")
    names = tuple(name.strip() for name in key.split("."))
    if not separator or not all(names):
        raise SettingInvalid(
            f"--set {setting}: a setting is written section.key=value, got {setting!r}"
        )
    try:
        value: object = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    _put(table, names, value, f"--set {'.'.join(names)}")
    return names


def line_of(text: str, place: Sequence[str | int]) -> int | None:
    """The line, from one, on which a TOML text defines the value at `place`; None if it does not.

    Every beginning of the text that ends between two statements is valid TOML itself. The shortest that
    has the value ends with its definition.
    """
    lines = text.split("\n")
    # The first `without` lines do not define it, the first `within` do.
    without = 0
    within = len(lines)
    if not _defines(text, place):
        return None
    while True:
        found = _statement_end(lines, without, within)
        if found is None:
            return without + 1
        if _defines(_first(lines, found), place):
            within = found
        else:
            without = found


def _statement_end(lines: Sequence[str], after: int, before: int) -> int | None:
    """The end of a statement near the middle between two; None if there is none. A value may span lines."""
    middle = (after + before) // 2
    ends = [*range(middle, before), *range(middle - 1, after, -1)]
    return next(
        (end for end in ends if end > after and _parse(_first(lines, end)) is not None), None
    )


def _first(lines: Sequence[str], count: int) -> str:
    return "\n".join(lines[:count]) + "\n"


def _parse(text: str) -> Table | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _defines(text: str, place: Sequence[str | int]) -> bool:
    value: object = _parse(text)
    for part in place:
        if isinstance(value, dict) and part in value:
            value = cast("dict[object, object]", value)[part]
        elif isinstance(value, list) and isinstance(part, int):
            items = cast("list[object]", value)
            if part >= len(items):
                return False
            value = items[part]
        else:
            return False
    return value is not None


def _read(path: Path) -> tuple[Table, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingInvalid(unreadable(path, error)) from error
    except UnicodeDecodeError as error:
        raise SettingInvalid(f"{path}: {error}") from error
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        hint = "; a configuration is TOML" if path.suffix in _NOT_TOML else ""
        raise SettingInvalid(f"{path}: {error}{hint}") from error


def _put(table: Table, names: Sequence[str], value: object, option: str) -> None:
    for depth, name in enumerate(names[:-1], 1):
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            above = ".".join(names[:depth])
            kind = f"; for a table of that kind, set {above}.kind={inner}"
            raise SettingInvalid(
                f"{option}: {above} is {inner!r} already, and not a table"
                f"{kind if isinstance(inner, str) else ''}"
            )
        table = cast("Table", inner)
    table[names[-1]] = value
