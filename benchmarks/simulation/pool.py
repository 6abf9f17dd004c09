"""The hub's engines on a virtual clock: `server/pool/engine.py` without the wire.

The rules are the server's own objects: `Placing` with `routing.place` and its memory of homes, and `Member`
with its `TurnLimit`. This module adds the times at which the server calls them:

    place    pool.turns: a turn is placed, or waits in the hub. When a turn ends, its engine has room
             and waiting turns are woken. Its trajectory is then between turns on that engine, or closed
    look     pool.roster, pool.member: an engine's load adjusts its limit. Its pace is compared with
             the usual pace of the pool. Here all engines are polled at the same moment, as often as each
             one is polled in the server
    switch   pool.switch: one part at a time of the engines without the version, or all of them; they are
             out of rotation during the switch. When no such engine is left, the version is the pool's. Here
             all engines take the same time to switch. So the parts switch one after the other, where the
             server starts the next engine whenever one has finished

`Placing.place` is a coroutine that waits only for a future that `wake` sets. So it is driven by hand: after
each `wake`, waiting turns are resumed in order.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from benchmarks.simulation.engine import SimulatedEngine, Turn
from benchmarks.simulation.setup import Setup

from penstock.server.engine.protocol import EngineRequest, Sampling
from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool.health import usual_pace
from penstock.server.pool.member import Member, State
from penstock.server.pool.placing import Placing
from penstock.server.pool.remote import EngineServer
from penstock.server.pool.roster import LOOKS_PER_SECOND
from penstock.wire.messages import GetServerInfoResponse
from penstock.wire.security import Security

# Placing a request does not read its tokens.
NO_TOKENS = np.zeros(1, np.int32)
SAMPLING = Sampling(max_tokens=1)

Act = Callable[[Any], None]


class Clock:
    """Jumps from event to event. Simultaneous events happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Act, Any]] = []
        self._sequence = 0

    def after(self, seconds: float, act: Act, what: Any = None) -> None:
        """Calls `act(what)` `seconds` from now."""
        self.at(self.now + seconds, act, what)

    def at(self, time: float, act: Act, what: Any = None) -> None:
        """Calls `act(what)` at `time`."""
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, act, what))

    def tick(self) -> bool:
        """Advances to the next event and runs it; returns False if there is none."""
        if not self._events:
            return False
        self.now, _, act, what = heapq.heappop(self._events)
        act(what)
        return True


class SimulatedPool:
    """The pool described in the module's docstring.

    It needs a running event loop, but never yields to it.
    """

    def __init__(
        self, setup: Setup, clock: Clock, seed: int, on_ended: Callable[[Turn], None]
    ) -> None:
        """`on_ended` is called with each turn that has ended."""
        self._setup = setup
        self._clock = clock
        self._on_ended = on_ended
        self.engines = [SimulatedEngine(f"engine{n}:1", setup.times) for n in range(setup.engines)]
        rules = setup.rules
        self._limits = LimitRules(first=rules.first_turns, most=rules.most_turns)
        self.members = [self._member(engine) for engine in self.engines]
        self.active_version = 0
        self._rotation = list(self.members)
        self._numbers = {engine.name: number for number, engine in enumerate(self.engines)}
        self.placing = Placing(lambda: self._rotation, setup.rules, rng=random.Random(seed))
        self._requests: dict[str, EngineRequest] = {}
        """Requests that are placed or wait for a place."""
        self._unplaced: deque[tuple[Coroutine[Any, Any, Member | None], Any, Turn]] = deque()

    def _member(self, engine: SimulatedEngine) -> Member:
        server = EngineServer(engine.name, Security())
        member = Member(server, self._limits, lambda: self._clock.now)
        member.heard(GetServerInfoResponse(server_id=engine.name))
        member.state, member.problem = State.SERVING, ""
        return member

    def close(self) -> None:
        """Closes the coroutines that still wait for a place."""
        for placing, _, _ in self._unplaced:
            placing.close()
        self._unplaced.clear()

    # Turns

    def place(self, turn: Turn, trajectory_id: str, group_id: str) -> None:
        """Sends a turn to an engine, or lets it wait for one."""
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
        """Forgets a trajectory that will have no further turns."""
        self.placing.closed(trajectory_id)

    def _wake(self) -> None:
        """Wakes waiting turns after an engine got room, and sends those with a place to their engines."""
        self.placing.wake()
        while self._unplaced and self._unplaced[0][1].done():
            placing, _, turn = self._unplaced.popleft()
            try:
                placing.send(None)
            except StopIteration as placed:
                self._give(placed.value, turn)
            else:
                raise AssertionError("the turn was placed, but still waits")

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
            return  # The engine's next event has changed since.
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
        """Polls every engine, and schedules the next poll."""
        for engine, member in zip(self.engines, self.members, strict=True):
            if member.state is State.SERVING:
                info = GetServerInfoResponse(
                    server_id=engine.name, active_weight_version=engine.version
                )
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
        """Switches every engine to a version. Then the version is active, and `concluded` is called."""
        behind = [m for m in self._rotation if m.version != version]
        if not behind:
            self.active_version = version
            concluded()
            return
        part = len(behind)
        if self._setup.rules.switch == "rolling":
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
