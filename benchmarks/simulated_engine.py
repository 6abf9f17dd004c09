"""One engine on a virtual clock: turns in flight that each get a token with every step.

    give -> waits -> joins at the next step boundary, its prefill before the step -> decodes -> `happen`

Nothing happens per token. Between two changes of what is in flight all steps take the same time, so an
engine knows how many steps it has made by arithmetic (`_steps` at `_anchor`, one more each `_pace`
seconds), and a turn that joins knows the step of its last token. An event is the next boundary at which a
turn ends, joins, or weights are switched.

A switch takes effect at a step boundary: what was sampled up to it is of the version before, then the
engine stands still for the pause, then turns in flight go on (`InFlight.KEEP`). Turns that waited at this
boundary have joined; what comes in the pause joins a step later. A prefix is in the cache
where the trajectory's last turn, or a sibling's prompt, was computed here by the same version: the
server's cache salt is the version. Nothing is ever evicted, and no turn is preempted.
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
"""Part of a step by which an event may miss its boundary."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """How long an engine takes, as measured."""

    steps: tuple[tuple[int, float], ...]
    """Seconds of a decode step with so many turns in flight, ascending; in between and beyond linear."""
    prefill_seconds: float = 0.0
    """Of each context token that is not in the cache; every turn in flight waits meanwhile."""
    first_token_steps: int = 1
    """Steps from joining to the first token: 1 where a step ends with its tokens, 0 where it begins so."""
    turn_seconds: float = 0.0
    """Of a turn outside the engine: its caller, the hub, the wire."""
    pause_seconds: float = 0.0
    """That a switch stops it."""
    most_running: int = 256
    """Turns that decode at a time; further ones wait in the engine."""
    cache_tokens: int = 1 << 40
    """Of the key-value cache; a turn that does not fit waits in the engine."""

    def __post_init__(self) -> None:
        counts = [count for count, _ in self.steps]
        if not counts or counts[0] < 1 or counts != sorted(set(counts)):
            raise ValueError(f"steps must have ascending counts from 1 on, got {counts}")
        if any(seconds <= 0.0 for _, seconds in self.steps):
            raise ValueError(f"steps must take time, got {self.steps}")
        if self.first_token_steps not in (0, 1) or self.most_running < 1:
            raise ValueError(
                f"{self.first_token_steps=} must be 0 or 1, {self.most_running=} positive"
            )

    def step_seconds(self, count: int) -> float:
        """A decode step of so many turns; never less than the fastest measured."""
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
    """Whose it is, for who gave it."""
    request_id: str
    token_count: int
    """That it will sample, at least 1."""
    context: int
    """Tokens before it."""
    prompt: int
    """Thereof those that siblings share."""
    cached: int
    """Thereof those of the trajectory up to its last turn: what the engine of that turn has."""
    last_home: tuple[SimulatedEngine, int] | None = None
    """Where the last turn was computed, and by which version."""
    group_homes: set[tuple[SimulatedEngine, int]] = field(
        default_factory=set["tuple[SimulatedEngine, int]"]
    )
    """Likewise the prompt; shared by siblings."""
    joined_at: float = 0.0
    home: tuple[SimulatedEngine, int] | None = None
    """Where it was computed, once it has joined."""
    first_step: int = 0
    last_step: int = 0


class SimulatedEngine:
    """See the module's docstring; `next_time` is when `happen` is due."""

    def __init__(self, name: str, times: EngineTimes) -> None:
        self.name = name
        self.times = times
        self.version = 0
        self.next_time = math.inf
        self.busy_seconds = 0.0
        """With a turn in flight."""
        self.turn_seconds = 0.0
        """Turns in flight, summed over time."""
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
        """Heap by last step."""
        self._waiting: deque[Turn] = deque()
        self._order = 0
        self._context = 0
        """Tokens in the cache at step zero, were it extrapolated: see `cache_usage`."""
        self._reserved = 0
        """Tokens that turns in flight will have at their ends."""
        self._switch: tuple[int, float] | None = None
        self._switch_steps = [-1]
        self._switch_versions = [0]

    @property
    def running_count(self) -> int:
        """Turns that decode."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Turns in the engine's own queue."""
        return len(self._waiting)

    def cache_usage(self, now: float) -> float:
        """Part of the key-value cache that turns in flight have."""
        return min(1.0, self._cache_tokens(self._steps_by(now)) / self.times.cache_tokens)

    def give(self, turn: Turn, now: float) -> None:
        """A turn arrives."""
        self._waiting.append(turn)
        self._plan(now)

    def switch(self, version: int, now: float) -> float:
        """Other weights from the next step boundary on; returns when it samples with them."""
        if not self._running and not self._waiting:
            self._take_over(version)
            self._anchor = max(self._anchor, now + self.times.pause_seconds)
            return now + self.times.pause_seconds
        self._switch = version, self.times.pause_seconds
        boundary = self._boundary(now)[0]
        self._plan(now)
        return boundary + self.times.pause_seconds

    def happen(self, now: float) -> list[Turn]:
        """What is due at `next_time`; returns the turns that ended, their last token sampled."""
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
        """(version, tokens) of a turn that ended."""
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
        # Tokens of a step after this one are its.
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
        """For all that it will have, beside all that the others will; one alone always has."""
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
            # A step that begins with its tokens is over only when its time is.
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
        """Begins the sums of what it did anew."""
        self.busy_seconds = self.turn_seconds = 0.0
        self.prefilled = self.reused = 0
        self._counted_until = now

    def count_until(self, now: float) -> None:
        """Brings the sums of what it did up to date."""
        if self._running:
            self.busy_seconds += now - self._counted_until
            self.turn_seconds += len(self._running) * (now - self._counted_until)
        self._counted_until = now
