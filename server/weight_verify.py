"""Reading tensors and checking their bytes: those announced, and all finite."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from penstock.server.weight_manifest import (
    FLOATS,
    Float,
    ManifestTensor,
    WeightRefused,
    checksum_mismatch,
)
from penstock.wire.reasons import Reason

PIECE_BYTES = 4 << 20
"""Bytes looked at at a time: few enough for the cache. A multiple of every itemsize."""


class Check:
    """Follows one tensor's bytes as they come by."""

    def __init__(self, name: str, dtype: str, xxh3: int) -> None:
        self._name = name
        self._layout = FLOATS[dtype]
        self._announced = xxh3
        self._digest = xxhash.xxh3_64()
        self._finite = True

    def update(self, piece: memoryview) -> None:
        """Takes the next bytes, a whole number of elements."""
        self._digest.update(piece)
        self._finite = self._finite and _is_finite(piece, self._layout)

    def finish(self) -> None:
        """Raises WeightRefused where the whole is not what was announced, or not finite."""
        if (got := self._digest.intdigest()) != self._announced:
            raise checksum_mismatch(self._name, self._announced, got)
        if not self._finite:
            raise WeightRefused(
                Reason.NOT_FINITE,
                f"{self._name} holds a NaN or an infinity",
                tensor=self._name,
            )


def verify_tensors(descriptor: int, manifest: Iterable[ManifestTensor]) -> None:
    """That the bytes behind the descriptor are those announced, and all finite.

    Raises WeightRefused.
    """
    buffer = memoryview(bytearray(PIECE_BYTES))
    for tensor in manifest:
        check = Check(tensor.name, tensor.dtype, tensor.xxh3)
        offset, end = tensor.offset_bytes, tensor.offset_bytes + tensor.length_bytes
        while offset < end:
            piece = buffer[: end - offset]
            read_into(piece, descriptor, offset, tensor.name)
            check.update(piece)
            offset += len(piece)
        check.finish()


def read_into(target: memoryview, descriptor: int, offset: int, name: str) -> None:
    """Fills `target` from the file. Raises WeightRefused, naming the tensor, where it ends before."""
    filled = 0
    while filled < len(target):
        try:
            count = os.preadv(descriptor, [target[filled:]], offset + filled)
        except OSError as error:
            raise _unreadable(name, f"cannot be read: {error.strerror}") from error
        if not count:
            where = f"ends at {offset + filled}, before the tensor does"
            raise _unreadable(name, where)
        filled += count


def pieces(whole: memoryview) -> Iterator[memoryview]:
    """What is in memory already, as `Check.update` takes it."""
    for start in range(0, len(whole), PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


def _unreadable(name: str, problem: str) -> WeightRefused:
    return WeightRefused(
        Reason.SOURCE_UNAVAILABLE, f"{name}: the payload {problem}", tensor=name, problem=problem
    )


def _is_finite(piece: memoryview, layout: Float) -> bool:
    magnitudes = np.frombuffer(piece, layout.bits) & layout.bits.type(layout.magnitude)
    return int(magnitudes.max(initial=0)) < layout.infinity
