"""Lease streams that wait for an attempt, and who gets the next one.

States of a stream:

    full --freed--> in line --dealt--> has a lease --> full, or in line again

Streams that want the same kind of attempt stand in one line, in order of arrival: what the first of them
cannot have, none of them can. So a change costs a look at the first stream of each line, however many
streams there are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.groups.attempts import Holder, Lease
from penstock.server.groups.task_queue import TaskQueue
from penstock.v1 import trajectory_pb2

_Kind = tuple[trajectory_pb2.Purpose.ValueType, int]


DEALT_AT_A_TIME = 200
"""Rounds after which other calls get their turn."""


class LeaseLines:
    def __init__(
        self, queue: TaskQueue, changed: Broadcast, active_version: Callable[[], int]
    ) -> None:
        """`changed` is notified when there may be an attempt to lease."""
        self._queue = queue
        self._changed = changed
        self._active_version = active_version
        self._lines: dict[_Kind, OrderedDict[Holder, asyncio.Future[Lease]]] = {}
        self._holders: set[Holder] = set()
        self._draining: DomainError | None = None

    def drain(self, refusal: DomainError) -> None:
        """Every stream that waits, or comes later, gets this refusal."""
        self._draining = refusal
        for holder in self._holders:
            holder.freed.notify()
        for line in self._lines.values():
            for answer in line.values():
                if not answer.done():
                    answer.set_exception(refusal)

    async def next(self, holder: Holder, give_back: Callable[[Lease], None]) -> Lease:
        """Wait for an attempt, and for the holder to have capacity. If the caller is cancelled when it has
        an attempt already, `give_back` is called with it. Raises the refusal of `drain`."""
        self._holders.add(holder)
        try:
            while holder.full and self._draining is None:
                await holder.freed.wait()
            if self._draining is not None:
                raise self._draining
            return await self._stand_in_line(holder, give_back)
        finally:
            self._holders.discard(holder)

    async def _stand_in_line(self, holder: Holder, give_back: Callable[[Lease], None]) -> Lease:
        line = self._lines.setdefault(_kind(holder), OrderedDict())
        answer: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        line[holder] = answer
        if len(line) == 1 or holder.owed:
            self._give(holder, answer)
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:
                give_back(answer.result())
            raise
        finally:
            line.pop(holder, None)
            if not line and self._lines.get(_kind(holder)) is line:
                del self._lines[_kind(holder)]

    async def run(self) -> None:
        """Gives out attempts, as long as the server runs."""
        while True:
            rounds = 0
            # Again after each lease: it may have begun a group, whose siblings another line can have.
            while self._deal():
                rounds += 1
                if not rounds % DEALT_AT_A_TIME:
                    await asyncio.sleep(0)
            await self._changed.wait()

    def _deal(self) -> bool:
        """Returns whether anybody was given an attempt."""
        dealt = False
        for holder in self._queue.offers.owing():
            line = self._lines.get(_kind(holder))
            if line is not None and holder in line:
                dealt |= self._give(holder, line[holder])
        for line in list(self._lines.values()):
            # One at a time, so that no line takes everything.
            if line and self._give(*next(iter(line.items()))):
                dealt = True
        return dealt

    def _give(self, holder: Holder, answer: asyncio.Future[Lease]) -> bool:
        """Returns False if there is nothing for the holder now."""
        if answer.done():
            # Its stream was lost a moment ago.
            del self._lines[_kind(holder)][holder]
            return True
        lease = self._queue.lease(holder, self._active_version())
        if lease is None:
            return False
        del self._lines[_kind(holder)][holder]
        answer.set_result(lease)
        return True


def _kind(holder: Holder) -> _Kind:
    # Other agents take tasks of any size, one attempt at a time.
    return holder.purpose, holder.concurrency if holder.whole_groups else 0
