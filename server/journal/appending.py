"""What every durable journal does: queue appends, write them in batches, keep records, fail, compact.

    append -> queue -> one batch -> `_write` -> answer        appends complete in order
    release, refusal, retry -> wake -> `_compaction_due` -> `_begin_compaction`

The journal of one kind of store supplies the steps below `Supplied`. One task writes the batches, and
begins compactions between them. A compaction runs in a separate task.

After the first error of a write, or a bug, the journal answers no append any more. `failed` gives the
reason, and the server stops. A compaction that fails with an expected error is tried again, because the
older records hold the same state.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from penstock.common.failpoints import hit
from penstock.server.core.errors import DomainError
from penstock.server.journal.protocol import (
    Appended,
    OnFull,
    Snapshot,
    SnapshotItem,
    Stored,
    free_nothing,
)
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

SHORTEST_WAIT_SECONDS = 1.0
TIMES_AS_LONG = 10


@dataclass
class CompactionPace:
    """When a full journal is compacted, and when a failed compaction is tried again.

    Some garbage only shows when the state is written again. So a compaction also begins when an append was
    refused, if anything was appended or released since the last one. Each compaction postpones the next of
    these by several times its duration. Otherwise a journal full of live data would be rewritten again and
    again. Times are those of the event loop.
    """

    pressed: bool = False
    """Whether an append was refused since the last compaction began."""
    changed: bool = False
    """Whether anything was appended or released since then."""
    _retry_at: float = 0.0
    """When a compaction may begin after a failed one; 0 if the last one did not fail."""
    _press_at: float = 0.0
    """When a compaction may begin only because an append was refused."""

    @property
    def may_begin(self) -> bool:
        """Whether enough time has passed since the last failure."""
        return asyncio.get_running_loop().time() >= self._retry_at

    @property
    def is_pressed(self) -> bool:
        now = asyncio.get_running_loop().time()
        return self.pressed and self.changed and now >= self._press_at

    def failed(self, began: float, wake: Callable[[], object]) -> bool:
        """Schedule `wake` for the next attempt. Returns whether this is the first failure in a row."""
        first = not self._retry_at
        self._retry_at = _rested(began)
        asyncio.get_running_loop().call_at(self._retry_at, wake)
        return first

    def ended(self, began: float) -> None:
        self._retry_at, self._press_at = 0.0, _rested(began)


def _rested(began: float) -> float:
    now = asyncio.get_running_loop().time()
    return now + max(SHORTEST_WAIT_SECONDS, TIMES_AS_LONG * (now - began))


class Framed(Protocol):
    @property
    def frame_bytes(self) -> int:
        """Largest size of the frame of a queued record."""
        ...


E = TypeVar("E", bound=Framed)


@dataclass(frozen=True, slots=True, eq=False)
class Append(Generic[E]):
    entries: list[E]
    hold_last: bool
    done: asyncio.Future[list[Stored]]
    byte_count: int
    waits_for_room: bool
    """Whether it counts as pending bytes; a copy of what is stored already does not."""


class AppendingJournal(ABC, Generic[E]):
    """The scheduling of a durable journal; see `protocol.Journal` for what each method promises."""

    on_disk = True

    def __init__(
        self, entry_of: Callable[[Appended], E], expected: tuple[type[Exception], ...]
    ) -> None:
        """`expected` are errors of the store. Any other error is a bug, logged with its trace."""
        self._entry_of = entry_of
        self._expected = expected
        self._held: set[Stored] = set()
        self._queue: deque[Append[E]] = deque()
        self._batch: list[Append[E]] = []
        """Appends that are being written."""
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._writing: asyncio.Task[None] | None = None
        self._compacting: asyncio.Task[None] | None = None
        self._pace = CompactionPace()
        self._on_full: OnFull = free_nothing
        self._failure: DomainError | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._snapshot: Snapshot | None = None
        self.compactions = 0

    # Appending

    async def start(self, snapshot: Snapshot, on_full: OnFull = free_nothing) -> None:
        self._snapshot, self._on_full = snapshot, on_full
        await self._prepare()
        self._writing = asyncio.create_task(self._write_batches(), name="journal")

    def append(
        self, records: Sequence[Appended], *, hold_last: bool = False
    ) -> asyncio.Future[list[Stored]]:
        return self._enqueue(list(map(self._entry_of, records)), hold_last=hold_last)

    def _enqueue(
        self,
        entries: list[E],
        *,
        hold_last: bool = False,
        waits_for_room: bool = True,
        first: bool = False,
    ) -> asyncio.Future[list[Stored]]:
        """Queue entries, with `first` ahead of all others. Raises JOURNAL_FAILED."""
        if self._failure is not None:
            raise self._failure
        done: asyncio.Future[list[Stored]] = asyncio.get_running_loop().create_future()
        size = sum(entry.frame_bytes for entry in entries)
        append = Append(entries, hold_last, done, size, waits_for_room)
        if first:
            self._queue.appendleft(append)
        else:
            self._queue.append(append)
        if waits_for_room:
            self._pending_bytes += size
        self._wake.set()
        return done

    def hold(self, stored: Stored) -> None:
        self._held.add(stored)
        self._count_held(stored, 1)

    def release(self, stored: Stored) -> None:
        self._held.remove(stored)
        self._count_held(stored, -1)
        self._pace.changed = True
        self._wake.set()

    def _refuse(self, wanted: int, message: str, kept: int, limit: int) -> DomainError:
        """Return DISK_FULL for `wanted` bytes, and have room made: by the server and by a compaction."""
        self._on_full(wanted)
        self._pace.pressed = True
        self._wake.set()
        metadata = {"kept_bytes": kept, "limit": limit}
        return DomainError(Reason.DISK_FULL, message, metadata, retry_after_seconds=5.0)

    async def _write_batches(self) -> None:
        try:
            while not (self._closing and not self._queue):
                await self._wake.wait()
                self._wake.clear()
                if self._failure is not None:
                    return
                self._batch = self._take_batch()
                if await self._write_batch() and self._compaction_due():
                    await self._begin_compaction()
        except Exception as error:  # Any error: otherwise pending appends would never complete.
            self._fail(error)

    def _take_batch(self) -> list[Append[E]]:
        """Take the appends of the next batch; if it leaves any, it wakes the writing task again."""
        batch = list(self._queue)
        self._queue.clear()
        return batch

    async def _write_batch(self) -> bool:
        """Write `_batch` and answer its appends; False if it has no room yet and waits again."""
        entries = [entry for append in self._batch for entry in append.entries]
        hit("journal.before_write")
        places = await self._write(entries)
        if places is None:
            self._queue.extendleft(reversed(self._batch))
            self._batch = []
            return False
        hit("journal.before_reply")
        batch, self._batch = self._batch, []
        for append in batch:
            if append.entries and append.waits_for_room:
                self._pace.changed = True
                self._pending_bytes -= append.byte_count
            count = len(append.entries)
            if append.hold_last:
                self.hold(places[count - 1])
            if not append.done.done():
                append.done.set_result(places[:count])
            places = places[count:]
        return True

    def _fail(self, error: Exception) -> DomainError:
        """Answer no append any more. Returns the error that they get."""
        if self._failure is None:
            message = f"the journal cannot be written: {error}"
            known = isinstance(error, self._expected)
            logger.critical("%s", message, exc_info=None if known else error)
            self._failure = DomainError(Reason.JOURNAL_FAILED, message)
            self.failed.set_result(message)
        for append in (*self._batch, *self._queue):
            if not append.done.done():
                append.done.set_exception(self._failure)
        self._batch = []
        self._queue.clear()
        self._wake.set()
        return self._failure

    # Compaction

    def _compaction_due(self) -> bool:
        if self._compacting is not None or self._snapshot is None or self._closing:
            return False
        return self._pace.may_begin and (self._pace.is_pressed or self._is_outgrown())

    def _take_state(self) -> list[SnapshotItem]:
        """Return the current state, and every held record that it does not name yet."""
        assert self._snapshot is not None
        self._pace.pressed = self._pace.changed = False
        items = list(self._snapshot())
        return items + list(self._held.difference(i for i in items if isinstance(i, Stored)))

    def _compact(self, began: float, work: Callable[[], Awaitable[float]]) -> None:
        """Run the work of a compaction, which returns for how many seconds it only waited."""
        self._compacting = asyncio.create_task(self._run_compaction(began, work), name="compaction")

    async def _run_compaction(self, began: float, work: Callable[[], Awaitable[float]]) -> None:
        try:
            waited = await work()
        except DomainError:
            return  # The journal failed, and `_fail` reported it.
        except self._expected as error:
            self._put_off(began, error)
        except Exception as error:  # A bug: what the journal holds is no longer known.
            self._fail(error)
            return
        else:
            self.compactions += 1
            # The pause before the next compaction depends on the duration of the work alone.
            self._pace.ended(began + waited)
        self._compacting = None
        self._wake.set()

    def _put_off(self, began: float, problem: object) -> None:
        """Note a failed compaction. Nothing is lost: the older records hold the same state."""
        if self._pace.failed(began, self._wake.set):
            logger.error("the journal cannot be compacted, will retry: %s", problem)

    async def close(self) -> None:
        """Write what is queued and free the store for another server. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        await self._end()

    # Supplied

    @abstractmethod
    async def _prepare(self) -> None:
        """Prepare the store for the first append. Raises OSError."""

    @abstractmethod
    async def _write(self, entries: Sequence[E]) -> list[Stored] | None:
        """Write entries; returns their locations once they are durable, None if they must wait for room."""

    @abstractmethod
    def _count_held(self, stored: Stored, sign: int) -> None:
        """Add the bytes of a held record to those kept, or subtract them."""

    @abstractmethod
    def _is_outgrown(self) -> bool:
        """Whether obsolete bytes outgrow the live ones."""

    @abstractmethod
    async def _begin_compaction(self) -> None:
        """Take the state, and call `_compact`."""

    @abstractmethod
    async def _end(self) -> None:
        """Finish compaction and writing, and close the store."""
