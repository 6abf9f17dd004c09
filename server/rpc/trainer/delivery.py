"""Delivery: the trainer grants credit, and gets as many finished groups.

A lost stream loses no groups. Groups delivered without a receipt wait for the next Hello, which carries
the step after which the trainer resumes. Groups that the trainer's state already contains are not delivered
again; the others are.

A trainer on the same host that can open the journal's folder (Welcome names it) may ask for groups by
place. It then reads them from that folder, which saves hundreds of KiB on the socket. Places of groups that
are ready at the same time share one message. A trainer that cannot read a place reconnects with Hello and
then receives the group as a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.groups import buffer as group_buffer
from penstock.server.groups.admission import Admission
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.staleness_gate import StalenessContract
from penstock.server.journal.protocol import Journal
from penstock.server.rpc.trainer.drops import Drops
from penstock.server.rpc.trainer.session import Session
from penstock.server.turns.encoding import Delivery
from penstock.v1 import trainer_service_pb2, trajectory_pb2

logger = logging.getLogger(__name__)

MAX_CREDIT = 1 << 20


class Deliverer:
    def __init__(
        self,
        changed: Broadcast,
        admission: Admission,
        buffer: GroupBuffer,
        journal: Journal,
        drops: Drops,
        on_delivery: Callable[[BufferedGroup], None],
    ) -> None:
        """`on_delivery` is called with each group before it is sent, for metrics."""
        self._changed = changed
        self._admission = admission
        self._buffer = buffer
        self._journal = journal
        self._drops = drops
        self._on_delivery = on_delivery

    @property
    def waiting_count(self) -> int:
        """Excludes evaluation groups, which have their own demand."""
        return self._buffer.buffered_count - self._buffer.buffered_evaluation_count

    def begin(self, contract: StalenessContract, weight_version: int, resume_step: int) -> None:
        """Agree with a trainer that holds `weight_version`: groups that its state does not contain wait
        again."""
        self._admission.agree(contract, weight_version)
        again = self._buffer.resume(resume_step)
        self._admission.restore(
            (g.group_id, g.admitted_version, g.oldest_version) for g in again if g.training
        )

    def leave(self) -> None:
        logger.info("the trainer is gone; keeping %d groups for it", self._buffer.held_count)
        # A trainer that is away does not starve.
        self._admission.select(0)

    def demand(self, session: Session, demand: trainer_service_pb2.Demand) -> None:
        if not 0 < demand.group_count <= MAX_CREDIT:
            raise FieldInvalid(
                "demand.group_count", f"must be from 1 to {MAX_CREDIT}", demand.group_count
            )
        session.by_place = demand.by_place
        if demand.purpose == trajectory_pb2.PURPOSE_EVAL:
            session.evaluation_credit = min(
                MAX_CREDIT, session.evaluation_credit + demand.group_count
            )
        elif demand.purpose in (
            trajectory_pb2.PURPOSE_TRAIN,
            trajectory_pb2.PURPOSE_UNSPECIFIED,
        ):
            session.credit = min(MAX_CREDIT, session.credit + demand.group_count)
        else:
            raise FieldInvalid("demand.purpose", "is unknown", demand.purpose)
        self._changed.notify()

    async def run(self, session: Session) -> None:
        while not session.ended:
            selection = self._admission.select(session.credit)
            # The gate has forgotten the selected groups. Move them to their new place before the first
            # await, which may fail.
            records = [
                record for group_id in selection.late for record in self._drops.late(group_id)
            ]
            chosen = [
                *selection.delivered,
                *self._buffer.buffered_evaluations(session.evaluation_credit),
            ]
            groups = self._buffer.deliver(chosen)
            session.credit -= len(selection.delivered)
            session.evaluation_credit -= len(chosen) - len(selection.delivered)
            if records:
                await self._journal.append(records)
            await self._send_groups(session, groups)
            noticed = await self._drops.tell(session)
            if groups or selection.late or noticed:
                continue  # Something may have changed during the awaits: look again before waiting.
            if session.half_closed:
                return
            await self._changed.wait()

    async def _send_groups(self, session: Session, groups: Iterable[BufferedGroup]) -> None:
        """Groups sent by place share messages."""
        placed: list[trainer_service_pb2.GroupDelivery] = []
        for group in groups:
            place = group.storage.place() if session.by_place else None
            if place is not None:
                self._on_delivery(group)
                placed.append(group_buffer.placed_delivery(group, place))
            if placed and (place is None or len(placed) == group_buffer.MOST_PLACED):
                await session.send(group_buffer.placed_message(placed))
                placed = []
            if place is None:
                await self._send_whole(session, group)
        if placed:
            await session.send(group_buffer.placed_message(placed))

    async def _send_whole(self, session: Session, group: BufferedGroup) -> None:
        """Drop the group if it cannot be read back."""
        try:
            data = await group.storage.read()
        except DomainError as error:
            # Drop it before the first await, because the notice may go to another stream.
            await self._journal.append(self._drops.unreadable(group, error))
            # The trainer's demand for this group is still unmet.
            if group.training:
                session.credit += 1
            else:
                session.evaluation_credit += 1
            return
        self._on_delivery(group)
        await session.send(Delivery(data, group.delivery_id, group.delivery_count - 1))
