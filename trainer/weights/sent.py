"""What it cost to send a version, to one server or to all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.trainer.exchange.stream import SwitchReceipt
from penstock.trainer.weights.copy import Parcel
from penstock.v1 import weights_pb2

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Sent:
    bytes_sent: int
    """Bytes of weights; through the stream, those of failed attempts are included."""
    dense_bytes: int
    """Size of the whole version."""
    delta: bool
    """Whether the version was sent as a difference."""
    changed_elements_ratio: float | None
    """Share of elements that differ from the previous version; None if sent whole."""
    changed_tensors: int | None
    """Tensors that differ from what the server sampled; None if the server did not report it."""
    pause_seconds: float = 0.0
    probe_difference: float | None = None
    """Pause of generation, and the probe's difference in nats, if the transport switches as it sends."""

    @classmethod
    def of(
        cls, parcel: Parcel, bytes_sent: int, answer: weights_pb2.UpdateWeightsResponse | None
    ) -> Sent:
        """`answer` is None if it was lost and the server nevertheless holds the version."""
        return cls(
            bytes_sent=bytes_sent,
            dense_bytes=parcel.payload.length_bytes,
            delta=parcel.is_delta,
            changed_elements_ratio=parcel.changed_elements_ratio,
            changed_tensors=answer.changed_tensor_count if answer else None,
            pause_seconds=answer.pause.ToNanoseconds() / 1e9 if answer else 0.0,
            probe_difference=(
                answer.probe.mean_difference if answer and answer.HasField("probe") else None
            ),
        )

    @classmethod
    def merged(cls, sent: Sequence[Sent]) -> Sent:
        """Of one version to several servers: sums the sizes, takes the largest of the rest."""
        return cls(
            bytes_sent=sum(one.bytes_sent for one in sent),
            dense_bytes=sum(one.dense_bytes for one in sent),
            delta=all(one.delta for one in sent),
            changed_elements_ratio=_largest(one.changed_elements_ratio for one in sent),
            changed_tensors=_largest(one.changed_tensors for one in sent),
            pause_seconds=max(one.pause_seconds for one in sent),
            probe_difference=_largest(one.probe_difference for one in sent),
        )


@dataclass(frozen=True, slots=True)
class Switched:
    """A completed switch: the server samples the version, or all servers do."""

    receipt: SwitchReceipt
    sent_again: Sent | None = None
    """Cost of the second upload, if a first switch was rejected."""

    @classmethod
    def merged(cls, switched: Sequence[Switched]) -> Switched:
        """Of all servers: longest pause, largest difference, last answer."""
        receipts = [one.receipt for one in switched]
        again = [one.sent_again for one in switched if one.sent_again is not None]
        receipt = SwitchReceipt(
            max(one.pause_seconds for one in receipts),
            _largest(one.probe_difference for one in receipts),
            max(one.received_at for one in receipts),
        )
        return cls(receipt, Sent.merged(again) if again else None)


def _largest(values: Iterable[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)
