"""Finished groups: order, delivery, redelivery, receipts.

States of a group:

    waiting --take--> delivered --receipt(step)--> used --finalize(step)--> gone
       ^                  |  \\--receipt(rejected)------------------------> gone
       |                  |                         |
       +------------------+-------------------------+   resume: a trainer went back before that step

Delivery is at least once; a group is gone only when a durable checkpoint contains its step, or when the
trainer refused it. An evaluation group is gone with its receipt: no weights are made of it, and a trainer
that goes back measures anew. The bound is the staleness gate's: a group is charged when it is admitted, and
leaves the gate's count when it is taken. Evaluation groups are charged by the task queue.

A group that lies in a journal on the disk is kept in memory too, while there is room for that, until it is
delivered for the first time: most are wanted as soon as they are finished. Whoever needs the memory gets
it, and the group is read from the journal then, as it is when it is delivered again.

A group that cannot wait here, because no message can carry it, is dropped: counted, and kept as a line for
the trainer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.reason_counts import ReasonCounts
from penstock.server.journal.records import FilePlace, Journal, Stored
from penstock.server.turns.group_bytes import EncodedGroup, group_in
from penstock.v1 import task_service_pb2, trajectory_pb2

MAX_UNREAD_DROPS = 1_000


class Payload(Protocol):
    """Where the group itself is."""

    @property
    def memory_bytes(self) -> int:
        """What it takes of the memory budget, and cannot give back."""
        ...

    async def read(self) -> bytes:
        """The group as a message. Raises JOURNAL_CORRUPT."""
        ...

    def place(self) -> FilePlace | None:
        """Where another process of this host finds its record; None where it cannot."""
        ...

    def release(self) -> None:
        """Nobody reads it again."""
        ...


class InMemory:
    """A group that is kept as it is."""

    def __init__(self, group: EncodedGroup) -> None:
        self._group = group
        self.memory_bytes = group.byte_count

    async def read(self) -> bytes:
        """The group as a message."""
        return self._group.joined()

    def place(self) -> FilePlace | None:
        """In no file."""
        return None

    def release(self) -> None:
        """Nothing to do."""


class KeptGroups:
    """Groups of the journal that are in memory, too, until somebody reads them or needs the room."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._groups: dict[Stored, EncodedGroup] = {}
        self.byte_count = 0

    def keep(self, stored: Stored, group: EncodedGroup) -> None:
        """Keeps a group, where it fits."""
        if self.byte_count + group.byte_count <= self._limit_bytes:
            self._groups[stored] = group
            self.byte_count += group.byte_count

    def take(self, stored: Stored) -> EncodedGroup | None:
        """The group, which is kept no longer; None where it was not."""
        group = self._groups.pop(stored, None)
        if group is not None:
            self.byte_count -= group.byte_count
        return group

    def clear(self) -> None:
        """Keeps nothing."""
        self._groups.clear()
        self.byte_count = 0


class InJournal:
    """A group that is read from the journal when it is wanted, and checked; unless it is kept."""

    def __init__(self, journal: Journal, stored: Stored, kept: KeptGroups) -> None:
        """The record is held already."""
        self._journal = journal
        self._kept = kept
        self.stored = stored
        self.memory_bytes = 0

    async def read(self) -> bytes:
        """The group as a message. Raises JOURNAL_CORRUPT."""
        kept = self._kept.take(self.stored)
        return group_in(await self._journal.read(self.stored)) if kept is None else kept.joined()

    def place(self) -> FilePlace | None:
        """Where its record lies; who is told that needs no copy in memory."""
        place = self._journal.place(self.stored)
        if place is not None:
            self._kept.take(self.stored)
        return place

    def release(self) -> None:
        """Its room may be used for something else."""
        self._kept.take(self.stored)
        self._journal.release(self.stored)


