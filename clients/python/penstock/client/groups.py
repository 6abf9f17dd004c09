"""Tracks groups under a group reward: the state of each sibling, and when a group can be scored."""

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
    SCORING = auto()
    SCORED = auto()
    FAILED = auto()
    """Closed as failed and not made again."""


_LIVE = {_State.RUNNING, _State.ENDED, _State.SCORING}


@dataclass
class _Place:
    attempt: Attempt
    state: _State = _State.RUNNING


@dataclass
class _Group:
    size: int
    places: dict[int, _Place] = field(default_factory=dict[int, _Place])
    """sample_index -> its newest attempt. A place without an entry awaits an attempt."""

    def in_state(self, *states: _State) -> list[Attempt]:
        """Returns the attempts in these states, ordered by sample_index."""
        places = (self.places[index] for index in sorted(self.places))
        return [place.attempt for place in places if place.state in states]


@dataclass(frozen=True)
class ReadyGroup:
    """A group whose siblings have all ended."""

    siblings: list[Attempt]
    """The siblings that did not fail, ordered by sample_index."""
    unscored: list[Attempt]
    """The siblings to score and close now, usually all. If one was made again because its own close
    failed after the others were closed, only that one; the scores of the others stand."""


class GroupBook:
    """Siblings by group. Pure: the worker runs functions and closes attempts."""

    def __init__(self, concurrency: int) -> None:
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._concurrency = concurrency

    def begin(self, attempt: Attempt) -> None:
        """Records a leased attempt. It replaces an earlier attempt of its place."""
        if attempt.group_id not in self._groups:
            self._forget_abandoned()
            self._groups[attempt.group_id] = _Group(attempt.task.group_size)
        self._groups[attempt.group_id].places[attempt.sample_index] = _Place(attempt)

    def end(self, attempt: Attempt) -> ReadyGroup | None:
        """Returns the attempt's group if no sibling is awaited any more."""
        return self._move(attempt, _State.ENDED)

    def close(self, attempt: Attempt, *, failed: bool) -> ReadyGroup | None:
        """Records a final close. Returns like `end`."""
        return self._move(attempt, _State.FAILED if failed else _State.SCORED)

    def lose(self, attempt: Attempt) -> None:
        """Records that the server will make an attempt again, here or with another agent."""
        if self.holds(attempt):
            group = self._groups[attempt.group_id]
            del group.places[attempt.sample_index]
            if not group.places:
                del self._groups[attempt.group_id]

    def holds(self, attempt: Attempt) -> bool:
        """Whether an attempt is the newest of its place, in a group that is still tracked."""
        group = self._groups.get(attempt.group_id)
        place = group.places.get(attempt.sample_index) if group is not None else None
        return place is not None and place.attempt is attempt

    def waiting(self) -> list[Attempt]:
        return [a for group in self._groups.values() for a in group.in_state(_State.ENDED)]

    def clear(self) -> None:
        self._groups.clear()

    def _move(self, attempt: Attempt, state: _State) -> ReadyGroup | None:
        if not self.holds(attempt):
            # A newer attempt has its place, or the group was dropped.
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
        """Drops the oldest groups that only await attempts, beyond `concurrency`.

        A server that drops a group does not report it. It holds at most `concurrency` groups that
        only await attempts to be made again: each took a slot, and takes the next free one.
        """
        idle = [key for key, group in self._groups.items() if not group.in_state(*_LIVE)]
        for key in idle[: -self._concurrency]:
            del self._groups[key]
