"""One weight version as it is sent: whole, or as the difference from what the server holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.trainer.weights.payload import Payload
from penstock.v1 import weights_pb2
from penstock.wire import differences, sparse
from penstock.wire.upload import Piece

Delta = Literal["auto", "on", "off"]
"""Whether differences are sent; "auto" leaves it to the transport."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is sent for one version."""

    weight_version: int
    base_weight_version: int
    """The version that the difference applies to; zero if the parcel is whole."""
    payload: Payload
    """The whole version, even if only a difference is sent."""
    specs: tuple[weights_pb2.TensorSpec, ...]
    """Every tensor, in the order of `pieces`."""
    pieces: tuple[Piece, ...]
    """The bytes to send, in order."""
    changed_elements_ratio: float | None = None
    """Share of elements that differ from the base; None if the parcel is whole."""
    base: Payload | None = None
    """The payload that it is the difference from; None if the parcel is whole."""

    @property
    def is_delta(self) -> bool:
        """Whether the parcel is a difference."""
        return self.base_weight_version != 0

    @property
    def length_bytes(self) -> int:
        """Number of bytes to send."""
        return sum(map(len, self.pieces))


@dataclass(frozen=True, slots=True)
class Held:
    """The version that the server samples, with the trainer's copy of its bytes."""

    payload: Payload
    weight_version: int


def whole(payload: Payload, weight_version: int) -> Parcel:
    """Make a parcel of the payload's every byte."""
    return Parcel(weight_version, 0, payload, payload.specs, (payload.file.view,))


def difference(payload: Payload, weight_version: int, base: Held) -> Parcel:
    """Make the bitwise difference that turns `base` into `payload`; equal tensors take no bytes."""
    if payload is base.payload:
        same = tuple(differences.same(spec) for spec in payload.specs)
        return Parcel(weight_version, base.weight_version, payload, same, (), 0.0, base.payload)
    found = differences.difference(payload.specs, base.payload.elements(), payload.elements())
    return Parcel(
        weight_version,
        base.weight_version,
        payload,
        found.specs,
        found.pieces,
        found.changed_part,
        base.payload,
    )


def can_differ(payload: Payload) -> bool:
    """Return whether differences of this payload's dtype can be encoded."""
    return payload.itemsize in sparse.WIDTHS
