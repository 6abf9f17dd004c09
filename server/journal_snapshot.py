"""Writes what counts into one file that takes the place of all before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.server.journal import Appended, Deferred, EncodedRecord, SnapshotItem, Stored
from penstock.server.journal_segment import (
    HEADER,
    Payload,
    Place,
    SegmentCorrupt,
    SegmentWriter,
    payload_length,
)
from penstock.wire.failpoints import hit
from penstock.wire.frames import frame_length

BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """A snapshot that is durable."""

    moves: list[tuple[Stored, tuple[int, int]]]
    """Records that lie in it now: offset and length of their frames."""
    end: int
    other_bytes: int
    """Of the frames of all records but those."""


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
                places = writer.write([payload for _, payload in part])
                for (stored, _), (offset, length) in zip(part, places, strict=True):
                    if stored is None:
                        other += length
                    else:
                        moves.append((stored, (offset, length)))
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


def _batches(
    items: Iterable[SnapshotItem], read: Callable[[Stored], bytes]
) -> Iterator[list[tuple[Stored | None, Payload]]]:
    """Payloads in parts that are written at once, with the record that each is a copy of."""
    part: list[tuple[Stored | None, Payload]] = []
    size = 0
    for item in written_out(items):
        if isinstance(item, Stored):
            payload: Payload = (read(item),)
            part.append((item, payload))
        else:
            payload = payload_of(item)
            part.append((None, payload))
        size += frame_length(payload_length(payload))
        if size >= BATCH_BYTES:
            yield part
            part, size = [], 0
    yield part


def written_out(items: Iterable[SnapshotItem]) -> Iterator[Appended | Stored]:
    for item in items:
        if isinstance(item, Deferred):
            yield from item.make()
        else:
            yield item
