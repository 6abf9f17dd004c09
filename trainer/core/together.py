"""Awaits several awaitables concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def together(waits: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results, in order. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_wait(one)) for one in waits]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _wait(one: Awaitable[T]) -> T:
    return await one
