"""Checkpoints: whole or not there. A folder appears under its name only when all of it is on disk.

step-00000010/  a model folder, the optimizer's state, state.json
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from penstock.trainer.errors import CheckpointUnusable

STATE_FILE = "state.json"
NAME = "step-{step:08d}"
UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the trainer knows beside the policy."""

    run_id: str
    step: int
    """Last step the policy contains."""
    weight_version: int
    """Version of the weights on the server."""
    next_index: int
    """First data index never submitted."""
    outstanding: tuple[int, ...]
    """Data indices submitted and not trained."""
    probe: tuple[int, ...] = ()
    """Tokens of the run's probe; none where it has none yet."""


def save_checkpoint(
    folder: Path, state: TrainerState, save_policy: Callable[[Path], None], *, keep: int
) -> Path:
    """Writes a checkpoint, durable on return, and removes all but the `keep` newest."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left_over)
    unfinished = folder / f"{UNFINISHED}{state.step}"
    unfinished.mkdir()
    save_policy(unfinished)
    (unfinished / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    final = folder / NAME.format(step=state.step)
    _publish(unfinished, final)
    for old in _checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder as a whole, in place of what has its name."""
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = final.with_name(f"{UNFINISHED}{final.name}")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    write(unfinished)
    _publish(unfinished, final)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the greatest step, if there is one."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's own part of a checkpoint. Raises CheckpointUnusable."""
    path = checkpoint / STATE_FILE
    try:
        fields = cast("dict[str, object]", json.loads(path.read_text(encoding="utf-8")))
        return TrainerState(
            run_id=str(fields["run_id"]),
            step=cast("int", fields["step"]),
            weight_version=cast("int", fields["weight_version"]),
            next_index=cast("int", fields["next_index"]),
            outstanding=tuple(cast("list[int]", fields["outstanding"])),
            # Checkpoints of before there were probes have no such field.
            probe=tuple(cast("list[int]", fields.get("probe", []))),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointUnusable(f"{path}: {error!r}") from error


def _publish(unfinished: Path, final: Path) -> None:
    """Makes everything durable, then gives it its name."""
    for path in sorted(unfinished.rglob("*"), reverse=True):
        _sync(path)
    _sync(unfinished)
    if final.exists():
        shutil.rmtree(final)
    unfinished.rename(final)
    _sync(final.parent)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
