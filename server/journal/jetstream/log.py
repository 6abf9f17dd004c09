"""The contents of a journal's stream: taken, read, added to, and cleared of what a snapshot made obsolete.

Who writes. Whoever opens the stream asks for the server that does; where none answers, nor comes to listen
for a while, it says OWNER in the next place. From then on any message of another server finds its place
taken.

The places of messages are counted here, and each message is stored in its place or not at all: so nothing
is missing in between, but where NATS lost its power (see `jetstream_reading`), and nothing is there twice.
Nothing is ever removed from the BEGIN of the last whole snapshot on.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

from penstock.server.config.settings import JournalSection
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
    Reading,
    begin_of,
    read_stored,
    replay_messages,
)
from penstock.server.journal.jetstream.snapshot import entry_bytes
from penstock.server.journal.jetstream.stream import (
    fit_stream,
    list_outside,
    open_stream,
    purge_log,
    purge_outside,
    why_not_synced,
)
from penstock.server.journal.records import JournalInUse, JournalUnreadable, Record, Stored

OWNER_SECONDS = 10.0
"""After which a server that does not say that it writes is taken over from."""
ABSENT_SECONDS = 3.0
"""After which a stream that has been written to counts as nobody's, where nobody listens. NATS that just
started knows nobody yet: a server that lived through that is back after a tenth of a second, or, where the
machine was away too, once a packet that went there in vain is sent again."""
TRIES = 3
"""Of taking a stream where nobody says that they write, and its next place is taken."""
MESSAGE_BYTES = 256 << 10
INLINE_BYTES = 64 << 10
"""Longest record that lies in the log itself: what is held is copied by each compaction."""


class StreamLog:
    """What is in one stream, and the connection to it."""

    def __init__(self, section: JournalSection) -> None:
        """Not opened yet."""
        self._section = section
        synced = section.durability == "fsync"
        self.connection = Connection(section, self._why_not_synced if synced else None)
        self._packing = Packing(self.connection.subjects, MESSAGE_BYTES, INLINE_BYTES)
        self._next = 1
        """Place of the next message."""
        self._begin = 1
        """Place that a server that starts reads from."""
        self._snapshot_end = 0
        """Place of the last message of the newest snapshot."""
        self._outside: dict[int, int] = {}
        """Bytes of the records that are outside, by their first messages."""
        self._outside_bytes = 0
        self.log_bytes = 0
        """Bytes of the log, from `_begin` on."""

    @property
    def byte_count(self) -> int:
        """Of everything that is in the stream and not about to be removed."""
        return self.log_bytes + self._outside_bytes

    @property
    def message_count(self) -> int:
        """Messages since the newest snapshot."""
        return self._next - 1 - self._snapshot_end

    async def _why_not_synced(self) -> str | None:
        assert self._section.monitor is not None, "the configuration sees to it"
        return await why_not_synced(self._section.monitor, self.connection.server_id)

    # Opening

    async def open(self) -> None:
        """Takes the stream. Raises JournalInUse and JournalUnreadable."""
        stream = self._section.stream
        try:
            await self.connection.connect()
            await self._take()
        except Fenced as error:
            raise JournalInUse(str(error)) from error
        except (JetStreamError, FrameCorrupt) as error:
            raise JournalUnreadable(f"the stream {stream} cannot be opened: {error}") from error

    async def _take(self) -> None:
        section, connection = self._section, self.connection
        if connection.max_payload < MESSAGE_BYTES + MESSAGE_OVERHEAD:
            raise JournalUnreadable(
                f"the NATS server takes messages of {connection.max_payload} bytes at most (max_payload), "
                f"and a journal's have up to {MESSAGE_BYTES + MESSAGE_OVERHEAD}"
            )
        state = await self._own()
        if section.durability == "fsync" and state.leader not in ("", connection.server_name):
            raise JournalUnreadable(
                f"the stream {section.stream} is kept by the NATS server {state.leader}, and "
                f"{section.monitor} is that of {connection.server_name}: what it promises is not known"
            )
        end = await connection.fetch_last(connection.subjects.end)
        if end is not None:
            self._begin = begin_of(end)
        elif state.first > 1:
            raise JournalUnreadable(
                f"the stream {section.stream} begins with message {state.first}: its beginning is lost"
            )

    async def _own(self) -> StreamState:
        """Says in the next place that this server writes; returns how the stream was.

        Where the place is taken meanwhile, nobody need have who writes from here on: what a server had sent
        when it was killed may be stored that late. So it is asked again who writes, TRIES times in all.
        Raises JournalInUse, JournalUnreadable and JetStreamError.
        """
        section, connection = self._section, self.connection
        tries = 0
        while True:
            # Before anybody is asked: who comes to be the owner meanwhile takes the place that is next now.
            state = await open_stream(connection, section.max_bytes)
            # To a new one nobody can have written.
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
        """Every record as the last server left them. Raises JournalUnreadable."""
        synced = self._section.durability == "fsync"
        reading = Reading(self.connection, self._begin, self._next - 1, synced)
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

    async def read(self, stored: Stored) -> bytes:
        """One record again. Raises FrameCorrupt and JetStreamError."""
        return await read_stored(self.connection, stored)

    # Writing

    async def store(self, entries: list[Entry]) -> list[Stored]:
        """Returns once they are durable, with where they lie. Raises JetStreamError."""
        if sum(map(entry_bytes, entries)) > MESSAGE_BYTES:
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
        """What came before `begin` counts no more."""
        self._begin, self._snapshot_end = begin, end
        self.log_bytes -= log_bytes_before

    async def make_room(self, byte_count: int) -> None:
        """Has the stream take so many bytes more. Raises JetStreamError."""
        state = await self.connection.state()
        needed = state.byte_count + byte_count
        await fit_stream(self.connection, state, needed, self._section.max_bytes)

    async def remove(self, carried: set[int]) -> None:
        """Removes what came before the newest snapshot, less the records outside that it refers to. After
        that the stream is as large as it should be.

        Raises JetStreamError.
        """
        gone = {first for first in self._outside if first < self._begin} - carried
        await purge_log(self.connection, self._begin)
        await purge_outside(self.connection, self._begin, set(self._outside) - gone, gone)
        for first in gone:
            self._outside_bytes -= self._outside.pop(first)
        await self.make_room(0)

    async def clear(self) -> None:
        """Removes what a compaction left that did not come to its end. Raises JetStreamError."""
        present = await list_outside(self.connection)
        gone = {first for first in present if first < self._begin} - set(self._outside)
        await purge_log(self.connection, self._begin)
        await purge_outside(self.connection, self._begin, present - gone, gone)

    async def close(self) -> None:
        """Gives the stream back."""
        await self.connection.close()
