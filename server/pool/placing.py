"""Which engine of a pool takes a request, now or when one has room.

    place -> an engine at once, or the request waits; those that wait are served by priority, then in order
    wake  -> room has come to be somewhere
    leave -> a request that waits is not wanted any more
    ended -> an engine has a request no more. Its trajectory is *between turns* there, and counts as a turn
             until it is placed again, `closed`, or has stayed away for BETWEEN_SECONDS

Those that one version alone may sample wait in a queue of their own, and are in nobody's way where no
engine has it. A queue whose first one finds no place is looked at no further: however many wait, a `wake`
asks for as many places as it gives, and one for each queue.

Who may take it, and who of those does, is `routing`'s.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.server.engine.protocol import EngineRequest
from penstock.server.pool.member import Member
from penstock.server.pool.routing import RoutingRules, place

HOMES = 200_000
"""Trajectories and groups whose engine is remembered."""
BETWEEN_SECONDS = 1.0
"""An agent that stays away for longer, as with a tool, is not expected at once."""
LOOKED_AT = 32
"""Engines that a request is compared between: more of them hardly find a better one, and cost time with
each request of a large pool."""


@dataclass(order=True, slots=True)
class _Waiting:
    """A request without a place; the first of a queue is the least."""

    priority: int
    order: int
    request: EngineRequest = field(compare=False)
    future: asyncio.Future[Member | None] = field(compare=False)
    """None where it was left."""


class Placing:
    """Places requests on the engines in rotation."""

    def __init__(
        self,
        serving: Callable[[], Sequence[Member]],
        rules: RoutingRules,
        *,
        rng: random.Random | None = None,
    ) -> None:
        """`serving` has the engines in rotation."""
        self._serving = serving
        self._rules = rules
        self._rng = rng or random.Random()
        self._homes: OrderedDict[str, Member] = OrderedDict()
        self._order = itertools.count()
        self._queues: dict[int, list[_Waiting]] = {}
        """By the version that each takes, zero for any; those that were left lie in them for a while."""
        self._left: Counter[int] = Counter()
        """How many of each queue were placed or left since it was cleared."""
        self._futures: dict[str, asyncio.Future[Member | None]] = {}
        self._between: OrderedDict[str, tuple[Member, float]] = OrderedDict()
        """Trajectories between turns, by when their last one ended: where, and when that was."""
        self.kept_home = 0
        """Requests that went where their cache is."""
        self.left_home = 0
        """Requests that had such a place and went elsewhere."""

    @property
    def waiting_count(self) -> int:
        """Requests without a place."""
        return len(self._futures)

    async def place(self, request: EngineRequest) -> Member | None:
        """The engine that takes it, which counts it from now on; None where it was left."""
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
        """A request is not wanted any more; whether it waited."""
        future = self._futures.get(request_id)
        if future is None or future.done():
            return False
        future.set_result(None)
        return True

    def ended(self, member: Member, request: EngineRequest) -> None:
        """An engine has a request no more; `wake` is the caller's to call."""
        member.left(request.request_id)
        if request.trajectory_id and member.stays:
            self.closed(request.trajectory_id)
            self._between[request.trajectory_id] = member, member.clock()
            member.between += 1

    def closed(self, trajectory_id: str) -> None:
        """No turn of it is expected any more."""
        if (found := self._between.pop(trajectory_id, None)) is not None:
            found[0].between -= 1

    def _give_up_those_away(self) -> None:
        while self._between:
            trajectory_id, (member, since) = next(iter(self._between.items()))
            if member.clock() < since + BETWEEN_SECONDS:
                return
            self.closed(trajectory_id)

    def wake(self) -> None:
        """Something has room, or came into rotation."""
        first = [
            queue[0] for version in list(self._queues) if (queue := self._first_that_wait(version))
        ]
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
        """The queue of a version, with one at its head that waits; empty, and no one's, where none does."""
        queue = self._queues.get(version, [])
        while queue and queue[0].future.done():
            heapq.heappop(queue)
        if not queue:
            self._queues.pop(version, None)
        return queue

    def _clear(self, version: int) -> None:
        """Lets go of those that were left, where they are most of a queue: each holds its tokens."""
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
        """What its cache held is gone."""
        for key in [key for key, home in self._homes.items() if home is member]:
            del self._homes[key]
        for trajectory_id in [name for name, (at, _) in self._between.items() if at is member]:
            self.closed(trajectory_id)

    def _find(self, request: EngineRequest) -> Member | None:
        required = request.required_weight_version
        # It is not away: it is here.
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
            # The siblings of a group stay with the first of them, wherever one of them went; and with the
            # one after it, where that engine is lost, drains or is listed no more: else each of those
            # that are still to come would go somewhere else.
            home = self._homes.get(key)
            if key.startswith("t/") or home is None or not home.stays:
                self._homes[key] = chosen
            self._homes.move_to_end(key)
        while len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        chosen.took(request.request_id)
        return chosen

    def _choose(self, homes: Sequence[Member], required: int) -> Member | None:
        serving = self._serving()
        rounds = [serving]
        if len(serving) > LOOKED_AT:
            rounds = [[*homes, *self._rng.sample(serving, LOOKED_AT)], serving]
        names = [member.address for member in homes]
        for members in rounds:
            known = {m.address: m for m in members if m.takes_turns(required)}
            found = place([member.as_load() for member in known.values()], names, self._rules)
            if found is not None:
                return known[found.name]
        return None
