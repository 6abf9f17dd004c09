"""Measures how late a test's own process runs, so that a test can subtract it from what it measures
elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

TICK_SECONDS = 0.005
LATE_SECONDS = 0.02
"""Smaller delays are within a timer's precision."""


class Lateness:
    """The total lateness of this process's event loop since it is watched."""

    def __init__(self) -> None:
        self._seconds = 0.0

    async def seconds(self) -> float:
        """The total so far. Waits briefly, so that a delay happening now is included."""
        await asyncio.sleep(2 * TICK_SECONDS)
        return self._seconds

    async def watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            await asyncio.sleep(TICK_SECONDS)
            late = clock() - begun - TICK_SECONDS
            self._seconds += late if late > LATE_SECONDS else 0.0


@contextlib.asynccontextmanager
async def watched_lateness() -> AsyncGenerator[Lateness]:
    """Watch until the end of the block."""
    lateness = Lateness()
    watching = asyncio.create_task(lateness.watch())
    try:
        yield lateness
    finally:
        watching.cancel()
        await asyncio.wait([watching])
