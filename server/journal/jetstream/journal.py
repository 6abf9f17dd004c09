"""The journal on NATS JetStream: for a hub whose machine may be lost with its disk.

States: opened (the stream is its own) -> replayed -> started -> closed, or failed. What is in the stream is
in `jetstream_log` and `jetstream_frames`, how it gets there in `jetstream_connection`.

Order of an append: records encoded -> queued -> with all that are queued by then, packed into messages ->
stored, large ones outside and before the message that refers to them -> answered. Appends end in the order
they began.

Compaction, once what nobody needs outgrows what somebody does: everything that was begun is stored -> BEGIN
-> the state as records, large ones that are held by reference, between what is appended meanwhile -> END ->
what came before BEGIN is removed. A server that stops in between reads from the BEGIN before it on. The
stream is made larger before it, where what servers that were killed in between left takes the room of the
copy, and as large as it should be after it.

What a failure does. While NATS is away appends wait, for `patience_seconds`. After that, and where NATS
refuses, or says that another server writes, or has lost what it had stored: nothing is answered any more,
`failed` says why, and the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from penstock.common.failpoints import hit
from penstock.server.config.settings import JournalSection
from penstock.server.core.errors import DomainError
from penstock.server.journal.compaction_pace import CompactionPace
from penstock.server.journal.jetstream.answers import JetStreamError
from penstock.server.journal.jetstream.frames import PLACE, Entry, FrameCorrupt, Kind, StoredOutside
from penstock.server.journal.jetstream.log import StreamLog
from penstock.server.journal.jetstream.snapshot import entry_bytes, entry_of, slice_snapshot
from penstock.server.journal.records import (
    Appended,
    FilePlace,
    Folder,
    JournalInUse,
    JournalUnreadable,
    OnFull,
    Record,
    Snapshot,
    SnapshotItem,
    Stored,
    no_way_to_give,
)
from penstock.wire.frames import frame_length
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

HEADROOM_BYTES = 1 << 20
"""For what is appended without asking: receipts and the like, which make room."""
BATCH_BYTES = 8 << 20
MOST_MESSAGES = 1 << 14
"""Messages since the last snapshot: to read one at a start costs, however short it is."""
MARKS = (Kind.BEGIN, Kind.END)


@dataclass(eq=False)
class _Append:
    entries: list[Entry]
    hold_last: bool
    done: asyncio.Future[list[Stored]]
    byte_count: int

    @property
    def waits_for_room(self) -> bool:
        """Whether it counts as what is about to be appended; a snapshot is a copy."""
        return bool(self.entries) and self.entries[0].kind is Kind.RECORD

    @property
    def mark(self) -> bool:
        """Whether it has a message of its own."""
        return bool(self.entries) and self.entries[0].kind in MARKS


class JetStreamJournal:
    """Durable records in a stream; see `journal.Journal` for what each method promises."""

    def __init__(self, section: JournalSection) -> None:
        """Not opened yet."""
        self._log = StreamLog(section)
        self._max_bytes = section.max_bytes
        self._most_kept = section.max_bytes // 3
        """Bytes of what may be needed, with room in the stream for its copy."""
        self._segment_bytes = section.segment_bytes
        self._held: set[Stored] = set()
        self._kept = 0
        """Bytes of the records that are held."""
        self._other = 0
        """Bytes of the records that no one holds, and that count: as of the last snapshot."""
        self._pending: deque[_Append] = deque()
        self._pending_bytes = 0
        self._batch: list[_Append] = []
        """What is being stored."""
        self._wake = asyncio.Event()
        self._closing = False
        self._writing: asyncio.Task[None] | None = None
        self._compacting: asyncio.Task[None] | None = None
        self._pace = CompactionPace()
        self.on_full: OnFull = no_way_to_give
        self._failure: DomainError | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._snapshot: Snapshot | None = None
        self.compactions = 0
        """Compactions finished."""

    @property
    def on_disk(self) -> bool:
        """All of it."""
        return True

    @property
    def folder(self) -> Folder | None:
        """None: it is on another machine."""
        return None

    @property
    def refers_from(self) -> int | None:
        """None: a message is read by itself."""
        return None

    # Opening

    async def open(self) -> None:
        """Takes the stream. Raises JournalInUse and JournalUnreadable."""
        try:
            await self._log.open()
        except (JournalInUse, JournalUnreadable):
            await self._log.close()
            raise

    def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Every record as the last server left them. Raises JournalUnreadable."""
        return self._log.replay()

    async def read(self, stored: Stored) -> bytes:
        """One record again, as bytes. Raises JOURNAL_CORRUPT, and JOURNAL_FAILED where NATS is away."""
        while True:
            place = (stored.segment, stored.offset)
            try:
                return await self._log.read(stored)
            except FrameCorrupt as error:
                if place != (stored.segment, stored.offset):
                    continue  # It was moved meanwhile.
                raise DomainError(
                    Reason.JOURNAL_CORRUPT, f"a record cannot be read again: {error}"
                ) from error
            except JetStreamError as error:
                raise self._fail(error) from error

    def place(self, stored: Stored) -> FilePlace | None:
        """None: it is in no file of this host."""
        return None

    # Appending

    async def start(self, snapshot: Snapshot) -> None:
        """Begins to write, after `replay`. Raises OSError."""
        self._snapshot = snapshot
        try:
            await self._log.clear()
        except JetStreamError as error:
            raise OSError(str(error)) from error
        self._writing = asyncio.create_task(self._write_batches(), name="journal")

    def check_room(self, byte_count: int) -> None:
        """Raises DISK_FULL where records of so many bytes may not fit any more."""
        wanted = frame_length(byte_count) + self._pending_bytes + HEADROOM_BYTES
        kept, limit = self._kept + self._other, self._most_kept
        if kept + wanted > limit:
            self.on_full(wanted)
            self._pace.press()
            self._wake.set()
            raise DomainError(
                Reason.DISK_FULL,
                f"the journal keeps {kept} bytes, {byte_count} more do not fit",
                {"kept_bytes": kept, "limit": limit},
                retry_after_seconds=5.0,
            )

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        """Returns once the records are durable, with where they lie."""
        return await self.begin_append(records, hold_last=hold_last)

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """Queues records; the future ends as `append` does. Raises JOURNAL_FAILED."""
        return self._queue([entry_of(record) for record in records], hold_last=hold_last)

    def _queue(
        self, entries: list[Entry], *, hold_last: bool = False, first: bool = False
    ) -> asyncio.Future[list[Stored]]:
        if self._failure is not None:
            raise self._failure
        done: asyncio.Future[list[Stored]] = asyncio.get_running_loop().create_future()
        append = _Append(entries, hold_last, done, sum(map(entry_bytes, entries)))
        if first:
            self._pending.appendleft(append)
        else:
            self._pending.append(append)
        if append.waits_for_room:
            self._pending_bytes += append.byte_count
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
        self._pace.change()
        self._wake.set()

    async def _write_batches(self) -> None:
        """Consumes queued appends; waits for the next; produces durable records, until `close`."""
        try:
            while not (self._closing and not self._pending):
                if not self._pending:
                    await self._wake.wait()
                self._wake.clear()
                await self._write_batch()
                if self._compaction_due():
                    self._begin_compaction()
        except Exception as error:  # Of any kind: otherwise no append would ever end again.
            self._fail(error)

    async def _write_batch(self) -> None:
        self._batch = batch = self._take_batch()
        hit("journal.before_write")
        places = await self._log.store([entry for append in batch for entry in append.entries])
        hit("journal.before_reply")
        for append in batch:
            if append.waits_for_room:
                self._pace.change()
                self._pending_bytes -= append.byte_count
            count = len(append.entries)
            if append.hold_last:
                self.hold(places[count - 1])
            if not append.done.done():
                append.done.set_result(places[:count])
            places = places[count:]
        self._batch = []

    def _take_batch(self) -> list[_Append]:
        batch: list[_Append] = []
        size = 0
        while self._pending:
            following = self._pending[0]
            if batch and (
                following.mark or batch[0].mark or size + following.byte_count > BATCH_BYTES
            ):
                break
            size += following.byte_count
            batch.append(self._pending.popleft())
        return batch

    def _fail(self, error: Exception) -> DomainError:
        if self._failure is None:
            message = f"the journal cannot be written: {error}"
            foreseen = isinstance(error, JetStreamError | OSError)
            logger.critical("%s", message, exc_info=None if foreseen else error)
            self._failure = DomainError(Reason.JOURNAL_FAILED, message)
            self.failed.set_result(message)
        for append in (*self._batch, *self._pending):
            if not append.done.done():
                append.done.set_exception(self._failure)
        self._batch = []
        self._pending.clear()
        self._wake.set()
        return self._failure

    # Compaction

    def _compaction_due(self) -> bool:
        if self._compacting is not None or self._snapshot is None or self._closing:
            return False
        if not self._pace.may_begin:
            return False
        needed = self._kept + self._other
        # What was appended since the last snapshot may all be needed, and is copied then: a third of the
        # stream, and this sixth, twice.
        most = min(max(self._segment_bytes, needed), self._max_bytes // 6)
        outgrown = self._log.byte_count - needed > most
        return outgrown or self._log.message_count > MOST_MESSAGES or self._pace.is_pressed

    def _begin_compaction(self) -> None:
        """The state as it is now, when everything that was begun is stored."""
        assert self._snapshot is not None
        began = asyncio.get_running_loop().time()
        self._pace.begun()
        items = list(self._snapshot())
        named = {item for item in items if isinstance(item, Stored)}
        items += self._held - named
        begun = self._queue([Entry(Kind.BEGIN, ())], first=True)
        before = self._log.log_bytes
        self._compacting = asyncio.create_task(
            self._compact(items, begun, before, began), name="compaction"
        )

    async def _compact(
        self,
        items: list[SnapshotItem],
        begun: asyncio.Future[list[Stored]],
        before: int,
        began: float,
    ) -> None:
        try:
            (begin,) = await begun
            await self._log.make_room(self._most_kept)
            carried = await self._write_snapshot(begin.segment, items, before)
            await self._log.remove(carried)
        except DomainError:
            return  # What is appended fails too, and says why.
        except (JetStreamError, FrameCorrupt) as error:
            # What is there stays, and says the same.
            if self._pace.failed(began, self._wake.set):
                logger.error("the journal cannot be compacted: %s; this is tried again", error)
        except Exception as error:  # A defect: what the journal holds is no longer known.
            self._fail(error)
            return
        else:
            self.compactions += 1
            self._pace.ended(began)
        self._compacting = None
        self._wake.set()

    async def _write_snapshot(self, begin: int, items: list[SnapshotItem], before: int) -> set[int]:
        """Returns the first messages of records that are outside and are still needed."""
        moves: list[tuple[Stored, Stored]] = []
        other = 0
        async for part in slice_snapshot(self._log.connection, items):
            places = await self._queue([entry for _, entry in part])
            for (item, _), place in zip(part, places, strict=True):
                if item is None:
                    other += place.length
                else:
                    moves.append((item, place))
        hit("journal.before_snapshot_fsync")
        (end,) = await self._queue([Entry(Kind.END, (PLACE.pack(begin),))])
        hit("journal.before_snapshot_clean_up")
        for stored, place in moves:
            stored.segment, stored.offset = place.segment, place.offset
        self._other = other
        self._log.snapshot_stored(begin, end.segment, before)
        return {stored.reference.first for stored, _ in moves if isinstance(stored, StoredOutside)}

    async def close(self) -> None:
        """Writes what is queued, and gives the stream back; once is enough."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        if self._compacting is not None:
            self._compacting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._compacting
        if self._writing is not None:
            await self._writing
        await self._log.close()
