"""The content of a journal's stream: taking it over, reading, appending, and removing obsolete messages.

A server that opens the stream asks which server writes to it. If no writer answers, and none starts to
listen for a while, the server writes OWNER to the next sequence. Every later message of another server
then finds its sequence occupied.

The server counts the sequences itself, and NATS stores each message under its sequence or not at all. So
no message is duplicated, and none is missing unless NATS lost power (see `reading`). Nothing after the
BEGIN of the last whole snapshot is ever removed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence

from penstock.server.config.journal import JournalSection
from penstock.server.journal.jetstream.answers import Fenced, JetStreamError, StreamState
from penstock.server.journal.jetstream.connection import Connection
from penstock.server.journal.jetstream.frames import (
    MESSAGE_OVERHEAD,
    Entry,
    FrameCorrupt,
    Kind,
    Packing,
    StoredOutside,
    outside_bytes,
)
from penstock.server.journal.jetstream.reading import (
    StreamReading,
    begin_of,
    replay_messages,
)
from penstock.server.journal.jetstream.stream import (
    fit_stream,
    list_outside,
    open_stream,
    purge,
    why_not_synced,
)
from penstock.server.journal.protocol import JournalInUse, JournalUnreadable, Record, Stored

OWNER_SECONDS = 10.0
"""How long a listening writer may take to answer before its stream is taken over."""
ABSENT_SECONDS = 3.0
"""How long a stream must be without a listening writer before it is free, unless it is empty.

