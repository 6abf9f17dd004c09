"""One engine on a virtual clock: each turn in flight gets one token with every step.

    give -> waits -> joins at the next step boundary, its prefill before the step -> decodes -> `happen`

There is no event per token. Between two changes of the turns in flight, all steps take the same time. So an
engine computes its number of steps by arithmetic: `_steps` at `_anchor`, and one more each `_pace` seconds.
The step of a turn's last token is known when the turn joins. The next event is the next boundary at which a
turn ends, a turn joins, or weights are switched.

A switch takes effect at a step boundary. Tokens sampled before it have the previous version. Then the
engine is paused, and then turns in flight continue (`InFlight.KEEP`). Turns that were waiting at this
boundary have joined. Turns that arrive during the pause join a step later.

A prefix is in the cache if this engine computed the trajectory's last turn, or a sibling's prompt, under
the same version. The version matters because the server uses it as cache salt. Nothing is ever evicted,
and no turn is preempted.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ROUNDING = 1e-9
"""Fraction of a step by which an event may miss its boundary."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Measured times of an engine."""

    steps: tuple[tuple[int, float], ...]
    """(Turns in flight, seconds of a decode step), ascending; linear in between and beyond."""
    prefill_seconds: float = 0.0
    """Time of each context token that is not in the cache. Every turn in flight waits for it."""
    first_token_steps: int = 1
    """Steps from joining to the first token: 1 if tokens appear at the end of a step, 0 if at its start."""
    turn_seconds: float = 0.0
    """Time of a turn outside the engine: in its caller, the hub and the network."""
    pause_seconds: float = 0.0
    """Pause of the engine at a switch."""
    most_running: int = 256
    """Maximum number of turns that decode at a time; further ones wait in the engine."""
    cache_tokens: int = 1 << 40
    """Size of the key-value cache. A turn that does not fit waits in the engine."""

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.steps]
        if not counts or counts[0] < 1 or counts != sorted(set(counts)):
            raise ValueError(f"steps must have ascending counts starting at 1, got {counts}")
        if any(seconds <= 0.0 for _, seconds in self.steps):
            raise ValueError(f"steps must take time, got {self.steps}")
        if self.first_token_steps not in (0, 1) or self.most_running < 1:
            raise ValueError(
                f"{self.first_token_steps=} must be 0 or 1, {self.most_running=} positive"
            )

    def step_seconds(self, count: int) -> float:
        """Time of a decode step with `count` turns; never less than the fastest measured one."""
        points = self.steps
        if len(points) == 1 or count <= points[0][0]:
            return points[0][1]
        place = min(max(bisect_left(points, (count, 0.0)), 1), len(points) - 1)
        (low, fast), (high, slow) = points[place - 1], points[place]
        seconds = fast + (slow - fast) * (count - low) / (high - low)
        return max(seconds, min(fastest for _, fastest in points))


@dataclass(slots=True, eq=False)
class Turn:
    """One turn of a trajectory."""

    owner: Any
    """The caller's object that the turn belongs to."""
    request_id: str
    token_count: int
    """Number of tokens that the turn will sample, at least 1."""
    context: int
    """Number of tokens before the turn."""
    prompt: int
    """Context tokens that siblings share."""
    cached: int
    """Context tokens up to the end of the trajectory's last turn, which that turn's engine has cached."""
    last_home: tuple[SimulatedEngine, int] | None = None
    """Engine and version that computed the last turn."""
    group_homes: set[tuple[SimulatedEngine, int]] = field(
        default_factory=set["tuple[SimulatedEngine, int]"]
    )
    """Engines and versions that computed the prompt; shared by siblings."""
    joined_at: float = 0.0
    home: tuple[SimulatedEngine, int] | None = None
    """Engine and version that compute the turn, once it has joined."""
    first_step: int = 0
    last_step: int = 0


