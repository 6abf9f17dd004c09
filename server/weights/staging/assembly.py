"""Puts one complete version together, tensor by tensor, from wherever its bytes are.

A delta is assembled from a payload and its base, a checkpoint from its files, a version to be held from the
file its uploader shares. What comes out is always the same: every tensor in full, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.server.engine.protocol import StagedTensor
from penstock.server.weights.staging.manifest import FLOATS, WeightRefused
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.server.weights.staging.verify import Check, pieces, read_into
from penstock.wire import sparse
from penstock.wire.reasons import Reason


@dataclass(frozen=True, slots=True)
class Patch:
    """What changes a copy of the base into the tensor."""

    source: Buffer
    offset_bytes: int
    length_bytes: int
    coding: sparse.SparseCoding


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor comes from, and where it goes."""

    tensor: StagedTensor
    """Its place in what is assembled."""
    source: Buffer
    """What has its bytes, or those of the base."""
    offset_bytes: int
    xxh3: int | None
    """XXH3-64 of the result, which then also has to be finite; None is not checked."""
    patch: Patch | None = None


def lay_out(
    tensors: Iterable[tuple[str, tuple[int, ...], str, int]],
) -> tuple[tuple[StagedTensor, ...], int]:
    """Tensors (name, shape, dtype, length) one after the other, and the length of the whole."""
    placed: list[StagedTensor] = []
    offset = 0
    for name, shape, dtype, length in tensors:
        # Some dtypes are narrower than others, where a base model mixes them.
        offset += -offset % 8
        placed.append(StagedTensor(name, shape, dtype, offset, length))
        offset += length
    return tuple(placed), offset


def assemble(target: Buffer, parts: Sequence[Part]) -> None:
    """Writes every part into `target`, which is the server's own, and checks it there. Blocks.

    Raises WeightRefused, which names the tensor.
    """
    if target.view is None:
        raise RuntimeError("only memory of the server's own can be written to")
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
            # While it is in the cache.
            check.update(piece)
    if part.patch is not None:
        _apply(place, part.patch, part.tensor)
    if check is not None and part.xxh3 is not None:
        for piece in pieces(place) if whole else ():
            check.update(piece)
        check.finish(part.xxh3)


def _apply(place: memoryview, patch: Patch, tensor: StagedTensor) -> None:
    payload = memoryview(bytearray(patch.length_bytes))
    read_into(payload, patch.source, patch.offset_bytes, tensor.name)
    try:
        sparse.apply(np.frombuffer(place, FLOATS[tensor.dtype].bits), patch.coding, payload)
    except sparse.SparseInvalid as error:
        raise WeightRefused(
            Reason.FIELD_INVALID,
            f"{tensor.name}: {error}",
            field="header.tensors.sparse",
            tensor=tensor.name,
        ) from error
