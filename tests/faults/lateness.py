"""How late a test's own process is, so that what it measures of another is not held against that one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

TICK_SECONDS = 0.005
LATE_SECONDS = 0.02
"""What is less is how exact a timer is."""


class Lateness:
    """What this process's event loop has been late by, all together, since it is watched."""

    def __init__(self) -> None:
        self._seconds = 0.0

    async def seconds(self) -> float:
        """Up to now; what is ready at this moment has been late already."""
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
    """Watched until the end of the block."""
    lateness = Lateness()
    watching = asyncio.create_task(lateness.watch())
    try:
        yield lateness
    finally:
        watching.cancel()
        await asyncio.wait([watching])
