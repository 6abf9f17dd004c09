"""The interface of a journal: state that must survive is appended to it before it is acknowledged.

A record describes the new state of one thing (`penstock/v1/journal.proto`). Order: ask for room, if the
change is large -> change the state in memory -> append the record -> answer. A caller that repeats the
request meanwhile waits for the same append. `groups.recovery` reads the records at start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.v1 import journal_pb2

Record = journal_pb2.JournalRecord
Part = bytes | bytearray
Payload = tuple[Part, ...]
"""The consecutive parts of one payload."""


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A record that is already encoded, as byte strings that never change again."""

    parts: Payload
    short: ShortRecord | None = None
    """A shorter form that a journal on disk may write instead."""


@dataclass(frozen=True, slots=True)
class ShortRecord:
    """A group record without the tokens that earlier records of its turns already hold."""

    parts: Payload
    turns: tuple[Stored, ...]
    """The records referred to, in the order in which the group refers to them."""


Appended = Record | EncodedRecord


def payload_of(record: Appended) -> Payload:
    return record.parts if isinstance(record, EncodedRecord) else (record.SerializeToString(),)


class JournalInUse(Exception):
    """Another server writes to this journal."""


class JournalUnreadable(Exception):
    """The journal that a previous server left is corrupt, incomplete or cannot be opened."""


@dataclass(slots=True, eq=False)
class Stored:
    """The location of a record; compaction updates it in place."""

    segment: int
    offset: int
    """Of the frame, in bytes, like `length`."""
    length: int
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
    """A `Stored` record's location in a file of a `Folder`."""

    file: str
    offset: int
    length: int
    turns: tuple[FilePlace, ...] = ()


@dataclass(frozen=True, slots=True)
class Deferred:
    """Records of immutable state, encoded only when written, in the thread that writes."""

    make: Callable[[], Iterable[Appended]]
    stored: Stored | None = None
    """Updated with the record's location once the snapshot is authoritative. Only for a single record, and
    only by a journal with locations."""


SnapshotItem = Record | Stored | Deferred
Snapshot = Callable[[], Iterable[SnapshotItem]]
"""Returns the whole current state: records, or locations of records already stored."""
OnFull = Callable[[int], None]
"""Called with the refused bytes, so that the server drops records it keeps only for convenience."""


def free_nothing(byte_count: int) -> None:
    """The `OnFull` of a server that keeps nothing for convenience."""


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
        """Smallest trajectory segment, in bytes, that a group's record refers to instead of copying it;
        None if groups are always written whole."""
        ...

    @property
    def failed(self) -> asyncio.Future[str]:
        """Completes with the reason once nothing can be appended any more."""
        ...

    def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Yield every record that the previous server left, oldest first. Raises JournalUnreadable."""
        ...

    async def start(self, snapshot: Snapshot, on_full: OnFull = free_nothing) -> None:
        """Begin to write, once everything was replayed. Raises OSError."""
        ...

    def check_room(self, byte_count: int) -> None:
        """Raise DISK_FULL if records of `byte_count` bytes may not fit."""
        ...

    def append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """Queue records; the future has their locations once they are durable. Raises JOURNAL_FAILED.

        Without records, it completes once all earlier appends are durable. With `hold_last`, the last
        record is held from the moment it is written.
        """
        ...

    async def read(self, stored: Stored) -> bytes:
        """Read a record again; returns the bytes of its whole form. Raises JOURNAL_CORRUPT."""
        ...

    def place(self, stored: Stored) -> FilePlace | None:
        """Where another process can read a record for the next seconds; None if it cannot."""
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
