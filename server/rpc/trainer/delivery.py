"""Delivery: the trainer grants credit, gets as many finished groups, and returns a receipt for each.

A lost stream loses no groups. Groups delivered without a receipt wait for the next Hello, which carries
the step after which the trainer resumes. Those that the trainer's state already contains are not delivered
again; the others are.

A trainer on the same host that can open the journal's folder (Welcome names it) may ask for groups by
place. It reads them from that folder, which saves hundreds of KiB on the socket. If it cannot read a
place, it reconnects with Hello and receives the group as a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.common.failpoints import hit
from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.groups import buffer as group_buffer
from penstock.server.groups.admission import Admission
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.staleness_gate import StalenessContract
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import groups_receipted, step_final
from penstock.server.rpc.trainer.drops import Drops
from penstock.server.rpc.trainer.session import Session, SessionState
from penstock.server.turns.encoding import Delivery
from penstock.v1 import trainer_service_pb2, trajectory_pb2

logger = logging.getLogger(__name__)

MAX_CREDIT = 1 << 20


@dataclass(eq=False)
class Deliverer:
    changed: Broadcast
    admission: Admission
    buffer: GroupBuffer
    journal: Journal
    drops: Drops
    on_delivery: Callable[[BufferedGroup], None]
    """Called with each group before it is sent, for metrics."""

    @property
    def waiting_count(self) -> int:
        """Excludes evaluation groups, which have their own demand."""
        return self.buffer.buffered_count - self.buffer.buffered_evaluation_count

    def begin(self, contract: StalenessContract, weight_version: int, resume_step: int) -> None:
        """The trainer holds `weight_version`. Groups that its state does not contain wait again."""
        self.admission.agree(contract, weight_version)
        again = self.buffer.resume(resume_step)
        self.admission.restore(
            (g.group_id, g.admitted_version, g.oldest_version) for g in again if g.training
        )

    def leave(self) -> None:
        logger.info("the trainer is gone; keeping %d groups for it", self.buffer.held_count)
        # A trainer that is away does not starve.
        self.admission.select(0)

    def demand(self, session: Session, demand: trainer_service_pb2.Demand) -> None:
        if not 0 < (count := demand.group_count) <= MAX_CREDIT:
            raise FieldInvalid("demand.group_count", f"must be from 1 to {MAX_CREDIT}", count)
        session.by_place = demand.by_place
        if demand.purpose == trajectory_pb2.PURPOSE_EVAL:
            session.evaluation_credit = min(MAX_CREDIT, session.evaluation_credit + count)
        elif demand.purpose in (trajectory_pb2.PURPOSE_TRAIN, trajectory_pb2.PURPOSE_UNSPECIFIED):
            session.credit = min(MAX_CREDIT, session.credit + count)
        else:
            raise FieldInvalid("demand.purpose", "is unknown", demand.purpose)
        self.changed.notify()

    async def run(self, session: Session) -> None:
        while not session.ended:
            selection = self.admission.select(session.credit)
            # The gate has forgotten these groups. Move them before the first await, which may fail.
            records = [record for late in selection.late for record in self.drops.late(late)]
            evaluations = self.buffer.buffered_evaluations(session.evaluation_credit)
            groups = self.buffer.deliver([*selection.delivered, *evaluations])
            session.credit -= len(selection.delivered)
            session.evaluation_credit -= len(evaluations)
            if records:
                await self.journal.append(records)
            await self._send_groups(session, groups)
            noticed = await self.drops.tell(session)
            if groups or selection.late or noticed:
                continue  # Something may have changed during the awaits: look again before waiting.
            if session.state is SessionState.HALF_CLOSED:
                return
            await self.changed.wait()

    async def _send_groups(self, session: Session, groups: Iterable[BufferedGroup]) -> None:
        """Groups sent by place share messages."""
        placed: list[trainer_service_pb2.GroupDelivery] = []
        for group in groups:
            place = self.buffer.place(group) if session.by_place else None
            if place is not None:
                self.on_delivery(group)
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
        delivery_id, redeliveries = group.delivery_id, group.delivery_count - 1
        try:
            data = await self.buffer.read(group)
        except DomainError as error:
            if not self.buffer.is_delivered(delivery_id):
                # A newer trainer has it, or its receipt was late. What reads it next sees the same error.
                return
            # Drop it before the first await, because the notice may go to another stream.
            await self.journal.append(self.drops.unreadable(group, error))
            # The trainer's demand for this group is still unmet.
            if group.training:
                session.credit += 1
            else:
                session.evaluation_credit += 1
            return
        self.on_delivery(group)
        await session.send(Delivery(data, delivery_id, redeliveries))


class Receipts:
    """What the trainer did with the groups it got, and which steps are final."""

    def __init__(self, admission: Admission, buffer: GroupBuffer, journal: Journal) -> None:
        self._admission = admission
        self._buffer = buffer
        self._journal = journal

    async def receipt(self, session: Session, receipt: trainer_service_pb2.GroupReceipt) -> None:
        if receipt.step < 0:
            raise FieldInvalid("receipt.step", "must not be negative", receipt.step)
        refused = receipt.HasField("rejection")
        if refused == bool(receipt.step):
            raise FieldInvalid(
                "receipt.step", "must be positive, or zero with a rejection", receipt.step
            )
        groups = self._buffer.receipt(receipt.delivery_ids, receipt.step)
        if not refused and groups:
            self._buffer.trained()
        if refused:
            self._buffer.drops.count(receipt.rejection.reason or "REFUSED", len(groups))
        if refused or receipt.step <= session.resume_step:
            # They do not count for the step being gathered, and must not keep the slots of others. Their
            # receipt was lost with an earlier stream, or names deliveries of it.
            for group in groups:
                self._admission.release(group.group_id)
        if not groups or any(group.training for group in groups):
            session.resume_step = max(session.resume_step, receipt.step)
        group_ids = tuple(group.group_id for group in groups if group.training)
        measured_ids = tuple(group.group_id for group in groups if not group.training)
        records = [groups_receipted(group_ids, receipt.step)]
        if measured_ids:
            # Recorded as gone, because no trainer asks for them again.
            records.append(groups_receipted(measured_ids, 0))
        hit("receipt.before_append")
        await self._journal.append(records)
        hit("receipt.after_append")

    async def finalize(self, step: int) -> None:
        """Receipts up to this step are final: the trainer's checkpoint contains their groups."""
        if step < 0:
            raise FieldInvalid("checkpoint.step", "must not be negative", step)
        self._buffer.finalize(step)
        hit("checkpoint.before_append")
        await self._journal.append([step_final(step)])
