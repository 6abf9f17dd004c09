"""Blocking work off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_to_its_end(work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Run `work` in a thread. If the caller is cancelled, this still waits until `work` has ended.

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
