"""Repeats the last answer of a long call until there is another.

To its caller, a call whose frames were lost looks like one that is still working: its stream is open, and
pings are answered. With the repetition, a caller that receives nothing for several intervals can give up.
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
    """Yield the function to answer with. Its last answer is repeated every `seconds`, but not after the end
    of the context nor in the middle of another answer."""
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
