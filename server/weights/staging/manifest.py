"""The tensors an upload announces, and their checks against the model before any of their bytes is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from penstock.common.memory_file import PROGRESS_BYTES
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import TensorMeta
from penstock.v1.weights_pb2 import SparseCoding
from penstock.wire.reasons import Reason


@dataclass(frozen=True, slots=True)
class Float:
    """Layout of a dtype, as needed to find numbers that are not finite."""

    bits: np.dtype[np.unsignedinteger]
    magnitude: int
    """Mask of every bit but the sign."""
    infinity: int
    """Smallest magnitude that is not finite."""


FLOATS: Mapping[str, Float] = {
    "float32": Float(np.dtype("<u4"), 0x7FFF_FFFF, 0x7F80_0000),
    "bfloat16": Float(np.dtype("<u2"), 0x7FFF, 0x7F80),
    "float16": Float(np.dtype("<u2"), 0x7FFF, 0x7C00),
}
# What compression may add to a payload that does not compress.
FRAME_BYTES = 4096
# How much longer than its tensors a payload may be, so that it can end on a page.
PADDING_BYTES = 4096


class WeightRefused(DomainError):
    """An upload was refused. The weights that serve are unchanged."""

    def __init__(self, reason: Reason, message: str, **metadata: object) -> None:
        super().__init__(reason, message, metadata)


class Encoding(Enum):
    RAW = "raw"
    SAME = "same"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor as the header of an upload announces it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    length_bytes: int
    """In the payload, after encoding."""
    xxh3: int
    """Of its decoded bytes."""
    encoding: Encoding = Encoding.RAW
    coding: SparseCoding | None = None
    """Set with SPARSE."""

    @property
    def element_count(self) -> int:
        return math.prod(self.shape)

    @property
    def decoded_bytes(self) -> int:
        return self.element_count * FLOATS[self.dtype].bits.itemsize


def check_full(
    manifest: Sequence[ManifestTensor],
    expected: Mapping[str, TensorMeta],
    weight_dtype: str,
    length_bytes: int,
) -> None:
    """The payload is the version itself: all of the model's tensors, within `length_bytes`. Raises
    WeightRefused."""
    _check_listed(manifest, expected, weight_dtype)
    for tensor in manifest:
        if tensor.encoding is not Encoding.RAW:
            raise invalid(tensor, "encoding", "needs a base_weight_version", tensor.encoding.value)
        _check_raw(tensor, length_bytes)
        itemsize = FLOATS[weight_dtype].bits.itemsize
        if tensor.offset_bytes % itemsize:
            problem = f"is not a multiple of {itemsize}"
            raise invalid(tensor, "offset_bytes", problem, tensor.offset_bytes)
    _check_apart(manifest)


def check_delta(
    manifest: Sequence[ManifestTensor],
    expected: Mapping[str, TensorMeta],
    weight_dtype: str,
    length_bytes: int,
    base: Mapping[str, int],
) -> None:
    """Each tensor is whole or a difference. `base` has the XXH3-64 of the base's. Raises WeightRefused."""
    _check_listed(manifest, expected, weight_dtype)
    for tensor in manifest:
        if tensor.encoding is Encoding.RAW:
            _check_raw(tensor, length_bytes)
            continue
        if tensor.encoding is Encoding.SPARSE:
            _check_sparse(tensor, length_bytes)
        elif tensor.length_bytes:
            raise invalid(tensor, "length_bytes", "must be 0", tensor.length_bytes)
        found = base.get(tensor.name)
        if found is None or (tensor.encoding is Encoding.SAME and found != tensor.xxh3):
            raise _not_the_base(tensor, found)
    _check_apart(manifest)


def check_length(manifest: Sequence[ManifestTensor], length_bytes: int) -> None:
    """Raise WeightRefused if an upload asks for memory that no tensor needs."""
    end = end_of(manifest)
    if length_bytes > end + PADDING_BYTES:
        raise field_refused(
            "header.inline.length_bytes",
            f"inline.length_bytes is {length_bytes}, but the last tensor ends at {end}",
            got=length_bytes,
        )


def end_of(manifest: Sequence[ManifestTensor]) -> int:
    """The end of the last tensor in the payload."""
    return max((tensor.offset_bytes + tensor.length_bytes for tensor in manifest), default=0)


def check_progress(
    manifest: Sequence[ManifestTensor], progress_offset_bytes: int, length_bytes: int
) -> None:
    """Raises WeightRefused if the payload's progress word overlaps a tensor."""
    end = end_of(manifest)
    inside = end <= progress_offset_bytes <= length_bytes - PROGRESS_BYTES
    if progress_offset_bytes and not (inside and progress_offset_bytes % PROGRESS_BYTES == 0):
        raise field_refused(
            "header.shared_memory.progress_offset_bytes",
            f"shared_memory.progress_offset_bytes is {progress_offset_bytes}; it must be a multiple of "
            f"{PROGRESS_BYTES} between the last tensor, which ends at {end}, and the end at {length_bytes}",
            got=progress_offset_bytes,
        )


