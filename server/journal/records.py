"""Durability: what must survive is appended here before it is acknowledged.

A record says what something is from now on (`penstock/v1/journal.proto`); whoever changes state makes the
record of it, with the functions below. Order: room asked for, where much is about to be written ->
state changed in memory -> record appended -> answered. Whoever asks for the same again meanwhile waits
for the same append.

`MemoryJournal` keeps nothing beyond the process: what it is handed is as durable as the process itself.
The one on disk is `log_journal`, the one on another machine `jetstream_journal`; which one a server has
says `journal_opening`, and what becomes of the records when it starts `recovery`.
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
    """A record that is bytes already, in pieces that nobody changes any more."""

    parts: tuple[Part, ...]
    short: ShortRecord | None = None
    """What may be written in its place."""


@dataclass(frozen=True, slots=True)
class ShortRecord:
    """The same, but for what records say that were written before, and are where they were."""

    parts: tuple[Part, ...]
    turns: tuple[Stored, ...]
    """Those, in the order of what is left to them."""


Appended = Record | EncodedRecord


class JournalInUse(Exception):
    """Another server writes to it."""


class JournalUnreadable(Exception):
    """What another server left cannot be relied on."""


@dataclass(slots=True, eq=False)
class Stored:
    """Where a record lies; changed in place when the journal is compacted."""

    segment: int
    offset: int
    """Of its frame, in bytes."""
    length: int
    """Of its frame, in bytes."""
    turns: tuple[Stored, ...] = field(default=(), kw_only=True)
    """Records that it leaves something to, in the order of what that is: it is short."""

    @property
    def byte_count(self) -> int:
        """What it keeps from being removed: its frame, and those of these records."""
        return self.length + sum(turn.length for turn in dict.fromkeys(self.turns))


@dataclass(frozen=True, slots=True)
class Folder:
    """Files that another process of this host may be able to read."""

    path: Path
    """Absolute."""
    device: int
    """Of its LOCK."""
    inode: int


@dataclass(frozen=True, slots=True)
class FilePlace:
    """A record in a file of that folder."""

    file: str
    offset: int
    """Of its frame, in bytes."""
    length: int
    """Of its frame, in bytes."""
    turns: tuple[FilePlace, ...] = ()
    """Of a short one: where the records are that it leaves something to."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """Records that are made only where they are written, in another thread: of what cannot change."""

    make: Callable[[], Iterable[Appended]]
    stored: Stored | None = None
    """Is told where it lies once the snapshot counts, if it is one record and the journal can say so."""


SnapshotItem = Record | Stored | Deferred
Snapshot = Callable[[], Iterable[SnapshotItem]]
"""Everything that counts now, as records, or by where it lies already."""


OnFull = Callable[[int], None]


def no_way_to_give(byte_count: int) -> None:
    """Where nothing can be given up for so many bytes."""


class Journal(Protocol):
    """An append-only record of what was accepted."""

    on_full: OnFull
    """Called where records of so many bytes are refused: to give up what is kept for convenience alone."""

    @property
    def on_disk(self) -> bool:
        """Whether what is appended can be read again, and need not be kept in memory."""
        ...

    @property
    def folder(self) -> Folder | None:
        """Where its files are, if it has any."""
        ...

    @property
    def refers_from(self) -> int | None:
        """Bytes of the smallest segment that a group's record may leave to its turn's; None where a group
        is always written whole."""
        ...

    @property
    def failed(self) -> asyncio.Future[str]:
        """Ends, with the reason, when nothing can be appended any more."""
        ...

    def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Every record, oldest first, as the last server left them. Raises JournalUnreadable."""
        ...

    async def start(self, snapshot: Snapshot) -> None:
        """Begins to write, once everything was replayed. Raises OSError."""
        ...

    def check_room(self, byte_count: int) -> None:
        """Raises DISK_FULL where records of so many bytes may not fit."""
        ...

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        """Returns once the records are durable, with where they lie. Raises JOURNAL_FAILED.

        Without records: once everything is durable that was appended before. With `hold_last` the last
        one is held from the moment it is written.
        """
        ...

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """The same, in its place in the order at once. Raises JOURNAL_FAILED."""
        ...

    async def read(self, stored: Stored) -> bytes:
        """A record again, as bytes, and whole. Raises JOURNAL_CORRUPT."""
        ...

    def place(self, stored: Stored) -> FilePlace | None:
        """Where another process finds a record within the next seconds; None where it cannot."""
        ...

    def hold(self, stored: Stored) -> None:
        """A record that was replayed is kept until `release`, in whatever place."""
        ...

    def release(self, stored: Stored) -> None:
        """Nobody reads it again."""
        ...

    async def close(self) -> None:
        """Writes what is queued."""
        ...


