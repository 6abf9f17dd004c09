"""Evaluation groups on the exchange: separate demand, and a receipt as soon as a group is read.

No step trains them, and no ledger lists them. The evaluation asks again for a group without a receipt, so
only the outstanding credit is tracked here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from penstock.trainer.exchange.stored_groups import Delivered
from penstock.v1 import trainer_service_pb2, trajectory_pb2
from penstock.wire.messages import Demand, GroupReceipt, Rejection
from penstock.wire.messages import ExchangeRequest as Request

NOT_MEASURED = "NOT_MEASURED"


@dataclass(eq=False)
class EvaluationStream:
    """One server's evaluation traffic, across reconnections."""

    ready: asyncio.Event
    """Set while the server is connected and up to date."""
    send: Callable[[trainer_service_pb2.ExchangeRequest], None]
    """Messages may be lost while the server is not ready."""
    owed: int = 0
    """Groups demanded and not yet delivered."""
    since: float = 0.0
    """When the server last came back, on the event loop's clock; zero if it was never away."""
    deliver: Callable[[Delivered], None] | None = None
    """Measures or refuses each group; None while no evaluation runs."""

    def demand(self, group_count: int) -> None:
        """Grants the server credit for more evaluation groups."""
        self.owed += group_count
        if self.ready.is_set():
            self._demand(group_count)

    def resume(self) -> None:
        """Repeats the open demand on a new stream."""
        self.since = asyncio.get_running_loop().time()
        if self.owed:
            self._demand(self.owed)

    def take(self, delivery: Delivered) -> None:
        self.owed = max(0, self.owed - 1)
        if self.deliver is None:
            self.refuse(delivery, NOT_MEASURED, "no evaluation is running")
        else:
            self.deliver(delivery)

    def measured(self, delivery: Delivered, step: int) -> None:
        """Acknowledges a group that was measured during this step."""
        receipt = GroupReceipt(delivery_ids=[delivery.delivery_id], step=step)
        self.send(Request(receipt=receipt))

    def refuse(self, delivery: Delivered, reason: str, message: str) -> None:
        rejection = Rejection(reason=reason, message=message)
        receipt = GroupReceipt(delivery_ids=[delivery.delivery_id], rejection=rejection)
        self.send(Request(receipt=receipt))

    def _demand(self, group_count: int) -> None:
        purpose = trajectory_pb2.PURPOSE_EVAL
        self.send(Request(demand=Demand(group_count=group_count, purpose=purpose)))
