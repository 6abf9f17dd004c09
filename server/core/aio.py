"""Helpers for asyncio: waiting for changes, and work that outlives its caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAY_AGAIN_SECONDS = 10.0


class Broadcast:
    """A change that any number of coroutines can wait for, without polling and without a queue.

    A waiter checks its condition and calls `wait` before it awaits anything else. So it misses no change.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class OwnTasks:
    """Tasks that belong to the server and run to their end even if their callers go away. Callers wait for
    them with `asyncio.shield`."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, T], name: str, on_end: Callable[[], None] | None = None
    ) -> asyncio.Task[T]:
        """`on_end` is called when the task ends, even if cancelled, before any waiter resumes."""
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
        await asyncio.gather(*self._running, return_exceptions=True)

    async def cancel(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def run_to_its_end(work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Run `work` in a thread. If the caller is cancelled, still wait until `work` has ended.

    So the memory that `work` reads and writes may be released as soon as this returns or raises. `undo`
    receives a result that the cancelled caller will never see.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if running.exception() is None and undo is not None:
            undo(running.result())
        raise


@asynccontextmanager
async def said_again(
    respond: Callable[[T], Awaitable[None]], seconds: float
) -> AsyncGenerator[Callable[[T], Awaitable[None]]]:
    """Yield the function that answers a long call. Its last answer is repeated every `seconds`, but not
    after the context ends nor in the middle of another answer.

    A call whose frames were lost looks like one that still works: its stream is open, and pings are
    answered. A caller that receives no repetition for several intervals can give up.
    """
    said: list[T] = []
    speaking = asyncio.Lock()

    async def say(answer: T) -> None:
        async with speaking:
            said[:] = [answer]
            await respond(answer)

    async def again() -> None:
        while True:
            await asyncio.sleep(seconds)
            async with speaking:
                for answer in said:
                    await respond(answer)

    repeating = asyncio.create_task(again(), name="what is said again")
    try:
        yield say
    finally:
        # A write under way must finish, because gRPC cannot send half a message.
        async with speaking:
            repeating.cancel()
        # A write fails if the call is over, which the caller's own writes notice too.
        await asyncio.gather(repeating, return_exceptions=True)
