"""Checks that the files and folders of a configuration exist, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from penstock.common.models import missing_folder
from penstock.common.settings import Origins, Place
from penstock.common.suggestions import unreadable
from penstock.machine.models import ModelUnusable, look_up
from penstock.trainer.config.data import MixableConfig
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import ConfigInvalid


def check_paths(config: TrainerConfig, origins: Origins) -> None:
    """Raises ConfigInvalid with a line for each path that does not exist."""
    wrong = [
        f"{origins.named(place)}: {what}"
        for place, path in _data(config)
        if (what := _missing(path))
    ]
    model = config.model.path
    if (what := missing_folder(model)) is not None and not _may_come(Path(model)):
        wrong.append(f"{origins.named(('model', 'path'))}: {what}")
    if wrong:
        raise ConfigInvalid("\n".join(wrong))


def check_hub(config: TrainerConfig, origins: Origins) -> None:
    """Raises ConfigInvalid if the model is a name that cannot be loaded from the cache or the hub."""
    try:
        look_up(config.model.path)
    except ModelUnusable as error:
        raise ConfigInvalid(f"{origins.named(('model', 'path'))}: {error}") from error


def _data(config: TrainerConfig) -> Iterator[tuple[Place, Path]]:
    yield from _sources(config.data, "data")
    for number, one in enumerate(config.evaluation):
        yield from _sources(one, "evaluation", number)


def _sources(config: MixableConfig, *at: str | int) -> Iterator[tuple[Place, Path]]:
    parts = [((*at, "mixture", number), part) for number, part in enumerate(config.mixture)]
    for place, one in ((at, config), *parts):
        for kind, source in (("jsonl", one.jsonl), ("parquet", one.parquet)):
            if source is not None:
                yield (*place, kind, "path"), source.path


def _missing(path: Path) -> str:
    try:
        path.stat()
    except OSError as error:
        return "" if _may_come(path) else unreadable(path, error)
    return ""


def _may_come(path: Path) -> bool:
    """Whether only a folder on the way to it is missing that the path leaves again, such as the run's."""
    return Path(os.path.normpath(path)).exists()
