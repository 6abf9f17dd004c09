"""Durability: state that must survive is appended to the journal before it is acknowledged.

A record describes the new state of one thing (`penstock/v1/journal.proto`). The module that changes
the state makes the record with the functions below. Order: ask for room, if the change is large ->
change the state in memory -> append the record -> answer. A caller that repeats the request
meanwhile waits for the same append.

`MemoryJournal` keeps nothing beyond the process. `log_journal` writes to disk, `jetstream_journal`
to another machine. `journal_opening` chooses one of them from the configuration, and `recovery`
reads the records at start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.v1 import journal_pb2, task_service_pb2, trajectory_pb2
from penstock.wire.codec import twin

JournalRecord = twin(journal_pb2.JournalRecord)
_ServerStarted = twin(journal_pb2.ServerStarted)
_SessionBegan = twin(journal_pb2.SessionBegan)
_RunReplaced = twin(journal_pb2.RunReplaced)
_WeightsActivated = twin(journal_pb2.WeightsActivated)
_TaskAccepted = twin(journal_pb2.TaskAccepted)
_TasksKnown = twin(journal_pb2.TasksKnown)
_GroupsEnded = twin(journal_pb2.GroupsEnded)
_TrajectoryClosed = twin(journal_pb2.TrajectoryClosed)
_TrajectoriesForgotten = twin(journal_pb2.TrajectoriesForgotten)
_LeasesExpired = twin(journal_pb2.LeasesExpired)
_GroupDropped = twin(journal_pb2.GroupDropped)
_GroupsReceipted = twin(journal_pb2.GroupsReceipted)
_StepFinal = twin(journal_pb2.StepFinal)

Record = journal_pb2.JournalRecord
Part = bytes | bytearray


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record that is already encoded, as a sequence of byte strings that never change again."""

    parts: tuple[Part, ...]
    short: ShortRecord | None = None
    """A shorter form that a journal on disk may write instead."""


@dataclass(frozen=True, slots=True)
class ShortRecord:
    """A group record without the tokens that earlier records of its turns already hold."""

    parts: tuple[Part, ...]
    turns: tuple[Stored, ...]
    """The records referred to, in the order in which the group refers to them."""


Appended = Record | EncodedRecord


class JournalInUse(Exception):
    """Another server writes to this journal."""


class JournalUnreadable(Exception):
    """The journal that a previous server left is corrupt, incomplete or cannot be opened."""


@dataclass(slots=True, eq=False)
class Stored:
    """The location of a record; compaction updates it in place."""

    segment: int
    offset: int
    """Of the frame, in bytes."""
    length: int
    """Of the frame, in bytes."""
    turns: tuple[Stored, ...] = field(default=(), kw_only=True)
    """Records that a short record refers to, in order; empty for a whole record."""

    @property
    def byte_count(self) -> int:
        """Bytes of its frame and of the distinct frames that it refers to."""
        return self.length + sum(turn.length for turn in dict.fromkeys(self.turns))


@dataclass(frozen=True, slots=True)
class Folder:
    """The journal's folder, as another process on this host can identify it."""

    path: Path
    """Absolute."""
    device: int
    """Of the LOCK file, like `inode`."""
    inode: int


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The location of a record in a file of a `Folder`."""

    file: str
    offset: int
    """Of the frame, in bytes."""
    length: int
    """Of the frame, in bytes."""
    turns: tuple[FilePlace, ...] = ()
    """The locations of the records that a short record refers to."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """Records of immutable state, encoded only when written, in the thread that writes."""

    make: Callable[[], Iterable[Appended]]
    stored: Stored | None = None
    """Updated with the record's location once the snapshot is authoritative. Only for a single record,
        and only by a journal with locations."""


SnapshotItem = Record | Stored | Deferred
Snapshot = Callable[[], Iterable[SnapshotItem]]
"""Returns the whole current state: records, or locations of records already stored."""


OnFull = Callable[[int], None]
"""Called with the bytes that were refused, so that the server drops records it keeps only for
convenience."""


def no_way_to_give(byte_count: int) -> None:
    """An `OnFull` that frees nothing."""


class Journal(Protocol):
    """An append-only log of accepted changes."""

    @property
    def on_disk(self) -> bool:
        """Whether appended records can be read again, so that they need not stay in memory."""
        ...

    @property
    def folder(self) -> Folder | None:
        """The folder of its files; None if it has no files on this host."""
        ...

    @property
    def refers_from(self) -> int | None:
        """Smallest trajectory segment, in bytes, that a group's record may refer to instead of
        copying it.

        None if groups are always written whole.
        """
        ...

    @property
    def failed(self) -> asyncio.Future[str]:
        """Completes with the reason once nothing can be appended any more."""
        ...

    def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Yield every record that the previous server left, oldest first. Raises
        JournalUnreadable."""
        ...

    async def start(self, snapshot: Snapshot, on_full: OnFull = no_way_to_give) -> None:
        """Begin to write, once everything was replayed. Raises OSError."""
        ...

    def check_room(self, byte_count: int) -> None:
        """Raise DISK_FULL if records of `byte_count` bytes may not fit."""
        ...

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        """Append records; returns their locations once they are durable. Raises JOURNAL_FAILED.

        Without records, it returns once all earlier appends are durable. With `hold_last`, the last
        record is held from the moment it is written.
        """
        ...

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """Like `append`, but takes its place in the order before returning. Raises
        JOURNAL_FAILED."""
        ...

    async def read(self, stored: Stored) -> bytes:
        """Read a record again; returns the bytes of its whole form. Raises JOURNAL_CORRUPT."""
        ...

    def place(self, stored: Stored) -> FilePlace | None:
        """Return where another process can read a record for the next seconds; None if it
        cannot."""
        ...

    def hold(self, stored: Stored) -> None:
        """Keep a replayed record until `release`, even if compaction moves it."""
        ...

    def release(self, stored: Stored) -> None:
        """Stop keeping a record, which will not be read again."""
        ...

    async def close(self) -> None:
        """Write what is queued, then close."""
        ...


