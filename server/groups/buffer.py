"""Finished groups: order, delivery, redelivery, receipts.

States of a group:

    waiting --take--> delivered --receipt(step)--> used --finalize(step)--> gone
       ^                  |  \\--receipt(rejected)------------------------> gone
       |                  |                         |
       +------------------+-------------------------+   resume: a trainer went back before that step

Groups are delivered at least once. A group is gone only when a durable checkpoint contains its
step, or when the trainer rejected it. An evaluation group is gone with its receipt, because it
trains no weights, and a trainer that goes back evaluates again.

The staleness gate limits the number of training groups. It counts a group from its admission until
it is taken. The task queue limits evaluation groups.

A group in a journal on disk is also kept in memory until its first delivery, if there is room. Most
groups are requested as soon as they finish. If the memory is needed for something else, the group is
read from the journal instead. Redelivered groups are read from the journal too.

A group too large for any message is dropped. It is counted, and reported to the trainer as an
event.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.reason_counts import ReasonCounts
from penstock.server.journal.protocol import FilePlace, Journal, Stored
from penstock.server.turns.group_bytes import EncodedGroup, group_in
from penstock.v1 import task_service_pb2, trajectory_pb2

MAX_UNREAD_DROPS = 1_000


class Payload(Protocol):
    """Storage of a finished group."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory budget that it takes and cannot give back."""
        ...

    async def read(self) -> bytes:
        """Returns the group as an encoded message. Raises JOURNAL_CORRUPT."""
        ...

    def place(self) -> FilePlace | None:
        """Where another process on this host can read the record; None if it cannot."""
        ...

    def release(self) -> None:
        """Frees the group, which is not read again."""
        ...


class InMemory:
    """A group that is kept only in memory."""

    def __init__(self, group: EncodedGroup) -> None:
        self._group = group
        self.memory_bytes = group.byte_count

    async def read(self) -> bytes:
        return self._group.joined()

    def place(self) -> FilePlace | None:
        return None

    def release(self) -> None:
        """Does nothing: the memory is freed with this object."""


class KeptGroups:
    """Groups of the journal that are also in memory, until they are read or the room is needed."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._groups: dict[Stored, EncodedGroup] = {}
        self.byte_count = 0

    def keep(self, stored: Stored, group: EncodedGroup) -> None:
        """Keeps a group if it fits."""
        if self.byte_count + group.byte_count <= self._limit_bytes:
            self._groups[stored] = group
            self.byte_count += group.byte_count

    def take(self, stored: Stored) -> EncodedGroup | None:
        """Removes and returns a group; None if it is not kept."""
        group = self._groups.pop(stored, None)
        if group is not None:
            self.byte_count -= group.byte_count
        return group

    def clear(self) -> None:
        self._groups.clear()
        self.byte_count = 0


class InJournal:
    """A group that is read from the journal on demand, unless it is still kept in memory."""

    def __init__(self, journal: Journal, stored: Stored, kept: KeptGroups) -> None:
        """The journal must already hold the record."""
        self._journal = journal
        self._kept = kept
        self.stored = stored
        self.memory_bytes = 0

    async def read(self) -> bytes:
        kept = self._kept.take(self.stored)
        return group_in(await self._journal.read(self.stored)) if kept is None else kept.joined()

    def place(self) -> FilePlace | None:
        """Where the record is. The copy in memory is dropped, because the trainer reads the
        file."""
        place = self._journal.place(self.stored)
        if place is not None:
            self._kept.take(self.stored)
        return place

    def release(self) -> None:
        """Lets the journal reuse the group's room."""
        self._kept.take(self.stored)
        self._journal.release(self.stored)


