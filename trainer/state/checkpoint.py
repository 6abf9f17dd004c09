"""Checkpoints: whole or not there, and kept N deep.

    step-00000010/
        manifest.json    size and XXH3-64 of every other file
        state.json       what the trainer knows beside the policy (`TrainerState`)
        ...              what the policy writes: a model folder, the optimizer, the random states

Order of events: what is left of earlier attempts removed -> files written under a name that is none ->
manifest -> every file and folder synced -> the name -> the parent synced -> durable; only now may it be
announced -> all but the N newest removed, each losing its name first.

What a failure does:

    killed before the name    the unfinished folder is removed by the next save; the newest is the
                                one before
    killed after it           the checkpoint is whole, and perhaps not announced: the server delivers
                                again what it contains, and the ledger says that it does. `restore`
                                syncs the parent, for the save may not have come to that
    no room, or the disk      the unfinished folder is removed, which gives its room back; the run
      fails: StorageFailed      ends, saying so, before anything was announced. The checkpoints
                                before are as they were
    a file is missing, cut    the manifest tells. `restore` passes such a checkpoint over, loudly,
      or changed afterwards     and takes the one before; the broken one becomes `broken-step-...`
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import xxhash
from safetensors import SafetensorError

from penstock.common.failpoints import hit
from penstock.common.folders import make_folder, sync_folder
from penstock.trainer.core.errors import CheckpointUnusable, StorageFailed

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
NAME = "step-{step:08d}"
UNFINISHED = ".unfinished-"
REMOVED = ".removed-"
BROKEN = "broken-"
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the trainer knows beside the policy."""

    run_id: str
    step: int
    """Last step the policy contains."""
    weight_version: int
    """Version of the weights on the server."""
    next_index: int
    """First data index after all that were submitted."""
    outstanding: tuple[int, ...]
    """Data indices submitted and not trained."""
    unasked: tuple[int, ...] = ()
    """Data indices before `next_index` that were never submitted: with several servers, of those that use
    up fewer than the others."""
    probe: tuple[int, ...] = ()
    """Tokens of the run's probe; none where it has none yet."""
    data: str = ""
    """What identifies the data that the indices are of; empty where nobody said."""
    ledger_bytes: int | None = None
    """Where the line of `step` ends in the ledger; None where nobody said."""
    start_id: str = ""
    """Which start of the run it is of (`start_ids`); empty where nobody said."""
    record: Mapping[str, object] = field(default_factory=dict[str, object])
    """The figures of `step`, as far as known: they are written when its switch is answered, which a
    trainer that is killed may not live to see. Empty where they are written already."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole."""

    folder: Path
    state: TrainerState
    passed_over: int = 0
    """Step of the newest checkpoint that was broken; zero where none was."""


def save_checkpoint(
    folder: Path, state: TrainerState, save_policy: Callable[[Path], None], *, keep: int
) -> Path:
    """Writes a checkpoint, durable on return, and removes all but the `keep` newest.

    Raises StorageFailed where it cannot be written; those before are as they were.
    """
    final = folder / NAME.format(step=state.step)

    def write(unfinished: Path) -> None:
        save_policy(unfinished)
        hit("checkpoint.policy_written")
        (unfinished / STATE_FILE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        _write_manifest(unfinished)

    _write(final, write, f"the checkpoint of step {state.step}")
    hit("checkpoint.before_prune")
    try:
        for old in _checkpoints(folder)[:-keep]:
            _remove(old)
    except OSError as error:
        raise StorageFailed(f"old checkpoints cannot be removed from {folder}: {error}") from error
    return final


def replace_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder as a whole, in place of what has its name. Raises StorageFailed."""
    _write(final, write, str(final))


def restore(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None where there is none at all.

    Those that are broken are set aside. Its name is durable on return, which a trainer that was killed may
    not have come to see to. Raises CheckpointUnusable where all of them are broken, StorageFailed.
    """
    found = _checkpoints(folder)
    passed_over = 0
    for checkpoint in reversed(found):
        try:
            verify(checkpoint)
            state = read_state(checkpoint)
        except CheckpointUnusable as error:
            log.error("BROKEN CHECKPOINT, going back to the one before: %s", error)
            passed_over = max(passed_over, int(checkpoint.name.rpartition("-")[2]))
            continue
        try:
            for broken in (other for other in found if other > checkpoint):
                _set_aside(broken)
            sync_folder(folder)
        except OSError as error:
            raise StorageFailed(f"{folder}: {error.strerror or error}") from error
        return Checkpoint(checkpoint, state, passed_over)
    if found:
        raise CheckpointUnusable(f"{folder}: none of the {len(found)} checkpoints is whole")
    return None


def has_checkpoints(folder: Path) -> bool:
    """Whether there is anything to resume from."""
    return bool(_checkpoints(folder))


def verify(checkpoint: Path) -> None:
    """That every file is there as it was written. Raises CheckpointUnusable."""
    path = checkpoint / MANIFEST_FILE
    try:
        manifest = cast("dict[str, dict[str, object]]", json.loads(path.read_bytes())["files"])
        expected = {name: (entry["bytes"], entry["xxh3"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointUnusable(f"{path}: {error!r}") from error
    for name, (size, xxh3) in expected.items():
        file = checkpoint / name
        try:
            # The size first: it is for nothing to hash what was cut.
            sound = file.stat().st_size == size and _digest(file) == xxh3
        except OSError as error:
            raise CheckpointUnusable(f"{file}: {error.strerror}") from error
        if not sound:
            raise CheckpointUnusable(f"{file} is not what was written: {size} bytes, XXH3 {xxh3}")


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
            unasked=tuple(cast("list[int]", fields.get("unasked", []))),
            probe=tuple(cast("list[int]", fields.get("probe", []))),
            data=str(fields.get("data", "")),
            ledger_bytes=cast("int | None", fields.get("ledger_bytes")),
            start_id=str(fields.get("start_id", "")),
            record=cast("dict[str, object]", fields.get("record", {})),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointUnusable(f"{path}: {error!r}") from error


def _write(final: Path, write: Callable[[Path], None], subject: str) -> None:
    """Has a folder written beside its place, makes all of it durable, and gives it its name."""
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
        for path in sorted(unfinished.rglob("*"), reverse=True):
            _sync(path)
        _sync(unfinished)
        hit("checkpoint.before_rename")
        removed = parent / f"{REMOVED}{final.name}"
        if final.exists():
            final.rename(removed)
        unfinished.rename(final)
        hit("checkpoint.after_rename")
        _sync(parent)
        if removed.exists():
            shutil.rmtree(removed)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        said = (error.strerror if isinstance(error, OSError) else None) or error
        raise StorageFailed(f"{subject} cannot be written to {parent}: {said}") from error


def _write_manifest(folder: Path) -> None:
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "xxh3": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _remove(checkpoint: Path) -> None:
    """It loses its name first: what is half removed must not be taken for a checkpoint."""
    removed = checkpoint.with_name(f"{REMOVED}{checkpoint.name}")
    checkpoint.rename(removed)
    shutil.rmtree(removed)


def _set_aside(broken: Path) -> None:
    aside = broken.with_name(f"{BROKEN}{broken.name}")
    if aside.exists():
        shutil.rmtree(aside)
    broken.rename(aside)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*[0-9]") if path.is_dir())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
