"""Assembles one complete version: every tensor in full, one after another, whatever the sources.

A delta is assembled from a payload and its base, a checkpoint from its files, and a version to be held from
the file its uploader shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.server.engine.protocol import StagedTensor
from penstock.server.weights.staging.manifest import FLOATS, field_refused
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.server.weights.staging.verify import Check, pieces, read_into
from penstock.v1 import weights_pb2
from penstock.wire import sparse


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes that turn a copy of the base into the tensor."""

    source: Buffer
    offset_bytes: int
    length_bytes: int
    coding: weights_pb2.SparseCoding


@dataclass(frozen=True, slots=True)
class Part:
    tensor: StagedTensor
    """Its position in the assembled version."""
    source: Buffer
    """Holds its bytes, or those of the base."""
    offset_bytes: int
    xxh3: int | None
    """XXH3-64 of the result, which must also be finite. None skips both checks."""
    patch: Patch | None = None


def lay_out(
    tensors: Iterable[tuple[str, tuple[int, ...], str, int]],
) -> tuple[tuple[StagedTensor, ...], int]:
    """Place tensors (name, shape, dtype, length) one after another. Also returns the total length."""
    placed: list[StagedTensor] = []
    offset = 0
    for name, shape, dtype, length in tensors:
        # Align, because a base model may mix dtypes of different widths.
        offset += -offset % 8
        placed.append(StagedTensor(name, shape, dtype, offset, length))
        offset += length
    return tuple(placed), offset


def assemble(target: Buffer, parts: Sequence[Part]) -> None:
    """Write and verify each part in `target`, the server's own memory. Blocks. Raises WeightRefused."""
    if target.view is None:
        raise RuntimeError("only memory owned by the server can be written to")
    for part in parts:
        begin = part.tensor.offset_bytes
        _write(target.view[begin : begin + part.tensor.length_bytes], part)


def _write(place: memoryview, part: Part) -> None:
    name = part.tensor.name
    check = Check(name, part.tensor.dtype) if part.xxh3 is not None else None
    whole = part.patch is not None or check is None
    offset = part.offset_bytes
    for piece in [place] if whole else pieces(place):
        read_into(piece, part.source, offset, name)
        offset += len(piece)
        if check is not None and not whole:
            # While the piece is in the cache.
            check.update(piece)
    if (patch := part.patch) is not None:
        payload = memoryview(bytearray(patch.length_bytes))
        read_into(payload, patch.source, patch.offset_bytes, name)
        try:
            elements = np.frombuffer(place, FLOATS[part.tensor.dtype].bits)
            sparse.apply(elements, patch.coding, payload)
        except sparse.SparseInvalid as error:
            problem = f"{name}: {error}"
            raise field_refused("header.tensors.sparse", problem, tensor=name) from error
    if check is not None and part.xxh3 is not None:
        for piece in pieces(place) if whole else ():
            check.update(piece)
        check.finish(part.xxh3)
