"""Threads for calls that block: one for as long as a call takes, and so many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.client.blocking import run_in_thread

T = TypeVar("T")


class CallTimeout(Exception):
    """A call took longer than it may."""


class CallThreads:
    """Runs calls in threads, at most `count` at a time; the others wait without one.

    A call whose caller has gone keeps its place until it returns: so calls that never return can take
    all places, but not all memory.
    """

    def __init__(self, count: int = 0) -> None:
        """Zero: four for each core, since calls may wait for other processes."""
        self._free = asyncio.Semaphore(count or 4 * (os.cpu_count() or 1))

    async def run(self, function: Callable[[], T], seconds: float | None = None) -> T:
        """What the function returns or raises. Raises CallTimeout so long after it began, not after it
        was asked for."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()

        def work() -> T:
            try:
                return function()
            finally:
                # The loop may be closed: nobody waits for a place any more.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._free.release)

        return await within(run_in_thread(work), seconds)


async def within(call: Awaitable[T], seconds: float | None) -> T:
    """What the call gives; None: whenever it does. Raises CallTimeout."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            # The call's own.
            raise
        raise CallTimeout(f"it took more than {seconds:g} s") from error
