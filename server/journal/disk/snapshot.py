"""Writes what counts into one file that takes the place of all before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.common.failpoints import hit
from penstock.server.journal.disk.segment import (
    HEADER,
    Payload,
    Place,
    SegmentCorrupt,
    SegmentWriter,
    payload_length,
)
from penstock.server.journal.records import Appended, Deferred, EncodedRecord, SnapshotItem, Stored
from penstock.wire.frames import frame_length

BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot that is durable."""

    moves: list[tuple[Stored, tuple[int, int]]]
    """What lies in it now, and is to know: offset and length of the frames."""
    end: int
    other_bytes: int
    """Of the frames of all records that are not copies of others."""


def payload_of(record: Appended) -> Payload:
    """The bytes of a record."""
    return record.parts if isinstance(record, EncodedRecord) else (record.SerializeToString(),)


def write_snapshot(
    folder: Path,
    number: int,
    before: Place,
    items: Iterable[SnapshotItem],
    read: Callable[[Stored], bytes],
) -> Written:
    """Writes a snapshot of all up to `before`; `read` gives the payload of a record by where it lies.

    Raises OSError, what `read` raises, and leaves nothing then that anybody reads.
    """
    unfinished, path = (folder / f"{number:010d}.{kind}" for kind in ("unfinished", "snapshot"))
    moves: list[tuple[Stored, tuple[int, int]]] = []
    other = 0
    try:
        writer = SegmentWriter(unfinished, HEADER.size)
        try:
            for part in _batches(items, read):
                places = writer.write([item.payload for item in part])
                for item, (offset, length) in zip(part, places, strict=True):
                    if item.stored is not None:
                        moves.append((item.stored, (offset, length)))
                    if not item.copied:
                        other += length
            writer.write_closing()
            hit("journal.before_snapshot_fsync")
            writer.begin(path, number, before)
        finally:
            writer.close()
    except (OSError, SegmentCorrupt):
        # Where it has its name already the older files still say the same.
        for left in (unfinished, path):
            left.unlink(missing_ok=True)
        raise
    hit("journal.before_snapshot_clean_up")
    return Written(moves, writer.end, other)


@dataclass(frozen=True, slots=True)
class _Item:
    """One record of a snapshot."""

    payload: Payload
    stored: Stored | None = None
    """What is to know where it lies."""
    copied: bool = False
    """Whether that says where it lay before."""


def _items(items: Iterable[SnapshotItem], read: Callable[[Stored], bytes]) -> Iterator[_Item]:
    for item in items:
        if isinstance(item, Stored):
            yield _Item((read(item),), item, copied=True)
        elif isinstance(item, Deferred):
            for record in item.make():
                yield _Item(payload_of(record), item.stored)
        else:
            yield _Item(payload_of(item))


def _batches(
    items: Iterable[SnapshotItem], read: Callable[[Stored], bytes]
) -> Iterator[list[_Item]]:
    """In parts that are written at once."""
    part: list[_Item] = []
    size = 0
    for item in _items(items, read):
        part.append(item)
        size += frame_length(payload_length(item.payload))
        if size >= BATCH_BYTES:
            yield part
            part, size = [], 0
    yield part
