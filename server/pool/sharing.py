"""What engines of one host take together that join at the same time: a version, opened once.

The first of them has it opened, those that come meanwhile use the same, and with the last of them it is
closed. Who opened it may leave before the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AbstractAsyncContextManager

from penstock.server.pool.uploads import Fanout

Opening = AbstractAsyncContextManager[Fanout | None]


class Sharing:
    """Fanouts in use, each under a key."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Shared] = {}

    @contextlib.asynccontextmanager
    async def use(
        self, key: Hashable, make: Callable[[], Opening]
    ) -> AsyncGenerator[Fanout | None]:
        """What was opened under this key, else what `make` opens; raises what opening it does."""
        shared = self._open.get(key)
        if shared is None:
            shared = self._open[key] = _Shared(make())
        shared.users += 1
        try:
            yield await asyncio.shield(shared.opened)
        finally:
            shared.users -= 1
            if not shared.users:
                if self._open.get(key) is shared:
                    del self._open[key]
                shared.unused.set()
                await asyncio.shield(shared.holding)

    def forget(self) -> None:
        """Nobody more uses what is open now; who does goes on."""
        self._open.clear()


class _Shared:
    """One that is open, in a task of its own."""

    def __init__(self, opening: Opening) -> None:
        self.users = 0
        self.unused = asyncio.Event()
        self.opened: asyncio.Future[Fanout | None] = asyncio.get_running_loop().create_future()
        self.opened.add_done_callback(_heard)
        self.holding = asyncio.create_task(self._hold(opening), name="a version for who joins")

    async def _hold(self, opening: Opening) -> None:
        try:
            async with opening as fanout:
                self.opened.set_result(fanout)
                await self.unused.wait()
        except Exception as error:
            if self.opened.done():
                raise
            # Each of its users is told.
            self.opened.set_exception(error)


def _heard(opened: asyncio.Future[Fanout | None]) -> None:
    """Its error is told where it is waited for, if anybody still waits."""
    if not opened.cancelled():
        opened.exception()
