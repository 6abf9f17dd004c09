"""The journal on NATS JetStream, for a hub whose machine may be lost along with its disk.

States: opened (this server owns the stream) -> replayed -> started -> closed or failed.
`jetstream_log` and `jetstream_frames` define the content of the stream, `jetstream_connection` the
transport.

Append: encode the records -> queue them -> pack everything queued into messages -> store them ->
answer. Large records go outside the log, before the message that refers to them. Appends complete
in the order in which they began.

Compaction starts when obsolete bytes outgrow the live ones:

    1. store everything that was begun, then BEGIN
    2. store the state as records, interleaved with appended ones; large held records by reference
    3. store END
    4. remove everything before BEGIN

A server that stops in between is followed by one that reads from the previous BEGIN. If killed
servers left so much that the copy has no room, the stream is enlarged before step 2. It gets its
normal size back at the end.

Failure. While NATS is unreachable, appends wait for up to `patience_seconds`. The journal fails
after that, or if NATS refuses, reports another writer, or has lost stored messages. It then answers
no append, `failed` gives the reason, and the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from penstock.common.failpoints import hit
from penstock.server.config.journal import JournalSection
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
"""Reserved for appends that do not call `check_room`: receipts and other records that free room."""
BATCH_BYTES = 8 << 20
MOST_MESSAGES = 1 << 14
"""Maximum number of messages since the last snapshot. At start each costs time, however short it
is."""
MARKS = (Kind.BEGIN, Kind.END)


@dataclass(eq=False)
class _Append:
    entries: list[Entry]
    hold_last: bool
    done: asyncio.Future[list[Stored]]
    byte_count: int

    @property
    def waits_for_room(self) -> bool:
        """Whether it counts as pending bytes; a snapshot does not, because it is a copy."""
        return bool(self.entries) and self.entries[0].kind is Kind.RECORD

    @property
    def mark(self) -> bool:
        """Whether it is BEGIN or END, which get a separate message."""
        return bool(self.entries) and self.entries[0].kind in MARKS


class JetStreamJournal:
    """Durable records in a stream; see `journal.Journal` for what each method promises."""

    def __init__(self, section: JournalSection) -> None:
        self._log = StreamLog(section)
        self._max_bytes = section.max_bytes
        self._most_kept = section.max_bytes // 3
        """Maximum bytes of live records, so that the stream has room for their copy."""
        self._segment_bytes = section.segment_bytes
        self._held: set[Stored] = set()
        self._kept = 0
        """Bytes of held records."""
        self._other = 0
        """Bytes of the state's records that are not held, as of the last snapshot."""
        self._pending: deque[_Append] = deque()
        self._pending_bytes = 0
        self._batch: list[_Append] = []
        """Appends that are being stored."""
        self._wake = asyncio.Event()
        self._closing = False
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
        """None: the journal is on another machine."""
        return None

    @property
    def refers_from(self) -> int | None:
        """None: groups are written whole, because each message is read on its own."""
        return None

    # Opening

    async def open(self) -> None:
        """Connect and become the stream's writer. Raises JournalInUse and JournalUnreadable."""
        try:
            await self._log.open()
        except (JournalInUse, JournalUnreadable):
            await self._log.close()
            raise

    def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Yield every record that the previous server left. Raises JournalUnreadable."""
        return self._log.replay()

    async def read(self, stored: Stored) -> bytes:
        """Read a record again, as bytes. Raises JOURNAL_CORRUPT, and JOURNAL_FAILED if NATS
        fails."""
        while True:
            place = (stored.segment, stored.offset)
            try:
                return await self._log.read(stored)
            except FrameCorrupt as error:
                if place != (stored.segment, stored.offset):
                    continue  # A compaction moved it meanwhile.
                raise DomainError(
                    Reason.JOURNAL_CORRUPT, f"a record cannot be read again: {error}"
                ) from error
            except JetStreamError as error:
                raise self._fail(error) from error

    def place(self, stored: Stored) -> FilePlace | None:
        """None: the record is not in a file on this host."""
        return None

    # Appending

    async def start(self, snapshot: Snapshot, on_full: OnFull = no_way_to_give) -> None:
        """Clean up and begin to write; called after `replay`. Raises OSError."""
        self._snapshot, self._on_full = snapshot, on_full
        try:
            await self._log.clear()
        except JetStreamError as error:
            raise OSError(str(error)) from error
        self._writing = asyncio.create_task(self._write_batches(), name="journal")

    def check_room(self, byte_count: int) -> None:
        """Raise DISK_FULL if records of `byte_count` bytes may not fit any more."""
        wanted = frame_length(byte_count) + self._pending_bytes + HEADROOM_BYTES
        kept, limit = self._kept + self._other, self._most_kept
        if kept + wanted > limit:
            self._on_full(wanted)
            self._pace.press()
            self._wake.set()
            raise DomainError(
                Reason.DISK_FULL,
                f"the journal keeps {kept} bytes; {byte_count} more do not fit",
                {"kept_bytes": kept, "limit": limit},
                retry_after_seconds=5.0,
            )

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        """Append records; returns their locations once they are durable."""
        return await self.begin_append(records, hold_last=hold_last)

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        """Queue records; the future completes as `append` does. Raises JOURNAL_FAILED."""
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
        """Keep a record, which will be read again, until `release`."""
        self._held.add(stored)
        self._kept += stored.length

    def release(self, stored: Stored) -> None:
        """Stop keeping a record; it may be dropped by the next compaction."""
        self._held.remove(stored)
        self._kept -= stored.length
        self._pace.change()
        self._wake.set()

    async def _write_batches(self) -> None:
        """Write queued appends in batches until `close`, and begin compactions between batches."""
        try:
            while not (self._closing and not self._pending):
                if not self._pending:
                    await self._wake.wait()
                self._wake.clear()
                await self._write_batch()
                if self._compaction_due():
                    self._begin_compaction()
        except Exception as error:  # Any error: otherwise pending appends would never complete.
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
        # Everything appended since the last snapshot may be live, and is then copied. So the stream
        # holds twice: a third of its size, and this sixth.
        most = min(max(self._segment_bytes, needed), self._max_bytes // 6)
        outgrown = self._log.byte_count - needed > most
        return outgrown or self._log.message_count > MOST_MESSAGES or self._pace.is_pressed

    def _begin_compaction(self) -> None:
        """Take the current state and queue BEGIN ahead of everything else that is queued."""
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
            return  # The journal failed, and `_fail` reported it.
        except (JetStreamError, FrameCorrupt) as error:
            # Nothing is lost: the older messages hold the same state.
            if self._pace.failed(began, self._wake.set):
                logger.error("the journal cannot be compacted, will retry: %s", error)
        except Exception as error:  # A bug: what the journal holds is no longer known.
            self._fail(error)
            return
        else:
            self.compactions += 1
            self._pace.ended(began)
        self._compacting = None
        self._wake.set()

    async def _write_snapshot(self, begin: int, items: list[SnapshotItem], before: int) -> set[int]:
        """Store the snapshot; returns the first sequences of records outside the log still
        needed."""
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
        """Write what is queued and give up the stream. Idempotent."""
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
