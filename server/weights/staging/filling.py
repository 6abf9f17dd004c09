"""Verifies shared memory while its uploader fills it, so that both sides work at the same time.

    header -> a thread follows the progress word -> commit, with the checksums -> the thread continues to
    the end, whatever the word is -> every tensor's verdict, in the header's order

The thread reads the word, verifies the new bytes (XXH3 and a search for values that are not finite), and
reads the word again. It reads every byte once. If it follows closely, it finds the bytes in the
cache, where the uploader has just put them. That is the word's only purpose. If the word is wrong,
goes back or never moves, the commit shows it: the checksums differ, or verification takes longer.
While there are no new bytes the thread sleeps, for longer the longer that lasts.

Await `end` before releasing the memory. It makes the thread stop, which takes at most one piece, and waits
for that.
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

# A copy writes some hundred KB in that time.
SHORTEST_PAUSE_SECONDS = 50e-6
# Upper bound on the delay after an uploader has paused for long.
LONGEST_PAUSE_SECONDS = 5e-3
# Fraction of the time without new bytes that the thread sleeps, and thus by which it can be late.
PAUSE_RATIO = 1 / 8


class _Looked:
    """How far one tensor has been verified."""

    def __init__(self, tensor: ManifestTensor) -> None:
        self.tensor = tensor
        self.check, self.position = begin_check(tensor)
        self.end = tensor.offset_bytes + tensor.length_bytes
        self.problem: WeightRefused | None = None
        """Why it could not be read."""


class Filling:
    """One payload that is being filled. Lives on the event loop and owns a thread."""

    def __init__(
        self, source: Buffer, manifest: Sequence[ManifestTensor], progress_offset_bytes: int
    ) -> None:
        """Start to follow. An offset of zero means that there is no progress word."""
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
        """The uploader has filled everything. Raises WeightRefused unless each tensor is finite and has
        its checksum."""
        self._committed = True
        self._wake.set()
        await asyncio.shield(self._following)
        for looked, announced in zip(self._in_order, xxh3, strict=True):
            if looked.problem is not None:
                raise looked.problem
            looked.check.finish(announced)

    async def end(self) -> None:
        """Return when the thread no longer reads, even if the caller is cancelled meanwhile."""
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

    # The rest runs in the thread.

    def _follow(self) -> None:
        place, moved = 0, time.monotonic()
        while not self._ended and place < len(self._by_offset):
            # Check for the commit before reading the word, because nothing changes after a commit.
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
        """Bytes filled so far, according to the progress word."""
        if not self._progress_offset_bytes:
            return 0
        return read_word(self._source, self._progress_offset_bytes)

    def _look_at(self, looked: _Looked, filled: int) -> bool:
        """Returns whether the tensor is finished."""
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
