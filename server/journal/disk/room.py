"""How much a journal's folder takes, and what may be added to it.

Of `max_bytes` the running segment and the next one take an eighth at most, and a sixteenth is for what is
appended without asking: receipts and the like, which make room. Of the rest

    a third     may be in use
    a twelfth   nobody needs, before it is compacted
    as much     is for the copy that compaction makes of both: it is not known of all that was appended
                since the last one whether anybody needs it
    a sixth     is for what is appended while it is made

Only the first two are bounds of what is kept. The copy is counted for what it may come to, so that what is
appended meanwhile has all the room that it leaves.
"""

from __future__ import annotations

from penstock.server.journal.disk.segment import HEADER

SMALLEST_SHARE = 16
MOST_HEADROOM_BYTES = 1 << 20


class Room:
    """Bytes of one journal; only counted here."""

    def __init__(self, max_bytes: int, segment_bytes: int) -> None:
        self.segment_bytes = min(segment_bytes, max_bytes // SMALLEST_SHARE)
        """Size of a segment of which nothing is larger."""
        self.headroom_bytes = min(MOST_HEADROOM_BYTES, max_bytes // SMALLEST_SHARE)
        """For what is appended without asking."""
        self._usable = max_bytes - 2 * self.segment_bytes - self.headroom_bytes
        self.limit = self._usable // 3
        """Most that may be in use."""
        self.kept = 0
        """Of the records that are held."""
        self.other = 0
        """Of the records that no one holds, and that count: as of the last snapshot."""
        self.by_file: dict[int, int] = {}
        """Written to each file that counts."""
        self.replaced = 0
        """Written to files that a snapshot has replaced, and that are still there."""
        self._released = 0
        """Of the records that were held: no snapshot that is begun from now on copies them."""
        self._released_meanwhile = 0
        """The same, since the one was begun that is being written."""
        self._copying = False

    @property
    def in_use(self) -> int:
        """What is known to count."""
        return self.kept + self.other

    def hold(self, length: int) -> None:
        """A record is read again later."""
        self.kept += length

    def release(self, length: int) -> None:
        """Nobody reads it again."""
        self.kept -= length
        if self._copying:
            self._released_meanwhile += length
        else:
            self._released += length

    def moved(self, more: int) -> None:
        """A record that is held takes so many bytes more in the snapshot that it lies in now."""
        self.kept += more

    @property
    def compaction_due(self) -> bool:
        """Whether what nobody needs, as far as that is known, is worth it."""
        unneeded = sum(self.by_file.values()) - self.in_use
        return unneeded > min(max(self.segment_bytes, self.in_use), self._usable // 12)

    @property
    def copy_bytes(self) -> int:
        """The most that a snapshot takes which is begun now."""
        return sum(self.by_file.values()) - self._released + HEADER.size

    def refusal(self, wanted: int) -> str | None:
        """Why so many bytes more have no place; None where they have."""
        if self.in_use + wanted > self.limit:
            return f"the journal keeps {self.in_use} bytes"
        written = sum(self.by_file.values())
        if written + max(self.copy_bytes, self.replaced) + wanted > self._usable:
            return f"the journal has {written + self.replaced} bytes on the disk before it is compacted"
        return None

    def begin_copy(self) -> None:
        """A snapshot of what counts now is being written."""
        self._copying = True

    def give_up_copy(self) -> None:
        """It was not."""
        self._copying = False
        self._released += self._released_meanwhile
        self._released_meanwhile = 0

    def end_copy(self, number: int, end: int, other: int) -> None:
        """It took the place of all files before it, which are about to be removed."""
        self._copying = False
        self._released, self._released_meanwhile = self._released_meanwhile, 0
        self.other = other
        older = [n for n in self.by_file if n < number]
        self.replaced = sum(self.by_file.pop(n) for n in older)
        self.by_file[number] = end

    def removed(self) -> None:
        """Those files are gone."""
        self.replaced = 0
