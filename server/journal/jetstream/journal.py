"""The journal on NATS JetStream, for a hub whose machine may be lost along with its disk.

`log` and `frames` define the content of the stream, `connection` the transport.

Append: encode the records -> queue them -> pack everything queued into messages -> store them -> answer.

Compaction starts when obsolete bytes outgrow the live ones:

    1. store everything that was begun, then BEGIN
    2. store the state as records, interleaved with appended ones; large held records by reference
    3. store END
    4. remove everything before BEGIN

A server that stops in between is followed by one that reads from the previous BEGIN.

While NATS is unreachable, appends wait for up to `patience_seconds`. The journal fails after that, or if
NATS refuses, reports another writer, or has lost stored messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from penstock.common.failpoints import hit
from penstock.server.config.journal import JournalSection
from penstock.server.core.errors import DomainError
from penstock.server.journal.appending import Append, AppendingJournal
from penstock.server.journal.jetstream.answers import JetStreamError
from penstock.server.journal.jetstream.connection import Connection
from penstock.server.journal.jetstream.frames import PLACE, Entry, FrameCorrupt, Kind, StoredOutside
from penstock.server.journal.jetstream.log import StreamLog
from penstock.server.journal.jetstream.reading import read_stored
from penstock.server.journal.protocol import (
    Appended,
    Deferred,
    JournalInUse,
    JournalUnreadable,
    Record,
    SnapshotItem,
    Stored,
    payload_of,
)
from penstock.wire.frames import frame_length
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

HEADROOM_BYTES = 1 << 20
"""Reserved for appends that do not call `check_room`: receipts and other records that free room."""
BATCH_BYTES = 8 << 20
MOST_MESSAGES = 1 << 14
"""Maximum number of messages since the last snapshot. At start each costs time, however short it is."""
SLICE_BYTES = 1 << 20
"""Size of a slice of a snapshot; appends can be stored between two slices."""
ENCODED_AT_A_TIME = 64

Slice = list[tuple[Stored | None, Entry]]
"""Entries, each with the location of the record it copies, if any."""


class JetStreamJournal(AppendingJournal[Entry]):
    folder = None  # It is on another machine.
    refers_from = None  # Each message is read on its own, so groups are written whole.

    def __init__(self, section: JournalSection) -> None:
        super().__init__(_entry_of, (JetStreamError, FrameCorrupt))
        self._log = StreamLog(section)
        self._max_bytes = section.max_bytes
        self._most_kept = section.max_bytes // 3
        """Maximum bytes of live records, so that the stream has room for their copy."""
        self._segment_bytes = section.segment_bytes
        self._kept = 0
        """Bytes of held records."""
        self._other = 0
        """Bytes of the state's records that are not held, as of the last snapshot."""

    # Opening

    async def open(self) -> None:
        """Connect and become the stream's writer. Raises JournalInUse and JournalUnreadable."""
        try:
            await self._log.open()
        except (JournalInUse, JournalUnreadable):
            await self._log.connection.close()
            raise

    def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        return self._log.replay()

    async def read(self, stored: Stored) -> bytes:
        """Raises JOURNAL_CORRUPT, and JOURNAL_FAILED if NATS fails."""
        while True:
            place = (stored.segment, stored.offset)
            try:
                return await read_stored(self._log.connection, stored)
            except FrameCorrupt as error:
                if place != (stored.segment, stored.offset):
                    continue  # A compaction moved it meanwhile.
                raise DomainError(
                    Reason.JOURNAL_CORRUPT, f"a record cannot be read again: {error}"
                ) from error
            except JetStreamError as error:
                raise self._fail(error) from error

    def place(self, stored: Stored) -> None:
        return None

    # Appending

    async def _prepare(self) -> None:
        try:
            await self._log.clear()
        except JetStreamError as error:
            raise OSError(str(error)) from error

    def check_room(self, byte_count: int) -> None:
        wanted = frame_length(byte_count) + self._pending_bytes + HEADROOM_BYTES
        kept, limit = self._kept + self._other, self._most_kept
        if kept + wanted > limit:
            message = f"the journal keeps {kept} bytes; {byte_count} more do not fit"
            raise self._refuse(wanted, message, kept, limit)

    def _count_held(self, stored: Stored, sign: int) -> None:
        self._kept += sign * stored.length

    async def _write(self, entries: Sequence[Entry]) -> list[Stored]:
        return await self._log.store(entries)

    def _take_batch(self) -> list[Append[Entry]]:
        """Take at most BATCH_BYTES; BEGIN and END each get a separate batch, and so a separate message."""
        batch: list[Append[Entry]] = []
        size = 0
        while self._queue:
            following = self._queue[0]
            size += following.byte_count
            if batch and (_is_mark(following) or _is_mark(batch[0]) or size > BATCH_BYTES):
                self._wake.set()
                break
            batch.append(self._queue.popleft())
        return batch

    # Compaction

    def _is_outgrown(self) -> bool:
        needed = self._kept + self._other
        # Everything appended since the last snapshot may be live, and is then copied. So the stream
        # holds twice: a third of its size, and this sixth.
        most = min(max(self._segment_bytes, needed), self._max_bytes // 6)
        return self._log.byte_count - needed > most or self._log.message_count > MOST_MESSAGES

    async def _begin_compaction(self) -> None:
        """Take the current state and queue BEGIN ahead of everything else that is queued."""
        began = asyncio.get_running_loop().time()
        items = self._take_state()
        begun = self._enqueue([Entry(Kind.BEGIN, ())], waits_for_room=False, first=True)
        before = self._log.log_bytes
        self._compact(began, lambda: self._replace_older(items, begun, before))

    async def _replace_older(
        self, items: list[SnapshotItem], begun: asyncio.Future[list[Stored]], before: int
    ) -> float:
        (begin,) = await begun
        await self._log.make_room(self._most_kept)
        carried = await self._write_snapshot(begin.segment, items, before)
        await self._log.remove(carried)
        return 0.0

    async def _write_snapshot(self, begin: int, items: list[SnapshotItem], before: int) -> set[int]:
        """Store the snapshot; returns the first sequences of records outside the log still needed."""
        moves: list[tuple[Stored, Stored]] = []
        other = 0
        async for part in _slices(self._log.connection, items):
            places = await self._enqueue([entry for _, entry in part], waits_for_room=False)
            for (item, _), place in zip(part, places, strict=True):
                if item is None:
                    other += place.length
                else:
                    moves.append((item, place))
        hit("journal.before_snapshot_fsync")
        (end,) = await self._enqueue([Entry(Kind.END, (PLACE.pack(begin),))], waits_for_room=False)
        hit("journal.before_snapshot_clean_up")
        for stored, place in moves:
            stored.segment, stored.offset = place.segment, place.offset
        self._other = other
        self._log.snapshot_stored(begin, end.segment, before)
        return {stored.reference.first for stored, _ in moves if isinstance(stored, StoredOutside)}

    async def _end(self) -> None:
        if self._compacting is not None:
            self._compacting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._compacting
        if self._writing is not None:
            await self._writing
        await self._log.connection.close()


def _is_mark(append: Append[Entry]) -> bool:
    return bool(append.entries) and append.entries[0].kind in (Kind.BEGIN, Kind.END)


def _entry_of(record: Appended) -> Entry:
    return Entry(Kind.RECORD, payload_of(record))


async def _slices(connection: Connection, items: Sequence[SnapshotItem]) -> AsyncIterator[Slice]:
    """Yield a snapshot in slices, in order; a thread encodes it. Raises FrameCorrupt and JetStreamError."""
    part: Slice = []
    size = 0
    async for stored, entry in _entries(connection, items):
        part.append((stored, entry))
        size += entry.frame_bytes
        if size >= SLICE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


async def _entries(
    connection: Connection, items: Sequence[SnapshotItem]
) -> AsyncIterator[tuple[Stored | None, Entry]]:
    waiting: list[Appended | Deferred] = []
    for item in items:
        if not isinstance(item, Stored):
            waiting.append(item)
            if len(waiting) < ENCODED_AT_A_TIME:
                continue
        for entry in await asyncio.to_thread(_encode, waiting):
            yield None, entry
        waiting = []
        if isinstance(item, StoredOutside):
            yield item, Entry(Kind.SNAPSHOT_REFERENCE, (), item.reference)
        elif isinstance(item, Stored):
            yield item, Entry(Kind.SNAPSHOT_RECORD, (await read_stored(connection, item),))
    for entry in await asyncio.to_thread(_encode, waiting):
        yield None, entry


def _encode(items: Sequence[Appended | Deferred]) -> list[Entry]:
    found: list[Entry] = []
    for item in items:
        records = item.make() if isinstance(item, Deferred) else (item,)
        found += [Entry(Kind.SNAPSHOT_RECORD, payload_of(record)) for record in records]
    return found
