"""Configuration as tables: a TOML file, and settings such as `train.run.steps=5` over it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import cast

Table = dict[str, object]


class SettingInvalid(ValueError):
    """A file or a setting cannot be read; the message names what is wrong."""


def read_table(path: Path) -> Table:
    """A TOML file. Raises SettingInvalid."""
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
    """Puts one `section.key=value` into a table, in place of what it held. Raises SettingInvalid.

    The value reads as in TOML; what is none is a text, so that `model.path=out/model` needs no quotes.
    """
    key, separator, text = setting.partition("=")
    names = key.strip().split(".")
    if not separator or not all(names):
        raise SettingInvalid(f"a setting reads section.key=value, got {setting!r}")
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
