"""Turns a snapshot into entries for a journal's stream, slice by slice. Encodes records in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from penstock.server.journal.jetstream.connection import Connection
from penstock.server.journal.jetstream.frames import Entry, Kind, StoredOutside
from penstock.server.journal.jetstream.reading import read_stored
from penstock.server.journal.protocol import Appended, Deferred, EncodedRecord, SnapshotItem, Stored

SLICE_BYTES = 1 << 20
"""Size of a slice; appends can be stored between two slices."""
ENCODED_AT_A_TIME = 64

Slice = list[tuple[Stored | None, Entry]]
"""Entries, each with the location of the record it copies, if any."""


def entry_of(record: Appended, kind: Kind = Kind.RECORD) -> Entry:
    """Encode a record as an entry."""
    parts = record.parts if isinstance(record, EncodedRecord) else (record.SerializeToString(),)
    return Entry(kind, parts)


async def slice_snapshot(
    connection: Connection, items: Sequence[SnapshotItem]
) -> AsyncIterator[Slice]:
    """Yield a snapshot in slices, in order. Raises FrameCorrupt and JetStreamError."""
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
        found += [entry_of(record, Kind.SNAPSHOT_RECORD) for record in records]
    return found
