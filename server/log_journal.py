"""The journal on disk: segments that are appended to, and compacted.

A folder holds

    LOCK                    held by the server that writes here
    0000000007.snapshot     everything that counted when it was made; what came before is gone
    0000000008.log ...      what was appended since, oldest first
    spare                   room for the next segment
    *.unfinished            a snapshot that was never finished; removed

Order of an append: records encoded -> queued -> with all that are queued by then, written and made durable
(`fsync`), or only written (`process`) -> answered. Appends end in the order they began.

Room. Nothing is begun that might not fit (`check_room`): what changes state asks before it does. There
is room where the next segment is allocated already, and where what is kept takes less than half of
`max_bytes`; the other half is for what compaction is about to free, and for the copy that it makes.

Compaction, once what nobody needs outgrows what somebody does: the state as records (`snapshot`), groups
by where they lie -> appends go on in a later segment -> the snapshot is written by a thread of its own,
made durable and given its name -> older files are removed. A server that stops in between finds the older
files whole. What left the state before the snapshot and was still to be written then is written first:
until it is durable, older files stay. A record that is held is carried over, whether or not the snapshot
has it yet.

What a failure does. A write or an fsync that fails leaves it open what is on the disk: nothing is answered
any more, `failed` says why, and the server stops. What was answered before is there. A record that is not
what was written is never handed out.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from penstock.server.errors import DomainError
from penstock.server.journal import (
    Appended,
    JournalInUse,
    JournalUnreadable,
    Record,
    Snapshot,
    SnapshotItem,
    Stored,
)
from penstock.server.journal_files import Reading, find_files, read_records
from penstock.server.journal_segment import (
    CLOSING_BYTES,
    HEADER,
    NOWHERE,
    Payload,
    Place,
    SegmentCorrupt,
    SegmentWriter,
    frame_length,
    payload_length,
    read_payload,
)
from penstock.server.journal_snapshot import Written, payload_of, write_snapshot
from penstock.wire.failpoints import hit
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

T = TypeVar("T")

Durability = Literal["fsync", "process"]

# For what is appended without asking: receipts and the like, which make room.
HEADROOM_BYTES = 1 << 20


@dataclass(eq=False)
class _Append:
    payloads: list[Payload]
    hold_last: bool
    done: asyncio.Future[list[Stored]]


class LogJournal:
    """Durable records in a folder; see `journal.Journal` for what each method promises."""

    def __init__(
        self, folder: Path, *, durability: Durability, max_bytes: int, segment_bytes: int
    ) -> None:
        """Takes the folder. Raises JournalInUse and OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._durability = durability
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._lock = (folder / "LOCK").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise JournalInUse(f"another server writes to the journal {folder}") from error
        self._files = find_files(folder)
        for path in self._files.obsolete:
            path.unlink()
        self._bytes: dict[int, int] = {}
        """Bytes written, by segment."""
        self._paths = dict(self._files.all)
        self._held: set[Stored] = set()
        self._kept = 0
        """Bytes of the records that are held."""
        self._other = 0
        """Bytes of the records that no one holds, and that count: as of the last snapshot."""
        self._pending: list[_Append] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, "journal")
        self._writer: SegmentWriter | None = None
        self._spare: SegmentWriter | None = None
        self._before = NOWHERE
        """Where the file before the running segment ended."""
        self._writing: asyncio.Task[None] | None = None
        self._compacting: asyncio.Task[None] | None = None
        self._failure: DomainError | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._snapshot: Snapshot | None = None
        self.compactions = 0
        """Compactions finished."""

    @property
    def on_disk(self) -> bool:
        """All of it."""
        return True

    # Reading

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Every record as the last server left them. Raises JournalUnreadable."""
        reading = Reading()
        try:
            for found in read_records(self._files, reading):
                yield found
        except SegmentCorrupt as error:
            raise JournalUnreadable(
                f"the journal {self._folder} is corrupt: {error}; `penstock journal verify` says more"
            ) from error
        self._bytes = reading.bytes_by_segment
        if reading.torn_bytes:
            logger.warning(
                "the journal's last %d bytes were being written when its server stopped, and were never "
                "acknowledged",
                reading.torn_bytes,
            )
        for number, path in self._files.segments:
            # Nothing may follow a torn tail, and what a segment was allocated is not used any more.
            with path.open("r+b") as file:
                end, last = self._bytes[number], path == self._files.segments[-1][1]
                if last or os.fstat(file.fileno()).st_size > end:
                    file.truncate(end)
                    os.fsync(file.fileno())
        if self._files.all:
            number, _ = self._files.all[-1]
            self._before = Place(number, self._bytes[number])

    async def read(self, stored: Stored) -> bytes:
        """One record again, as bytes. Raises JOURNAL_CORRUPT."""
        loop = asyncio.get_running_loop()
        while True:
            place = (stored.segment, stored.offset, stored.length)
            try:
                return await loop.run_in_executor(None, self._read, *place)
            except (FileNotFoundError, KeyError):
                if place == (stored.segment, stored.offset, stored.length):
                    raise
                # It was moved meanwhile.
            except SegmentCorrupt as error:
                raise DomainError(
                    Reason.JOURNAL_CORRUPT, f"a record cannot be read again: {error}"
                ) from error

    def _read(self, segment: int, offset: int, length: int) -> bytes:
        return read_payload(self._paths[segment], offset, length)

    # Appending

    async def start(self, snapshot: Snapshot) -> None:
        """Begins to write, after `replay`. Raises OSError."""
        self._snapshot = snapshot
        newest = max((number for number, _ in self._files.all), default=0)
        await self._in_thread(lambda: self._rotate(newest + 1))
        self._writing = asyncio.create_task(self._write_batches(), name="journal")

    def check_room(self, byte_count: int) -> None:
        """Raises DISK_FULL where records of so many bytes may not fit any more."""
        wanted = frame_length(byte_count) + self._pending_bytes + HEADROOM_BYTES
        kept = self._kept + self._other
        if kept + wanted > self._max_bytes // 2:
            message = f"the journal keeps {kept} bytes, {byte_count} more do not fit"
        elif not self._allocated(wanted):
            message = f"the disk of the journal has no room for {byte_count} bytes"
        else:
            return
        raise DomainError(
            Reason.DISK_FULL,
            message,
            {"kept_bytes": kept, "limit": self._max_bytes // 2},
            retry_after_seconds=5.0,
        )

    def _allocated(self, wanted: int) -> bool:
        writer, spare = self._writer, self._spare
        if wanted <= (writer.room if writer else 0) + (spare.room if spare else 0):
            return True
        # More than segments of the usual size take: one of its own is made for it.
        free = os.statvfs(self._folder)
        return wanted + self._segment_bytes <= free.f_bavail * free.f_frsize

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        """Returns once the records are durable, with where they lie."""
        return await self.begin_append(records, hold_last=hold_last)

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """Queues records; the future ends as `append` does. Raises JOURNAL_FAILED."""
        if self._failure is not None:
            raise self._failure
        payloads = [payload_of(record) for record in records]
        done: asyncio.Future[list[Stored]] = asyncio.get_running_loop().create_future()
        self._pending.append(_Append(payloads, hold_last, done))
        self._pending_bytes += sum(frame_length(payload_length(payload)) for payload in payloads)
        self._wake.set()
        return done

    def hold(self, stored: Stored) -> None:
        """A record that is read again later, and has to be kept until `release`."""
        self._held.add(stored)
        self._kept += stored.length

    def release(self, stored: Stored) -> None:
        """Nobody reads it again."""
        self._held.remove(stored)
        self._kept -= stored.length
        self._wake.set()

    async def _write_batches(self) -> None:
        """Consumes queued appends; waits for the next; produces durable records, until `close`."""
        while not (self._closing and not self._pending):
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, []
            try:
                await self._write_batch(batch)
                if self._compaction_due():
                    await self._begin_compaction()
            except Exception as error:  # Of any kind: otherwise no append would ever end again.
                self._fail(error, batch)
                return

    async def _write_batch(self, batch: list[_Append]) -> None:
        payloads = [payload for append in batch for payload in append.payloads]
        hit("journal.before_write")
        places = await self._in_thread(lambda: self._write(payloads))
        hit("journal.before_reply")
        self._pending_bytes -= sum(place.length for place in places)
        for append in batch:
            count = len(append.payloads)
            if append.hold_last:
                self.hold(places[count - 1])
            if not append.done.done():
                append.done.set_result(places[:count])
            places = places[count:]

    def _write(self, payloads: list[Payload]) -> list[Stored]:
        """In the thread."""
        places: list[Stored] = []
        part: list[Payload] = []
        length = 0
        for payload in payloads:
            more = frame_length(payload_length(payload))
            assert self._writer is not None
            if length + more > self._writer.room:
                places += self._write_part(part)
                part, length = [], 0
                self._rotate(self._writer.number + 1, more)
            part.append(payload)
            length += more
        places += self._write_part(part)
        assert self._writer is not None
        if payloads:
            if self._durability == "fsync":
                hit("journal.before_fsync")
                self._writer.sync()
            else:
                self._writer.rely()
        self._make_spare()
        return places

    def _write_part(self, payloads: list[Payload]) -> list[Stored]:
        writer = self._writer
        assert writer is not None
        places = writer.write(payloads) if payloads else []
        self._bytes[writer.number] = writer.end
        return [Stored(writer.number, offset, length) for offset, length in places]

    def _rotate(self, number: int, at_least: int = 0) -> None:
        """Goes on in a new segment; the one before is durable then."""
        if self._writer is not None:
            self._writer.trim()
            self._writer.sync()
            self._writer.close()
            self._before = Place(self._writer.number, self._writer.end)
        self._make_spare(at_least)
        if self._spare is None:
            raise OSError(28, "no room for another segment", str(self._folder))
        path = self._folder / f"{number:010d}.log"
        hit("journal.before_rotate")
        self._spare.begin(path, number, self._before)
        self._writer, self._spare = self._spare, None
        self._paths[number] = path
        self._bytes[number] = HEADER.size
        self._make_spare()

    def _make_spare(self, at_least: int = 0) -> None:
        """Room for the next segment; none where the disk has none, which `check_room` then says."""
        size = max(self._segment_bytes, at_least + HEADER.size + CLOSING_BYTES)
        if self._spare is not None:
            if self._spare.room >= at_least:
                return
            self._spare.close()
            self._spare = None
        try:
            self._spare = SegmentWriter(self._folder / "spare", size)
        except OSError as error:
            logger.error("no room for another segment of the journal: %s", error)

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
        needed = self._kept + self._other
        return sum(self._bytes.values()) - needed > max(self._segment_bytes, needed)

    async def _begin_compaction(self) -> None:
        """The state as it is now, and a later segment for what comes after."""
        assert self._snapshot is not None and self._writer is not None
        records = list(self._snapshot())
        named = {item for item in records if isinstance(item, Stored)}
        records += self._held - named
        pending = self.begin_append(())
        number = self._writer.number + 1
        await self._in_thread(lambda: self._rotate(number + 1))
        self._compacting = asyncio.create_task(
            self._compact(number, self._before, records, pending), name="compaction"
        )

    async def _compact(
        self,
        number: int,
        before: Place,
        records: list[SnapshotItem],
        pending: asyncio.Future[list[Stored]],
    ) -> None:
        try:
            await pending
            await self._replace_older(number, before, records)
        except (OSError, SegmentCorrupt, DomainError) as error:
            # Tried no more by this server: the older files stay, and say the same.
            logger.error("the journal cannot be compacted: %s", error)
        except Exception as error:  # A defect: what the journal holds is no longer known.
            self._fail(error, [])
        else:
            self.compactions += 1
            self._compacting = None

    async def _replace_older(self, number: int, before: Place, records: list[SnapshotItem]) -> None:
        written = await asyncio.to_thread(self._write_snapshot, number, before, records)
        older = [(n, path) for n, path in self._paths.items() if n < number]
        self._paths[number] = self._folder / f"{number:010d}.snapshot"
        self._bytes[number], self._other = written.end, written.other_bytes
        for stored, (offset, length) in written.moves:
            stored.segment, stored.offset, stored.length = number, offset, length
        for older_number, path in older:
            del self._paths[older_number]
            self._bytes.pop(older_number, None)
            try:
                # A file of some size takes tens of milliseconds, in which nothing else would be answered.
                await asyncio.to_thread(path.unlink)
            except OSError as error:
                # The next server removes it, for it is older than a snapshot.
                logger.error("%s stays: %s", path, error)

    def _write_snapshot(self, number: int, before: Place, records: list[SnapshotItem]) -> Written:
        """In a thread of its own."""

        def read(stored: Stored) -> bytes:
            return self._read(stored.segment, stored.offset, stored.length)

        return write_snapshot(self._folder, number, before, records, read)

    def _close_segment(self) -> None:
        assert self._writer is not None
        self._writer.sync()
        self._writer.write_closing()
        self._writer.sync()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Writes what is queued, and gives the folder back; once is enough."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if self._writing is not None:
            await self._writing
        if self._compacting is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._compacting
        if self._writer is not None and self._failure is None:
            await self._in_thread(self._close_segment)
        for writer in (self._writer, self._spare):
            if writer is not None:
                writer.close()
        (self._folder / "spare").unlink(missing_ok=True)
        self._thread.shutdown()
        self._lock.close()
