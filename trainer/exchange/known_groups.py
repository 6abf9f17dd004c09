"""Tracks what became of each delivered group, in case a server delivers it again.

States of a group:

    new -> in hand -> settled: trained by a step, or refused
             |           +-> delivered again: the receipt is repeated. If a durable checkpoint contains the
             |                 group, it is refused instead, so that the server never delivers it again
             +-> delivered again, because a stream was lost: the newest delivery is the one to receipt
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from penstock.trainer.exchange.stored_groups import Delivered
from penstock.v1 import trainer_service_pb2
from penstock.wire.messages import GroupReceipt

REMEMBERED_GROUPS = 65_536
"""Of each kind. The server forgets a refused group at once, and a trained group with its checkpoint."""


class KnownGroups:
    def __init__(self, trained: Mapping[str, int] | None = None) -> None:
        """`trained` is as in `RunFacts`; trained and refused groups each come oldest first."""
        self._in_hand: dict[str, int] = {}
        """Newest delivery id of each group that was delivered and not yet receipted."""
        # Separate maps, so that many refused groups never displace a trained one.
        self._trained: OrderedDict[str, int] = OrderedDict()
        """The step that used each group."""
        self._refused: OrderedDict[str, int] = OrderedDict()
        for group_id, step in (trained or {}).items():
            self._remember(group_id, step)

    def take(self, delivery: Delivered) -> bool:
        """Take the group in hand unless it is settled; return whether it is new."""
        group_id = delivery.group.group_id
        if self._step(group_id) is not None:
            return False
        known = group_id in self._in_hand
        self._in_hand[group_id] = delivery.delivery_id
        return not known

    def settle(self, group_id: str, step: int) -> int:
        """Settle a group in hand: trained by `step`, or refused if zero. Returns its delivery id."""
        self._remember(group_id, step)
        return self._in_hand.pop(group_id)

    def answer(
        self, delivery: Delivered, final_step: int
    ) -> trainer_service_pb2.GroupReceipt | None:
        """Return the receipt of a group that was delivered again; None while it is in hand.

        A durable checkpoint contains the groups trained up to `final_step`.
        """
        step = self._step(delivery.group.group_id)
        if step is None:
            return None
        receipt = GroupReceipt(delivery_ids=[delivery.delivery_id])
        if not step:
            receipt.rejection.reason = "REFUSED_BEFORE"
        elif step <= final_step:
            receipt.rejection.reason = "TRAINED_BEFORE"
            receipt.rejection.message = f"a durable checkpoint contains it, trained in step {step}"
        else:
            receipt.step = step
        return receipt

    def _remember(self, group_id: str, step: int) -> None:
        settled = self._trained if step else self._refused
        settled[group_id] = step
        while len(settled) > REMEMBERED_GROUPS:
            settled.popitem(last=False)

    def _step(self, group_id: str) -> int | None:
        return self._trained.get(group_id, self._refused.get(group_id))
