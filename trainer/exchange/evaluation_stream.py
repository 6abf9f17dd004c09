"""Evaluation groups on the exchange: separate demand, and a receipt as soon as a group is read.

They are no part of training: no step trains them, and no ledger lists them. The evaluation asks
again for a group without a receipt. Therefore only the outstanding credit is tracked here.
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
    """One server's evaluation traffic, across reconnections."""

    def __init__(
        self, ready: asyncio.Event, send: Callable[[trainer_service_pb2.ExchangeRequest], None]
    ) -> None:
        """`ready` is set while the server is connected and up to date. Messages that `send` is
        given at other times may be lost."""
        self._ready = ready
        self._send = send
        self.owed = 0
        """Groups demanded and not yet delivered."""
        self.since = 0.0
        """When the server last came back, on the event loop's clock; zero if it was never away."""
        self._take: Callable[[Delivered], None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the server is connected and up to date."""
        return self._ready.is_set()

    async def ready(self) -> None:
        """Waits until the server is connected and up to date."""
        await self._ready.wait()

    def deliver_to(self, take: Callable[[Delivered], None]) -> None:
        """Calls `take` with each group from now on. It measures or refuses the group."""
        self._take = take

    def demand(self, group_count: int) -> None:
        """Grants the server credit for more evaluation groups."""
        self.owed += group_count
        if self.is_ready:
            self._demand(group_count)

    def resume(self) -> None:
        """Repeats the open demand on a new stream."""
        self.since = asyncio.get_running_loop().time()
        if self.owed:
            self._demand(self.owed)

    def take(self, delivery: Delivered) -> None:
        """Handles a delivered group."""
        self.owed = max(0, self.owed - 1)
        if self._take is None:
            self.refuse(delivery, NOT_MEASURED, "no evaluation is running")
        else:
            self._take(delivery)

    def measured(self, delivery: Delivered, step: int) -> None:
        """Acknowledges a group that was measured during this step."""
        receipt = GroupReceipt(delivery_ids=[delivery.delivery_id], step=step)
        self._send(Request(receipt=receipt))

    def refuse(self, delivery: Delivered, reason: str, message: str) -> None:
        """Tells the server that a group is unusable."""
        rejection = Rejection(reason=reason, message=message)
        receipt = GroupReceipt(delivery_ids=[delivery.delivery_id], rejection=rejection)
        self._send(Request(receipt=receipt))

    def _demand(self, group_count: int) -> None:
        purpose = trajectory_pb2.PURPOSE_EVAL
        self._send(Request(demand=Demand(group_count=group_count, purpose=purpose)))
