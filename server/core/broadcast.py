"""Wakes all waiters of a change, without polling and without a queue to bound."""

from __future__ import annotations

import asyncio


class Broadcast:
    """A change that any number of coroutines can wait for.

    A waiter first checks its condition. If it is false, the waiter calls `wait` before it awaits
    anything else. Then it cannot miss a change between the check and the wait.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all current waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Waits for the next `notify`."""
        await self._event.wait()
