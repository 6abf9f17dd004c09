"""The files of a journal's folder, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.server.journal import JournalRecord, Record, Stored
from penstock.server.journal_segment import SegmentCorrupt, SegmentReader


@dataclass(frozen=True, slots=True)
class Files:
    """What a folder holds."""

    snapshot: tuple[int, Path] | None
    segments: tuple[tuple[int, Path], ...]
    """What was appended since, oldest first."""
    obsolete: tuple[Path, ...]

    @property
    def all(self) -> tuple[tuple[int, Path], ...]:
        """What to read, in order."""
        return (*((self.snapshot,) if self.snapshot else ()), *self.segments)


def find_files(folder: Path) -> Files:
    """What to read of a journal, and what to remove."""
    snapshots = sorted((int(p.stem), p) for p in folder.glob("*.snapshot"))
    snapshot = snapshots[-1] if snapshots else None
    newest = snapshot[0] if snapshot else 0
    logs = sorted((int(p.stem), p) for p in folder.glob("*.log"))
    return Files(
        snapshot,
        tuple(entry for entry in logs if entry[0] > newest),
        tuple(
            path
            for path in (
                *(path for _, path in snapshots[:-1]),
                *(path for number, path in logs if number <= newest),
                *folder.glob("*.unfinished"),
            )
        ),
    )


@dataclass(eq=False)
class Reading:
    """What was found when a journal was read."""

    records: int = 0
    torn_bytes: int = 0
    bytes_by_segment: dict[int, int] = field(default_factory=dict[int, int])


def read_records(files: Files, reading: Reading) -> Iterator[tuple[Record, Stored]]:
    """Every record, oldest first. Raises SegmentCorrupt."""
    for number, path in files.all:
        last = bool(files.segments) and (number, path) == files.segments[-1]
        reader = SegmentReader(path, last=last)
        for frame in reader.frames():
            record = JournalRecord()
            try:
                record.ParseFromString(bytes(frame.payload))
            except Exception as error:  # protobuf's own, of several kinds.
                raise SegmentCorrupt(path, frame.offset, f"is no record: {error}") from error
            reading.records += 1
            yield record, Stored(number, frame.offset, frame.length)
        reading.torn_bytes += reader.torn_bytes
        reading.bytes_by_segment[number] = reader.end
