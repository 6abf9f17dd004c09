"""Weight switches that a trainer asks for on its stream."""

from __future__ import annotations

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError, FieldInvalid, to_rejection
from penstock.server.groups.admission import Admission
from penstock.server.rpc.trainer.session import Session
from penstock.server.weights.header import read_in_flight
from penstock.server.weights.switch import ProbeMismatch
from penstock.server.weights.versions import WeightVersions
from penstock.v1 import trainer_service_pb2, weights_pb2
from penstock.wire.codec import twin

ExchangeResponse = twin(trainer_service_pb2.ExchangeResponse)
WeightReceipt = twin(weights_pb2.WeightReceipt)


class Switches:
    def __init__(self, changed: Broadcast, admission: Admission, weights: WeightVersions) -> None:
        self._changed = changed
        self._admission = admission
        self._weights = weights

    async def ask(self, session: Session, request: trainer_service_pb2.SwitchWeights) -> None:
        if request.weight_version < 0:
            raise FieldInvalid(
                "switch_weights.weight_version", "must not be negative", request.weight_version
            )
        # The trainer holds this version from now on, even if the switch fails. The exception is a
        # version that was never uploaded.
        if self._weights.has(request.weight_version):
            self._admission.advance(request.weight_version)
        await session.switches.put(request)

    async def settled_version(self) -> int:
        """The active version, once no switch is under way."""
        await self._weights.settled()
        return self._weights.active_version

    async def run(self, session: Session) -> None:
        """One at a time."""
        while (request := await session.switches.get()) is not None:
            receipt = WeightReceipt(weight_version=request.weight_version)
            try:
                switched = await self._weights.activate(
                    request.weight_version, read_in_flight(request.in_flight)
                )
                receipt.pause.FromNanoseconds(int(switched.pause_seconds * 1e9))
                probe = switched.probe
            except DomainError as error:
                receipt.rejection.CopyFrom(to_rejection(error))
                probe = error.result if isinstance(error, ProbeMismatch) else None
            if probe is not None:
                receipt.probe.CopyFrom(probe.message())
            receipt.active_weight_version = self._weights.active_version
            # A new version may make admission possible again.
            self._changed.notify()
            await session.send(ExchangeResponse(weight_receipt=receipt))
