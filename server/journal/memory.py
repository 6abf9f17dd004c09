"""The journal that keeps nothing: the state lives only in the process's store, queue and buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from penstock.server.journal import protocol
from penstock.server.journal.protocol import Record, Stored


class MemoryJournal:
    on_disk = False
    folder = None
    refers_from = None

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._appended: asyncio.Future[list[Stored]] = loop.create_future()
        self._appended.set_result([])
        self.failed: asyncio.Future[str] = loop.create_future()
        """Never completes: nothing is written."""

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        for found in ():
            yield found

    async def start(
        self, snapshot: protocol.Snapshot, on_full: protocol.OnFull = protocol.free_nothing
    ) -> None:
        pass

    def check_room(self, byte_count: int) -> None:
        """Never refuse: `memory_budget` bounds memory."""

    def append(
        self, records: Sequence[protocol.Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        return self._appended

    async def read(self, stored: Stored) -> bytes:
        raise LookupError("a journal in memory stores no records to read again")

    def place(self, stored: Stored) -> None:
        return None

    def hold(self, stored: Stored) -> None:
        pass

    def release(self, stored: Stored) -> None:
        pass

    async def close(self) -> None:
        pass
