"""Chooses the engine of a pool that takes a request, now or when one has room.

    place   return an engine at once, or wait; waiting requests are served by priority, then in order
    wake    an engine has room again
    leave   a waiting request is no longer wanted
    ended   an engine no longer has a request. Its trajectory is then *between turns* there. It counts as a
            turn until it is placed again, `closed`, or has stayed away for BETWEEN_SECONDS

Requests that only one version may sample wait in a separate queue, so that they block no others while no
engine has that version. If the first request of a queue finds no place, the rest of the queue is not
tried. So a `wake` costs one attempt per request it places, plus one per queue, however many requests wait.

`routing` decides which engines may take a request, and which of them does.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.server.config.pool import PoolSection
from penstock.server.engine.protocol import EngineRequest
from penstock.server.pool.member import Member
from penstock.server.pool.routing import place

HOMES = 200_000
"""Number of trajectories and groups whose engine is remembered."""
BETWEEN_SECONDS = 1.0
"""An agent that stays away for longer, for example in a tool, no longer counts as a turn."""
LOOKED_AT = 32
"""Engines compared for a request. In a large pool, more cost time and hardly improve the choice."""


@dataclass(order=True, slots=True)
class _Waiting:
    """A waiting request; the smallest is the first of its queue."""

    priority: int
    order: int
    request: EngineRequest = field(compare=False)
    future: asyncio.Future[Member | None] = field(compare=False)
    """Completes with the engine, or with None if the request is no longer wanted."""


@dataclass(eq=False)
class Placing:
    serving: Callable[[], Sequence[Member]]
    """Returns the engines in rotation."""
    rules: PoolSection
    rng: random.Random = field(default_factory=random.Random)
    kept_home: int = 0
    """Number of requests placed on the engine that has their prefix cache."""
    left_home: int = 0
    """Number of requests placed elsewhere although an engine had their prefix cache."""

    def __post_init__(self) -> None:
        self._homes: OrderedDict[str, Member] = OrderedDict()
        self._order = itertools.count()
        self._queues: dict[int, list[_Waiting]] = {}
        """By required version, zero for any. Requests that are done stay in them for a while."""
        self._left: Counter[int] = Counter()
        """Number of requests per queue that were placed or left since the queue was cleared."""
        self._futures: dict[str, asyncio.Future[Member | None]] = {}
        self._between: OrderedDict[str, tuple[Member, float]] = OrderedDict()
        """Trajectories between turns, oldest first: the engine, and when their last turn ended."""

    @property
    def waiting_count(self) -> int:
        return len(self._futures)

    async def place(self, request: EngineRequest) -> Member | None:
        """Wait for an engine and count the request there; None if `leave` ended the wait."""
        queue = self._first_that_wait(request.required_weight_version)
        if not queue and (member := self._find(request)) is not None:
            return member
        future: asyncio.Future[Member | None] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        waiting = _Waiting(request.priority, next(self._order), request, future)
        heapq.heappush(queue, waiting)
        self._queues[request.required_weight_version] = queue
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (member := future.result()) is not None:
                self.ended(member, request)
                self.wake()
            raise
        finally:
            self._futures.pop(request.request_id, None)
            self._clear(request.required_weight_version)

    def leave(self, request_id: str) -> bool:
        """Returns whether the request was waiting."""
        future = self._futures.get(request_id)
        if future is None or future.done():
            return False
        future.set_result(None)
        return True

    def ended(self, member: Member, request: EngineRequest) -> None:
        """The caller then calls `wake`."""
        member.left(request.request_id)
        if request.trajectory_id and member.stays:
            self.closed(request.trajectory_id)
            self._between[request.trajectory_id] = member, member.clock()
            member.between += 1

    def closed(self, trajectory_id: str) -> None:
        """Stop expecting another turn of a trajectory."""
        if (found := self._between.pop(trajectory_id, None)) is not None:
            found[0].between -= 1

    def _give_up_those_away(self) -> None:
        while self._between:
            trajectory_id, (member, since) = next(iter(self._between.items()))
            if member.clock() < since + BETWEEN_SECONDS:
                return
            self.closed(trajectory_id)

    def wake(self) -> None:
        """Place waiting requests, because an engine has room or came into rotation."""
        queues = map(self._first_that_wait, list(self._queues))
        first = [queue[0] for queue in queues if queue]
        heapq.heapify(first)
        while first:
            waiting = heapq.heappop(first)
            member = self._find(waiting.request)
            if member is None:
                continue
            waiting.future.set_result(member)
            if queue := self._first_that_wait(waiting.request.required_weight_version):
                heapq.heappush(first, queue[0])

    def _first_that_wait(self, version: int) -> list[_Waiting]:
        """The queue from its first request that still waits; empty and unregistered without one."""
        queue = self._queues.get(version, [])
        while queue and queue[0].future.done():
            heapq.heappop(queue)
        if not queue:
            self._queues.pop(version, None)
        return queue

    def _clear(self, version: int) -> None:
        """Drop finished requests once they are most of a queue: each keeps its tokens in memory."""
        queue = self._queues.get(version, [])
        self._left[version] += 1
        if 2 * self._left[version] <= len(queue):
            return
        del self._left[version]
        queue[:] = [waiting for waiting in queue if not waiting.future.done()]
        heapq.heapify(queue)
        if not queue:
            self._queues.pop(version, None)

    def forget(self, member: Member) -> None:
        """Forget what an engine's prefix cache held, because the cache is gone."""
        for key in [key for key, home in self._homes.items() if home is member]:
            del self._homes[key]
        for trajectory_id in [name for name, (at, _) in self._between.items() if at is member]:
            self.closed(trajectory_id)

    def _find(self, request: EngineRequest) -> Member | None:
        required = request.required_weight_version
        # The trajectory is back, so it is no longer between turns.
        self.closed(request.trajectory_id)
        self._give_up_those_away()
        keys = [f"t/{request.trajectory_id}"] if request.trajectory_id else []
        keys += [f"g/{request.group_id}"] if request.group_id else []
        homes = [self._homes[key] for key in keys if key in self._homes]
        chosen = self._choose(homes, required)
        if chosen is None:
            return None
        if homes:
            self.kept_home += chosen in homes
            self.left_home += chosen not in homes
        for key in keys:
            # A group's home stays the engine of its first sibling, even if a later sibling went
            # elsewhere. If that engine is lost, drains or is unlisted, the next sibling's becomes
            # the home. Otherwise the remaining siblings would scatter.
            home = self._homes.get(key)
            if key.startswith("t/") or home is None or not home.stays:
                self._homes[key] = chosen
            self._homes.move_to_end(key)
        while len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        chosen.took(request.request_id)
        return chosen

    def _choose(self, homes: Sequence[Member], required: int) -> Member | None:
        serving = self.serving()
        rounds = [serving]
        if len(serving) > LOOKED_AT:
            rounds = [[*homes, *self.rng.sample(serving, LOOKED_AT)], serving]
        names = [member.address for member in homes]
        for members in rounds:
            known = {m.address: m for m in members if m.takes_turns(required)}
            found = place([member.as_load() for member in known.values()], names, self.rules)
            if found is not None:
                return known[found.name]
        return None
