"""One weight version as it travels: whole, or as its difference from the one the server has."""

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
    """What is sent of one version."""

    weight_version: int
    base_weight_version: int
    """Version the server adds this to; zero where it is whole."""
    payload: Payload
    """The whole version, whatever travels of it."""
    specs: tuple[weights_pb2.TensorSpec, ...]
    """Every tensor, in the order of `pieces`."""
    pieces: tuple[Piece, ...]
    """The bytes that travel, one after the other."""
    changed_elements_ratio: float | None = None
    """Elements that differ from the base, of all; None where it is whole."""
    base: Payload | None = None
    """What it is the difference from; None where it is whole."""

    @property
    def is_delta(self) -> bool:
        """Whether it needs its base."""
        return self.base_weight_version != 0

    @property
    def length_bytes(self) -> int:
        """Bytes that travel."""
        return sum(map(len, self.pieces))


@dataclass(frozen=True, slots=True)
class Held:
    """What the server samples, as the trainer has its bytes too."""

    payload: Payload
    weight_version: int


def whole(payload: Payload, weight_version: int) -> Parcel:
    """Every byte."""
    return Parcel(weight_version, 0, payload, payload.specs, (payload.file.view,))


def difference(payload: Payload, weight_version: int, base: Held) -> Parcel:
    """What makes `payload` out of `base`: bitwise, with no bytes for a tensor that is the same."""
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
    """Whether differences of this dtype can be coded."""
    return payload.itemsize in sparse.WIDTHS
