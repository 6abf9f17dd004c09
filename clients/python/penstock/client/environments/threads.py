"""A bounded number of threads for blocking calls, one thread per call."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.client.blocking import run_in_thread

T = TypeVar("T")


class StepTimeout(Exception):
    """A call of the environment exceeded its time limit."""


class CallThreads:
    """Runs calls in threads, at most `count` at a time. Waiting calls use no thread.

    A call whose caller has gone keeps its slot until it returns. So calls that never return can
    take all slots, but not all memory.
    """

    def __init__(self, count: int = 0) -> None:
        """A `count` of zero means four per core, because calls may wait for other processes."""
        self._free = asyncio.Semaphore(count or 4 * (os.cpu_count() or 1))

    async def run(
        self, function: Callable[[], T], name: str = "", seconds: float | None = None
    ) -> T:
        """Returns or raises what the function does. Raises StepTimeout `seconds` after the call
        started; time spent waiting for a thread does not count."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()

        def work() -> T:
            try:
                return function()
            finally:
                # The loop may be closed. Then no caller waits for a slot.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._free.release)

        return await within(run_in_thread(work), name, seconds)


async def within(call: Awaitable[T], name: str, seconds: float | None) -> T:
    """Awaits the call, without a limit if `seconds` is None. Raises StepTimeout."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            # The call itself raised it.
            raise
        raise StepTimeout(f"{name} took more than {seconds:g} s") from error
