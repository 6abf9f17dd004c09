"""The journal that keeps nothing: the state lives only in the process's store, queue and buffer, and
ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from penstock.server.journal.protocol import (
    Appended,
    FilePlace,
    Folder,
    OnFull,
    Record,
    Snapshot,
    Stored,
    free_nothing,
)


class MemoryJournal:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._appended: asyncio.Future[list[Stored]] = loop.create_future()
        self._appended.set_result([])
        self._failed: asyncio.Future[str] = loop.create_future()

    @property
    def on_disk(self) -> bool:
        return False

    @property
    def folder(self) -> Folder | None:
        return None

    @property
    def refers_from(self) -> int | None:
        return None

    @property
    def failed(self) -> asyncio.Future[str]:
        """Never completes: nothing is written."""
        return self._failed

    async def replay(self) -> AsyncIterator[tuple[Record, Stored]]:
        for found in ():
            yield found

    async def start(self, snapshot: Snapshot, on_full: OnFull = free_nothing) -> None:
        pass

    def check_room(self, byte_count: int) -> None:
        """Never refuse: `memory_budget` bounds memory."""

    async def append(self, records: Sequence[Appended], *, hold_last: bool = False) -> list[Stored]:
        return []

    def begin_append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        return self._appended

    async def read(self, stored: Stored) -> bytes:
        raise LookupError("a journal in memory stores no records to read again")

    def place(self, stored: Stored) -> FilePlace | None:
        return None

    def hold(self, stored: Stored) -> None:
        pass

    def release(self, stored: Stored) -> None:
        pass

    async def close(self) -> None:
        pass
