"""Rows from a file with one JSON object per line."""

from __future__ import annotations

import json

import xxhash

from penstock.common.suggestions import unreadable
from penstock.trainer.config.data import JsonlConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import setting
from penstock.trainer.data.sources.rows import RowSource


def open_jsonl(config: JsonlConfig, seed: int, section: str = "data.jsonl") -> RowSource:
    """Reads a file with one JSON object per line. Empty lines and a byte order mark are skipped.

    Raises ConfigInvalid, naming the line, if it is not an object that can become a task.
    """
    where = setting(section, "path")
    try:
        content = config.path.read_bytes()
        # Not splitlines: a JSON string may contain characters that Unicode counts as line ends.
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigInvalid(f"{where}: {unreadable(config.path, error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"{where}: {config.path}: {error}") from error
    rows: list[object] = []
    numbers: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{config.path}:{number}"
        try:
            row: object = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ConfigInvalid(f"{place}: {error}") from error
        if not isinstance(row, dict):
            raise ConfigInvalid(f"{place}: expected an object, got {line[:80]!r}")
        rows.append(row)  # pyright: ignore[reportUnknownArgumentType]
        numbers.append(number)
    if not rows:
        raise ConfigInvalid(f"{where}: {config.path} has no lines")
    return RowSource(
        rows,
        config,
        kind="jsonl",
        name=config.path.stem,
        seed=seed,
        place=lambda row: f"{config.path}:{numbers[row]}",
        digest=xxhash.xxh3_128_hexdigest(content),
    )


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON compliant")
