"""When a journal is compacted because it has to be, and when again after that failed.

    refused ──► pressed ──► compacted, where anything was appended or released since the last time
    failed ──► left alone for a while ──► tried again

What is known not to be needed is not all: of the state it shows only when it is written anew. So whoever is
refused for want of room has it compacted. Each waits for some times what the last one took, so that a
journal that is full of what is needed is not written again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SHORTEST_WAIT_SECONDS = 1.0
TIMES_AS_LONG = 10


class CompactionPace:
    """Of one journal; times are those of the event loop."""

    def __init__(self) -> None:
        """Nothing is asked for yet."""
        self._retry_at = 0.0
        """When one may begin, after one that failed; 0 where the last did not."""
        self._press_at = 0.0
        """When one may begin only because something was refused."""
        self._pressed = False
        """Whether something was refused since the last one began."""
        self._changed = False
        """Whether anything was appended or released since then."""

    def press(self) -> None:
        """Something was refused for want of room."""
        self._pressed = True

    def change(self) -> None:
        """Something was appended or released."""
        self._changed = True

    @property
    def may_begin(self) -> bool:
        """Whether the last one that failed is long enough ago."""
        return asyncio.get_running_loop().time() >= self._retry_at

    @property
    def is_pressed(self) -> bool:
        """Whether one should begin because something was refused."""
        now = asyncio.get_running_loop().time()
        return self._pressed and self._changed and now >= self._press_at

    def begun(self) -> None:
        """One begins, with the state as it is now."""
        self._pressed = self._changed = False

    def failed(self, began: float, wake: Callable[[], object]) -> bool:
        """One that began then failed; `wake` is called when it may be tried again.

        Returns whether it is the first in a row.
        """
        first = not self._retry_at
        self._retry_at = _rested(began)
        asyncio.get_running_loop().call_at(self._retry_at, wake)
        return first

    def ended(self, began: float) -> None:
        """One that began then is done."""
        self._retry_at, self._press_at = 0.0, _rested(began)


def _rested(began: float) -> float:
    now = asyncio.get_running_loop().time()
    return now + max(SHORTEST_WAIT_SECONDS, TIMES_AS_LONG * (now - began))
