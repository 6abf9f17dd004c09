"""Verifies shared memory while its uploader fills it: both sides at work at the same time.

    header -> a thread follows the progress word -> commit, with the checksums -> the thread goes on to the
    end, whatever the word says -> every tensor's verdict, in the header's order

The thread reads the word, looks at what is new, an XXH3 and a search for what is not finite, and reads the
word again; bytes are looked at once. Following closely it has them from the cache, into which the uploader
has just brought them, and that is all that the word is for: one that lies, goes back or never moves is
seen at the commit, as bytes that are not those announced or in the time that it takes. While nothing is
new the thread sleeps, the longer the longer that lasts.

`end` has to be awaited before the memory is given away: it tells the thread to leave, which it does after
at most one piece, and waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence

from penstock.server.weights.staging.manifest import ManifestTensor, WeightRefused
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.server.weights.staging.verify import Reader, begin_check, read_word, whole_elements

# A copy brings some hundred KB in that time.
SHORTEST_PAUSE_SECONDS = 50e-6
# A uploader that was away for long is not missed for longer than this.
LONGEST_PAUSE_SECONDS = 5e-3
# Of the time for which nothing was new: so much later than it could be does the thread notice.
PAUSE_RATIO = 1 / 8


class _Looked:
    """How far one tensor has been looked at."""

    def __init__(self, tensor: ManifestTensor) -> None:
        self.tensor = tensor
        self.check, self.position = begin_check(tensor)
        self.end = tensor.offset_bytes + tensor.length_bytes
        self.problem: WeightRefused | None = None
        """Why it could not be read."""


class Filling:
    """One payload that is being filled; on the event loop, with a thread of its own beside it."""

    def __init__(
        self, source: Buffer, manifest: Sequence[ManifestTensor], progress_offset_bytes: int
    ) -> None:
        """Begins to follow; a word at zero is none."""
        self._source = source
        self._reader = Reader(source)
        self._progress_offset_bytes = progress_offset_bytes
        self._in_order = [_Looked(tensor) for tensor in manifest]
        self._by_offset = sorted(
            (looked for looked in self._in_order if looked.tensor.length_bytes),
            key=lambda looked: looked.position,
        )
        self._wake = threading.Event()
        self._committed = self._ended = False
        self._following = asyncio.get_running_loop().run_in_executor(None, self._follow)

    async def finish(self, xxh3: Sequence[int]) -> None:
        """The uploader says that all is there: every tensor has its checksum, and is finite.

        Raises WeightRefused.
        """
        self._committed = True
        self._wake.set()
        await asyncio.shield(self._following)
        for looked, announced in zip(self._in_order, xxh3, strict=True):
            if looked.problem is not None:
                raise looked.problem
            looked.check.finish(announced)

    async def end(self) -> None:
        """Returns when nothing is read any more, even where the caller is cancelled meanwhile."""
        self._ended = True
        self._wake.set()
        cancelled: asyncio.CancelledError | None = None
        while not self._following.done():
            try:
                await asyncio.wait([self._following])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # In the thread.

    def _follow(self) -> None:
        place, moved = 0, time.monotonic()
        while not self._ended and place < len(self._by_offset):
            # Before the word is read: what comes after a commit does not change any more.
            filled = self._by_offset[-1].end if self._committed else self._filled()
            looked = self._by_offset[place]
            if whole_elements(looked.tensor, filled) <= looked.position:
                now = time.monotonic()
                pause = max(SHORTEST_PAUSE_SECONDS, PAUSE_RATIO * (now - moved))
                self._wake.wait(min(pause, LONGEST_PAUSE_SECONDS))
                continue
            while place < len(self._by_offset) and self._look_at(self._by_offset[place], filled):
                place += 1
            moved = time.monotonic()

    def _filled(self) -> int:
        """What the word says."""
        if not self._progress_offset_bytes:
            return 0
        return read_word(self._source, self._progress_offset_bytes)

    def _look_at(self, looked: _Looked, filled: int) -> bool:
        """Looks at what is new of a tensor; whether that was the last of it."""
        stop = whole_elements(looked.tensor, filled)
        with contextlib.closing(
            self._reader.read(looked.position, stop, looked.tensor.name)
        ) as found:
            try:
                for piece in found:
                    if self._ended:
                        return False
                    looked.check.update(piece)
            except WeightRefused as error:
                looked.problem, stop = error, looked.end
        looked.position = max(looked.position, stop)
        return looked.position == looked.end
