"""Shares one opened version among engines of the same host that join at the same time.

The first engine opens the version, engines that join meanwhile use the same one, and the last to
finish closes it. The engine that opened it may finish before the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AbstractAsyncContextManager

from penstock.server.pool.uploads import Fanout

Opening = AbstractAsyncContextManager[Fanout | None]


class Sharing:
    """Open fanouts by key."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Shared] = {}

    @contextlib.asynccontextmanager
    async def use(
        self, key: Hashable, make: Callable[[], Opening]
    ) -> AsyncGenerator[Fanout | None]:
        """Use the fanout that is open under `key`, else open one with `make`; raises what opening
        raises."""
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
        """Stop sharing the fanouts that are open now; their current users keep them."""
        self._open.clear()


class _Shared:
    """An open fanout, held open by a separate task."""

    def __init__(self, opening: Opening) -> None:
        self.users = 0
        self.unused = asyncio.Event()
        self.opened: asyncio.Future[Fanout | None] = asyncio.get_running_loop().create_future()
        self.opened.add_done_callback(_heard)
        self.holding = asyncio.create_task(
            self._hold(opening), name="a version for joining engines"
        )

    async def _hold(self, opening: Opening) -> None:
        try:
            async with opening as fanout:
                self.opened.set_result(fanout)
                await self.unused.wait()
        except Exception as error:
            if self.opened.done():
                raise
            # Every user gets the error.
            self.opened.set_exception(error)


def _heard(opened: asyncio.Future[Fanout | None]) -> None:
    """Mark the error as retrieved; users that still wait raise it."""
    if not opened.cancelled():
        opened.exception()
