"""The journal on disk: append-only segments, compacted into snapshots.

A folder holds

    LOCK                    locked by the server that writes to the folder
    0000000007.snapshot     the whole state when it was written; replaces all older files
    0000000008.log ...      records appended since the snapshot, oldest first
    spare                   preallocated room for the next segment
    *.unfinished            an incomplete snapshot; removed at start

Append: encode the records -> queue them -> write everything queued as one batch, durably (`fsync`)
or not (`process`) -> answer. Appends complete in the order in which they began.

Room. A caller that is about to change state first calls `check_room`, so that nothing begins that
may not fit. There is room if the next segment is already allocated, or if `journal_room` still
finds some within `max_bytes`.

Compaction starts when obsolete bytes outgrow the live ones:

    1. take the state (`snapshot`): records, and references to finished groups already on disk
    2. continue appending in a later segment
    3. write the snapshot in a separate thread, make it durable and give it its name
    4. remove the older files

A short group record refers to the records of its turns. The snapshot stores each group whole. New
appends never refer to a file that is about to be removed. The writer decides the form when it
writes (`_form_of`): after all earlier appends, and before a compaction can begin.

A server that stops during a compaction finds the older files intact. If a trainer on this host was
just given the location of a group in an older file, that file stays for `READING_SECONDS`. A
trainer that comes too late asks again. Appends still queued when the state was taken are written
before the snapshot; the older files stay until they are durable. A held record is carried over
whether or not the state includes it yet. A failed compaction is retried after ten times as long as
it took. A refused append also triggers a compaction that would otherwise not pay off, because
records that were live at the last one may be obsolete by now.

Failure. After a failed write or fsync the content of the disk is unknown. The journal then answers
no append, `failed` gives the reason, and the server stops. Everything answered before is on disk.
After a failed fsync the page cache may show data that the disk does not hold, and nothing would
write it again. So the next server reads the last segment from the disk (`forget_cached`); whatever
is missing there was never acknowledged. A record whose checksum does not match is never handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from penstock.common.failpoints import hit
from penstock.common.folders import make_folder
from penstock.server.core.errors import DomainError
from penstock.server.journal.compaction_pace import CompactionPace
from penstock.server.journal.disk.files import Reading, find_files, forget_cached, read_records
from penstock.server.journal.disk.room import Room
from penstock.server.journal.disk.segment import (
    Payload,
    Place,
    SegmentCorrupt,
    payload_length,
    read_payload,
    whole_record,
)
from penstock.server.journal.disk.snapshot import Written, payload_of, write_snapshot
from penstock.server.journal.disk.writing import Durability, NoRoom, Segments
from penstock.server.journal.records import (
    Appended,
    EncodedRecord,
    FilePlace,
    Folder,
    JournalInUse,
    JournalUnreadable,
    OnFull,
    Record,
    ShortRecord,
    Snapshot,
    SnapshotItem,
    Stored,
    no_way_to_give,
)
from penstock.wire.frames import frame_length
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_SECONDS = 1.0
"""Delay before retrying to allocate a segment on a full disk."""
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Transient errors of opening or reading a file; they do not mean that it is corrupt."""
READING_SECONDS = 2.0
"""How long a file stays after `place` returned a location in it, unless its room is needed."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A queued record, in its whole form and possibly a short one."""

    whole: Payload
    short: ShortRecord | None
    most_bytes: int
    """Bytes of its frame in the whole form, which is the larger one."""

    @classmethod
    def of(cls, record: Appended) -> _Pending:
        whole = payload_of(record)
        short = record.short if isinstance(record, EncodedRecord) else None
        return cls(whole, short, frame_length(payload_length(whole)))


@dataclass(eq=False)
class _Append:
    records: list[_Pending]
    hold_last: bool
    done: asyncio.Future[list[Stored]]


