"""The life of a completed group, in the words that the whole server uses:

    settled     an attempt has its result, or returns to the queue (`task_queue`)
    completed   its last attempt is settled; the group's record is being written (`rollouts.buffering`)
    buffered    its record is durable, and the trainer may ask for it
    delivered   it was sent to the trainer
    receipted   a step of the trainer used it
    forgotten   a durable checkpoint contains that step

    buffered --deliver--> delivered --receipt(step)--> receipted --finalize(step)--> forgotten
       ^                  |  \\--receipt(rejected)------------------------> forgotten
       |                  |                         |
       +------------------+-------------------------+   resume: a trainer went back before that step

A group is *dropped* if it is forgotten without being trained: because it is too large for any message or
too old, cannot be read back, was refused, or its run was replaced. Drops are counted by reason.

Groups are delivered at least once. A group is forgotten only when a durable checkpoint contains its
step, or when it is dropped. An evaluation group is forgotten with its receipt, because it trains no
weights, and a trainer that goes back evaluates again.

The staleness gate limits the number of training groups, and the task queue that of evaluation groups. Each
has a slot there from its beginning, which is *released* when the group is delivered or dropped. A
delivered training group keeps its slot until the trainer's next version.

A group in a journal on disk is also kept in memory until its first delivery, if there is room: most groups
are requested as soon as they finish. Otherwise, and for redelivery, it is read from the journal.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from penstock.server.core.aio import Broadcast
from penstock.server.core.telemetry import ReasonCounts
from penstock.server.journal.protocol import FilePlace, Journal, Stored
from penstock.server.turns.encoding import EncodedGroup, group_in
from penstock.v1 import task_service_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire.messages import ExchangeResponse, GroupDeliveries, GroupDelivery

MAX_UNREAD_DROPS = 1_000
MOST_PLACED = 32
"""Most groups that one message names by place. Each takes about 50 bytes, plus 50 for each turn that
holds its tokens."""


class KeptGroups:
    """Groups of the journal that are also in memory, until they are read or the room is needed."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._groups: dict[Stored, EncodedGroup] = {}
        self.byte_count = 0

    def keep(self, stored: Stored, group: EncodedGroup) -> None:
        if self.byte_count + group.byte_count <= self._limit_bytes:
            self._groups[stored] = group
            self.byte_count += group.byte_count

    def take(self, stored: Stored) -> EncodedGroup | None:
        """None if it is not kept."""
        group = self._groups.pop(stored, None)
        if group is not None:
            self.byte_count -= group.byte_count
        return group

    def clear(self) -> None:
        self._groups.clear()
        self.byte_count = 0


@dataclass(slots=True, eq=False)
class BufferedGroup:
    group_id: str
    task_id: str
    purpose: trajectory_pb2.Purpose.ValueType
    stored: Stored | None
    """Its record in the journal; None if the journal stores none."""
    trajectory_ids: tuple[str, ...]
    task: task_service_pb2.Task | None
    admitted_version: int
    oldest_version: int | None
    """Smallest weight version of its policy tokens; None if it has none."""
    byte_count: int
    """As an encoded message."""
    encoded: EncodedGroup | None = None
    """Set if no record is stored."""
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
        return self.purpose != trajectory_pb2.PURPOSE_EVAL

    @property
    def memory_bytes(self) -> int:
        """Memory budget that it takes and cannot give back."""
        return 0 if self.encoded is None else self.byte_count