@dataclass(slots=True, eq=False)
class BufferedGroup:
    group_id: str
    task_id: str
    purpose: trajectory_pb2.Purpose.ValueType
    payload: Payload
    trajectory_ids: tuple[str, ...]
    task: task_service_pb2.Task | None
    admitted_version: int
    oldest_version: int | None
    """Smallest weight version of its policy tokens; None if it has none."""
    byte_count: int
    """Size of the group as a message."""
    delivery_id: int = 0
    delivery_count: int = 0
    step: int = 0
    """Step that trained it; 0 before."""

    @property
    def index(self) -> int:
        """Position in the order of the data."""
        return self.task.index if self.task is not None else 0

    @property
    def training(self) -> bool:
        """Whether it is trained on, unlike an evaluation group."""
        return self.purpose != trajectory_pb2.PURPOSE_EVAL


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A finished group that cannot be delivered."""

    group_id: str
    task_id: str
    reason: str
    message: str


class GroupBuffer:
    """Groups from the moment they finish until the trainer can no longer ask for them."""

    def __init__(self, changed: Broadcast, kept_bytes: int = 0) -> None:
        """`kept_bytes` limits the journal's groups that are also kept in memory."""
        self.kept = KeptGroups(kept_bytes)
        self._waiting: OrderedDict[str, BufferedGroup] = OrderedDict()
        self._evaluations: OrderedDict[str, None] = OrderedDict()
        """Ids of waiting evaluation groups."""
        self._delivered: dict[int, BufferedGroup] = {}
        self._used: dict[str, BufferedGroup] = {}
        self._last_delivery_id = 0
        self._dropped: deque[DroppedGroup] = deque(maxlen=MAX_UNREAD_DROPS)
        self.drops = ReasonCounts()
        """Groups that left without being trained, by reason."""
        self.redeliveries = 0
        self.byte_count = 0
        """Memory budget used by groups, without those that are kept in addition to the journal."""
        self.on_gone: Callable[[BufferedGroup], None] = lambda _: None
        """Called with each group that the trainer can no longer ask for."""
        self._changed = changed

    @property
    def waiting_count(self) -> int:
        """Groups finished and not delivered."""
        return len(self._waiting)

    @property
    def waiting_evaluation_count(self) -> int:
        """Evaluation groups finished and not delivered."""
        return len(self._evaluations)

    @property
    def held_count(self) -> int:
        """Number of groups in all states."""
        return len(self._waiting) + len(self._delivered) + len(self._used)

    @property
    def groups(self) -> Iterator[BufferedGroup]:
        """Groups in all states."""
        return chain(self._waiting.values(), self._delivered.values(), self._used.values())

    def restore(self, groups: Iterable[BufferedGroup], last_delivery_id: int) -> None:
        """Takes over the groups of a previous server. Those with a step are used; the others wait.

        `last_delivery_id` must be at least as high as any id that it assigned.
        """
        self._last_delivery_id = last_delivery_id
        for group in groups:
            if group.step:
                self._used[group.group_id] = group
            else:
                self._wait(group)
        self._changed.notify()

    def add(self, group: BufferedGroup) -> None:
        """Adds a finished group."""
        self.byte_count += group.payload.memory_bytes
        self._wait(group)
        self._changed.notify()

    def drop(self, dropped: DroppedGroup) -> None:
        """Records a finished group that cannot be delivered."""
        self.drops[dropped.reason] += 1
        self._dropped.append(dropped)
        self._changed.notify()

    def read_drops(self) -> list[DroppedGroup]:
        """Returns the groups dropped since the last call, for the trainer."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def find(self, group_id: str) -> BufferedGroup | None:
        """Returns a group in any state, or None."""
        found = self._waiting.get(group_id) or self._used.get(group_id)
        delivered = (g for g in self._delivered.values() if g.group_id == group_id)
        return found or next(delivered, None)

    def waiting_evaluations(self, count: int) -> list[str]:
        """Ids of the first `count` waiting evaluation groups."""
        return list(islice(self._evaluations, count))

    def take(self, group_ids: Iterable[str]) -> list[BufferedGroup]:
        """Marks groups as delivered, in the order of the data. Each gets its own delivery id."""
        groups = sorted((self._leave(group_id) for group_id in group_ids), key=lambda g: g.index)
        for group in groups:
            self._last_delivery_id += 1
            group.delivery_id = self._last_delivery_id
            group.delivery_count += 1
            self.redeliveries += group.delivery_count > 1
            self._delivered[group.delivery_id] = group
        if not all(group.training for group in groups):
            # Evaluation tasks may be waiting for this room.
            self._changed.notify()
        return groups

    def discard(self, group_id: str) -> BufferedGroup:
        """Removes a waiting group because it is too old."""
        group = self._leave(group_id)
        self._gone(group)
        return group

    def _leave(self, group_id: str) -> BufferedGroup:
        self._evaluations.pop(group_id, None)
        return self._waiting.pop(group_id)

    def _gone(self, group: BufferedGroup) -> None:
        self.byte_count -= group.payload.memory_bytes
        group.payload.release()
        self.on_gone(group)
        # Another group may be waiting for this room.
        self._changed.notify()

    def lose(self, group: BufferedGroup) -> None:
        """Removes a taken group that cannot be read again."""
        del self._delivered[group.delivery_id]
        self._gone(group)

    def _wait(self, group: BufferedGroup) -> None:
        self._waiting[group.group_id] = group
        if not group.training:
            self._evaluations[group.group_id] = None

    def receipt(self, delivery_ids: Iterable[int], step: int) -> list[BufferedGroup]:
        """Settles deliveries that `step` trained, or that were rejected if `step` is zero.

        Evaluation groups are gone afterwards. Unknown deliveries are ignored: those whose group was
        delivered again, and those that are final.
        """
        settled: list[BufferedGroup] = []
        for delivery_id in delivery_ids:
            group = self._delivered.pop(delivery_id, None)
            if group is None:
                continue
            settled.append(group)
            if step and group.training:
                group.step = step
                self._used[group.group_id] = group
            else:
                self._gone(group)
        return settled

    def finalize(self, step: int) -> list[BufferedGroup]:
        """Forgets groups used up to `step`, because a durable checkpoint contains them."""
        final = [group for group in self._used.values() if group.step <= step]
        for group in final:
            del self._used[group.group_id]
            self._gone(group)
        return final

    def resume(self, step: int) -> list[BufferedGroup]:
        """Makes groups wait again that the trainer's state after `step` does not contain. Returns
        them.

        These were delivered without a receipt, or used by a later step.
        """
        again = list(self._delivered.values())
        again += [group for group in self._used.values() if group.step > step]
        for group in sorted(again, key=lambda g: g.delivery_id):
            self._delivered.pop(group.delivery_id, None)
            self._used.pop(group.group_id, None)
            group.step = 0
            self._wait(group)
        self._changed.notify()
        return again

    def drop_all(self) -> list[BufferedGroup]:
        """Forgets every group, including used ones. Returns those that were not used."""
        lost = [*self._waiting.values(), *self._delivered.values()]
        for group in (*lost, *self._used.values()):
            self._gone(group)
        self._waiting.clear()
        self._evaluations.clear()
        self._delivered.clear()
        self._used.clear()
        # The next trainer would take them for drops among its tasks.
        self._dropped.clear()
        return lost
