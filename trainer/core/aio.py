"""Waiting for several things at once, for one thing or an event, and for the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def together(waits: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Return all results, in order. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in waits]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless(event: asyncio.Event, wait: Awaitable[T]) -> T | None:
    """Return the result of `wait`, or cancel it and return None if the event is set first.

    Returns only once `wait` has ended. If it ends with a result or an error after all, that takes
    precedence over the event.
    """
    answer = asyncio.ensure_future(wait)
    happening = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((answer, happening), return_when=asyncio.FIRST_COMPLETED)
    finally:
        happening.cancel()
        if not answer.done():
            answer.cancel()
            await asyncio.wait((answer,))
    return None if answer.cancelled() else answer.result()


class ComputeThread:
    """Runs functions one after another in a single thread, so that the exchange continues during a long
    step.

    It is always the same thread, because OpenMP starts a separate team for each thread that calls it.
    """

    def __init__(self, threads: int = 0) -> None:
        """`threads` is the size of torch's team. Zero leaves the choice to torch."""
        self._executor = ThreadPoolExecutor(1, "compute", _set_threads, (threads,))

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the function's result. The function runs to its end even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Wait for the running function."""
        self._executor.shutdown()


def _set_threads(threads: int) -> None:
    if threads:
        # Only here: what merely waits does not need torch.
        import torch

        torch.set_num_threads(threads)
