"""Decides when a full journal is compacted, and when a failed compaction is tried again.

    refused ──► pressed ──► compacted, if anything was appended or released since the last time
    failed ──► left alone for a while ──► tried again

The journal does not know all of its garbage. Some only shows when the state is written again. So a caller
that is refused for lack of room triggers a compaction. After each compaction the next one waits for
several times its duration. Otherwise a journal full of live data would be rewritten again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHORTEST_WAIT_SECONDS = 1.0
TIMES_AS_LONG = 10


class CompactionPace:
    """The pace of one journal. Times are those of the event loop."""

    def __init__(self) -> None:
        self._retry_at = 0.0
        """When a compaction may begin after a failed one; 0 if the last one did not fail."""
        self._press_at = 0.0
        """When a compaction may begin only because an append was refused."""
        self._pressed = False
        """Whether an append was refused since the last compaction began."""
        self._changed = False
        """Whether anything was appended or released since then."""

    def press(self) -> None:
        """Records that an append was refused for lack of room."""
        self._pressed = True

    def change(self) -> None:
        """Records that something was appended or released."""
        self._changed = True

    @property
    def may_begin(self) -> bool:
        """Whether enough time has passed since the last failure."""
        return asyncio.get_running_loop().time() >= self._retry_at

    @property
    def is_pressed(self) -> bool:
        """Whether a compaction should begin because an append was refused."""
        now = asyncio.get_running_loop().time()
        return self._pressed and self._changed and now >= self._press_at

    def begun(self) -> None:
        """Records that a compaction begins, with the current state."""
        self._pressed = self._changed = False

    def failed(self, began: float, wake: Callable[[], object]) -> bool:
        """Records the failure of a compaction that began at `began`.

        Calls `wake` when it may be tried again. Returns whether it is the first failure in a row.
        """
        first = not self._retry_at
        self._retry_at = _rested(began)
        asyncio.get_running_loop().call_at(self._retry_at, wake)
        return first

    def ended(self, began: float) -> None:
        """Records that the compaction that began at `began` has succeeded."""
        self._retry_at, self._press_at = 0.0, _rested(began)


def _rested(began: float) -> float:
    now = asyncio.get_running_loop().time()
    return now + max(SHORTEST_WAIT_SECONDS, TIMES_AS_LONG * (now - began))
