"""Verifies shared memory while its uploader fills it, so that both sides work at the same time.

    header -> a thread follows the progress word -> commit, with the checksums -> the thread continues to
    the end, whatever the word is -> every tensor's verdict, in the header's order

The thread reads every byte once. If it follows the word closely, it finds the bytes in the cache, where the
uploader has just put them. That is the word's only purpose. If the word is wrong, goes back or never moves,
the commit shows it: the checksums differ, or verification takes longer. While there are no new bytes the
thread sleeps, for longer the longer that lasts. Await `end` before releasing the memory.
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


class _Progress:
    """How far one tensor has been verified."""

    def __init__(self, tensor: ManifestTensor) -> None:
        self.tensor = tensor
        self.check, self.position = begin_check(tensor)
        self.end = tensor.offset_bytes + tensor.length_bytes
        self.problem: WeightRefused | None = None


class Filling:
    """One payload that is being filled. Lives on the event loop and owns a thread."""

    def __init__(
        self, source: Buffer, manifest: Sequence[ManifestTensor], progress_offset_bytes: int
    ) -> None:
        """An offset of zero means that there is no progress word."""
        self._source = source
        self._reader = Reader(source)
        self._progress_offset_bytes = progress_offset_bytes
        self._in_order = [_Progress(tensor) for tensor in manifest]
        self._by_offset = sorted(
            (progress for progress in self._in_order if progress.tensor.length_bytes),
            key=lambda progress: progress.position,
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
        for progress, announced in zip(self._in_order, xxh3, strict=True):
            if progress.problem is not None:
                raise progress.problem
            progress.check.finish(announced)

    async def end(self) -> None:
        """Make the thread stop, after at most one piece, and wait for that even if cancelled."""
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
            filled = self._by_offset[-1].end
            if not self._committed:
                word = self._progress_offset_bytes
                filled = read_word(self._source, word) if word else 0
            progress = self._by_offset[place]
            if whole_elements(progress.tensor, filled) <= progress.position:
                now = time.monotonic()
                pause = max(SHORTEST_PAUSE_SECONDS, PAUSE_RATIO * (now - moved))
                self._wake.wait(min(pause, LONGEST_PAUSE_SECONDS))
                continue
            while place < len(self._by_offset) and self._verify_up_to(
                self._by_offset[place], filled
            ):
                place += 1
            moved = time.monotonic()

    def _verify_up_to(self, progress: _Progress, filled: int) -> bool:
        stop = whole_elements(progress.tensor, filled)
        with contextlib.closing(
            self._reader.read(progress.position, stop, progress.tensor.name)
        ) as found:
            try:
                for piece in found:
                    if self._ended:
                        return False
                    progress.check.update(piece)
            except WeightRefused as error:
                progress.problem, stop = error, progress.end
        progress.position = max(progress.position, stop)
        return progress.position == progress.end
