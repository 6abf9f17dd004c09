"""A weight version as its difference from another version, as it is sent: tensor specs and payload.

Needs zstandard, on which the client does not depend (`penstock.wire.sparse`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.v1 import weights_pb2
from penstock.wire import sparse
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from penstock.wire.sparse import Elements

NOT_THE_DIFFERENCE = (
    Reason.BASE_VERSION_MISMATCH,
    Reason.CHECKSUM_MISMATCH,
    Reason.DISK_FULL,
)
"""Reasons for which the server may refuse a difference but accept the whole version. For a whole version,
the server drops the base if it lacks room for both."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Turns a base into a version, bitwise; takes no bytes for unchanged tensors."""

    specs: tuple[weights_pb2.TensorSpec, ...]
    """As in `WeightHeader.tensors` of a delta, in the order of the version's tensors."""
    pieces: tuple[bytes | memoryview, ...]
    """The payload, in order. Some pieces are views of the new tensors, valid until those change."""
    changed_part: float
    """Share of the elements that changed, from 0 to 1."""

    @property
    def length_bytes(self) -> int:
        return sum(map(len, self.pieces))


def difference(
    specs: Sequence[weights_pb2.TensorSpec], base: Sequence[Elements], new: Sequence[Elements]
) -> Difference:
    """Computes the difference; blocks, on two threads.

    `specs` are those of a full upload, including each tensor's checksum. `base` and `new` are flat, in the
    same order.
    """
    described: list[weights_pb2.TensorSpec] = []
    pieces: list[bytes | memoryview] = []
    changed = offset = 0
    pairs = list(zip(base, new, strict=True))
    for spec, encoded in zip(specs, sparse.encode_all(pairs), strict=True):
        described.append(_encoded(spec, encoded, offset))
        pieces += encoded.parts
        offset += encoded.length_bytes
        changed += encoded.changed_element_count
    count = sum(map(len, new))
    return Difference(tuple(described), tuple(pieces), changed / count if count else 0.0)


def same(spec: weights_pb2.TensorSpec) -> weights_pb2.TensorSpec:
    """The spec of a tensor that equals the base's."""
    return weights_pb2.TensorSpec(
        name=spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        encoding=weights_pb2.TENSOR_ENCODING_SAME,
        xxh3=spec.xxh3,
    )


def _encoded(
    spec: weights_pb2.TensorSpec, encoded: sparse.Encoded, offset: int
) -> weights_pb2.TensorSpec:
    described = same(spec)
    if encoded.encoding != weights_pb2.TENSOR_ENCODING_SAME:
        sent = weights_pb2.TensorSpec(
            offset_bytes=offset,
            length_bytes=encoded.length_bytes,
            encoding=encoded.encoding,
            sparse=encoded.coding,
        )
        described.MergeFrom(sent)
    return described