A NATS server that just started knows no listeners yet. A writer that survived its restart reconnects
within a tenth of a second, or, if the machine was unreachable too, after a TCP retransmission.
"""
TRIES = 3
"""Attempts to take a stream that has no writer but whose next sequence turns out to be occupied."""
MESSAGE_BYTES = 256 << 10
INLINE_BYTES = 64 << 10
"""Largest record stored inside the log. Kept small, because each compaction copies the held ones."""


class StreamLog:
    def __init__(self, section: JournalSection) -> None:
        self._section = section
        synced = section.durability == "fsync"
        self.connection = Connection(section, self._why_not_synced if synced else None)
        self._packing = Packing(self.connection.subjects, MESSAGE_BYTES, INLINE_BYTES)
        self._next = 1
        self._begin = 1
        """Sequence from which a restarted server reads."""
        self._snapshot_end = 0
        """Sequence of the last message of the newest snapshot."""
        self._outside: dict[int, int] = {}
        """Bytes of each record outside the log, by the sequence of its first message."""
        self._outside_bytes = 0
        self.log_bytes = 0
        """Bytes of the log, from `_begin` on."""

    @property
    def byte_count(self) -> int:
        """Bytes of everything in the stream that is not about to be removed."""
        return self.log_bytes + self._outside_bytes

    @property
    def message_count(self) -> int:
        """Messages since the newest snapshot."""
        return self._next - 1 - self._snapshot_end

    async def _why_not_synced(self) -> str | None:
        assert self._section.monitor is not None, "required by the configuration"
        return await why_not_synced(self._section.monitor, self.connection.told("server_id"))

    # Opening

    async def open(self) -> None:
        """Connect and become the stream's writer. Raises JournalInUse and JournalUnreadable."""
        try:
            await self.connection.connect()
            await self._take()
        except Fenced as error:
            raise JournalInUse(str(error)) from error
        except (JetStreamError, FrameCorrupt) as error:
            raise JournalUnreadable(
                f"the stream {self._section.stream} cannot be opened: {error}"
            ) from error

    async def _take(self) -> None:
        section, connection = self._section, self.connection
        if connection.max_payload < MESSAGE_BYTES + MESSAGE_OVERHEAD:
            raise JournalUnreadable(
                f"the NATS server accepts messages of at most {connection.max_payload} bytes "
                f"(max_payload), but the journal needs {MESSAGE_BYTES + MESSAGE_OVERHEAD}"
            )
        state = await self._own()
        monitored = connection.told("server_name")
        if section.durability == "fsync" and state.leader not in ("", monitored):
            raise JournalUnreadable(
                f"the stream {section.stream} is kept by the NATS server {state.leader}, but "
                f"{section.monitor} monitors {monitored}: cannot check that it syncs writes"
            )
        end = await connection.fetch_one({"last_by_subj": connection.subjects.end})
        if end is not None:
            self._begin = begin_of(end)
        elif state.first > 1:
            raise JournalUnreadable(
                f"the stream {section.stream} begins with message {state.first}: its beginning is lost"
            )

    async def _own(self) -> StreamState:
        """Become the writer by storing OWNER in the next sequence; returns the state before that.

        If the sequence is occupied meanwhile, there need not be another writer: NATS may store the
        last messages of a killed server that late. So the server asks again, TRIES times in all.
        Raises JournalInUse, JournalUnreadable and JetStreamError.
        """
        section, connection = self._section, self.connection
        tries = 0
        while True:
            # Read the state before asking, so that another new owner occupies the sequence that is
            # next now.
            state = await open_stream(connection, section.max_bytes)
            # An empty stream has no writer.
            absent_seconds = ABSENT_SECONDS if state.last else 0.0
            owner = await connection.ask_owner(OWNER_SECONDS, absent_seconds)
            if owner is not None:
                raise JournalInUse(f"another server writes to the stream {section.stream}: {owner}")
            await connection.answer_as_owner(f"process {os.getpid()} of {socket.gethostname()}")
            self._next = state.last + 1
            try:
                await self.store([Entry(Kind.OWNER, (connection.writer.encode(),))])
                return state
            except Fenced:
                await connection.stop_answering()
                tries += 1
                if tries == TRIES:
                    raise

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        """Raises JournalUnreadable."""
        synced = self._section.durability == "fsync"
        reading = StreamReading(self.connection, self._begin, self._next - 1, synced)
        try:
            async for found in replay_messages(reading):
                yield found
        except (JetStreamError, FrameCorrupt) as error:
            raise JournalUnreadable(
                f"the journal in the stream {self._section.stream} cannot be read: {error}"
            ) from error
        self._outside = reading.outside
        self._outside_bytes = sum(reading.outside.values())
        self.log_bytes = reading.log_bytes
        self._snapshot_end = reading.snapshot_end

    # Writing

    async def store(self, entries: Sequence[Entry]) -> list[Stored]:
        """Store entries; returns their locations once they are durable. Raises JetStreamError."""
        if sum(entry.frame_bytes for entry in entries) > MESSAGE_BYTES:
            messages, places = await asyncio.to_thread(self._packing.pack, self._next, entries)
        else:
            messages, places = self._packing.pack(self._next, entries)
        await self.connection.store(messages)
        self._next += len(messages)
        self.log_bytes += sum(
            len(message.body) + MESSAGE_OVERHEAD
            for message in messages
            if self.connection.subjects.is_log(message.subject)
        )
        for place in places:
            if isinstance(place, StoredOutside) and place.reference.first not in self._outside:
                count = outside_bytes(place.reference)
                self._outside[place.reference.first] = count
                self._outside_bytes += count
        return places

    def snapshot_stored(self, begin: int, end: int, log_bytes_before: int) -> None:
        """A snapshot from `begin` to `end` was stored, so everything before `begin` is obsolete."""
        self._begin, self._snapshot_end = begin, end
        self.log_bytes -= log_bytes_before

    async def make_room(self, byte_count: int) -> None:
        """Make the stream large enough for `byte_count` more bytes. Raises JetStreamError."""
        state = await self.connection.state()
        needed = state.byte_count + byte_count
        await fit_stream(self.connection, state, needed, self._section.max_bytes)

    async def remove(self, carried: set[int]) -> None:
        """Remove everything before the newest snapshot, except records outside the log that it refers to.

        `carried` holds the first sequences of those. Then restore the stream's normal size. Raises
        JetStreamError.
        """
        gone = {first for first in self._outside if first < self._begin} - carried
        await purge(self.connection, self._begin, set(self._outside) - gone, gone)
        for first in gone:
            self._outside_bytes -= self._outside.pop(first)
        await self.make_room(0)

    async def clear(self) -> None:
        """Remove what an interrupted compaction left behind. Raises JetStreamError."""
        present = await list_outside(self.connection)
        gone = {first for first in present if first < self._begin} - set(self._outside)
        await purge(self.connection, self._begin, present - gone, gone)
