"""Work that goes on to its end whether or not its caller is there to hear of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OwnTasks:
    """Tasks of the server's own; a caller waits for one behind `asyncio.shield`."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, T], name: str, on_end: Callable[[], None] | None = None
    ) -> asyncio.Task[T]:
        """Begins; `on_end` is called when it ends, however early, and before anybody hears of it."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        if on_end is not None:
            task.add_done_callback(lambda _: on_end())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s: %s", task.get_name(), error)

    async def wait(self) -> None:
        """Waits until all of them have ended."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def cancel(self) -> None:
        """Ends all of them and waits for that."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
