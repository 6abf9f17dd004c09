"""The ways to encode the difference of two tensors that `benchmarks/codec/weight_deltas.py` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from penstock.v1 import weights_pb2
from penstock.wire import sparse
from penstock.wire.sparse import Encoded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements = NDArray[np.uint16]
LEVELS = (None, 1, 3, 9)
"""Zstandard levels; None is no compression."""
GAPS = weights_pb2.INDEX_CODING_GAPS
BITMAP = weights_pb2.INDEX_CODING_BITMAP
RAW = weights_pb2.TENSOR_ENCODING_RAW
SAME = weights_pb2.TENSOR_ENCODING_SAME
SPARSE = weights_pb2.TENSOR_ENCODING_SPARSE


@dataclass(frozen=True)
class Form:
    """One way to send the tensors of a version."""

    name: str
    encode: Callable[[Elements, Elements], Encoded]
    """Encodes the new tensor, given base and new."""
    apply: Callable[[Elements, Encoded], None]
    """Turns a copy of the base into the new tensor."""


def shipped_form() -> Form:
    """The codec that the trainer and the server use."""
    return Form("penstock.wire.sparse", sparse.encode, apply_shipped)


def apply_shipped(target: Elements, encoded: Encoded) -> None:
    payload = b"".join(encoded.parts)
    if encoded.coding is not None:
        sparse.apply(target, encoded.coding, payload)
    elif encoded.encoding == RAW:
        target[:] = np.frombuffer(payload, target.dtype)


def forms() -> Iterator[Form]:
    """Each coding of positions with each compression; all of them code values in the same way."""
    for coding, name in ((None, "LEB128 gaps"), (GAPS, "gaps, 255 escapes"), (BITMAP, "bitmap")):
        for level in LEVELS:
            suffix = "" if level is None else f", zstd {level}"
            apply = apply_leb128 if coding is None else apply_shipped
            yield Form(name + suffix, partial(encode_as, coding=coding, level=level), apply)


def encode_as(
    base: Elements,
    new: Elements,
    *,
    coding: weights_pb2.IndexCoding.ValueType | None,
    level: int | None,
) -> Encoded:
    """Encodes with the given coding of positions; None is LEB128, which the protocol does not have."""
    changes = list(sparse._changes(base, new))
    count = sum(len(change.positions) for change in changes)
    if not count:
        return Encoded(SAME, None, 0, ())
    if coding == BITMAP:
        index = sparse._bitmap(changes, len(new))
    elif coding == GAPS:
        index = sparse._gaps(changes)
    else:
        index = leb128(np.concatenate([change.start + change.positions for change in changes]))
    values = sparse._planes(changes)
    compression = weights_pb2.COMPRESSION_UNSPECIFIED
    if level is not None:
        compression = weights_pb2.COMPRESSION_ZSTD
        compressor = zstandard.ZstdCompressor(level)
        index, values = compressor.compress(index), compressor.compress(values)
    described = weights_pb2.SparseCoding(
        changed_element_count=count,
        index_coding=coding or GAPS,
        index_length_bytes=len(index),
        compression=compression,
    )
    return Encoded(SPARSE, described, count, (index, values))


def leb128(positions: NDArray[np.uint32]) -> bytes:
    """Gaps as base-128 varints: seven bits in each byte; a set highest bit means that more follow."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    if gaps.max() < 128:
        return gaps.astype(np.uint8).tobytes()
    lengths = 1 + sum((gaps >= 1 << shift).astype(np.int64) for shift in (7, 14, 21, 28))
    starts = np.cumsum(lengths) - lengths
    octets = np.empty(int(lengths.sum()), np.uint8)
    for place in range(int(lengths.max())):
        chosen = lengths > place
        octet = gaps[chosen] >> 7 * place & 127 | (lengths[chosen] > place + 1) << 7
        octets[starts[chosen] + place] = octet
    return octets.tobytes()


def leb128_positions(octets: NDArray[np.uint8], count: int) -> NDArray[np.int64]:
    """The inverse of `leb128`."""
    ends = np.flatnonzero(octets < 128)
    if len(ends) == len(octets):
        gaps = octets.astype(np.int64)
    else:
        starts = np.concatenate(([0], ends[:-1] + 1))
        places = np.arange(len(octets)) - np.repeat(starts, ends + 1 - starts)
        gaps = np.add.reduceat((octets & 127).astype(np.int64) << 7 * places, starts)
    return np.cumsum(gaps) + np.arange(count)


def apply_leb128(target: Elements, encoded: Encoded) -> None:
    if encoded.coding is None:
        return
    index, values = encoded.parts
    if encoded.coding.compression == weights_pb2.COMPRESSION_ZSTD:
        decompressor = zstandard.ZstdDecompressor()
        index, values = decompressor.decompress(index), decompressor.decompress(values)
    count = encoded.changed_element_count
    positions = leb128_positions(np.frombuffer(index, np.uint8), count)
    planes = np.frombuffer(values, np.uint8).reshape(2, count)
    sparse._add(target, iter((positions,)), planes)