class MemoryJournal:
    """Keeps nothing: the state lives only in the process's store, queue and buffer, and ends with
    it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._appended: asyncio.Future[list[Stored]] = loop.create_future()
        self._appended.set_result([])
        self._failed: asyncio.Future[str] = loop.create_future()

    @property
    def on_disk(self) -> bool:
        return False

    @property
    def folder(self) -> Folder | None:
        return None

    @property
    def refers_from(self) -> int | None:
        return None

    @property
    def failed(self) -> asyncio.Future[str]:
        """Never completes: nothing is written."""
        return self._failed

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        for found in ():
            yield found

    async def start(self, snapshot: Snapshot, on_full: OnFull = no_way_to_give) -> None:
        pass

    def check_room(self, byte_count: int) -> None:
        """Never refuse: `memory_budget` bounds memory."""

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        return []

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        return self._appended

    async def read(self, stored: Stored) -> bytes:
        raise LookupError("a journal in memory stores no records to read again")

    def place(self, stored: Stored) -> FilePlace | None:
        return None

    def hold(self, stored: Stored) -> None:
        pass

    def release(self, stored: Stored) -> None:
        pass

    async def close(self) -> None:
        pass


# Records. `trajectory_records` makes those of trajectories and turns, `group_bytes` that of a
# group.


def server_started(start: int) -> Record:
    """A server began to write; `start` counts the servers so far."""
    return JournalRecord(server_started=_ServerStarted(start=start))


def session_began(run_id: str, trainer_epoch: int, start_id: str, resume_step: int) -> Record:
    """A trainer began a session; groups trained after `resume_step` wait again."""
    return JournalRecord(
        session_began=_SessionBegan(
            run_id=run_id,
            trainer_epoch=trainer_epoch,
            resume_step=resume_step,
            start_id=start_id,
        )
    )


def run_replaced(run_id: str) -> Record:
    """All state of a run was discarded."""
    return JournalRecord(run_replaced=_RunReplaced(run_id=run_id))


def weights_activated(weight_version: int) -> Record:
    """The engines switched to this weight version."""
    return JournalRecord(weights_activated=_WeightsActivated(weight_version=weight_version))


def task_accepted(task: task_service_pb2.Task, *, first: bool = False) -> Record:
    """A task was accepted and waits; with `first`, ahead of all others."""
    return JournalRecord(task_accepted=_TaskAccepted(task=task, first=first))


def tasks_known(task_ids: Iterable[str]) -> Record:
    """Ids of tasks that are finished; a repeated submission is recognised by them."""
    return JournalRecord(tasks_known=_TasksKnown(task_ids=task_ids))


def groups_ended(group_ids: Iterable[str]) -> Record:
    """Ids of groups that have ended."""
    return JournalRecord(groups_ended=_GroupsEnded(group_ids=group_ids))


def trajectory_closed(
    trajectory_id: str,
    outcome: trajectory_pb2.Outcome | bytes,
    group_id: str,
    *,
    group_completed: bool = False,
    retried: bool = False,
) -> Record:
    """A trajectory was closed with this outcome, given whole or as its SHA-256."""
    digest = outcome if isinstance(outcome, bytes) else b""
    return JournalRecord(
        trajectory_closed=_TrajectoryClosed(
            trajectory_id=trajectory_id,
            outcome=None if isinstance(outcome, bytes) else outcome,
            outcome_sha256=digest,
            group_id=group_id,
            group_completed=group_completed,
            retried=retried,
        )
    )


def trajectories_forgotten(trajectory_ids: Iterable[str]) -> Record:
    """Trajectories that are no longer needed."""
    return JournalRecord(
        trajectories_forgotten=_TrajectoriesForgotten(trajectory_ids=trajectory_ids)
    )


def leases_expired(trajectory_ids: Iterable[str], *, retried: bool) -> Record:
    """Leases expired; `retried` says whether their attempts are made again."""
    return JournalRecord(
        leases_expired=_LeasesExpired(trajectory_ids=trajectory_ids, retried=retried)
    )


def group_dropped(group_id: str, reason: str) -> Record:
    """A group was dropped without being trained."""
    return JournalRecord(group_dropped=_GroupDropped(group_id=group_id, reason=reason))


def groups_receipted(group_ids: Iterable[str], step: int) -> Record:
    """A step trained these groups; step zero means that the trainer refused them."""
    return JournalRecord(groups_receipted=_GroupsReceipted(group_ids=group_ids, step=step))


def step_final(step: int) -> Record:
    """A durable checkpoint contains every step up to this one."""
    return JournalRecord(step_final=_StepFinal(step=step))
