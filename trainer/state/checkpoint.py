"""Checkpoints: each is complete or absent, and the N newest are kept.

    step-00000010/
        manifest.json    size and XXH3-64 of every other file
        state.json       the trainer's state besides the policy (`TrainerState`)
        ...              written by the policy: a model folder, the optimizer, the random states

Order of events: leftovers of earlier attempts are removed -> files are written under a temporary name ->
manifest -> every file and folder synced -> rename -> parent synced -> durable. Only then may the checkpoint
be announced. Last, all but the N newest are removed, each renamed first.

    killed before the rename  the next save removes the unfinished folder
    killed after it           the checkpoint is complete, but perhaps not announced. The server then
                                redelivers groups it contains, which the ledger identifies
    disk full or failing:     the unfinished folder is removed, which frees its space. The run ends with
      StorageFailed             an error before anything was announced
    a file is missing,        the manifest reveals it. `restore` logs an error and skips to the previous
      truncated or changed      checkpoint; the broken one is renamed to `broken-step-...`
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import xxhash
from pydantic import TypeAdapter
from safetensors import SafetensorError

from penstock.common.failpoints import hit
from penstock.common.folders import make_folder, sync_folder
from penstock.trainer.core.errors import CheckpointUnusable, StorageFailed, storing
from penstock.trainer.state.ending import Ending

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
NAME = "step-{step:08d}"
UNFINISHED = ".unfinished-"
REMOVED = ".removed-"
BROKEN = "broken-"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The trainer's state besides the policy."""

    run_id: str
    step: int
    """Last step contained in the policy."""
    weight_version: int
    """Version of the weights on the server."""
    next_index: int
    """First data index after all submitted ones."""
    outstanding: tuple[int, ...]
    """Data indices submitted and not yet trained."""
    unasked: tuple[int, ...] = ()
    """Data indices before `next_index` that were never submitted. With several servers, they belong
    to servers that use up fewer than the others."""
    probe: tuple[int, ...] = ()
    """Tokens of the run's probe; empty if there is none yet."""
    data: str = ""
    """Identity of the data that the indices refer to; empty in checkpoints without it."""
    ledger_bytes: int | None = None
    """Offset in the ledger where the line of `step` ends; None in checkpoints without it."""
    start_id: str = ""
    """The start of the run that wrote it (`run_id`); empty in checkpoints without it."""
    record: Mapping[str, object] = field(default_factory=dict[str, object])
    """The figures of `step` that are known before its switch is answered, which is when they are written to
    the metrics; empty if they are already written."""
    ending: Ending = field(default_factory=Ending)
    """How close the run was to its target; empty without one."""


_STATE = TypeAdapter(TrainerState)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was verified as complete."""

    folder: Path
    state: TrainerState
    passed_over: int = 0
    """Step of the newest broken checkpoint that was skipped; zero if none was."""


def save_checkpoint(
    folder: Path, state: TrainerState, save_policy: Callable[[Path], None], *, keep: int
) -> Path:
    """Writes a checkpoint, durable on return, and removes all but the `keep` newest.

    Raises StorageFailed if it cannot be written. Earlier checkpoints are unchanged then.
    """
    final = folder / NAME.format(step=state.step)

    def write(unfinished: Path) -> None:
        save_policy(unfinished)
        hit("checkpoint.policy_written")
        (unfinished / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        _write_manifest(unfinished)

    replace_folder(final, write, f"the checkpoint of step {state.step}")
    hit("checkpoint.before_prune")
    try:
        for old in checkpoints_in(folder)[:-keep]:
            # Renamed first, so that a partly removed folder is never taken for a checkpoint.
            shutil.rmtree(old.rename(old.with_name(f"{REMOVED}{old.name}")))
    except OSError as error:
        raise StorageFailed(f"old checkpoints cannot be removed from {folder}: {error}") from error
    return final


def restore(folder: Path) -> Checkpoint | None:
    """Returns the newest complete checkpoint; None if there are no checkpoints.

    Newer ones, which are broken, are set aside. The folder is synced, because a killed trainer may not have
    done so. Raises CheckpointUnusable if all checkpoints are broken, and StorageFailed.
    """
    found = checkpoints_in(folder)
    passed_over = 0
    for checkpoint in reversed(found):
        try:
            verify(checkpoint)
            state = read_state(checkpoint)
        except CheckpointUnusable as error:
            log.error("BROKEN CHECKPOINT, falling back to the previous one: %s", error)
            passed_over = max(passed_over, int(checkpoint.name.rpartition("-")[2]))
            continue
        with storing(folder):
            for broken in (other for other in found if other > checkpoint):
                aside = broken.with_name(f"{BROKEN}{broken.name}")
                if aside.exists():
                    shutil.rmtree(aside)
                broken.rename(aside)
            sync_folder(folder)
        return Checkpoint(checkpoint, state, passed_over)
    if found:
        raise CheckpointUnusable(f"{folder}: none of the {len(found)} checkpoints is complete")
    return None


def verify(checkpoint: Path) -> None:
    """Checks that every file is as it was written. Raises CheckpointUnusable."""
    path = checkpoint / MANIFEST_FILE
    try:
        manifest = cast("dict[str, dict[str, object]]", json.loads(path.read_bytes())["files"])
        expected = {name: (entry["bytes"], entry["xxh3"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointUnusable(f"{path}: {error!r}") from error
    for name, (size, xxh3) in expected.items():
        file = checkpoint / name
        try:
            sound = file.stat().st_size == size and _digest(file) == xxh3
        except OSError as error:
            raise CheckpointUnusable(f"{file}: {error.strerror}") from error
        if not sound:
            raise CheckpointUnusable(
                f"{file} differs from what was written: {size} bytes, XXH3 {xxh3}"
            )


def read_state(checkpoint: Path) -> TrainerState:
    """Returns the trainer's own part of a checkpoint. Raises CheckpointUnusable."""
    path = checkpoint / STATE_FILE
    try:
        return _STATE.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointUnusable(f"{path}: {error!r}") from error


def replace_folder(final: Path, write: Callable[[Path], None], subject: str = "") -> None:
    """Writes a folder under a temporary name, makes all of it durable, and renames it, in place of any
    folder of that name. Raises StorageFailed, which names the `subject`, or else the folder."""
    parent = final.parent
    unfinished = parent / f"{UNFINISHED}{final.name}"
    try:
        make_folder(parent)
        for left_over in (*parent.glob(f"{UNFINISHED}*"), *parent.glob(f"{REMOVED}*")):
            shutil.rmtree(left_over)
        unfinished.mkdir()
        hit("checkpoint.begun")
        write(unfinished)
        hit("checkpoint.before_sync")
        for path in (*sorted(unfinished.rglob("*"), reverse=True), unfinished):
            _sync(path)
        hit("checkpoint.before_rename")
        removed = parent / f"{REMOVED}{final.name}"
        if final.exists():
            final.rename(removed)
        unfinished.rename(final)
        hit("checkpoint.after_rename")
        sync_folder(parent)
        if removed.exists():
            shutil.rmtree(removed)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        said = (error.strerror if isinstance(error, OSError) else None) or error
        what = subject or final
        raise StorageFailed(f"{what} cannot be written to {parent}: {said}") from error


def _write_manifest(folder: Path) -> None:
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "xxh3": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns every checkpoint that a save has finished, oldest first."""
    return sorted(path for path in folder.glob("step-*[0-9]") if path.is_dir())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
