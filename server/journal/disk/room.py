"""Counts the bytes of a journal's folder, and decides what may be added.

The current segment and the next one take at most an eighth of `max_bytes`. A sixteenth is reserved for
appends that do not call `check_room`: receipts and other records that free room. The rest is divided:

    a third     records in use
    a twelfth   obsolete records that may pile up before a compaction
    a twelfth   copies of records appended since then, because they may all be needed
    a sixth     appends while a compaction runs

Only the first two are limits on what is kept. The copy is counted at its largest possible size, so that
appends during a compaction may use all the room that it leaves.
"""

from __future__ import annotations

from penstock.server.journal.disk.segment import HEADER

SMALLEST_SHARE = 16
MOST_HEADROOM_BYTES = 1 << 20


class Room:
    def __init__(self, max_bytes: int, segment_bytes: int) -> None:
        self.segment_bytes = min(segment_bytes, max_bytes // SMALLEST_SHARE)
        """Size of a segment, unless a larger record needs more."""
        self.headroom_bytes = min(MOST_HEADROOM_BYTES, max_bytes // SMALLEST_SHARE)
        """Reserved for appends that do not call `check_room`."""
        self._usable = max_bytes - 2 * self.segment_bytes - self.headroom_bytes
        self.limit = self._usable // 3
        """Upper bound of `in_use`."""
        self.kept = 0
        """Bytes of held records."""
        self.other = 0
        """Bytes of the state's records that are not held, as of the last snapshot."""
        self.by_file: dict[int, int] = {}
        """Bytes written to the snapshot and each later segment, by file number."""
        self.replaced = 0
        """Bytes of files that a snapshot has replaced but that are not removed yet."""
        self._released = 0
        """Bytes of released records, which the next snapshot does not copy."""
        self._released_meanwhile = 0
        """Bytes released since the snapshot that is being written was begun."""
        self._copying = False

    @property
    def in_use(self) -> int:
        """Bytes that are known to be needed."""
        return self.kept + self.other

    def release(self, length: int) -> None:
        self.kept -= length
        if self._copying:
            self._released_meanwhile += length
        else:
            self._released += length

    @property
    def compaction_due(self) -> bool:
        """Whether enough bytes are known to be obsolete."""
        unneeded = sum(self.by_file.values()) - self.in_use
        return unneeded > min(max(self.segment_bytes, self.in_use), self._usable // 12)

    @property
    def copy_bytes(self) -> int:
        """Largest possible size of a snapshot begun now."""
        return sum(self.by_file.values()) - self._released + HEADER.size

    def refusal(self, wanted: int) -> str | None:
        """Return why `wanted` more bytes do not fit; None if they fit."""
        if self.in_use + wanted > self.limit:
            return f"the journal keeps {self.in_use} bytes"
        written = sum(self.by_file.values())
        if written + max(self.copy_bytes, self.replaced) + wanted > self._usable:
            return f"the journal has {written + self.replaced} bytes on the disk before it is compacted"
        return None

    def begin_copy(self) -> None:
        self._copying = True

    def give_up_copy(self) -> None:
        """The snapshot failed; the older files stay."""
        self._copying = False
        self._released += self._released_meanwhile
        self._released_meanwhile = 0

    def end_copy(self, number: int, end: int, other: int) -> None:
        """The snapshot replaced all earlier files, which are about to be removed."""
        self._copying = False
        self._released, self._released_meanwhile = self._released_meanwhile, 0
        self.other = other
        # The journal's thread may add a file meanwhile, so the loop is over a copy.
        older = [n for n in list(self.by_file) if n < number]
        self.replaced = sum(self.by_file.pop(n) for n in older)
        self.by_file[number] = end
