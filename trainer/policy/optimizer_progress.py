"""A file in each checkpoint with the optimizer's progress and the setup that computed it."""

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
    """The record stored next to the optimizer's state."""

    optimizer_steps: int
    """Updates applied so far."""
    backend: str
    """`model.backend.kind`; no backend reads another one's state."""
    ranks: int
    threads: int
    """Compute threads of each rank."""
    dtype: str
    """The dtype of the forward pass."""


def save_progress(
    folder: Path, steps: int, *, backend: str, ranks: int, dtype: torch.dtype
) -> None:
    """Write the file. Raises OSError."""
    threads = torch.get_num_threads()
    progress = Progress(steps, backend, ranks, threads, _name(dtype))
    (folder / FILE).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_progress(
    folder: Path, *, backend: str, ranks: int, dtype: torch.dtype, same_dtype: bool = False
) -> int:
    """Return the updates applied so far; log differences between that setup and this run's.

    Raises CheckpointUnusable if another backend wrote the checkpoint, or if `same_dtype` is set and
    the dtype differs. Raises OSError, ValueError or KeyError for an invalid file.
    """
    found = cast("dict[str, object]", json.loads((folder / FILE).read_text(encoding="utf-8")))
    if (wrote := found.get("backend", backend)) != backend:
        raise CheckpointUnusable(
            f'{folder}: model.backend = "{wrote}" wrote it, and this run has "{backend}", which cannot '
            "load that optimizer; to start from the model alone, use it as model.path"
        )
    if same_dtype and found["optimizer_steps"] and found.get("dtype", _name(dtype)) != _name(dtype):
        raise CheckpointUnusable(
            f"{folder}: it was computed in {found['dtype']}, and this run in {_name(dtype)}: "
            f'its optimizer requires model.dtype = "{found["dtype"]}"'
        )
    if (before := found.get("dtype", _name(dtype))) != _name(dtype):
        log.warning("%s was computed in %s, this run continues in %s", folder, before, _name(dtype))
    own = {"ranks": ranks, "threads": torch.get_num_threads()}
    for name, count in own.items():
        if (before := found.get(name, count)) != count:
            log.warning(
                "%s was computed with %s %s, this run continues with %d; sums may be rounded differently",
                folder,
                before,
                name,
                count,
            )
    return int(cast("int", found["optimizer_steps"]))
