"""The ledger: records what each step trained, durably and before the server samples the result.

`ledger.jsonl` in the run's folder has one object per line, in the order of events:

    {"step": 3, "weight_version": 3, "weights": "9f0c..", "groups": [{"group_id": .., "task_id": ..,
     "trajectory_ids": [..]}, ..]}
    {"refused": {"group_id": .., "task_id": ..}, "reason": "ALL_FAILED"}

The lines up to the step of the newest complete checkpoint are the lineage: they alone show what the model
was trained on. Once a run has ended, the whole file is the lineage.

Order of events in a step: computed -> its line durable -> weights uploaded, switched to, groups receipted
-> (if one is due) a checkpoint, which records the ledger's length. So a server never holds a version whose
groups the ledger does not list.

A run that resumes after step K finds the lines beyond K: `ahead`. If it repeats such a step with the same
groups, and gets exactly the same weights, the line stands. At the first step with a different result the
file is cut. Lines of refused groups are kept: a refusal stays true however far back the trainer resumes,
because the server has forgotten the group. The remaining lines are written to a separate file, which takes
the ledger's name once it is durable.

A line that was half written when the process died is cut at the next start. If there is no room for a
line, the step is not published and the run ends with an error. One trainer at a time writes to a folder:
the ledger is locked for as long as it is open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from penstock.common.failpoints import hit
from penstock.common.folders import make_folder, sync_folder
from penstock.trainer.core.errors import CheckpointUnusable, RunFolderInUse, storing

FILE = "ledger.jsonl"
UNFINISHED = ".unfinished-ledger.jsonl"
# More than the number of groups that the state contains and a server can still deliver.
REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    group_id: str
    task_id: str
    """Empty for a group of unleased trajectories."""
    trajectory_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepEntry:
    step: int
    weight_version: int
    """The version that the step produced."""
    weights: str
    """Checksum of the weights as uploaded; empty if the server was unreachable, unless the step was a
    repetition."""
    groups: tuple[TrainedGroup, ...]
    """In the order in which the step computed them."""

    @property
    def group_ids(self) -> frozenset[str]:
        return frozenset(group.group_id for group in self.groups)


@dataclass(frozen=True, slots=True)
class RefusedEntry:
    group_id: str
    task_id: str
    reason: str


Entry = StepEntry | RefusedEntry
_STEP = TypeAdapter(StepEntry)


class Ledger:
    """One run's ledger, open for writing. All methods block on the disk."""

    def __init__(self, folder: Path) -> None:
        """Raises RunFolderInUse if another trainer has locked the ledger, and StorageFailed."""
        self.path = folder / FILE
        with storing(self.path):
            make_folder(folder)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _lock(self._descriptor, self.path):
                os.close(self._descriptor)
                raise RunFolderInUse(f"another trainer is writing to {folder}")
            (folder / UNFINISHED).unlink(missing_ok=True)
            sync_folder(folder)
        self.length_bytes = 0
        """Where the last step's line ends; later bytes are not part of the lineage yet."""
        self.trained: dict[str, int] = {}
        """Step of each recent group that the resumed state contains, oldest first; REMEMBERED at most."""
        self.refused: list[RefusedEntry] = []
        """Groups refused before this process started."""
        self._unfinished: list[RefusedEntry] = []
        self.ahead: dict[int, StepEntry] = {}
        """Steps a killed trainer did beyond the resumed state, from the next step on, without a gap."""
        self._ends: dict[int, int] = {}
        """Byte offset at which the line of each step in `ahead` ends."""

    def resume(self, step: int, length_bytes: int | None = None) -> None:
        """Read the file for a run that resumes after `step`.

        `length_bytes` is where the step's line ended when its checkpoint was written. Raises
        CheckpointUnusable if it ends elsewhere now: the ledger then belongs to another run.
        """
        with storing(self.path):
            content = self.path.read_bytes()
        end = 0
        for entry, end in _lines(content):
            if isinstance(entry, RefusedEntry):
                self.refused.append(entry)
                self._unfinished.append(entry)
                continue
            self._unfinished.clear()
            if entry.step <= step:
                self.trained |= dict.fromkeys((g.group_id for g in entry.groups), entry.step)
                self.length_bytes = end
            elif entry.step == step + len(self.ahead) + 1:
                self.ahead[entry.step], self._ends[entry.step] = entry, end
            else:
                break
        if length_bytes is not None and length_bytes != self.length_bytes:
            raise CheckpointUnusable(
                f"{self.path}: the line of step {step} ends at byte {self.length_bytes}, but ended at "
                f"{length_bytes} when the checkpoint was written: the ledger is of another run"
            )
        self.trained = dict(list(self.trained.items())[-REMEMBERED:])
        with storing(self.path):
            # Anything after the last complete line is what a killed trainer left unfinished.
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            # That trainer may have died between a line and its sync. Lines that stand are not rewritten.
            os.fdatasync(self._descriptor)

    def begin(self) -> None:
        """Empty the file, for a run that starts without a checkpoint."""
        with storing(self.path):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            # Before the start id is written, so that no start id lies next to another run's ledger.
            os.fsync(self._descriptor)

    def take_unfinished(self) -> list[RefusedEntry]:
        """Return, once, the refusals recorded for the step that a killed trainer was gathering."""
        taken, self._unfinished = self._unfinished, []
        return taken

    def write(self, entry: StepEntry) -> None:
        """Record a step; durable on return. Raises StorageFailed.

        An identical existing line stays. Otherwise the lines of this step and later ones are removed.
        """
        if self.ahead.pop(entry.step, None) == entry:
            self.length_bytes = self._ends.pop(entry.step)
        else:
            self._cut()
            self.length_bytes = self._append(entry)

    def refuse(self, entry: RefusedEntry) -> None:
        """Record a refusal; durable on return. Raises StorageFailed."""
        self._append(entry)

    def close(self) -> None:
        """Close and unlock the file. May be called more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _cut(self) -> None:
        if not self._ends:
            return
        self.ahead.clear()
        self._ends.clear()
        with storing(self.path):
            content = self.path.read_bytes()
            beyond = (entry for entry, _ in _lines(content[self.length_bytes :]))
            kept = [_line(entry) for entry in beyond if isinstance(entry, RefusedEntry)]
            self._replace(content[: self.length_bytes] + b"".join(kept))

    def _replace(self, content: bytes) -> None:
        """Replace the open file by one with this content. Raises OSError."""
        unfinished = self.path.with_name(UNFINISHED)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Lock before the rename, so that another trainer never finds it unlocked.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(descriptor, content)
            os.fsync(descriptor)
            unfinished.rename(self.path)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        sync_folder(self.path.parent)

    def _append(self, entry: Entry) -> int:
        line = _line(entry)
        with storing(self.path):
            hit("ledger.before_append")
            begin = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            try:
                _write_all(self._descriptor, line)
                hit("ledger.before_fsync")
                os.fdatasync(self._descriptor)
            except OSError:
                # A reader stops at half a line.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, begin)
                raise
            hit("ledger.after_fsync")
        return begin + len(line)


def read_ledger(path: Path) -> list[Entry]:
    """Read every complete line of a ledger."""
    return [entry for entry, _ in _lines(path.read_bytes() if path.exists() else b"")]


def _lines(content: bytes) -> Iterator[tuple[Entry, int]]:
    """Yield each entry and where its line ends, up to the first incomplete one."""
    begin = 0
    while (end := content.find(b"\n", begin) + 1) > 0:
        try:
            yield _from_json(json.loads(content[begin:end])), end
        except (ValueError, KeyError, TypeError):
            return
        begin = end


def _lock(descriptor: int, path: Path) -> bool:
    """Return False if the file is locked by another process, or was replaced since it was opened."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.path.samestat(os.fstat(descriptor), path.stat())


def _write_all(descriptor: int, content: bytes) -> None:
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def _line(entry: Entry) -> bytes:
    fields = asdict(entry)
    if isinstance(entry, RefusedEntry):
        reason = fields.pop("reason")
        fields = {"refused": fields, "reason": reason}
    return (json.dumps(fields) + "\n").encode()


def _from_json(fields: Any) -> Entry:
    if "refused" in fields:
        return RefusedEntry(**fields["refused"], reason=fields["reason"])
    return _STEP.validate_python(fields)
