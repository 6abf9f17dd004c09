"""Reads the stream of a journal, from the last whole snapshot on.

Every message from there on must be present, in order and whole. The one exception is a message that NATS
was writing when it lost power: its sequence stays empty, and the next message is of the server that
started afterwards. If NATS syncs each message before it acknowledges it, that message was never
acknowledged. If not, other messages may be missing as well, and an empty sequence counts as a loss.

Records appended while a snapshot was written lie between its records, but are newer. They are yielded after
the end of the snapshot. Snapshots without an end are ignored, and so is whatever their server failed to
remove.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from penstock.server.journal.jetstream.answers import Fetched
from penstock.server.journal.jetstream.connection import Connection
from penstock.server.journal.jetstream.frames import (
    IN_SNAPSHOT,
    MESSAGE_OVERHEAD,
    PLACE,
    FrameCorrupt,
    Kind,
    StoredOutside,
    outside_bytes,
    read_at,
    read_message,
)
from penstock.server.journal.protocol import Record, Stored
from penstock.wire.messages import JournalRecord

logger = logging.getLogger(__name__)

AHEAD = 64
"""Messages requested ahead, concurrently."""


@dataclass(eq=False)
class StreamReading:
    """The range to read, and totals that are filled in while reading."""

    connection: Connection
    begin: int
    last: int
    synced: bool
    """Whether NATS syncs each message before it acknowledges it."""
    outside: dict[int, int] = field(default_factory=dict[int, int])
    """Bytes of each record outside the log, by the sequence of its first message."""
    log_bytes: int = 0
    snapshot_end: int = 0


def begin_of(end: Fetched) -> int:
    """Return the sequence where the snapshot that ends with this message begins. Raises FrameCorrupt."""
    found = list(read_message(end.sequence, end.body))[-1]
    if found.kind is not Kind.END:
        raise FrameCorrupt(f"message {end.sequence} does not end a snapshot")
    return int(PLACE.unpack(found.content)[0])


async def replay_messages(reading: StreamReading) -> AsyncIterator[tuple[Record, Stored]]:
    """Yield every record, oldest first. Raises FrameCorrupt and JetStreamError."""
    connection = reading.connection
    in_snapshot = False
    aside: list[tuple[memoryview, Stored]] = []
    chunks: dict[int, bytes] = {}
    async for message in _fetch_told(reading):
        if not connection.subjects.is_log(message.subject):
            chunks[message.sequence] = message.body
            continue
        reading.log_bytes += len(message.body) + MESSAGE_OVERHEAD
        for found in read_message(message.sequence, message.body):
            stored = found.stored
            if isinstance(stored, StoredOutside) and (in_snapshot or found.kind not in IN_SNAPSHOT):
                reading.outside[stored.reference.first] = outside_bytes(stored.reference)
            if found.kind is Kind.BEGIN and message.sequence == reading.begin:
                in_snapshot = True
            elif found.kind is Kind.END and in_snapshot:
                in_snapshot = False
                reading.snapshot_end = message.sequence
                for content, each in aside:
                    yield await _record(connection, content, each, {}), each
                aside.clear()
            elif found.kind is Kind.RECORD or found.kind is Kind.REFERENCE:
                if in_snapshot:
                    aside.append((found.content, stored))
                else:
                    yield await _record(connection, found.content, stored, chunks), stored
            elif found.kind in IN_SNAPSHOT and in_snapshot:
                yield await _record(connection, found.content, stored, chunks), stored
        chunks.clear()
    if in_snapshot:
        raise FrameCorrupt(f"the snapshot that begins with message {reading.begin} has no end")


async def _record(
    connection: Connection, content: memoryview, stored: Stored, chunks: dict[int, bytes]
) -> Record:
    data = bytes(content)
    if isinstance(stored, StoredOutside):
        reference = stored.reference
        places = range(reference.first, reference.first + reference.count)
        if all(place in chunks for place in places):
            data = reference.join([chunks[place] for place in places])
        else:
            data = await read_stored(connection, stored)
    try:
        return JournalRecord.FromString(data)
    except Exception as error:  # protobuf raises several types.
        raise FrameCorrupt(
            f"message {stored.segment} at {stored.offset} is not a valid record: {error}"
        ) from error


async def read_stored(connection: Connection, stored: Stored) -> bytes:
    """Read a record again. Raises FrameCorrupt and JetStreamError."""
    if isinstance(stored, StoredOutside):
        first = stored.reference.first
        last = first + stored.reference.count - 1
        bodies: list[bytes] = []
        async with aclosing(_fetch_places(connection, first, last)) as places:
            async for sequence, message in places:
                if message is None:
                    raise FrameCorrupt(f"message {sequence} is missing")
                bodies.append(message.body)
        return stored.reference.join(bodies)
    # Copy the location: a compaction may update `stored` during the fetch.
    sequence, offset = stored.segment, stored.offset
    message = await connection.fetch(sequence)
    if message is None:
        raise FrameCorrupt(f"message {sequence} is missing")
    found, _ = read_at(sequence, message.body, offset)
    return bytes(found.content)


async def _fetch_told(reading: StreamReading) -> AsyncIterator[Fetched]:
    """Yield every acknowledged message, in order. Raises FrameCorrupt and JetStreamError."""
    missing = 0
    async with aclosing(_fetch_places(reading.connection, reading.begin, reading.last)) as places:
        async for sequence, message in places:
            if message is None and missing:
                break
            if message is None:
                missing = sequence
                continue
            if missing:
                if not (reading.synced and _begins_anew(reading.connection, message)):
                    break
                logger.warning(
                    "message %d was never whole and is skipped: NATS lost power while writing it",
                    missing,
                )
                missing = 0
            yield message
    if missing:
        raise FrameCorrupt(f"message {missing} is missing")


def _begins_anew(connection: Connection, message: Fetched) -> bool:
    """Whether it is the first message of a newly started server."""
    if not connection.subjects.is_log(message.subject):
        return False
    return next(read_message(message.sequence, message.body)).kind is Kind.OWNER


async def _fetch_places(
    connection: Connection, first: int, last: int
) -> AsyncGenerator[tuple[int, Fetched | None]]:
    """Yield each sequence of a range with its message or None, in order. Raises JetStreamError."""
    ahead: deque[asyncio.Task[Fetched | None]] = deque()
    wanted = first
    try:
        for sequence in range(first, last + 1):
            while wanted <= last and len(ahead) < AHEAD:
                ahead.append(asyncio.create_task(connection.fetch(wanted)))
                wanted += 1
            message = await ahead[0]
            ahead.popleft()
            yield sequence, message
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
