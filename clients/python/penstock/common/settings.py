"""Configuration as tables: a TOML file, overridden by settings such as `train.run.steps=5`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import cast

Table = dict[str, object]


class SettingInvalid(ValueError):
    """A file or a setting cannot be read; the message names the error."""


def read_table(path: Path) -> Table:
    """Reads a TOML file. Raises SettingInvalid."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingInvalid(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingInvalid(f"{path}: {error}") from error


def read_settings(path: Path | None, settings: Iterable[str]) -> Table:
    """A TOML file with settings applied over it, the last one winning. Raises SettingInvalid."""
    table = {} if path is None else read_table(path)
    for setting in settings:
        apply_setting(table, setting)
    return table


def apply_setting(table: Table, setting: str) -> None:
    """Sets one `section.key=value` in a table, replacing the old value. Raises SettingInvalid.

    The value is parsed as TOML. Anything else is taken as a string, so `model.path=out/model` needs no
    quotes.
    """
    key, separator, text = setting.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names):
        raise SettingInvalid(f"a setting must be section.key=value, got {setting!r}")
    try:
        value: object = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for name in names[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise SettingInvalid(f"{setting!r}: {name} is a value, not a section")
        table = cast("Table", inner)
    table[names[-1]] = value
