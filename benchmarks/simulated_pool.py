"""The hub's engines on a virtual clock: `server/pool/engine.py` without the wire.

The rules are the server's own objects: `Placing` with `routing.place` and its memory of homes, `Member`
with its `TurnLimit`. What is here is when the server calls them:

    place    pool_turns._deltas: a turn is placed, or waits in the hub. When one ends its engine has
             room, and who waits is woken; its trajectory is between turns there, or is closed
    look     pool_roster._keep, pool_member.heard: an engine's load moves its limit, and it is told the pace
             that is usual, which its own is against. All engines are looked at in one moment here, as often
             as each is there
    switch   pool.switch: a part of the engines that have not got the version at a time, or all of them;
             out of rotation meanwhile. Without any that have not, the version is the pool's. Engines take
             as long as each other to switch here, and have it at the same time: one after which the next
             begins is the part after which the next part does

`Placing.place` is a coroutine that waits for nothing but a future that `wake` sets, so it is driven by
hand: what waits is resumed, in its order, after each `wake`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from pool_setup import Setup
from simulated_engine import SimulatedEngine, Turn

from penstock.server.engine.protocol import EngineRequest, Sampling
from penstock.server.pool.health import usual_pace
from penstock.server.pool.member import Member, State
from penstock.server.pool.placing import Placing
from penstock.server.pool.remote import EngineServer
from penstock.server.pool.roster import LOOKS_PER_SECOND
from penstock.v1 import rollout_service_pb2
from penstock.wire.codec import twin
from penstock.wire.security import Security

Info = twin(rollout_service_pb2.GetServerInfoResponse)
# Nothing that places a request looks at its tokens.
NO_TOKENS = np.zeros(1, np.int32)
SAMPLING = Sampling(max_tokens=1)

Act = Callable[[Any], None]


class Clock:
    """Jumps from event to event; those of one moment happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Act, Any]] = []
        self._sequence = 0

    def after(self, seconds: float, act: Act, what: Any = None) -> None:
        """Calls `act(what)` so many seconds from now."""
        self.at(self.now + seconds, act, what)

    def at(self, time: float, act: Act, what: Any = None) -> None:
        """Calls `act(what)` then."""
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, act, what))

    def tick(self) -> bool:
        """Goes to the next event and has it happen; False where there is none."""
        if not self._events:
            return False
        self.now, _, act, what = heapq.heappop(self._events)
        act(what)
        return True


