"""Rows from a file with one JSON object per line."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, cast

import xxhash

from penstock.common.suggestions import unreadable
from penstock.trainer.config.data import COMPRESSED_ENDINGS, JsonlConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import setting
from penstock.trainer.data.sources.rows import RowSource

ARROW_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def open_jsonl(config: JsonlConfig, seed: int, section: str = "data.jsonl") -> RowSource:
    """Reads a file with one JSON object per line. Empty lines and a byte order mark are skipped.

    Raises ConfigInvalid, naming the line, if it is not an object that can become a task.
    """
    where = setting(section, "path")
    try:
        content = _read(config.path)
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
        name=_plain(config.path).stem,
        seed=seed,
        place=lambda row: f"{config.path}:{numbers[row]}",
        digest=xxhash.xxh3_128_hexdigest(content),
    )


def _plain(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED_ENDINGS else path


def _read(path: Path) -> bytes:
    """The content of a file, decompressed. Raises OSError."""
    if path.suffix not in COMPRESSED_ENDINGS:
        return path.read_bytes()
    with path.open("rb") as file:
        if path.suffix == ".xz":
            try:
                return lzma.open(file).read()
            except (EOFError, lzma.LZMAError) as error:
                raise OSError(str(error)) from error
        import pyarrow

        # Unlike zstandard, Arrow reports a file that is cut off.
        arrow, codec = cast("Any", pyarrow), ARROW_CODECS[path.suffix]
        return arrow.input_stream(file, compression=codec).read()


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON compliant")
