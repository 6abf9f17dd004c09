"""The options `--data` and `--columns`, which commands share."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from penstock.common.explaining import check
from penstock.common.settings import Origins, SettingInvalid
from penstock.trainer.config.data import (
    COMPRESSED_ENDINGS,
    ColumnsConfig,
    JsonlConfig,
    MixableConfig,
    ParquetConfig,
    PythonConfig,
)
from penstock.trainer.core.errors import ConfigInvalid


def parse_columns(text: str | None) -> dict[str, str]:
    """Reads `prompt=question,answer=solution`, as `--columns` takes it. Raises ConfigInvalid."""
    if text is None:
        return {}
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(name and column for name, _, column in pairs):
        raise ConfigInvalid(
            f"--columns {text}: write it as prompt=COLUMN,answer=COLUMN, with one or both of them"
        )
    table: dict[str, object] = {name.strip(): column.strip() for name, _, column in pairs}
    try:
        columns = check(ColumnsConfig, table, Origins(options={(): "--columns"}))
    except SettingInvalid as error:
        raise ConfigInvalid(str(error)) from error
    return columns.model_dump(exclude_defaults=True)


def source_of(data: str, columns: dict[str, str], *, shuffle: bool = True) -> MixableConfig:
    """The source that `--data` names: a file, a folder or a function. Raises ConfigInvalid."""
    path = Path(data)
    endings = [suffix for suffix in path.suffixes if suffix not in COMPRESSED_ENDINGS]
    rows = {"columns": columns, "shuffle": shuffle}
    if path.is_dir() or path.suffix == ".parquet":
        return MixableConfig(parquet=ParquetConfig.model_validate({"path": path, **rows}))
    if endings[-1:] in ([".jsonl"], [".json"]):
        return MixableConfig(jsonl=JsonlConfig.model_validate({"path": path, **rows}))
    try:
        return MixableConfig(python=PythonConfig.model_validate({"function": data, **rows}))
    except ValidationError:
        raise ConfigInvalid(
            f"--data {data}: expected a *.jsonl or *.parquet file, a folder of *.parquet files, or "
            "PKG.MODULE:FUNCTION"
        ) from None
