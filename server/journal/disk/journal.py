"""The journal on disk: append-only segments, compacted into snapshots (docs/operations/journal.md).

Append: encode the records -> queue them -> write everything queued as one batch, durably (`fsync`) or not
(`process`) -> answer. The writer decides between the whole and the short form of a group record when it
writes (`_form_of`): after all earlier appends, and before a compaction can begin. New appends never refer
to a file that is about to be removed.

Compaction starts when obsolete bytes outgrow the live ones, or after a refused append:

    1. take the state (`snapshot`): records, and references to finished groups already on disk
    2. continue appending in a later segment
    3. write the snapshot in a separate thread, with whole groups, make it durable and give it its name
    4. remove the older files

Appends still queued when the state was taken are written before the snapshot; the older files stay until
they are durable. A held record is carried over whether or not the state includes it yet. If a trainer on
this host was just given the location of a group in an older file, that file stays for `READING_SECONDS`. A
trainer that comes too late asks again.

After a failed write or fsync the content of the disk is unknown: the page cache may show data that the
disk does not hold, and nothing would write it again. So the next server reads the last segment from the
disk (`forget_cached`); whatever is missing there was never acknowledged.
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

from penstock.common.folders import make_folder
from penstock.server.core.errors import DomainError
from penstock.server.journal.appending import AppendingJournal
from penstock.server.journal.disk.files import Reading, find_files, forget_cached, read_records
from penstock.server.journal.disk.room import Room
from penstock.server.journal.disk.segment import (
    Place,
    SegmentCorrupt,
    payload_length,
    read_payload,
    whole_record,
)
from penstock.server.journal.disk.snapshot import WrittenSnapshot, write_snapshot
from penstock.server.journal.disk.writing import Durability, NoRoom, Segments
from penstock.server.journal.protocol import (
    Appended,
    EncodedRecord,
    FilePlace,
    Folder,
    JournalInUse,
    JournalUnreadable,
    Payload,
    Record,
    ShortRecord,
    SnapshotItem,
    Stored,
    payload_of,
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
    whole: Payload
    short: ShortRecord | None
    frame_bytes: int
    """Of the whole form, which is the larger one."""

    @classmethod
    def of(cls, record: Appended) -> _Pending:
        whole = payload_of(record)
        short = record.short if isinstance(record, EncodedRecord) else None
        return cls(whole, short, frame_length(payload_length(whole)))


class LogJournal(AppendingJournal[_Pending]):
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
        super().__init__(_Pending.of, (OSError, SegmentCorrupt))
        self.refers_from = refers_from
        self._leaving = 0
        """Files with a lower number are removed, or about to be."""
        make_folder(folder, 0o700)
        self._path = folder
        self._room = Room(max_bytes, segment_bytes)
        self._segments = Segments(folder, durability, self._room)
        self._lock = (folder / "LOCK").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise JournalInUse(f"another server writes to the journal {folder}") from error
        lock = os.fstat(self._lock.fileno())
        self.folder: Folder | None = Folder(folder.absolute(), lock.st_dev, lock.st_ino)
        self._told_at = -math.inf
        """Loop time of the last call of `place`."""
        self._room_needed = asyncio.Event()
        """Set when older files must be removed at once, even if a trainer may still read them."""
        self._files = find_files(folder)
        for path in self._files.obsolete:
            path.unlink()
        self._segments.paths = dict(self._files.all)
        self._thread = ThreadPoolExecutor(1, "journal")

    # Reading

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Raises JournalUnreadable and OSError."""
        reading = Reading()
        if self._files.segments:
            # Only the last one: a segment is durable before its successor begins.
            await self._in_thread(lambda: forget_cached(self._files.segments[-1][1]))
        try:
            for found in read_records(self._files, reading):
                yield found
        except SegmentCorrupt as error:
            raise JournalUnreadable(
                f"the journal {self._path} is corrupt: {error}; `penstock journal verify` shows details"
            ) from error
        self._room.by_file = reading.bytes_by_segment
        if reading.torn_bytes:
            logger.warning(
                "ignoring the journal's last %d bytes: they were being written when its server stopped "
                "and were never acknowledged",
                reading.torn_bytes,
            )
        for number, path in self._files.segments:
            # Nothing may be appended after a torn tail. This also frees the unused end of each segment.
            with path.open("r+b") as file:
                end, last = self._room.by_file[number], path == self._files.segments[-1][1]
                if last or os.fstat(file.fileno()).st_size > end:
                    file.truncate(end)
                    os.fsync(file.fileno())
        if self._files.all:
            number, _ = self._files.all[-1]
            self._segments.before = Place(number, self._room.by_file[number])

    async def read(self, stored: Stored) -> bytes:
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
        """Raises OSError, SegmentCorrupt, and KeyError if its file was removed."""
        path = self._segments.paths[stored.segment]
        payload = read_payload(path, stored.offset, stored.length)
        turns = {turn: self._read(turn) for turn in stored.turns}
        try:
            return whole_record(payload, map(turns.__getitem__, stored.turns))
        except (ValueError, DecodeError) as error:
            raise SegmentCorrupt(path, stored.offset, str(error)) from error

    def place(self, stored: Stored) -> FilePlace | None:
        """The location is valid for READING_SECONDS, unless its room is needed."""
        self._told_at = asyncio.get_running_loop().time()
        return self._place(stored)

    def _place(self, stored: Stored) -> FilePlace:
        name = self._segments.paths[stored.segment].name
        return FilePlace(name, stored.offset, stored.length, tuple(map(self._place, stored.turns)))

    # Appending

    async def _prepare(self) -> None:
        newest = max((number for number, _ in self._files.all), default=0)
        await self._in_thread(lambda: self._segments.rotate(newest + 1))

    def check_room(self, byte_count: int) -> None:
        wanted = frame_length(byte_count) + self._pending_bytes
        refusal = self._room.refusal(wanted)
        if refusal is not None:
            message = f"{refusal}; {byte_count} more do not fit"
        elif not self._segments.takes(wanted + self._room.headroom_bytes):
            message = f"the journal's disk has no room for {byte_count} more bytes"
        else:
            return
        self._room_needed.set()
        raise self._refuse(wanted, message, self._room.in_use, self._room.limit)

    def _count_held(self, stored: Stored, sign: int) -> None:
        if sign > 0:
            self._room.kept += stored.byte_count
        else:
            self._room.release(stored.byte_count)

    async def _write(self, entries: Sequence[_Pending]) -> list[Stored] | None:
        forms = [self._form_of(entry) for entry in entries]
        try:
            places = await self._in_thread(
                lambda: self._segments.write([payload for payload, _ in forms])
            )
        except NoRoom:
            if self._closing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            # These appends wait, and so do later ones. Callers that use `check_room` are refused.
            self._room_needed.set()
            asyncio.get_running_loop().call_later(ROOM_SECONDS, self._wake.set)
            return None
        for place, (_, turns) in zip(places, forms, strict=True):
            place.turns = turns
        return places

    def _form_of(self, record: _Pending) -> tuple[Payload, tuple[Stored, ...]]:
        """Return the bytes to write, and the records they refer to.

        The short form is used only if none of those records is in a file about to be removed.
        """
        short = record.short
        if short is None or any(turn.segment < self._leaving for turn in short.turns):
            return record.whole, ()
        return short.parts, short.turns

    # Compaction

    def _is_outgrown(self) -> bool:
        return self._room.compaction_due

    async def _begin_compaction(self) -> None:
        """Take the current state, switch to a later segment and start writing the snapshot."""
        began = asyncio.get_running_loop().time()
        least = self._room.kept
        if self._segments.spare is None:
            least += self._room.segment_bytes
        if self._segments.free_bytes < least:
            self._put_off(began, f"the disk has fewer than {least} bytes free")
            return
        records = self._take_state()
        pending = self.append(())
        number = self._leaving = self._segments.current.number + 1
        self._room.begin_copy()
        await self._in_thread(lambda: self._segments.rotate(number + 1))
        before = self._segments.before
        self._compact(began, lambda: self._replace_older(number, before, records, pending))

    async def _replace_older(
        self,
        number: int,
        before: Place,
        records: list[SnapshotItem],
        pending: asyncio.Future[list[Stored]],
    ) -> float:
        """Write a snapshot in place of the older files; returns the seconds that readers were given."""
        await pending
        try:
            written = await asyncio.to_thread(
                write_snapshot, self._path, number, before, records, self._read
            )
            older = self._take_over(number, written)
        except (OSError, SegmentCorrupt):
            self._room.give_up_copy()
            raise
        waited = await self._let_read()
        await self._remove(older)
        return waited

    def _take_over(self, number: int, written: WrittenSnapshot) -> list[Path]:
        """Make the snapshot authoritative; returns the files that it replaces."""
        # The journal's thread may begin a file meanwhile, so the loop is over a copy.
        older = [(n, path) for n, path in list(self._segments.paths.items()) if n < number]
        self._segments.paths[number] = self._path / f"{number:010d}.snapshot"
        self._room.end_copy(number, written.end, written.other_bytes)
        for stored, (offset, length) in written.moves:
            before = stored.byte_count
            stored.segment, stored.offset, stored.length, stored.turns = number, offset, length, ()
            if stored in self._held:
                self._room.kept += length - before
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
                # Removing a large file takes tens of milliseconds, which would block the event loop.
                await asyncio.to_thread(path.unlink)
            except OSError as error:
                # The next server removes it, because it is older than the snapshot.
                logger.error("cannot remove obsolete journal file %s: %s", path, error)
        self._room.replaced = 0

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _end(self) -> None:
        self._room_needed.set()
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
