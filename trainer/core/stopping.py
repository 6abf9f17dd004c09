"""Waiting for an answer, unless an event comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


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