class GroupBuffer:
    def __init__(
        self,
        changed: Broadcast,
        journal: Journal,
        on_forgotten: Callable[[BufferedGroup], None],
        kept_bytes: int,
    ) -> None:
        """`on_forgotten` is called with each group that the trainer can no longer ask for. `kept_bytes`
        limits the journal's groups that are also kept in memory."""
        self.kept = KeptGroups(kept_bytes)
        self._buffered: OrderedDict[str, BufferedGroup] = OrderedDict()
        self._evaluations: OrderedDict[str, None] = OrderedDict()
        self._delivered: dict[int, BufferedGroup] = {}
        self._receipted: dict[str, BufferedGroup] = {}
        self._last_delivery_id = 0
        self._dropped: deque[trainer_service_pb2.Notice] = deque(maxlen=MAX_UNREAD_DROPS)
        self.drops = ReasonCounts()
        self._drops_before = Counter[str]()
        """The drops when a group was last trained."""
        self.redeliveries = 0
        self.byte_count = 0
        """Memory budget used by groups, excluding journal groups that are also kept in memory."""
        self._on_forgotten = on_forgotten
        self._changed = changed
        self._journal = journal

    @property
    def buffered_count(self) -> int:
        return len(self._buffered)

    @property
    def buffered(self) -> Iterable[BufferedGroup]:
        """Oldest first."""
        return self._buffered.values()

    @property
    def buffered_evaluation_count(self) -> int:
        return len(self._evaluations)

    @property
    def drops_since_trained(self) -> Counter[str]:
        """Groups dropped or refused since one was trained, by reason."""
        return self.drops - self._drops_before

    def trained(self) -> None:
        """A step has used a group."""
        self._drops_before = Counter(self.drops)

    @property
    def held_count(self) -> int:
        return len(self._buffered) + len(self._delivered) + len(self._receipted)

    @property
    def groups(self) -> Iterator[BufferedGroup]:
        return chain(self._buffered.values(), self._delivered.values(), self._receipted.values())

    def restore(self, groups: Iterable[BufferedGroup], last_delivery_id: int) -> None:
        """Takes over the groups of a previous server. Those with a step are receipted. `last_delivery_id`
        must be at least as high as any id that it assigned."""
        self._last_delivery_id = last_delivery_id
        for group in groups:
            if group.step:
                self._receipted[group.group_id] = group
            else:
                self._buffer(group)
        self._changed.notify()

    def add(self, group: BufferedGroup) -> None:
        """The group must be durable."""
        self.byte_count += group.memory_bytes
        self._buffer(group)
        self._changed.notify()

    async def read(self, group: BufferedGroup) -> bytes:
        """Returns the encoded group. Raises JOURNAL_CORRUPT."""
        encoded = group.encoded
        if group.stored is not None:
            encoded = self.kept.take(group.stored)
            if encoded is None:
                return group_in(await self._journal.read(group.stored))
        assert encoded is not None
        return encoded.joined()

    def place(self, group: BufferedGroup) -> FilePlace | None:
        """Where another process on this host can read the record; None if it cannot. Drops the copy in
        memory, because the trainer reads the file."""
        if group.stored is None:
            return None
        place = self._journal.place(group.stored)
        if place is not None:
            self.kept.take(group.stored)
        return place

    def drop_unbuffered(self, dropped: trainer_service_pb2.Notice) -> None:
        """Records a completed group that is dropped instead of being added."""
        self.drops[dropped.reason] += 1
        self._dropped.append(dropped)
        self._changed.notify()

    @property
    def unread_drops(self) -> Iterable[trainer_service_pb2.Notice]:
        """What the next `read_drops` returns."""
        return self._dropped

    def read_drops(self) -> list[trainer_service_pb2.Notice]:
        """Returns notices of the groups dropped since the last call."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def find(self, group_id: str) -> BufferedGroup | None:
        """Finds a group in any state."""
        found = self._buffered.get(group_id) or self._receipted.get(group_id)
        delivered = (g for g in self._delivered.values() if g.group_id == group_id)
        return found or next(delivered, None)

    def is_delivered(self, delivery_id: int) -> bool:
        """Whether a delivery awaits its receipt."""
        return delivery_id in self._delivered

    def buffered_evaluations(self, count: int) -> list[str]:
        return list(islice(self._evaluations, count))

    def deliver(self, group_ids: Iterable[str]) -> list[BufferedGroup]:
        """Returns the groups in the order of the data. Each gets its own delivery id."""
        groups = sorted((self._unbuffer(group_id) for group_id in group_ids), key=lambda g: g.index)
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

    def drop(self, group_id: str) -> BufferedGroup:
        """Removes a buffered group that is too old, or a delivered one that cannot be read again."""
        group = self.find(group_id)
        assert group is not None
        if self._delivered.pop(group.delivery_id, None) is None:
            self._unbuffer(group_id)
        self._forget(group)
        return group

    def _unbuffer(self, group_id: str) -> BufferedGroup:
        self._evaluations.pop(group_id, None)
        return self._buffered.pop(group_id)

    def _forget(self, group: BufferedGroup) -> None:
        self.byte_count -= group.memory_bytes
        if group.stored is not None:
            self.kept.take(group.stored)
            self._journal.release(group.stored)
        self._on_forgotten(group)
        # Another group may be waiting for this room.
        self._changed.notify()

    def _buffer(self, group: BufferedGroup) -> None:
        self._buffered[group.group_id] = group
        if not group.training:
            self._evaluations[group.group_id] = None

    def receipt(self, delivery_ids: Iterable[int], step: int) -> list[BufferedGroup]:
        """Notes that `step` used these deliveries, or that they were rejected if `step` is zero. Forgets
        rejected groups and evaluation groups. Ignores unknown deliveries: those whose group was delivered
        again, and those that are final."""
        receipted: list[BufferedGroup] = []
        for delivery_id in delivery_ids:
            group = self._delivered.pop(delivery_id, None)
            if group is None:
                continue
            receipted.append(group)
            if step and group.training:
                group.step = step
                self._receipted[group.group_id] = group
            else:
                self._forget(group)
        return receipted

    def finalize(self, step: int) -> list[BufferedGroup]:
        """Forgets groups receipted up to `step`, because a durable checkpoint contains them."""
        final = [group for group in self._receipted.values() if group.step <= step]
        for group in final:
            del self._receipted[group.group_id]
            self._forget(group)
        return final

    def resume(self, step: int) -> list[BufferedGroup]:
        """Buffers groups again that the trainer's state after `step` does not contain: those without a
        receipt, and those receipted by a later step. Returns them."""
        again = list(self._delivered.values())
        again += [group for group in self._receipted.values() if group.step > step]
        for group in sorted(again, key=lambda g: g.delivery_id):
            self._delivered.pop(group.delivery_id, None)
            self._receipted.pop(group.group_id, None)
            group.step = 0
            self._buffer(group)
        self._changed.notify()
        return again

    def drop_all(self) -> list[BufferedGroup]:
        """Returns the groups that no step used."""
        lost = [*self._buffered.values(), *self._delivered.values()]
        for group in (*lost, *self._receipted.values()):
            self._forget(group)
        self._buffered.clear()
        self._evaluations.clear()
        self._delivered.clear()
        self._receipted.clear()
        # The next trainer would take them for drops among its tasks.
        self._dropped.clear()
        return lost


def placed_delivery(group: BufferedGroup, place: FilePlace) -> trainer_service_pb2.GroupDelivery:
    """Names the place of a group, for a trainer on the same host."""
    delivery = GroupDelivery(
        delivery_id=group.delivery_id, redelivery_count=group.delivery_count - 1
    )
    stored = delivery.stored
    for told, where in ((stored, place), *((stored.turns.add(), turn) for turn in place.turns)):
        told.file, told.offset_bytes, told.length_bytes = where.file, where.offset, where.length
    return delivery


def placed_message(
    deliveries: Sequence[trainer_service_pb2.GroupDelivery],
) -> trainer_service_pb2.ExchangeResponse:
    if len(deliveries) == 1:
        return ExchangeResponse(delivery=deliveries[0])
    return ExchangeResponse(deliveries=GroupDeliveries(deliveries=deliveries))
