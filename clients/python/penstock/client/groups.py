"""Groups under a group reward: which siblings have ended, and when they can be scored."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.leases import Attempt


@dataclass
class _Group:
    size: int
    retry_counts: dict[int, int] = field(default_factory=dict[int, int])
    """sample_index -> the newest attempt that was begun."""
    ended: dict[int, Attempt | None] = field(default_factory=dict[int, "Attempt | None"])
    """sample_index -> the attempt that waits for its siblings or was scored; None: it failed."""
    scored: set[int] = field(default_factory=set[int])


@dataclass(frozen=True)
class ReadyGroup:
    """A group all of whose siblings have ended."""

    siblings: list[Attempt]
    """Those that did not fail, by sample_index."""
    unscored: list[Attempt]
    """Those of them still to be closed: all, unless a failed one was made again afterwards."""


class GroupBook:
    """Siblings by group. Pure: it decides, and others call and close.

    A sibling that failed is made again by the server, as long as that has patience; the agent is not told
    when it has none. So a group is ready when every sibling has ended *as far as is known*, and one that
    is made again later is scored next to its siblings, whose scores stand.
    """

    def __init__(self, keep: int) -> None:
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        self._keep = keep

    def begin(self, attempt: Attempt) -> None:
        """An attempt was taken."""
        group = self._groups.setdefault(attempt.group_id, _Group(attempt.task.group_size))
        group.retry_counts[attempt.sample_index] = attempt.retry_count
        group.ended.pop(attempt.sample_index, None)

    def end(self, attempt: Attempt, *, failed: bool) -> ReadyGroup | None:
        """An attempt ended; the group, where it was the last."""
        group = self._groups.get(attempt.group_id)
        if group is None or group.retry_counts.get(attempt.sample_index) != attempt.retry_count:
            # Its next attempt has begun already, or the group was given up.
            return None
        group.ended[attempt.sample_index] = None if failed else attempt
        return self._take_ready(attempt.group_id, group)

    def lose(self, attempt: Attempt) -> None:
        """An attempt went to another agent, or will be leased anew."""
        group = self._groups.get(attempt.group_id)
        if group and group.retry_counts.get(attempt.sample_index) == attempt.retry_count:
            del group.retry_counts[attempt.sample_index]
            group.ended.pop(attempt.sample_index, None)
            if not group.retry_counts:
                del self._groups[attempt.group_id]

    def waiting(self) -> list[Attempt]:
        """Attempts that have ended and wait for their siblings."""
        return [
            attempt
            for group in self._groups.values()
            for index, attempt in group.ended.items()
            if attempt is not None and index not in group.scored
        ]

    def clear(self) -> None:
        """Gives every group up."""
        self._groups.clear()

    def _take_ready(self, group_id: str, group: _Group) -> ReadyGroup | None:
        if len(group.ended) < group.size:
            return None
        siblings = [group.ended[index] for index in sorted(group.ended)]
        whole = [attempt for attempt in siblings if attempt is not None]
        unscored = [attempt for attempt in whole if attempt.sample_index not in group.scored]
        group.scored.update(attempt.sample_index for attempt in unscored)
        if len(whole) == group.size:
            del self._groups[group_id]
        else:
            self._groups.move_to_end(group_id)
            self._forget_oldest()
        return ReadyGroup(whole, unscored) if unscored else None

    def _forget_oldest(self) -> None:
        settled = [key for key, group in self._groups.items() if len(group.ended) == group.size]
        for key in settled[: -self._keep]:
            del self._groups[key]
