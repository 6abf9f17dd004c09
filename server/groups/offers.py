"""Groups with attempts that wait for a lease, listed where the agents look that may work on them.

    group of single attempts          offered to every agent
    whole group, its holder there     owed to this holder
    whole group that lost its holder  not listed until all its attempts are back, then offered again

Agents that want whole groups can have an offered one only while it is untouched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from penstock.server.groups.attempts import Group, Holder
from penstock.v1 import trajectory_pb2


class Offers:
    def __init__(self) -> None:
        self._offered: dict[trajectory_pb2.Purpose.ValueType, OrderedDict[str, Group]] = {
            trajectory_pb2.PURPOSE_EVAL: OrderedDict(),
            trajectory_pb2.PURPOSE_TRAIN: OrderedDict(),
        }
        self._owing: dict[Holder, None] = {}

    def place(self, group: Group, *, first: bool = False) -> None:
        """List a group, or remove it if no attempt waits. Call it after each change of its attempts or
        holder. With `first` it comes before all others: some of its attempts came back."""
        if group.whole and group.holder is None and group.untouched:
            group.whole = False
        offered = self._offered[group.purpose]
        place = None
        if group.waiting and group.holder is not None:
            place = group.holder.owed
            if first:
                self._owing[group.holder] = None
        elif group.waiting and not group.whole:
            place = offered
        if place is not offered:
            offered.pop(group.group_id, None)
        if place is not None:
            place[group.group_id] = group
            if first:
                place.move_to_end(group.group_id, last=False)
        elif group.holder is not None:
            group.holder.owed.pop(group.group_id, None)

    def next(self, holder: Holder) -> Group | None:
        """The group whose next attempt the holder gets."""
        for group in holder.owed.values():
            return group
        for purpose, groups in self._offered.items():
            if not holder.wants(purpose):
                continue
            for group in groups.values():
                if self.suits(group, holder):
                    return group
        return None

    def offered(self) -> Iterator[Group]:
        """Groups that any agent may work on which takes them."""
        return chain.from_iterable(groups.values() for groups in self._offered.values())

    @staticmethod
    def suits(group: Group, holder: Holder) -> bool:
        """Whether a holder that is not full would get attempts of an offered group."""
        assert group.task is not None
        if not holder.wants(group.purpose):
            return False
        return not holder.whole_groups or (group.untouched and holder.takes(group.task))

    def owing(self) -> list[Holder]:
        """Holders for whose whole groups attempts came back since the last call."""
        owing = [*self._owing]
        self._owing.clear()
        return owing

    def holder_lost(self, holder: Holder) -> None:
        holder.owed.clear()
        self._owing.pop(holder, None)

    def clear(self) -> None:
        self._owing.clear()
        for groups in self._offered.values():
            groups.clear()