class SimulatedPool:
    """See the module's docstring; wants a running loop, which it never lets run."""

    def __init__(
        self, setup: Setup, clock: Clock, seed: int, on_ended: Callable[[Turn], None]
    ) -> None:
        """`on_ended` is called with each turn that an engine has ended."""
        self._setup = setup
        self._clock = clock
        self._on_ended = on_ended
        self.engines = [SimulatedEngine(f"engine{n}:1", setup.times) for n in range(setup.engines)]
        self.members = [self._member(engine) for engine in self.engines]
        self.active_version = 0
        self._rotation = list(self.members)
        self._numbers = {engine.name: number for number, engine in enumerate(self.engines)}
        self.placing = Placing(lambda: self._rotation, setup.rules.routing, rng=random.Random(seed))
        self._requests: dict[str, EngineRequest] = {}
        """Those that are placed, or wait to be."""
        self._unplaced: deque[tuple[Coroutine[Any, Any, Member | None], Any, Turn]] = deque()

    def _member(self, engine: SimulatedEngine) -> Member:
        server = EngineServer(engine.name, Security())
        member = Member(server, self._setup.rules.limits, lambda: self._clock.now)
        member.heard(Info(server_id=engine.name))
        member.state, member.problem = State.SERVING, ""
        return member

    def close(self) -> None:
        """Nobody waits for a place any more."""
        for placing, _, _ in self._unplaced:
            placing.close()
        self._unplaced.clear()

    # Turns

    def place(self, turn: Turn, trajectory_id: str, group_id: str) -> None:
        """A turn goes to an engine, or waits for one."""
        request = EngineRequest(
            turn.request_id,
            NO_TOKENS,
            SAMPLING,
            "",
            trajectory_id=trajectory_id,
            group_id=group_id,
        )
        self._requests[turn.request_id] = request
        placing = self.placing.place(request)
        try:
            future = placing.send(None)
        except StopIteration as placed:
            self._give(placed.value, turn)
        else:
            self._unplaced.append((placing, future, turn))

    def closed(self, trajectory_id: str) -> None:
        """No turn of it comes any more."""
        self.placing.closed(trajectory_id)

    def _wake(self) -> None:
        """Something has room; who is given a place goes there."""
        self.placing.wake()
        while self._unplaced and self._unplaced[0][1].done():
            placing, _, turn = self._unplaced.popleft()
            try:
                placing.send(None)
            except StopIteration as placed:
                self._give(placed.value, turn)
            else:
                raise AssertionError("it was placed, and waits on")

    def _give(self, member: Member, turn: Turn) -> None:
        engine = self.engines[self._numbers[member.address]]
        engine.give(turn, self._clock.now)
        self._schedule(engine)

    def _schedule(self, engine: SimulatedEngine) -> None:
        if engine.next_time < math.inf:
            self._clock.at(engine.next_time, self._engine_acts, (engine, engine.next_time))

    def _engine_acts(self, due: tuple[SimulatedEngine, float]) -> None:
        engine, time = due
        if engine.next_time != time:
            return  # It has other plans since.
        ended = engine.happen(time)
        member = self.members[self._numbers[engine.name]]
        for turn in ended:
            member.paced(time - turn.joined_at, turn.token_count)
            self.placing.ended(member, self._requests.pop(turn.request_id))
            self._on_ended(turn)
        if ended:
            self._wake()
        self._schedule(engine)

    # Loads

    def look(self, _: object = None) -> None:
        """At every engine, and again after a while."""
        for engine, member in zip(self.engines, self.members, strict=True):
            if member.state is State.SERVING:
                info = Info(server_id=engine.name, active_weight_version=engine.version)
                info.load.running_turn_count = engine.running_count
                info.load.waiting_turn_count = engine.waiting_count
                info.load.kv_cache_usage = engine.cache_usage(self._clock.now)
                member.heard(info)
        self._rotate()
        pause = max(self._setup.rules.look_seconds, len(self.members) / LOOKS_PER_SECOND)
        self._clock.after(pause, self.look)

    def _rotate(self) -> None:
        self._rotation = [m for m in self.members if m.state is State.SERVING]
        usual = usual_pace(member.pace for member in self._rotation)
        for member in self._rotation:
            member.usual_pace = usual
        self._wake()

    # Weights

    def switch(self, version: int, concluded: Callable[[], None]) -> None:
        """Every engine goes on to a version; then it is the active one, and `concluded` is called."""
        behind = [m for m in self._rotation if m.version != version]
        if not behind:
            self.active_version = version
            concluded()
            return
        part = len(behind)
        if not self._setup.rules.switches_at_once:
            part = max(1, int(len(self._rotation) * self._setup.rules.switch_part))
        done = self._clock.now + self._setup.switch_seconds
        for member in behind[:part]:
            member.state = State.SWITCHING
            member.settle(member.reserve(version), accepted=True)
            engine = self.engines[self._numbers[member.address]]
            done = max(done, engine.switch(version, self._clock.now))
            self._schedule(engine)
        self._rotate()
        self._clock.at(done, self._switched, (version, behind[:part], concluded))

    def _switched(self, part: tuple[int, list[Member], Callable[[], None]]) -> None:
        version, members, concluded = part
        for member in members:
            member.has(version, adapter=False)
            member.state = State.SERVING
        self._rotate()
        self.switch(version, concluded)
