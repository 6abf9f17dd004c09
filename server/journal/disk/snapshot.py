"""Writes the current state into one file, which replaces all earlier files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.common.failpoints import hit
from penstock.server.journal.disk.segment import (
    HEADER,
    Place,
    SegmentCorrupt,
    SegmentWriter,
    payload_length,
)
from penstock.server.journal.protocol import Deferred, Payload, SnapshotItem, Stored, payload_of
from penstock.wire.frames import frame_length

BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenSnapshot:
    moves: list[tuple[Stored, tuple[int, int]]]
    """Locations to update, with the new offset and length of their frames."""
    end: int
    other_bytes: int
    """Bytes of the frames that are not copies of stored records."""


def write_snapshot(
    folder: Path,
    number: int,
    before: Place,
    items: Iterable[SnapshotItem],
    read: Callable[[Stored], bytes],
) -> WrittenSnapshot:
    """Write a snapshot of everything up to `before`; `read` returns the payload of a stored record.

    Raises OSError and what `read` raises, and then removes its file.
    """
    unfinished, path = (folder / f"{number:010d}.{kind}" for kind in ("unfinished", "snapshot"))
    moves: list[tuple[Stored, tuple[int, int]]] = []
    other = 0
    try:
        writer = SegmentWriter(unfinished, HEADER.size)
        try:
            for part in _batches(items, read):
                places = writer.write([payload for payload, _, _ in part])
                for (_, stored, copied), (offset, length) in zip(part, places, strict=True):
                    if stored is not None:
                        moves.append((stored, (offset, length)))
                    if not copied:
                        other += length
            writer.write_closing()
            hit("journal.before_snapshot_fsync")
            writer.begin(path, number, before)
        finally:
            writer.close()
    except (OSError, SegmentCorrupt):
        # Safe even if it has its name already: the older files still hold the same state.
        for left in (unfinished, path):
            left.unlink(missing_ok=True)
        raise
    hit("journal.before_snapshot_clean_up")
    return WrittenSnapshot(moves, writer.end, other)


_Item = tuple[Payload, Stored | None, bool]
"""A record, the location to update, and whether the record is a copy from there."""


def _items(items: Iterable[SnapshotItem], read: Callable[[Stored], bytes]) -> Iterator[_Item]:
    for item in items:
        if isinstance(item, Stored):
            yield (read(item),), item, True
        elif isinstance(item, Deferred):
            for record in item.make():
                yield payload_of(record), item.stored, False
        else:
            yield payload_of(item), None, False


def _batches(
    items: Iterable[SnapshotItem], read: Callable[[Stored], bytes]
) -> Iterator[list[_Item]]:
    """Group the items into batches of about BATCH_BYTES, each written at once."""
    part: list[_Item] = []
    size = 0
    for item in _items(items, read):
        part.append(item)
        size += frame_length(payload_length(item[0]))
        if size >= BATCH_BYTES:
            yield part
            part, size = [], 0
    yield part
