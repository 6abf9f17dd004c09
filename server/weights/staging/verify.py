"""Reading tensors and checking their bytes: those announced, and all finite."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping

import numpy as np
import xxhash

from penstock.server.engine.protocol import StagedTensor
from penstock.server.weights.staging.manifest import (
    FLOATS,
    PROGRESS_BYTES,
    ManifestTensor,
    WeightRefused,
    checksum_mismatch,
)
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.wire.reasons import Reason

PIECE_BYTES = 512 << 10
"""Bytes looked at at a time: few enough to stay in the cache of a core from one look to the next. A
multiple of every itemsize."""


class Check:
    """Follows one tensor's bytes as they come by."""

    def __init__(self, name: str, dtype: str) -> None:
        self._name = name
        self._layout = FLOATS[dtype]
        self._signed = np.dtype(f"<i{self._layout.bits.itemsize}")
        self._digest = xxhash.xxh3_64()
        self._finite = True

    def update(self, piece: memoryview) -> None:
        """Takes the next bytes, a whole number of elements, and not none."""
        self._digest.update(piece)
        self._finite = self._finite and self._is_finite(piece)

    def finish(self, xxh3: int) -> None:
        """Raises WeightRefused where the whole is not what was announced, or not finite."""
        if (got := self._digest.intdigest()) != xxh3:
            raise checksum_mismatch(self._name, xxh3, got)
        if not self._finite:
            raise WeightRefused(
                Reason.NOT_FINITE,
                f"{self._name} holds a NaN or an infinity",
                tensor=self._name,
            )

    def _is_finite(self, piece: memoryview) -> bool:
        """Two looks without a copy: among signed numbers the positive are the largest, and among
        unsigned ones the negative."""
        infinity, negative = self._layout.infinity, self._layout.magnitude + 1
        patterns = np.frombuffer(piece, self._layout.bits)
        return bool(
            patterns.view(self._signed).max() < infinity and patterns.max() < negative + infinity
        )


class RunningCheck:
    """Checks the tensors of a payload while it comes in, as far as it comes in order."""

    def __init__(self, manifest: Iterable[ManifestTensor]) -> None:
        self._manifest = sorted(manifest, key=lambda tensor: tensor.offset_bytes)
        self._index = 0
        self.begun: dict[str, tuple[Check, int]] = {}
        """By the tensor's name, its check and how far in the payload that has come."""

    def follow(self, payload: memoryview, end: int) -> None:
        """Looks at what is new; all bytes before `end` are there."""
        while self._index < len(self._manifest):
            tensor = self._manifest[self._index]
            if end < tensor.offset_bytes:
                return
            check, begin = self.begun.get(tensor.name) or begin_check(tensor)
            stop = whole_elements(tensor, end)
            for piece in pieces(payload[begin:stop]):
                check.update(piece)
            self.begun[tensor.name] = check, stop
            if stop < tensor.offset_bytes + tensor.length_bytes:
                return
            self._index += 1


def begin_check(tensor: ManifestTensor) -> tuple[Check, int]:
    """The check of a tensor, and where in the payload it begins."""
    return Check(tensor.name, tensor.dtype), tensor.offset_bytes


def whole_elements(tensor: ManifestTensor, end: int) -> int:
    """How far in the payload a tensor can be looked at whose bytes are there up to `end`; what is left of
    an element is looked at with its rest."""
    stop = min(end, tensor.offset_bytes + tensor.length_bytes)
    return stop - (stop - tensor.offset_bytes) % FLOATS[tensor.dtype].bits.itemsize


def verify_tensors(
    source: Buffer,
    manifest: Iterable[ManifestTensor],
    begun: Mapping[str, tuple[Check, int]],
) -> None:
    """That the bytes are those announced, and all finite. Raises WeightRefused.

    `begun` has what a `RunningCheck` looked at before.
    """
    reader = Reader(source)
    for tensor in manifest:
        check, offset = begun.get(tensor.name) or begin_check(tensor)
        for piece in reader.read(offset, tensor.offset_bytes + tensor.length_bytes, tensor.name):
            check.update(piece)
        check.finish(tensor.xxh3)


def verify_again(
    source: Buffer, tensors: Iterable[StagedTensor], hashes: Mapping[str, int]
) -> None:
    """That the bytes still are those that were verified. Raises WeightRefused."""
    reader = Reader(source)
    for tensor in tensors:
        check, offset = Check(tensor.name, tensor.dtype), tensor.offset_bytes
        for piece in reader.read(offset, offset + tensor.length_bytes, tensor.name):
            check.update(piece)
        check.finish(hashes[tensor.name])


class Reader:
    """Reads a payload piece by piece: where it lies, or, where it cannot be mapped, into a room of its
    own."""

    def __init__(self, source: Buffer) -> None:
        self._source = source
        self._room = None if source.view is not None else memoryview(bytearray(PIECE_BYTES))

    def read(self, begin: int, end: int, name: str) -> Generator[memoryview]:
        """The bytes from `begin` to `end`, of the tensor `name`; a piece is good until the next.

        Raises WeightRefused where they are not there.
        """
        if self._room is None:
            if self._source.view is not None:
                yield from pieces(self._source.view[begin:end])
            return
        while begin < end:
            piece = self._room[: end - begin]
            read_into(piece, self._source, begin, name)
            yield piece
            begin += len(piece)


def read_word(source: Buffer, offset: int) -> int:
    """A little-endian unsigned number of 8 bytes; zero where the file ends before it."""
    if source.view is not None:
        return int.from_bytes(source.view[offset : offset + PROGRESS_BYTES], "little")
    try:
        return int.from_bytes(os.pread(source.descriptor, PROGRESS_BYTES, offset), "little")
    except OSError:
        return 0


def read_into(target: memoryview, source: Buffer, offset: int, name: str) -> None:
    """Fills `target` from there. Raises WeightRefused, naming the tensor, where it ends before."""
    if source.view is not None and target:
        # Unlike an assignment, this lets other threads run.
        found = np.frombuffer(source.view, np.uint8, len(target), offset)
        np.copyto(np.frombuffer(target, np.uint8), found)
        return
    filled = 0
    while filled < len(target):
        try:
            count = os.preadv(source.descriptor, [target[filled:]], offset + filled)
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
