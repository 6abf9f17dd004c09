"""Waking everyone who waits for a change, without polling and without a queue to bound."""

from __future__ import annotations

import asyncio


class Broadcast:
    """A change that any number of coroutines wait for.

    A waiter checks its condition, and where it does not hold calls `wait` before it awaits anything else:
    then no change between the check and the wait can be missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes everyone who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Returns at the next `notify`."""
        await self._event.wait()
