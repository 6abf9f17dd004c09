"""Evaluation groups on the exchange: a demand of their own, and a receipt as soon as they are read.

They are no part of training: no step is made of them, no ledger names them, and what is not received
is asked for again by whoever measures. So nothing of them is remembered here but the credit that is out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.trainer.exchange.stored_groups import Delivered
from penstock.v1 import rejection_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire import codec

Request = codec.twin(trainer_service_pb2.ExchangeRequest)
Demand = codec.twin(trainer_service_pb2.Demand)
GroupReceipt = codec.twin(trainer_service_pb2.GroupReceipt)
Rejection = codec.twin(rejection_pb2.Rejection)

NOT_MEASURED = "NOT_MEASURED"


class EvaluationStream:
    """What evaluations send and are sent, over as many connections as it takes."""

    def __init__(
        self, ready: asyncio.Event, send: Callable[[trainer_service_pb2.ExchangeRequest], None]
    ) -> None:
        """`ready` is set while the server is there and up to date; what `send` is given otherwise may be
        lost."""
        self._ready = ready
        self._send = send
        self.owed = 0
        """Groups demanded and not yet delivered."""
        self.since = 0.0
        """When the server was last there again, by the event loop's clock; zero where it never was away."""
        self.on_delivery: Callable[[Delivered], None] | None = None
        """Called with each group, which it measures or refuses."""

    @property
    def is_ready(self) -> bool:
        """Whether the server is there and up to date."""
        return self._ready.is_set()

    async def ready(self) -> None:
        """Waits until it is."""
        await self._ready.wait()

    def demand(self, group_count: int) -> None:
        """Grants the server credit for further evaluation groups."""
        self.owed += group_count
        if self.is_ready:
            self._demand(group_count)

    def resume(self) -> None:
        """A new stream begins: what was demanded on the one before is demanded of it."""
        self.since = asyncio.get_running_loop().time()
        if self.owed:
            self._demand(self.owed)

    def take(self, delivery: Delivered) -> None:
        """A group came."""
        self.owed = max(0, self.owed - 1)
        if self.on_delivery is None:
            self.refuse(delivery, NOT_MEASURED, "nothing is being measured")
        else:
            self.on_delivery(delivery)

    def measured(self, delivery: Delivered, step: int) -> None:
        """Says that a group was measured while this step was under way."""
        receipt = GroupReceipt(delivery_ids=[delivery.delivery_id], step=step)
        self._send(Request(receipt=receipt))

    def refuse(self, delivery: Delivered, reason: str, message: str) -> None:
        """Says that a group is of no use."""
        rejection = Rejection(reason=reason, message=message)
        receipt = GroupReceipt(delivery_ids=[delivery.delivery_id], rejection=rejection)
        self._send(Request(receipt=receipt))

    def _demand(self, group_count: int) -> None:
        purpose = trajectory_pb2.PURPOSE_EVAL
        self._send(Request(demand=Demand(group_count=group_count, purpose=purpose)))