class LogJournal:
    """Durable records in a folder; see `journal.Journal` for what each method promises."""

    def __init__(
        self,
        folder: Path,
        *,
        durability: Durability,
        max_bytes: int,
        segment_bytes: int,
        refers_from: int | None = None,
    ) -> None:
        """Lock the folder. Raises JournalInUse and OSError."""
        self._refers_from = refers_from
        self._leaving = 0
        """Files with a lower number are removed, or about to be."""
        make_folder(folder, 0o700)
        self._folder = folder
        self._room = Room(max_bytes, segment_bytes)
        self._segments = Segments(folder, durability, self._room)
        self._lock = (folder / "LOCK").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise JournalInUse(f"another server writes to the journal {folder}") from error
        lock = os.fstat(self._lock.fileno())
        self._shared = Folder(folder.absolute(), lock.st_dev, lock.st_ino)
        self._told_at = -math.inf
        """Loop time of the last call of `place`."""
        self._room_needed = asyncio.Event()
        """Set when older files must be removed at once, even if a trainer may still read them."""
        self._files = find_files(folder)
        for path in self._files.obsolete:
            path.unlink()
        self._segments.paths = dict(self._files.all)
        self._held: set[Stored] = set()
        self._pending: list[_Append] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, "journal")
        self._writing: asyncio.Task[None] | None = None
        self._compacting: asyncio.Task[None] | None = None
        self._pace = CompactionPace()
        self._on_full: OnFull = no_way_to_give
        self._failure: DomainError | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._snapshot: Snapshot | None = None
        self.compactions = 0
        """Number of finished compactions."""

    @property
    def on_disk(self) -> bool:
        return True

    @property
    def folder(self) -> Folder | None:
        return self._shared

    @property
    def refers_from(self) -> int | None:
        return self._refers_from

    # Reading

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Yield every record that the previous server left. Raises JournalUnreadable and
        OSError."""
        reading = Reading()
        if self._files.segments:
            # Only the last one: a segment is durable before its successor begins.
            await self._in_thread(lambda: forget_cached(self._files.segments[-1][1]))
        try:
            for found in read_records(self._files, reading):
                yield found
        except SegmentCorrupt as error:
            raise JournalUnreadable(
                f"the journal {self._folder} is corrupt: {error}; `penstock journal verify` shows details"
            ) from error
        self._room.by_file = reading.bytes_by_segment
        if reading.torn_bytes:
            logger.warning(
                "ignoring the journal's last %d bytes: they were being written when its server stopped "
                "and were never acknowledged",
                reading.torn_bytes,
            )
        for number, path in self._files.segments:
            # Nothing may be appended after a torn tail. This also frees the unused end of each
            # segment.
            with path.open("r+b") as file:
                end, last = self._room.by_file[number], path == self._files.segments[-1][1]
                if last or os.fstat(file.fileno()).st_size > end:
                    file.truncate(end)
                    os.fsync(file.fileno())
        if self._files.all:
            number, _ = self._files.all[-1]
            self._segments.before = Place(number, self._room.by_file[number])

    async def read(self, stored: Stored) -> bytes:
        """Read a record again; returns the bytes of its whole form. Raises JOURNAL_CORRUPT."""
        loop = asyncio.get_running_loop()
        while True:
            place = replace(stored)
            try:
                return await loop.run_in_executor(None, self._read, place)
            except (OSError, KeyError, SegmentCorrupt) as error:
                if (place.segment, place.offset) != (stored.segment, stored.offset):
                    continue  # A compaction moved it meanwhile.
                if isinstance(error, KeyError) or getattr(error, "errno", None) in PASSING:
                    raise
                raise DomainError(
                    Reason.JOURNAL_CORRUPT, f"a record cannot be read again: {error}"
                ) from error

    def _read(self, stored: Stored) -> bytes:
        """Return the whole record. Raises OSError, SegmentCorrupt, and KeyError if its file was
        removed."""
        path = self._segments.paths[stored.segment]
        payload = read_payload(path, stored.offset, stored.length)
        turns = {turn: self._read(turn) for turn in stored.turns}
        try:
            return whole_record(payload, map(turns.__getitem__, stored.turns))
        except (ValueError, DecodeError) as error:
            raise SegmentCorrupt(path, stored.offset, str(error)) from error

    def place(self, stored: Stored) -> FilePlace | None:
        """Return the record's current location, valid for READING_SECONDS unless its room is
        needed."""
        self._told_at = asyncio.get_running_loop().time()
        return self._place(stored)

    def _place(self, stored: Stored) -> FilePlace:
        name = self._segments.paths[stored.segment].name
        return FilePlace(name, stored.offset, stored.length, tuple(map(self._place, stored.turns)))

    # Appending

    async def start(self, snapshot: Snapshot, on_full: OnFull = no_way_to_give) -> None:
        """Open a new segment and begin to write; called after `replay`. Raises OSError."""
        self._snapshot, self._on_full = snapshot, on_full
        newest = max((number for number, _ in self._files.all), default=0)
        await self._in_thread(lambda: self._segments.rotate(newest + 1))
        self._writing = asyncio.create_task(self._write_batches(), name="journal")

    def check_room(self, byte_count: int) -> None:
        """Raise DISK_FULL if records of `byte_count` bytes may not fit any more."""
        wanted = frame_length(byte_count) + self._pending_bytes
        refusal = self._room.refusal(wanted)
        if refusal is not None:
            message = f"{refusal}; {byte_count} more do not fit"
        elif not self._segments.takes(wanted + self._room.headroom_bytes):
            message = f"the journal's disk has no room for {byte_count} more bytes"
        else:
            return
        self._on_full(wanted)
        self._pace.press()
        self._room_needed.set()
        self._wake.set()
        raise DomainError(
            Reason.DISK_FULL,
            message,
            {"kept_bytes": self._room.in_use, "limit": self._room.limit},
            retry_after_seconds=5.0,
        )

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        """Append records; returns their locations once they are durable."""
        return await self.begin_append(records, hold_last=hold_last)

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """Queue records; the future completes as `append` does. Raises JOURNAL_FAILED."""
        if self._failure is not None:
            raise self._failure
        pending = [_Pending.of(record) for record in records]
        done: asyncio.Future[list[Stored]] = asyncio.get_running_loop().create_future()
        self._pending.append(_Append(pending, hold_last, done))
        self._pending_bytes += _most_bytes(pending)
        self._wake.set()
        return done

    def hold(self, stored: Stored) -> None:
        """Keep a record, which will be read again, until `release`."""
        self._held.add(stored)
        self._room.hold(stored.byte_count)

    def release(self, stored: Stored) -> None:
        """Stop keeping a record; it may be dropped by the next compaction."""
        self._held.remove(stored)
        self._room.release(stored.byte_count)
        self._pace.change()
        self._wake.set()

    async def _write_batches(self) -> None:
        """Write queued appends in batches until `close`, and begin compactions between batches."""
        while not (self._closing and not self._pending):
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, []
            try:
                await self._write_batch(batch)
                if self._compaction_due():
                    await self._begin_compaction()
            except NoRoom:
                if self._closing:
                    self._fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), batch)
                    return
                # These appends wait, and so do later ones. Callers that use `check_room` are
                # refused.
                self._pending = [*batch, *self._pending]
                self._room_needed.set()
                asyncio.get_running_loop().call_later(ROOM_SECONDS, self._wake.set)
            except Exception as error:  # Any error: otherwise pending appends would never complete.
                self._fail(error, batch)
                return

    async def _write_batch(self, batch: list[_Append]) -> None:
        pending = [record for append in batch for record in append.records]
        forms = [self._form_of(record) for record in pending]
        hit("journal.before_write")
        places = await self._in_thread(
            lambda: self._segments.write([payload for payload, _ in forms])
        )
        hit("journal.before_reply")
        if pending:
            self._pace.change()
        self._pending_bytes -= _most_bytes(pending)
        for place, (_, turns) in zip(places, forms, strict=True):
            place.turns = turns
        for append in batch:
            count = len(append.records)
            if append.hold_last:
                self.hold(places[count - 1])
            if not append.done.done():
                append.done.set_result(places[:count])
            places = places[count:]

    def _form_of(self, record: _Pending) -> tuple[Payload, tuple[Stored, ...]]:
        """Return the bytes to write, and the records they refer to.

        The short form is used only if none of those records is in a file about to be removed.
        """
        short = record.short
        if short is None or any(turn.segment < self._leaving for turn in short.turns):
            return record.whole, ()
        return short.parts, short.turns

    def _fail(self, error: Exception, batch: list[_Append]) -> None:
        message = f"the journal cannot be written: {error}"
        logger.critical("%s", message, exc_info=None if isinstance(error, OSError) else error)
        self._failure = DomainError(Reason.JOURNAL_FAILED, message)
        for append in (*batch, *self._pending):
            if not append.done.done():
                append.done.set_exception(self._failure)
        self._pending = []
        if not self.failed.done():
            self.failed.set_result(message)

    # Compaction

    def _compaction_due(self) -> bool:
        if self._compacting is not None or self._snapshot is None or self._closing:
            return False
        return self._pace.may_begin and (self._pace.is_pressed or self._room.compaction_due)

    async def _begin_compaction(self) -> None:
        """Take the current state, switch to a later segment and start writing the snapshot."""
        assert self._snapshot is not None
        began = asyncio.get_running_loop().time()
        least = self._room.kept
        if not self._segments.has_spare:
            least += self._room.segment_bytes
        if self._segments.free_bytes < least:
            self._put_off(began, f"the disk has fewer than {least} bytes free")
            return
        self._pace.begun()
        records = list(self._snapshot())
        named = {item for item in records if isinstance(item, Stored)}
        records += self._held - named
        pending = self.begin_append(())
        number = self._leaving = self._segments.number + 1
        self._room.begin_copy()
        await self._in_thread(lambda: self._segments.rotate(number + 1))
        self._compacting = asyncio.create_task(
            self._compact(number, self._segments.before, records, pending, began), name="compaction"
        )

    def _put_off(self, began: float, problem: object) -> None:
        """Note a failed compaction. Nothing is lost: the older files hold the same state."""
        if self._pace.failed(began, self._wake.set):
            logger.error("the journal cannot be compacted, will retry: %s", problem)

    async def _compact(
        self,
        number: int,
        before: Place,
        records: list[SnapshotItem],
        pending: asyncio.Future[list[Stored]],
        began: float,
    ) -> None:
        try:
            await pending
            written = await asyncio.to_thread(self._write_snapshot, number, before, records)
            older = self._take_over(number, written)
            # Exclude this wait from the duration: the pause before the next compaction depends on
            # it.
            began += await self._let_read()
            await self._remove(older)
        except DomainError:
            return  # An earlier append failed, and `_fail` reported it.
        except (OSError, SegmentCorrupt) as error:
            self._room.give_up_copy()
            self._put_off(began, error)
        except Exception as error:  # A bug: what the journal holds is no longer known.
            self._fail(error, [])
            return
        else:
            self.compactions += 1
            self._pace.ended(began)
        self._compacting = None
        self._wake.set()

    def _take_over(self, number: int, written: Written) -> list[Path]:
        """Make the snapshot authoritative; returns the files that it replaces."""
        older = [(n, path) for n, path in self._segments.paths.items() if n < number]
        self._segments.paths[number] = self._folder / f"{number:010d}.snapshot"
        self._room.end_copy(number, written.end, written.other_bytes)
        for stored, (offset, length) in written.moves:
            before = stored.byte_count
            stored.segment, stored.offset, stored.length, stored.turns = number, offset, length, ()
            if stored in self._held:
                self._room.moved(length - before)
        for older_number, _ in older:
            del self._segments.paths[older_number]
        return [path for _, path in older]

    async def _let_read(self) -> float:
        """Give readers time before older files are removed; returns the seconds waited."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._told_at + READING_SECONDS):
                await self._room_needed.wait()
        self._room_needed.clear()
        return loop.time() - began

    async def _remove(self, older: list[Path]) -> None:
        for path in older:
            try:
                # Removing a large file takes tens of milliseconds, which would block the event
                # loop.
                await asyncio.to_thread(path.unlink)
            except OSError as error:
                # The next server removes it, because it is older than the snapshot.
                logger.error("cannot remove obsolete journal file %s: %s", path, error)
        self._room.removed()

    def _write_snapshot(self, number: int, before: Place, records: list[SnapshotItem]) -> Written:
        return write_snapshot(self._folder, number, before, records, self._read)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Write what is queued and unlock the folder. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._room_needed.set()
        self._wake.set()
        if self._writing is not None:
            await self._writing
        if self._compacting is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._compacting
        if self._failure is None:
            await self._in_thread(self._segments.finish)
        self._segments.close()
        self._thread.shutdown()
        self._lock.close()


def _most_bytes(records: Sequence[_Pending]) -> int:
    return sum(record.most_bytes for record in records)
