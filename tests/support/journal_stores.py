"""The journal backends behind one interface, for tests of the guarantees that each must keep."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.server.journal import appending
from penstock.server.journal.disk import snapshot as journal_snapshot
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.protocol import Journal, OnFull, Record, Stored, free_nothing
from penstock.server.journal.records import tasks_known
from penstock.wire.messages import JournalRecord
from tests.support.nats_server import NatsServer

MEBIBYTE = 1 << 20
STREAMS = itertools.count()


def record(name: str, size: int = 0) -> Record:
    """A record that tests can identify by name."""
    return tasks_known([name, "x" * size])


def name_of(found: Record) -> str:
    """The name of a record made by `record`."""
    return found.tasks_known.task_ids[0]


def read_name(payload: bytes) -> str:
    """The name of a record made by `record`, read from its bytes."""
    return name_of(JournalRecord.FromString(payload))


class Store(ABC):
    """One location that journals write to, one after the other."""

    modules: tuple[ModuleType, ...]
    """The modules that implement its journal."""

    @abstractmethod
    async def make(self, *, max_bytes: int = 64 * MEBIBYTE) -> Any:
        """Open a journal without replaying or starting it. Raises
        JournalInUse and JournalUnreadable."""

    @abstractmethod
    async def crash(self, journal: Any) -> None:
        """Simulate a server killed now: the next journal finds only
        what is stored at this moment."""

    @abstractmethod
    async def damage(self, journal: Any, stored: Stored) -> None:
        """Corrupt a stored record."""

    @abstractmethod
    async def stored_bytes(self, journal: Any) -> int:
        """The size of everything stored, in bytes."""

    @asynccontextmanager
    async def opened(
        self,
        snapshot: Callable[[], Iterable[Record | Stored]] = list,
        on_full: OnFull = free_nothing,
        **options: int,
    ) -> AsyncGenerator[tuple[Any, list[str]]]:
        """A journal that accepts records, and the names of the records it held before."""
        journal = await self.make(**options)
        try:
            names = await names_in(journal)
            await journal.start(snapshot, on_full)
            yield journal, names
        finally:
            await journal.close()

    async def names(self, **options: int) -> list[str]:
        """The names of all records it holds."""
        async with self.opened(list, free_nothing, **options) as (_, names):
            return names


async def names_in(journal: Journal) -> list[str]:
    """The names of all replayed records."""
    return [name_of(found) async for found, _ in journal.replay()]


class LogStore(Store):
    """A folder on disk."""

    modules = (appending, journal_snapshot)

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "journal"

    async def make(self, *, max_bytes: int = 64 * MEBIBYTE) -> LogJournal:
        return LogJournal(
            self.folder, durability="fsync", max_bytes=max_bytes, segment_bytes=MEBIBYTE
        )

    async def crash(self, journal: LogJournal) -> None:
        copy = self.folder.with_name(f"{self.folder.name}-again")
        while True:
            try:
                # Run in the journal's thread, so that it writes nothing during the copy.
                await journal._in_thread(lambda: shutil.copytree(self.folder, copy))
                break
            except shutil.Error:  # Compaction removed a file.
                shutil.rmtree(copy)
        await journal.close()
        self.folder = copy

    async def damage(self, journal: LogJournal, stored: Stored) -> None:
        with journal._segments.paths[stored.segment].open("r+b") as file:
            file.seek(stored.offset + 100)
            file.write(b"?")

    async def stored_bytes(self, journal: LogJournal) -> int:
        while True:
            # Compaction may remove a file during the scan.
            with contextlib.suppress(FileNotFoundError):
                return sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())


class JetStreamStore(Store):
    """A NATS JetStream stream."""

    def __init__(self, nats: NatsServer) -> None:
        from penstock.server.journal.jetstream import journal as jetstream_journal

        self.modules = (appending, jetstream_journal)
        self.nats = nats
        self.stream = f"TEST_{next(STREAMS)}"

    async def make(self, *, max_bytes: int = 64 * MEBIBYTE, **settings: object) -> Any:
        from penstock.server.journal.jetstream.journal import JetStreamJournal

        section = self.nats.section(
            self.stream, max_bytes=max_bytes, segment_bytes=MEBIBYTE, **settings
        )
        journal = JetStreamJournal(section)
        await journal.open()
        return journal

    async def crash(self, journal: Any) -> None:
        tasks = [task for task in (journal._writing, journal._compacting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await journal._log.connection.close()

    async def damage(self, journal: Any, stored: Stored) -> None:
        reference = getattr(stored, "reference", None)
        place = stored.segment if reference is None else reference.first
        await journal._log.connection.ask("STREAM.MSG.DELETE", {"seq": place})

    async def stored_bytes(self, journal: Any) -> int:
        table = await journal._log.connection.ask("STREAM.INFO")
        return int(table["state"]["bytes"])