class MemoryJournal:
    """Durable as far as the process is: its state is the store, the queue and the buffer themselves."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._appended: asyncio.Future[list[Stored]] = loop.create_future()
        self._appended.set_result([])
        self._failed: asyncio.Future[str] = loop.create_future()
        self.on_full: OnFull = no_way_to_give

    @property
    def on_disk(self) -> bool:
        """Nothing is."""
        return False

    @property
    def folder(self) -> Folder | None:
        """None."""
        return None

    @property
    def refers_from(self) -> int | None:
        """Nothing is written."""
        return None

    @property
    def failed(self) -> asyncio.Future[str]:
        """Never."""
        return self._failed

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Nothing was left."""
        for found in ():
            yield found

    async def start(self, snapshot: Snapshot) -> None:
        """Nothing to do."""

    def check_room(self, byte_count: int) -> None:
        """Memory is bounded elsewhere."""

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        """Nothing to do."""
        return []

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """Nothing to do."""
        return self._appended

    async def read(self, stored: Stored) -> bytes:
        """Nothing was stored."""
        raise LookupError("nothing is kept in memory")

    def place(self, stored: Stored) -> FilePlace | None:
        """Nothing was stored."""
        return None

    def hold(self, stored: Stored) -> None:
        """Nothing was stored."""

    def release(self, stored: Stored) -> None:
        """Nothing was stored."""

    async def close(self) -> None:
        """Nothing is queued."""


# Records. Those of trajectories and turns are in `trajectory_records`, that of a group in `group_bytes`.


def server_started(start: int) -> Record:
    """A server begins to write, as the `start`-th."""
    return JournalRecord(server_started=_ServerStarted(start=start))


def session_began(run_id: str, trainer_epoch: int, start_id: str, resume_step: int) -> Record:
    """A trainer began a session; groups that were used after `resume_step` wait again."""
    return JournalRecord(
        session_began=_SessionBegan(
            run_id=run_id,
            trainer_epoch=trainer_epoch,
            resume_step=resume_step,
            start_id=start_id,
        )
    )


def run_replaced(run_id: str) -> Record:
    """Everything of a run is gone."""
    return JournalRecord(run_replaced=_RunReplaced(run_id=run_id))


def weights_activated(weight_version: int) -> Record:
    """Other weights sample."""
    return JournalRecord(weights_activated=_WeightsActivated(weight_version=weight_version))


def task_accepted(task: task_service_pb2.Task, *, first: bool = False) -> Record:
    """A task waits, `first` before all others."""
    return JournalRecord(task_accepted=_TaskAccepted(task=task, first=first))


def tasks_known(task_ids: Iterable[str]) -> Record:
    """Tasks that are done with."""
    return JournalRecord(tasks_known=_TasksKnown(task_ids=task_ids))


def groups_ended(group_ids: Iterable[str]) -> Record:
    """Groups that are done with."""
    return JournalRecord(groups_ended=_GroupsEnded(group_ids=group_ids))


def trajectory_closed(
    trajectory_id: str,
    outcome: trajectory_pb2.Outcome | bytes,
    group_id: str,
    *,
    group_completed: bool = False,
    retried: bool = False,
) -> Record:
    """A trajectory was closed, with this outcome or one of this SHA-256."""
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
    """Trajectories are of no use any more."""
    return JournalRecord(
        trajectories_forgotten=_TrajectoriesForgotten(trajectory_ids=trajectory_ids)
    )


def leases_expired(trajectory_ids: Iterable[str], *, retried: bool) -> Record:
    """Leases ran out; `retried` is whether the attempt is made again."""
    return JournalRecord(
        leases_expired=_LeasesExpired(trajectory_ids=trajectory_ids, retried=retried)
    )


def group_dropped(group_id: str, reason: str) -> Record:
    """A group left without being trained."""
    return JournalRecord(group_dropped=_GroupDropped(group_id=group_id, reason=reason))


def groups_receipted(group_ids: Iterable[str], step: int) -> Record:
    """Groups were used by a step, or refused where it is zero."""
    return JournalRecord(groups_receipted=_GroupsReceipted(group_ids=group_ids, step=step))


def step_final(step: int) -> Record:
    """A durable checkpoint contains every step up to this one."""
    return JournalRecord(step_final=_StepFinal(step=step))
