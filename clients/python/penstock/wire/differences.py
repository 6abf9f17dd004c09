"""A version as its difference from another one, as it travels: what is told of each tensor, and the bytes.

Needs zstandard, which the client does not (`penstock.wire.sparse`).
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
"""What a difference can be refused for and the whole version may not be: for a whole one the server lets go
of the base, where it has no room beside it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What makes a version out of its base: bitwise, with no bytes for a tensor that is the same."""

    specs: tuple[weights_pb2.TensorSpec, ...]
    """As `WeightHeader.tensors` of a delta has them, in the order of the version's own."""
    pieces: tuple[bytes | memoryview, ...]
    """The payload, in order; some are views of the new tensors, good as long as those stay unchanged."""
    changed_part: float
    """Elements that changed, of all."""

    @property
    def length_bytes(self) -> int:
        """Bytes that travel."""
        return sum(map(len, self.pieces))


def difference(
    specs: Sequence[weights_pb2.TensorSpec], base: Sequence[Elements], new: Sequence[Elements]
) -> Difference:
    """`specs` are those of a full upload, with the checksum of each tensor; `base` and `new` are flat, in
    the same order. Blocks, on two threads."""
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
    """A tensor that is that of the base."""
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
    if encoded.encoding == weights_pb2.TENSOR_ENCODING_SAME:
        return same(spec)
    result = weights_pb2.TensorSpec(
        name=spec.name,
        shape=spec.shape,
        dtype=spec.dtype,
        offset_bytes=offset,
        length_bytes=encoded.length_bytes,
        encoding=encoded.encoding,
        xxh3=spec.xxh3,
    )
    if (coding := encoded.coding) is not None:
        result.sparse.changed_element_count = coding.changed_element_count
        result.sparse.index_coding = coding.index_coding
        result.sparse.index_length_bytes = coding.index_length_bytes
        result.sparse.compression = coding.compression
    return result
