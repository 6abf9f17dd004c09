"""Opens a journal on disk for reading only, without locking or changing it.

A server may write to the folder meanwhile. All files are opened before anything is read, and together they
are one state of the folder: if a snapshot replaced older files in between, they are opened again. An open
file stays readable after it is removed, and a file that is being written is read up to its current end.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.server.journal.disk.files import Files, find_files, records_in
from penstock.server.journal.disk.segment import SegmentCorrupt
from penstock.server.journal.disk.segment_reader import SegmentReader
from penstock.server.journal.protocol import Record, Stored
from penstock.wire.messages import JournalRecord
from penstock.wire.referred import put_together

MAX_REOPENINGS = 100


class NoJournal(Exception):
    """The folder cannot be read as a journal. The message is shown to the user."""


@dataclass(frozen=True, eq=False)
class StoredJournal:
    folder: Path
    segments: tuple[SegmentReader, ...]
    """In reading order; a snapshot comes first."""
    obsolete: tuple[Path, ...]
    """Files that a server removes at start."""
    writer: int | None
    """Id of the process that writes to it, if visible from here."""

    def records(self) -> Iterator[tuple[Record, Stored]]:
        """Yield every record, oldest first. Raises SegmentCorrupt."""
        return records_in(self.segments)

    def read(self, stored: Stored) -> Record:
        """Read a record again, in its whole form. Raises SegmentCorrupt."""
        segment = next(s for s in self.segments if s.number == stored.segment)
        record = segment.read(stored.offset)
        if not stored.turns:
            return record
        turns = (self.read(turn).turn_changed for turn in stored.turns)
        try:
            return JournalRecord(group_finished=put_together(record.group_referred, turns))
        except ValueError as error:
            raise SegmentCorrupt(segment.path, stored.offset, str(error)) from error


@contextlib.contextmanager
def open_stored(folder: Path) -> Generator[StoredJournal]:
    """Open all files of a journal. Raises NoJournal."""
    with contextlib.ExitStack() as stack:
        try:
            # Every segment needs a descriptor; the soft limit only protects programs that use `select`.
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            files, segments = _open_files(folder, stack)
            if not segments and not (folder / "LOCK").exists():
                raise NoJournal(f"{folder} is not a journal: it holds neither LOCK nor segments")
            writer = find_writer(folder / "LOCK")
        except ValueError as error:
            raise NoJournal(f"{folder} holds files that no journal writes: {error}") from error
        except OSError as error:
            raise NoJournal(f"{error.filename or folder}: {error.strerror}") from error
        yield StoredJournal(folder, tuple(segments), files.obsolete, writer)


def _open_files(folder: Path, stack: contextlib.ExitStack) -> tuple[Files, list[SegmentReader]]:
    for _ in range(MAX_REOPENINGS):
        files = find_files(folder)
        with contextlib.ExitStack() as opened:
            segments: list[SegmentReader] = []
            try:
                for number, path in files.all:
                    segments.append(opened.enter_context(files.opened(number, path)))
            except FileNotFoundError:
                continue
            # Unchanged, so the set is complete: older files go only after a snapshot has its name.
            if find_files(folder).snapshot == files.snapshot:
                stack.push(opened.pop_all())
                return files, segments
    raise NoJournal(f"the files of {folder} are replaced faster than they can be opened")


def find_writer(lock: Path) -> int | None:
    """Return the id of the process that holds a lock file; None if there is none, or if it runs in another
    container.

    Reads the kernel's list of locks, because testing the lock would mean taking it.
    """
    try:
        found = lock.stat()
        table = Path("/proc/locks").read_text()
    except OSError:
        return None
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in table.splitlines():
        # 1: FLOCK  ADVISORY  WRITE 4711 08:02:131 0 EOF
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == device:
            return int(fields[4])
    return None
