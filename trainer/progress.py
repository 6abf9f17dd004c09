"""How far a checkpoint's optimizer had come, and by what it was computed: a file of each checkpoint."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch

from penstock.trainer.errors import CheckpointUnusable

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


def save_progress(folder: Path, steps: int, *, backend: str, ranks: int) -> None:
    """Raises OSError."""
    progress = Progress(steps, backend, ranks, torch.get_num_threads())
    (folder / FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def load_progress(folder: Path, *, backend: str, ranks: int) -> int:
    """The updates made so far; logs what this run computes otherwise than the one that made them.

    Raises CheckpointUnusable where another backend wrote it, OSError, ValueError, and KeyError for a file
    that is none of these.
    """
    found = cast("dict[str, object]", json.loads((folder / FILE).read_text(encoding="utf-8")))
    if (wrote := found.get("backend", backend)) != backend:
        raise CheckpointUnusable(
            f'{folder}: model.backend = "{wrote}" wrote it, and this run has "{backend}", which cannot go '
            "on with that optimizer; the model alone can be begun with, as model.path"
        )
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