class SimulatedEngine:
    """The engine described in the module's docstring; `happen` is due at `next_time`."""

    def __init__(self, name: str, times: EngineTimes) -> None:
        self.name = name
        self.times = times
        self.version = 0
        self.next_time = math.inf
        self.busy_seconds = 0.0
        """Time with at least one turn in flight."""
        self.turn_seconds = 0.0
        """Number of turns in flight, integrated over time."""
        self.prefilled = 0
        """Context tokens that were computed."""
        self.reused = 0
        """Context tokens that were in the cache."""
        self._pace_of = [0.0, *(times.step_seconds(n) for n in range(1, times.most_running + 1))]
        self._anchor = 0.0
        self._steps = 0
        self._pace = 0.0
        self._counted_until = 0.0
        self._next_step = 0
        self._running: list[tuple[int, int, Turn]] = []
        """Turns in flight, as a heap ordered by last step."""
        self._waiting: deque[Turn] = deque()
        self._order = 0
        self._context = 0
        """Tokens in the cache, extrapolated back to step zero; see `cache_usage`."""
        self._reserved = 0
        """Tokens that the turns in flight will have at their ends."""
        self._switch: tuple[int, float] | None = None
        self._switch_steps = [-1]
        self._switch_versions = [0]

    @property
    def running_count(self) -> int:
        """Number of turns that decode."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Number of turns in the engine's queue."""
        return len(self._waiting)

    def cache_usage(self, now: float) -> float:
        """Fraction of the key-value cache that turns in flight use."""
        return min(1.0, self._cache_tokens(self._steps_by(now)) / self.times.cache_tokens)

    def give(self, turn: Turn, now: float) -> None:
        """Adds a turn to the engine's queue."""
        self._waiting.append(turn)
        self._plan(now)

    def switch(self, version: int, now: float) -> float:
        """Switches weights at the next step boundary; returns the time at which it samples again."""
        if not self._running and not self._waiting:
            self._take_over(version)
            self._anchor = max(self._anchor, now + self.times.pause_seconds)
            return now + self.times.pause_seconds
        self._switch = version, self.times.pause_seconds
        boundary = self._boundary(now)[0]
        self._plan(now)
        return boundary + self.times.pause_seconds

    def happen(self, now: float) -> list[Turn]:
        """Handles the event due at `next_time`; returns the turns that have sampled their last token."""
        self.count_until(now)
        self._steps, self._anchor = self._next_step, now
        ended = self._end()
        if self._switch is not None:
            version, pause = self._switch
            self._switch = None
            self._take_over(version)
            self._anchor += pause
        self._join(now)
        if not self.times.first_token_steps:
            ended += self._end()
        if self._running:
            self._pace = self._pace_of[len(self._running)]
        self._plan(now)
        return ended

    def versions_of(self, turn: Turn) -> Iterator[tuple[int, int]]:
        """Yields (version, number of tokens) of a turn that ended."""
        steps = self._switch_steps
        place = bisect_left(steps, turn.first_step) - 1
        begin = turn.first_step
        while begin <= turn.last_step:
            later = steps[place + 1] if place + 1 < len(steps) else turn.last_step
            end = min(later, turn.last_step)
            if end >= begin:
                yield self._switch_versions[place], end - begin + 1
                begin = end + 1
            place += 1

    def _take_over(self, version: int) -> None:
        self.version = version
        # Tokens of later steps have the new version.
        self._switch_steps.append(self._steps)
        self._switch_versions.append(version)

    def _end(self) -> list[Turn]:
        ended: list[Turn] = []
        while self._running and self._running[0][0] <= self._steps:
            turn = heapq.heappop(self._running)[2]
            self._context -= turn.context - turn.first_step
            self._reserved -= turn.context + turn.token_count
            ended.append(turn)
        return ended

    def _join(self, now: float) -> None:
        times = self.times
        while self._waiting and len(self._running) < times.most_running:
            turn = self._waiting[0]
            if not self._has_room(turn):
                break
            self._waiting.popleft()
            turn.joined_at = now
            turn.home = self, self.version
            turn.first_step = self._steps + times.first_token_steps
            turn.last_step = turn.first_step + turn.token_count - 1
            self._context += turn.context - turn.first_step
            self._reserved += turn.context + turn.token_count
            self._order += 1
            heapq.heappush(self._running, (turn.last_step, self._order, turn))
            reused = 0
            if turn.last_home == turn.home:
                reused = turn.cached
            elif turn.home in turn.group_homes:
                reused = turn.prompt
            turn.group_homes.add(turn.home)
            self.reused += reused
            self.prefilled += turn.context - reused
            self._anchor += (turn.context - reused) * times.prefill_seconds

    def _has_room(self, turn: Turn) -> bool:
        """Whether the turn's final tokens fit with those of the others; a single turn always fits."""
        reserved = self._reserved + turn.context + turn.token_count
        return not self._running or reserved <= self.times.cache_tokens

    def _cache_tokens(self, step: int) -> int:
        # Each turn in flight has its context and a token for each step since it joined.
        return self._context + len(self._running) * step

    def _steps_by(self, now: float) -> int:
        if not self._running or now <= self._anchor:
            return self._steps
        return self._steps + int((now - self._anchor) / self._pace)

    def _boundary(self, now: float) -> tuple[float, int]:
        """The next step boundary at which something can change, and the number of that step."""
        if not self._running:
            # If tokens appear at the start of a step, the step still takes its full time.
            ready = self._anchor + (0.0 if self.times.first_token_steps else self._pace)
            return max(now, ready), self._steps + 1
        ahead = max(1, math.ceil((now - self._anchor) / self._pace - ROUNDING))
        return self._anchor + ahead * self._pace, self._steps + ahead

    def _plan(self, now: float) -> None:
        time, step = math.inf, 0
        if self._running:
            step = self._running[0][0]
            time = self._anchor + (step - self._steps) * self._pace
        can_join = self._waiting and len(self._running) < self.times.most_running
        if (can_join and self._has_room(self._waiting[0])) or self._switch is not None:
            sooner = self._boundary(now)
            if sooner[0] < time:
                time, step = sooner
        self.next_time, self._next_step = time, step

    def count_anew(self, now: float) -> None:
        self.busy_seconds = self.turn_seconds = 0.0
        self.prefilled = self.reused = 0
        self._counted_until = now

    def count_until(self, now: float) -> None:
        """Updates the sums to the given time."""
        if self._running:
            self.busy_seconds += now - self._counted_until
            self.turn_seconds += len(self._running) * (now - self._counted_until)
        self._counted_until = now
