"""Tables: Parquet files, and data sets that `datasets` reads. Both use Arrow."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import xxhash

from penstock.common.distribution import pip_install
from penstock.common.suggestions import unreadable
from penstock.trainer.config.data import HuggingFaceConfig, ParquetConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import setting
from penstock.trainer.data.sources.rows import RowSource

ROWS_AT_ONCE = 1024
# `save_to_disk` writes one of them: the second if there are several splits.
SAVED_FILES = ("state.json", "dataset_dict.json")
# Names that apply to a data set saved without the name of its split, or with the name of a slice.
ANY_SPLIT = ("train", "validation", "test")


class TableRows:
    """The rows of an Arrow table, each created on access. The library has no types."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> object:
        return self._rows(index, 1)[0]

    def __iter__(self) -> Iterator[object]:
        for begin in range(0, len(self), ROWS_AT_ONCE):
            yield from self._rows(begin, ROWS_AT_ONCE)

    def _rows(self, begin: int, count: int) -> list[object]:
        """Raises ConfigInvalid for values that Python cannot represent."""
        try:
            return self._table.slice(begin, count).to_pylist()
        except (OverflowError, ValueError) as error:
            # For example, a date after the year 9999.
            last = min(begin + count, len(self))
            rows = f"row {last}" if last == begin + 1 else f"rows {begin + 1} to {last}"
            raise ConfigInvalid(f"data: {rows} of a table cannot be read: {error}") from error


def open_parquet(config: ParquetConfig, seed: int, section: str = "data.parquet") -> RowSource:
    """Opens a file, or a folder of files. Raises ConfigInvalid, naming the row, if one has no prompt."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigInvalid(f"{section}: pyarrow is not installed: pip install pyarrow") from error
    arrow, parquet = cast("Any", pyarrow), cast("Any", pyarrow.parquet)
    where, folder = setting(section, "path"), config.path.is_dir()
    paths = sorted(config.path.glob("*.parquet")) if folder else [config.path]
    if not paths:
        raise ConfigInvalid(f"{where}: {config.path} holds no file named *.parquet")
    digest = xxhash.xxh3_128()
    tables: list[Any] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
            table = parquet.read_table(path)
            # Columns that pandas adds.
            indices = [name for name in table.column_names if name.startswith("__index_level_")]
            tables.append(table.drop_columns(indices))
        except OSError as error:
            raise ConfigInvalid(f"{where}: {unreadable(path, error)}") from error
        except arrow.ArrowException as error:
            raise ConfigInvalid(f"{where}: {path}: {error}") from error
    try:
        # Shards may differ in column order, have empty columns, or use narrower numbers.
        table = arrow.concat_tables(tables, promote_options="permissive")
    except arrow.ArrowException as error:
        raise ConfigInvalid(f"{where}: {config.path}: {error}") from error
    return RowSource(
        TableRows(table),
        config,
        kind="parquet",
        name=config.path.stem,
        seed=seed,
        place=lambda row: f"{config.path}, row {row + 1}",
        digest=digest.hexdigest(),
    )


def open_huggingface(
    config: HuggingFaceConfig, seed: int, section: str = "data.huggingface"
) -> RowSource:
    """Opens a data set without streaming, so that its rows are counted.

    Raises ConfigInvalid if it cannot be loaded or, naming the row, if one has no prompt.
    """
    try:
        import datasets as library
    except ModuleNotFoundError as error:
        raise ConfigInvalid(
            f"{section}: datasets is not installed: {pip_install('datasets')}"
        ) from error
    datasets = cast("Any", library)
    problems = (OSError, ValueError, LookupError, RuntimeError, datasets.exceptions.DatasetsError)
    saved = any((Path(config.path) / name).is_file() for name in SAVED_FILES)
    if saved and (config.name or config.revision):
        given = "name" if config.name else "revision"
        raise ConfigInvalid(
            f"{setting(section, given)}: {config.path} was saved to disk, so it is one data set of one "
            "revision"
        )
    try:
        if saved:
            loaded = _of_split(datasets, datasets.load_from_disk(config.path), config.split)
        else:
            loaded = datasets.load_dataset(
                config.path,
                config.name or None,
                split=config.split,
                revision=config.revision or None,
                streaming=False,
            )
        table = loaded.with_format("arrow")[:]
    except problems as error:
        what = f"{config.path!r}, split {config.split!r}"
        why = f"{type(error).__name__}: {error}"
        if error.__cause__ is not None:
            why += f": {error.__cause__}"
        raise ConfigInvalid(f"{section}: {what}: {why}") from error
    return RowSource(
        TableRows(table),
        config,
        kind="huggingface",
        name=config.name or Path(config.path).name,
        seed=seed,
        place=lambda row: f"{config.path}, {config.split}, row {row + 1}",
    )


def _of_split(datasets: Any, saved: Any, split: str) -> Any:
    """Selects a split of a saved data set as `load_dataset` would. Raises ValueError."""
    if not isinstance(saved, datasets.DatasetDict):
        named = str(saved.split or "")
        names = (named,) if re.fullmatch(r"\w+(\.\w+)*", named) else ANY_SPLIT
        saved = dict.fromkeys(names, saved)
    splits = cast("Mapping[str, Any]", saved)
    if split == "all":
        several = len({id(rows) for rows in splits.values()}) > 1
        split = "+".join(splits) if several else next(iter(splits))
    lengths = {name: rows.num_rows for name, rows in splits.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    found = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return datasets.concatenate_datasets(found)