def check_unplaced(
    manifest: Sequence[ManifestTensor],
    expected: Mapping[str, TensorMeta],
    weight_dtype: str,
    where: str,
    *,
    whole: bool = True,
) -> None:
    """The bytes come from `where`, without a payload. Only the model's tensors, and all of them for a
    `whole` version. Raises WeightRefused."""
    _check_listed(manifest, expected, weight_dtype, whole=whole)
    for tensor in manifest:
        if tensor.encoding is not Encoding.RAW:
            raise invalid(tensor, "encoding", "must be raw", tensor.encoding.value)
        for field, got in (("offset", tensor.offset_bytes), ("length", tensor.length_bytes)):
            if got:
                raise invalid(tensor, f"{field}_bytes", f"must be 0 {where}", got)


def _check_listed(
    manifest: Sequence[ManifestTensor],
    expected: Mapping[str, TensorMeta],
    weight_dtype: str,
    *,
    whole: bool = True,
) -> None:
    names: set[str] = set()
    for tensor in manifest:
        if tensor.name in names:
            raise invalid(tensor, "name", "appears twice", tensor.name)
        names.add(tensor.name)
        meta = expected.get(tensor.name)
        if meta is None:
            problem = f"the model has no tensor {tensor.name!r}"
            raise WeightRefused(Reason.TENSOR_UNKNOWN, problem, tensor=tensor.name)
        if tensor.shape != meta.shape:
            raise shape_mismatch(tensor.name, meta.shape, tensor.shape)
        if tensor.dtype != weight_dtype:
            raise dtype_mismatch(tensor.name, weight_dtype, tensor.dtype)
    missing = [n for n, meta in expected.items() if n not in names and not meta.optional]
    if missing and whole:
        raise WeightRefused(
            Reason.TENSOR_MISSING,
            f"{len(missing)} tensors of the model are missing, first {missing[0]}",
            tensor=missing[0],
            count=len(missing),
        )


def _check_raw(tensor: ManifestTensor, length_bytes: int) -> None:
    if tensor.length_bytes != tensor.decoded_bytes:
        problem = f"must be {tensor.decoded_bytes}"
        raise invalid(tensor, "length_bytes", problem, tensor.length_bytes)
    _check_inside(tensor, length_bytes)


def _check_sparse(tensor: ManifestTensor, length_bytes: int) -> None:
    coding = tensor.coding
    if coding is None:
        raise invalid(tensor, "sparse", "must be set with this encoding", "nothing")
    # Upper bound of every coding: a byte of position and the element for each, and a frame's header.
    longest = tensor.element_count + tensor.decoded_bytes + FRAME_BYTES
    if not 0 <= tensor.length_bytes <= longest:
        problem = f"must be from 0 to {longest}"
        raise invalid(tensor, "length_bytes", problem, tensor.length_bytes)
    _check_inside(tensor, length_bytes)
    if not 0 <= coding.changed_element_count <= tensor.element_count:
        problem = f"must be from 0 to {tensor.element_count}"
        raise invalid(tensor, "sparse", problem, coding.changed_element_count)
    if not 0 <= coding.index_length_bytes <= tensor.length_bytes:
        problem = f"has positions outside its {tensor.length_bytes} bytes"
        raise invalid(tensor, "sparse", problem, coding.index_length_bytes)


def _check_inside(tensor: ManifestTensor, length_bytes: int) -> None:
    if tensor.offset_bytes < 0 or tensor.offset_bytes + tensor.length_bytes > length_bytes:
        where = f"is not inside the payload of {length_bytes}"
        raise invalid(tensor, "offset_bytes", where, tensor.offset_bytes)


def _check_apart(manifest: Sequence[ManifestTensor]) -> None:
    by_offset = sorted((t for t in manifest if t.length_bytes), key=lambda t: t.offset_bytes)
    for first, second in pairwise(by_offset):
        if first.offset_bytes + first.length_bytes > second.offset_bytes:
            raise invalid(second, "offset_bytes", f"overlaps {first.name}", second.offset_bytes)


def field_refused(field: str, message: str, **metadata: object) -> WeightRefused:
    return WeightRefused(Reason.FIELD_INVALID, message, field=field, **metadata)


def invalid(tensor: ManifestTensor, field: str, problem: str, got: object) -> WeightRefused:
    message = f"{tensor.name}: {field} {problem}, got {got}"
    return field_refused(f"header.tensors.{field}", message, tensor=tensor.name, got=got)


def shape_mismatch(name: str, expected: Sequence[int], got: Sequence[int]) -> WeightRefused:
    return WeightRefused(
        Reason.SHAPE_MISMATCH,
        f"{name} has shape {list(expected)}, got {list(got)}",
        tensor=name,
        expected=list(expected),
        got=list(got),
    )


def dtype_mismatch(name: str, expected: str, got: str) -> WeightRefused:
    return WeightRefused(
        Reason.DTYPE_MISMATCH,
        f"{name} must be {expected}, got {got!r}",
        tensor=name,
        expected=expected,
        got=got,
    )


def checksum_mismatch(name: str, announced: int, got: int) -> WeightRefused:
    return WeightRefused(
        Reason.CHECKSUM_MISMATCH,
        f"{name}: XXH3 is {got:016x}, announced {announced:016x}",
        tensor=name,
    )


def _not_the_base(tensor: ManifestTensor, found: int | None) -> WeightRefused:
    held = "nothing" if found is None else f"{found:016x}"
    return WeightRefused(
        Reason.BASE_VERSION_MISMATCH,
        f"{tensor.name} differs from the base: the base has {held}, announced {tensor.xxh3:016x}",
        tensor=tensor.name,
        base_xxh3=held,
        got=f"{tensor.xxh3:016x}",
    )