@dataclass(slots=True, eq=False)
class BufferedGroup:
    """One finished group."""

    group_id: str
    task_id: str
    purpose: trajectory_pb2.Purpose.ValueType
    payload: Payload
    trajectory_ids: tuple[str, ...]
    task: task_service_pb2.Task | None
    admitted_version: int
    oldest_version: int | None
    """Smallest version over its policy tokens; None where it has none."""
    byte_count: int
    """Size of the group as a message."""
    delivery_id: int = 0
    delivery_count: int = 0
    step: int = 0
    """Step that used it."""

    @property
    def index(self) -> int:
        """Order in the data."""
        return self.task.index if self.task is not None else 0

    @property
    def training(self) -> bool:
        """Whether it feeds the optimizer."""
        return self.purpose != trajectory_pb2.PURPOSE_EVAL


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that was finished and cannot be delivered."""

    group_id: str
    task_id: str
    reason: str
    message: str


class GroupBuffer:
    """Groups from the moment they are finished until nobody can ask for them again."""

    def __init__(self, changed: Broadcast, kept_bytes: int = 0) -> None:
        """`kept_bytes` bounds the groups that lie in a journal and are in memory, too."""
        self.kept = KeptGroups(kept_bytes)
        self._waiting: OrderedDict[str, BufferedGroup] = OrderedDict()
        self._evaluations: OrderedDict[str, None] = OrderedDict()
        """Those that wait and are evaluation groups."""
        self._delivered: dict[int, BufferedGroup] = {}
        self._used: dict[str, BufferedGroup] = {}
        self._last_delivery_id = 0
        self._dropped: deque[DroppedGroup] = deque(maxlen=MAX_UNREAD_DROPS)
        self.drops = ReasonCounts()
        """Groups that left without being trained, by reason."""
        self.redeliveries = 0
        self.byte_count = 0
        """What groups take of the memory budget, those that are kept beside the journal not among them."""
        self.on_gone: Callable[[BufferedGroup], None] = lambda _: None
        """Called with each group that nobody can ask for any more."""
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
        """Groups held in any state."""
        return len(self._waiting) + len(self._delivered) + len(self._used)

    @property
    def groups(self) -> Iterator[BufferedGroup]:
        """Groups held in any state."""
        return chain(self._waiting.values(), self._delivered.values(), self._used.values())

    def restore(self, groups: Iterable[BufferedGroup], last_delivery_id: int) -> None:
        """Takes up what another server left: those with a step were used by it, the others wait.

        `last_delivery_id` is above every one it gave.
        """
        self._last_delivery_id = last_delivery_id
        for group in groups:
            if group.step:
                self._used[group.group_id] = group
            else:
                self._wait(group)
        self._changed.notify()

    def add(self, group: BufferedGroup) -> None:
        """A group is finished."""
        self.byte_count += group.payload.memory_bytes
        self._wait(group)
        self._changed.notify()

    def drop(self, dropped: DroppedGroup) -> None:
        """A group is finished and cannot be delivered."""
        self.drops[dropped.reason] += 1
        self._dropped.append(dropped)
        self._changed.notify()

    def read_drops(self) -> list[DroppedGroup]:
        """What was dropped since this was last asked, for the trainer."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def find(self, group_id: str) -> BufferedGroup | None:
        """A group in any state, or None."""
        found = self._waiting.get(group_id) or self._used.get(group_id)
        delivered = (g for g in self._delivered.values() if g.group_id == group_id)
        return found or next(delivered, None)

    def waiting_evaluations(self, count: int) -> list[str]:
        """Ids of the first `count` evaluation groups that wait."""
        return list(islice(self._evaluations, count))

    def take(self, group_ids: Iterable[str]) -> list[BufferedGroup]:
        """Marks groups as delivered, each with a delivery id of its own, in the order of the data."""
        groups = sorted((self._leave(group_id) for group_id in group_ids), key=lambda g: g.index)
        for group in groups:
            self._last_delivery_id += 1
            group.delivery_id = self._last_delivery_id
            group.delivery_count += 1
            self.redeliveries += group.delivery_count > 1
            self._delivered[group.delivery_id] = group
        if not all(group.training for group in groups):
            # Evaluation tasks may have waited for the place.
            self._changed.notify()
        return groups

    def discard(self, group_id: str) -> BufferedGroup:
        """Removes a group that waits: it was thrown away for its age."""
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
        # Its room may let another begin.
        self._changed.notify()

    def lose(self, group: BufferedGroup) -> None:
        """A group that was taken cannot be read again."""
        del self._delivered[group.delivery_id]
        self._gone(group)

    def _wait(self, group: BufferedGroup) -> None:
        self._waiting[group.group_id] = group
        if not group.training:
            self._evaluations[group.group_id] = None

    def receipt(self, delivery_ids: Iterable[int], step: int) -> list[BufferedGroup]:
        """Groups were used by a step, or refused where it is zero; unknown deliveries are ignored. What
        was measured is gone.

        A delivery is unknown once its group was delivered again, or when it is final.
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
        """Forgets groups used up to a step: a durable checkpoint contains them."""
        final = [group for group in self._used.values() if group.step <= step]
        for group in final:
            del self._used[group.group_id]
            self._gone(group)
        return final

    def resume(self, step: int) -> list[BufferedGroup]:
        """Makes wait again what the trainer's state after `step` does not contain; returns it.

        That is what was delivered without a receipt, and what was used by a later step.
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
        """Forgets every group, used ones included; returns those that were not used."""
        lost = [*self._waiting.values(), *self._delivered.values()]
        for group in (*lost, *self._used.values()):
            self._gone(group)
        self._waiting.clear()
        self._evaluations.clear()
        self._delivered.clear()
        self._used.clear()
        # Told to whoever comes now, they would be taken for drops of its own tasks.
        self._dropped.clear()
        return lost
