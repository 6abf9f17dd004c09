"""The segments that a journal appends to: the current one, and a preallocated spare for the next.

Every method that writes runs in the journal's thread.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.common.failpoints import hit
from penstock.server.journal.disk.room import Room
from penstock.server.journal.disk.segment import (
    CLOSING_BYTES,
    HEADER,
    NOWHERE,
    Place,
    SegmentWriter,
    payload_length,
)
from penstock.server.journal.protocol import Payload, Stored
from penstock.wire.frames import frame_length

logger = logging.getLogger(__name__)

Durability = Literal["fsync", "process"]


class NoRoom(Exception):
    """The disk has no room for the next segment. Nothing was written."""


@dataclass(eq=False)
class Segments:
    folder: Path
    durability: Durability
    room: Room
    before: Place = NOWHERE
    """Where the file before the current segment ended."""
    paths: dict[int, Path] = field(default_factory=dict[int, Path])
    """Paths of the snapshot and the segments after it, by number."""
    spare: SegmentWriter | None = None
    """The next segment, once it is allocated."""
    _writer: SegmentWriter | None = None
    """The current segment; None until `rotate`."""
    _short: bool = False
    """Whether the last attempt to allocate a spare failed."""

    @property
    def current(self) -> SegmentWriter:
        assert self._writer is not None
        return self._writer

    @property
    def free_bytes(self) -> int:
        free = os.statvfs(self.folder)
        return free.f_bavail * free.f_frsize

    def takes(self, byte_count: int) -> bool:
        """Whether frames of `byte_count` bytes fit into the segments or onto the disk."""
        writer, spare = self._writer, self.spare
        if byte_count <= (writer.room if writer else 0) + (spare.room if spare else 0):
            return True
        # Too large for the usual segments: `rotate` makes a larger one.
        needed = byte_count + self.room.segment_bytes + self.room.copy_bytes
        return needed <= self.free_bytes

    def write(self, payloads: Sequence[Payload]) -> list[Stored]:
        """Append payloads, synced if durability is `fsync`.

        Raises OSError, and NoRoom, after which the caller may retry.
        """
        self._provide(payloads)
        places: list[Stored] = []
        part: list[Payload] = []
        length = 0
        for payload in payloads:
            more = frame_length(payload_length(payload))
            if length + more > self.current.room:
                places += self._write_part(part)
                part, length = [], 0
                self.rotate(self.current.number + 1, more)
            part.append(payload)
            length += more
        places += self._write_part(part)
        if payloads and self.durability == "fsync":
            hit("journal.before_fsync")
            self.current.sync()
        elif payloads:
            self.current.rely()
        self._make_spare()
        return places

    def _provide(self, payloads: Sequence[Payload]) -> None:
        """Allocate a next segment if the payloads do not fit into the current one. Raises NoRoom."""
        room, firsts = self.current.room, list[int]()
        for length in (frame_length(payload_length(payload)) for payload in payloads):
            if length > room:
                firsts.append(length)
                room = max(self.room.segment_bytes - HEADER.size - CLOSING_BYTES, length)
            room -= length
        if not firsts:
            return
        if self.spare is None or self.spare.room < firsts[0]:
            self._allocate_spare(firsts[0])
        # `rotate` allocates the ones after it when it needs them.
        others = sum(max(self.room.segment_bytes, length) for length in firsts[1:])
        if self.spare is None or others > self.free_bytes:
            raise NoRoom

    def _write_part(self, payloads: list[Payload]) -> list[Stored]:
        writer = self.current
        places = writer.write(payloads) if payloads else []
        self.room.by_file[writer.number] = writer.end
        return [Stored(writer.number, offset, length) for offset, length in places]

    def rotate(self, number: int, at_least: int = 0) -> None:
        """Make the current segment durable and continue in a new one. Raises OSError."""
        # Allocate first: if there is no room, the current segment stays as it is.
        if self.spare is None or self.spare.room < at_least:
            self._allocate_spare(at_least)
        if self.spare is None:
            raise OSError(errno.ENOSPC, "no room for another segment", str(self.folder))
        if self._writer is not None:
            self._writer.trim()
            self._writer.sync()
            self._writer.close()
            self.before = Place(self._writer.number, self._writer.end)
        path = self.folder / f"{number:010d}.log"
        hit("journal.before_rotate")
        self.spare.begin(path, number, self.before)
        self._writer, self.spare = self.spare, None
        self.paths[number] = path
        self.room.by_file[number] = HEADER.size
        self._make_spare()

    def _make_spare(self) -> None:
        """Allocate the next segment if that leaves room for a compaction and its segment."""
        if self.spare is None:
            reserved = 2 * self.room.segment_bytes + self.room.copy_bytes
            if reserved <= self.free_bytes:
                self._allocate_spare()
            else:
                self._note_short(f"{reserved} bytes must be free")

    def _allocate_spare(self, at_least: int = 0) -> None:
        """Allocate the spare; on a full disk there is none, and `takes` reports that."""
        if self.spare is not None:
            self.spare.close()
            self.spare = None
        size = max(self.room.segment_bytes, at_least + HEADER.size + CLOSING_BYTES)
        try:
            self.spare = SegmentWriter(self.folder / "spare", size)
            self._short = False
        except OSError as error:
            self._note_short(error)

    def _note_short(self, problem: object) -> None:
        if not self._short:
            logger.error("the disk has no room for another journal segment: %s", problem)
        self._short = True

    def finish(self) -> None:
        """Write the closing frame of the current segment and sync it. Raises OSError."""
        if self._writer is not None:
            self._writer.sync()
            self._writer.write_closing()
            self._writer.sync()

    def close(self) -> None:
        for writer in (self._writer, self.spare):
            if writer is not None:
                writer.close()
        (self.folder / "spare").unlink(missing_ok=True)
