"""What became of each group that a server delivered, for the day that it delivers one again.

States of a group:

    new -> in hand -> settled: trained by a step, or refused
             |           +-> delivered again: the receipt once more. One that a durable checkpoint contains
             |                 is refused instead: it must never come again
             +-> delivered again, because a stream was lost: the newest delivery is the one to receipt
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from penstock.trainer.exchange.stored_groups import Delivered
from penstock.v1 import trainer_service_pb2
from penstock.wire import codec

# The server forgets a refused group at once and a trained one with its checkpoint; so many of each are
# remembered here.
REMEMBERED_GROUPS = 65_536

GroupReceipt = codec.twin(trainer_service_pb2.GroupReceipt)


class KnownGroups:
    """The groups of one server."""

    def __init__(self, trained: Mapping[str, int] | None = None) -> None:
        """`trained` are the steps of groups that the trainer's state contains, zero where one was refused;
        of each kind the oldest first."""
        self._in_hand: dict[str, int] = {}
        """Delivery id of each group delivered and not yet receipted, the newest."""
        # Apart, so that however many are refused, none that was trained is forgotten for them.
        self._trained: OrderedDict[str, int] = OrderedDict()
        """Step that used each group."""
        self._refused: OrderedDict[str, int] = OrderedDict()
        """Zero for each group that was refused."""
        for group_id, step in (trained or {}).items():
            self._remember(group_id, step)

    def take(self, delivery: Delivered) -> bool:
        """Whether the group is new; it is in hand from now on."""
        group_id = delivery.group.group_id
        if self._step(group_id) is not None:
            return False
        known = group_id in self._in_hand
        self._in_hand[group_id] = delivery.delivery_id
        return not known

    def settle(self, group_id: str, step: int) -> int:
        """A step used a group in hand, or it was refused where that is zero; returns its delivery's id."""
        self._remember(group_id, step)
        return self._in_hand.pop(group_id)

    def answer(
        self, delivery: Delivered, final_step: int
    ) -> trainer_service_pb2.GroupReceipt | None:
        """The receipt of a group that was delivered again; None while it is in hand. A durable checkpoint
        contains what was trained up to `final_step`."""
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
        """What `settle` was told of it; None where nothing is known."""
        return self._trained.get(group_id, self._refused.get(group_id))
