"""Deliveries that name the location of groups, for a trainer on the same host that reads them
there."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.server.groups.buffer import BufferedGroup
from penstock.server.journal.protocol import FilePlace
from penstock.v1 import trainer_service_pb2
from penstock.wire.codec import twin

_ExchangeResponse = twin(trainer_service_pb2.ExchangeResponse)
_GroupDeliveries = twin(trainer_service_pb2.GroupDeliveries)
_GroupDelivery = twin(trainer_service_pb2.GroupDelivery)

MOST = 32
"""Most groups in a message. Each takes about 50 bytes, plus 50 for each turn that holds its
tokens."""


def placed(group: BufferedGroup, place: FilePlace) -> trainer_service_pb2.GroupDelivery:
    """Makes a delivery of a group that is stored at `place`."""
    delivery = _GroupDelivery(
        delivery_id=group.delivery_id, redelivery_count=group.delivery_count - 1
    )
    stored = delivery.stored
    for told, where in ((stored, place), *((stored.turns.add(), turn) for turn in place.turns)):
        told.file, told.offset_bytes, told.length_bytes = where.file, where.offset, where.length
    return delivery


def message_of(
    deliveries: Sequence[trainer_service_pb2.GroupDelivery],
) -> trainer_service_pb2.ExchangeResponse:
    """Combines deliveries into one message."""
    if len(deliveries) == 1:
        return _ExchangeResponse(delivery=deliveries[0])
    return _ExchangeResponse(deliveries=_GroupDeliveries(deliveries=deliveries))
