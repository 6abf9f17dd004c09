"""How far a checkpoint's optimizer had come, and by what it was computed: a file of each checkpoint."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch

from penstock.trainer.core.errors import CheckpointUnusable

FILE = "optimizer.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """What is kept beside the optimizer's state."""

    optimizer_steps: int
    """Updates made so far."""
    backend: str
    """`model.backend.kind`: neither reads the other's state."""
    ranks: int
    threads: int
    """Of each rank, for computing."""
    dtype: str
    """What was computed in."""


def save_progress(
    folder: Path, steps: int, *, backend: str, ranks: int, dtype: torch.dtype
) -> None:
    """Raises OSError."""
    threads = torch.get_num_threads()
    progress = Progress(steps, backend, ranks, threads, _name(dtype))
    (folder / FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_progress(
    folder: Path, *, backend: str, ranks: int, dtype: torch.dtype, same_dtype: bool = False
) -> int:
    """The updates made so far; logs what this run computes otherwise than the one that made them.

    Raises CheckpointUnusable where another backend wrote it, or, where it has to be the `same_dtype`, it
    was computed in another, OSError, ValueError, and KeyError for a file that is none of these.
    """
    found = cast("dict[str, object]", json.loads((folder / FILE).read_text(encoding="utf-8")))
    if (wrote := found.get("backend", backend)) != backend:
        raise CheckpointUnusable(
            f'{folder}: model.backend = "{wrote}" wrote it, and this run has "{backend}", which cannot go '
            "on with that optimizer; the model alone can be begun with, as model.path"
        )
    if same_dtype and found["optimizer_steps"] and found.get("dtype", _name(dtype)) != _name(dtype):
        raise CheckpointUnusable(
            f"{folder}: it was computed in {found['dtype']}, and this run in {_name(dtype)}: "
            f'its optimizer goes on with model.dtype = "{found["dtype"]}"'
        )
    if (before := found.get("dtype", _name(dtype))) != _name(dtype):
        log.warning("%s was computed in %s, this run goes on in %s", folder, before, _name(dtype))
    own = {"ranks": ranks, "threads": torch.get_num_threads()}
    for name, count in own.items():
        if (before := found.get(name, count)) != count:
            log.warning(
                "%s was computed with %s %s, this run goes on with %d: sums may be rounded otherwise",
                folder,
                before,
                name,
                count,
            )
    return int(cast("int", found["optimizer_steps"]))
