"""The ledger: what each step trained, on disk before the server samples what came of it.

`ledger.jsonl` in the run's folder, an object a line, in the order of what happened:

    {"step": 3, "weight_version": 3, "weights": "9f0c..", "groups": [{"group_id": .., "task_id": ..,
     "trajectory_ids": [..]}, ..]}
    {"refused": {"group_id": .., "task_id": ..}, "reason": "ALL_FAILED"}

The lines of steps up to that of the newest whole checkpoint are the lineage that survives: read them and
nothing else, and you know what the model was trained on. Lines beyond it are of steps that no checkpoint
contains yet. Once a run has ended, the whole file is the lineage.

Order of events of a step: computed -> its line durable -> weights uploaded, switched to, groups receipted
-> (where one is due) a checkpoint, which says how long the ledger was. So a server never holds a version of
which the ledger does not say what it was made of.

A run that resumes after step K finds the lines beyond K: `ahead`. Where it does one of those steps
again with the same groups, and the very same weights come of it, the line stands. At the first step
that comes out otherwise the file is cut there. That a group was refused stays true whatever the
trainer goes back to, because the server has forgotten it: such lines are kept. What is left is written to a
file of its own, which takes the name once it is durable.

What a failure does: a line that was half written when the process died is cut at the next start; the
others are synced then, for they may not have been. A death while the file is cut leaves it as it was.
Without room for a line the step is not published and the run ends, saying so. One trainer at a time
writes to a folder: the ledger is locked for as long as it is open.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from penstock.common.failpoints import hit
from penstock.common.folders import make_folder, sync_folder
from penstock.trainer.core.errors import CheckpointUnusable, RunFolderInUse, storing

FILE = "ledger.jsonl"
UNFINISHED = ".unfinished-ledger.jsonl"
# What a server can still deliver of what the state contains is less than this.
REMEMBERED = 65_536


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group that a step used."""

    group_id: str
    task_id: str
    """Empty for a group of a caller's own."""
    trajectory_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepEntry:
    """What one step was."""

    step: int
    weight_version: int
    """Version of the weights it made."""
    weights: str
    """Checksum of these weights as they are uploaded; empty where the server was away, unless the step
    was done again."""
    groups: tuple[TrainedGroup, ...]
    """In the order they were computed in."""

    @property
    def group_ids(self) -> frozenset[str]:
        """Ids of its groups."""
        return frozenset(group.group_id for group in self.groups)


@dataclass(frozen=True, slots=True)
class RefusedEntry:
    """A group that was of no use."""

    group_id: str
    task_id: str
    reason: str


Entry = StepEntry | RefusedEntry


