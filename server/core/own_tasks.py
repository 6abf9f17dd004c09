"""Work that runs to its end even if its caller goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OwnTasks:
    """Tasks that belong to the server; callers wait for them with `asyncio.shield`."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, T], name: str, on_end: Callable[[], None] | None = None
    ) -> asyncio.Task[T]:
        """Start a task; `on_end` is called when it ends, even if cancelled, before any waiter
        resumes."""
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
        """Wait until all tasks have ended."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
