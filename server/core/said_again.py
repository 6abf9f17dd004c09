"""Answers of a call that works for long, the last of which is said again until there is another.

A call whose frames went astray on the way looks, to whoever made it, as one that is being worked on:
its stream is open, and pings are answered. Who hears nothing for several of these intervals can give it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

SAY_AGAIN_SECONDS = 10.0


@asynccontextmanager
async def said_again(
    respond: Callable[[T], Awaitable[None]], seconds: float
) -> AsyncGenerator[Callable[[T], Awaitable[None]]]:
    """What to answer with meanwhile. Nothing is said again after the end, nor in the middle of another
    answer."""
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
        # One that is being written is written to its end: gRPC knows no half messages.
        async with speaking:
            repeating.cancel()
        # A write that failed does so because the call is over, which its own writes meet as well.
        await asyncio.gather(repeating, return_exceptions=True)