class Ledger:
    """One run's ledger, open for writing. All methods block on the disk."""

    def __init__(self, folder: Path) -> None:
        """Opens and locks the file of a folder, which is made where there is none.

        Raises RunFolderInUse where another trainer has it, StorageFailed.
        """
        self.path = folder / FILE
        with storing(self.path):
            make_folder(folder)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not _lock(self._descriptor, self.path):
                os.close(self._descriptor)
                raise RunFolderInUse(f"another trainer is writing to {folder}")
            (folder / UNFINISHED).unlink(missing_ok=True)
            sync_folder(folder)
        self._length = 0
        self.trained: dict[str, int] = {}
        """Step of each of the last groups that the state resumed from contains, oldest first."""
        self.refused: list[RefusedEntry] = []
        """Groups that were refused before this process began."""
        self._unfinished: list[RefusedEntry] = []
        self.ahead: dict[int, StepEntry] = {}
        """Steps beyond that state, of a trainer that was killed: from the next one on, without a gap."""
        self._ends: dict[int, int] = {}
        """Where the line of each of those ends."""

    @property
    def length_bytes(self) -> int:
        """Where the last step's line ends; what follows is not part of the lineage yet."""
        return self._length

    def resume(self, step: int, length_bytes: int | None = None) -> None:
        """Reads the file for a run that goes on after `step`, whose line ended at `length_bytes` when its
        checkpoint was written.

        Raises CheckpointUnusable where it ends elsewhere now: then this is another run's ledger.
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
                self._length = end
            elif entry.step == step + len(self.ahead) + 1:
                self.ahead[entry.step], self._ends[entry.step] = entry, end
            else:
                break
        if length_bytes is not None and length_bytes != self._length:
            raise CheckpointUnusable(
                f"{self.path}: the line of step {step} ends at byte {self._length}, and ended at "
                f"{length_bytes} when the checkpoint was written"
            )
        self.trained = dict(
            islice(self.trained.items(), max(0, len(self.trained) - REMEMBERED), None)
        )
        with storing(self.path):
            # What follows the last whole line is what a killed trainer had not finished.
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            # It may have died between a line and its sync, and lines that stand are not written again.
            os.fdatasync(self._descriptor)

    def begin(self) -> None:
        """Empties the file: a run begins that resumes from nothing."""
        with storing(self.path):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            # Before there is an id of the start: it is beside no ledger of another.
            os.fsync(self._descriptor)

    def take_unfinished(self) -> list[RefusedEntry]:
        """Those that were refused for the step that a killed trainer was gathering; once."""
        taken, self._unfinished = self._unfinished, []
        return taken

    def write(self, entry: StepEntry) -> None:
        """Notes a step; durable on return. Raises StorageFailed.

        A line that says the same already stays; any other lines of this step and those after it go.
        """
        if self.ahead.pop(entry.step, None) == entry:
            self._length = self._ends.pop(entry.step)
        else:
            self._cut()
            self._length = self._append(entry)

    def refuse(self, entry: RefusedEntry) -> None:
        """Notes a refusal; durable on return. Raises StorageFailed."""
        self._append(entry)

    def close(self) -> None:
        """Gives the file up. May be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _cut(self) -> None:
        """Removes what is beyond the lineage, but for refusals."""
        if not self._ends:
            return
        self.ahead.clear()
        self._ends.clear()
        with storing(self.path):
            content = self.path.read_bytes()
            beyond = (entry for entry, _ in _lines(content[self._length :]))
            kept = [_line(entry) for entry in beyond if isinstance(entry, RefusedEntry)]
            self._replace(content[: self._length] + b"".join(kept))

    def _replace(self, content: bytes) -> None:
        """Puts a file with this content in the place of the one that is open. Raises OSError."""
        unfinished = self.path.with_name(UNFINISHED)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            # Before it has the name: who finds it finds it locked.
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
        """Returns where the line ends."""
        line = _line(entry)
        with storing(self.path):
            hit("ledger.before_append")
            begin = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            try:
                _write_all(self._descriptor, line)
                hit("ledger.before_fsync")
                os.fdatasync(self._descriptor)
            except OSError:
                # Half a line would end the file for whoever reads it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, begin)
                raise
            hit("ledger.after_fsync")
        return begin + len(line)


def read_ledger(path: Path, step: int | None = None) -> list[Entry]:
    """Every whole line of a ledger, up to that of `step` where there is one."""
    found: list[Entry] = []
    for entry, _ in _lines(path.read_bytes() if path.exists() else b""):
        if step is not None and isinstance(entry, StepEntry) and entry.step > step:
            break
        found.append(entry)
    return found


def _lines(content: bytes) -> Iterator[tuple[Entry, int]]:
    """Each entry and where its line ends, up to the first that is not whole."""
    begin = 0
    while (end := content.find(b"\n", begin) + 1) > 0:
        try:
            yield _from_json(json.loads(content[begin:end])), end
        except (ValueError, KeyError, TypeError):
            return
        begin = end


def _lock(descriptor: int, path: Path) -> bool:
    """Whether nobody else has the file; nor, where it was replaced since it was opened, the one that has
    its name."""
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
    return (json.dumps(_as_json(entry)) + "\n").encode()


def _as_json(entry: Entry) -> dict[str, object]:
    if isinstance(entry, StepEntry):
        return asdict(entry)
    refused = {"group_id": entry.group_id, "task_id": entry.task_id}
    return {"refused": refused, "reason": entry.reason}


def _from_json(fields: dict[str, object]) -> Entry:
    if "refused" in fields:
        refused = cast("dict[str, str]", fields["refused"])
        return RefusedEntry(refused["group_id"], refused["task_id"], str(fields["reason"]))
    groups = cast("Iterable[dict[str, object]]", fields["groups"])
    return StepEntry(
        cast("int", fields["step"]),
        cast("int", fields["weight_version"]),
        str(fields["weights"]),
        tuple(
            TrainedGroup(
                str(group["group_id"]),
                str(group["task_id"]),
                tuple(cast("list[str]", group["trajectory_ids"])),
            )
            for group in groups
        ),
    )
