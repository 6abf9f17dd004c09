"""Receipts: what the trainer did with the groups it got, and which steps are final."""

from __future__ import annotations

from penstock.common.failpoints import hit
from penstock.server.core.errors import FieldInvalid
from penstock.server.groups.admission import Admission
from penstock.server.groups.buffer import GroupBuffer
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import groups_receipted, step_final
from penstock.server.rpc.trainer.session import Session
from penstock.v1 import trainer_service_pb2


class Receipts:
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
        if refused:
            self._buffer.drops.count(receipt.rejection.reason or "REFUSED", len(groups))
        if refused or receipt.step <= session.resume_step:
            # Such groups do not count for the step being gathered. Their receipt was lost with an earlier
            # stream, or names deliveries of it, so they were delivered again. They must not keep the slots
            # of others.
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
