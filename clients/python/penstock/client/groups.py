"""Groups under a group reward: how far each sibling is, and when they can be scored."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.leases import Attempt


class _State(Enum):
    RUNNING = auto()
    ENDED = auto()
    """Waits for its siblings."""
    SCORING = auto()
    SCORED = auto()
    """Closed with its score."""
    FAILED = auto()
    """Closed as failed, and not made again."""


_LIVE = {_State.RUNNING, _State.ENDED, _State.SCORING}


@dataclass
class _Place:
    attempt: Attempt
    state: _State = _State.RUNNING


@dataclass
class _Group:
    size: int
    places: dict[int, _Place] = field(default_factory=dict[int, _Place])
    """sample_index -> its newest attempt; none while one is awaited."""

    def in_state(self, *states: _State) -> list[Attempt]:
        """The attempts in these states, by sample_index."""
        places = (self.places[index] for index in sorted(self.places))
        return [place.attempt for place in places if place.state in states]


@dataclass(frozen=True)
class ReadyGroup:
    """A group all of whose siblings have ended."""

    siblings: list[Attempt]
    """Those that did not fail, by sample_index."""
    unscored: list[Attempt]
    """Those of them to be scored and closed now: all, unless one is made again after its siblings
    were closed, because its own close failed; their scores stand."""


class GroupBook:
    """Siblings by group. Pure: it decides, and others call and close."""

    def __init__(self, concurrency: int) -> None:
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._concurrency = concurrency

    def begin(self, attempt: Attempt) -> None:
        """An attempt was taken; it replaces an earlier one of its place."""
        if attempt.group_id not in self._groups:
            self._forget_abandoned()
            self._groups[attempt.group_id] = _Group(attempt.task.group_size)
        self._groups[attempt.group_id].places[attempt.sample_index] = _Place(attempt)

    def end(self, attempt: Attempt) -> ReadyGroup | None:
        """An attempt is ready to be scored; the group, where no sibling is awaited any more."""
        return self._move(attempt, _State.ENDED)

    def close(self, attempt: Attempt, *, failed: bool) -> ReadyGroup | None:
        """An attempt was closed for good; the group, where no sibling is awaited any more."""
        return self._move(attempt, _State.FAILED if failed else _State.SCORED)

    def lose(self, attempt: Attempt) -> None:
        """An attempt will be made again, here or by another agent."""
        if self.holds(attempt):
            group = self._groups[attempt.group_id]
            del group.places[attempt.sample_index]
            if not group.places:
                del self._groups[attempt.group_id]

    def holds(self, attempt: Attempt) -> bool:
        """Whether an attempt is the newest of its place, in a group that was not given up."""
        group = self._groups.get(attempt.group_id)
        place = group.places.get(attempt.sample_index) if group is not None else None
        return place is not None and place.attempt is attempt

    def waiting(self) -> list[Attempt]:
        """Attempts that have ended and wait for their siblings."""
        return [a for group in self._groups.values() for a in group.in_state(_State.ENDED)]

    def clear(self) -> None:
        """Gives every group up."""
        self._groups.clear()

    def _move(self, attempt: Attempt, state: _State) -> ReadyGroup | None:
        if not self.holds(attempt):
            # Its next attempt has begun already, or the group was given up.
            return None
        group = self._groups[attempt.group_id]
        group.places[attempt.sample_index].state = state
        if len(group.places) < group.size or group.in_state(_State.RUNNING):
            return None
        unscored = group.in_state(_State.ENDED)
        for one in unscored:
            group.places[one.sample_index].state = _State.SCORING
        if not group.in_state(*_LIVE):
            del self._groups[attempt.group_id]
        if not unscored:
            return None
        return ReadyGroup(group.in_state(_State.SCORING, _State.SCORED), unscored)

    def _forget_abandoned(self) -> None:
        """A server that dropped a group does not say so. Of groups that only await attempts to be made
        again it holds at most `concurrency`: each took a place, and takes the next one free."""
        idle = [key for key, group in self._groups.items() if not group.in_state(*_LIVE)]
        for key in idle[: -self._concurrency]:
            del self._groups[key]
