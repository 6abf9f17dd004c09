"""Reading tensors and verifying their bytes: checksums, and whether all values are finite."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping

import numpy as np
import xxhash

from penstock.common.memory_file import PROGRESS_BYTES
from penstock.server.engine.protocol import StagedTensor
from penstock.server.weights.staging.manifest import (
    FLOATS,
    ManifestTensor,
    WeightRefused,
    checksum_mismatch,
)
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.wire.reasons import Reason

PIECE_BYTES = 512 << 10
"""Few enough to stay in a core's cache from one pass to the next, and a multiple of every itemsize."""

Tensor = ManifestTensor | StagedTensor


class Check:
    def __init__(self, name: str, dtype: str) -> None:
        self._name = name
        self._layout = FLOATS[dtype]
        self._signed = np.dtype(f"<i{self._layout.bits.itemsize}")
        self._digest = xxhash.xxh3_64()
        self._finite = True

    def update(self, piece: memoryview) -> None:
        """A whole number of elements, at least one."""
        self._digest.update(piece)
        self._finite = self._finite and self._is_finite(piece)

    def finish(self, xxh3: int) -> None:
        """Raise WeightRefused if the checksum differs from the announced one or a value is not finite."""
        if (got := self._digest.intdigest()) != xxh3:
            raise checksum_mismatch(self._name, xxh3, got)
        if not self._finite:
            problem = f"{self._name} contains a NaN or an infinity"
            raise WeightRefused(Reason.NOT_FINITE, problem, tensor=self._name)

    def _is_finite(self, piece: memoryview) -> bool:
        """Without a copy: positive values are the largest as signed, negative ones as unsigned numbers."""
        infinity, negative = self._layout.infinity, self._layout.magnitude + 1
        patterns = np.frombuffer(piece, self._layout.bits)
        return bool(
            patterns.view(self._signed).max() < infinity and patterns.max() < negative + infinity
        )


class RunningCheck:
    """Verifies the tensors of a payload while it is received, as far as it arrives in order."""

    def __init__(self, manifest: Iterable[ManifestTensor]) -> None:
        self._manifest = sorted(manifest, key=lambda tensor: tensor.offset_bytes)
        self._index = 0
        self.begun: dict[str, tuple[Check, int]] = {}
        """By tensor name: the check, and the offset in the payload that it has reached."""

    def follow(self, payload: memoryview, end: int) -> None:
        """All bytes before `end` have arrived."""
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


def begin_check(tensor: Tensor) -> tuple[Check, int]:
    """Also returns the tensor's offset in the payload."""
    return Check(tensor.name, tensor.dtype), tensor.offset_bytes


def whole_elements(tensor: ManifestTensor, end: int) -> int:
    """Offset up to which a tensor can be verified. A partial element is left for later."""
    stop = min(end, tensor.offset_bytes + tensor.length_bytes)
    return stop - (stop - tensor.offset_bytes) % FLOATS[tensor.dtype].bits.itemsize


def verify_tensors(
    source: Buffer,
    tensors: Iterable[Tensor],
    hashes: Mapping[str, int],
    begun: Mapping[str, tuple[Check, int]],
) -> None:
    """`hashes` has each tensor's XXH3-64, `begun` the checks that a `RunningCheck` started. Raises
    WeightRefused."""
    reader = Reader(source)
    for tensor in tensors:
        check, offset = begun.get(tensor.name) or begin_check(tensor)
        for piece in reader.read(offset, tensor.offset_bytes + tensor.length_bytes, tensor.name):
            check.update(piece)
        check.finish(hashes[tensor.name])


class Reader:
    """Reads a payload piece by piece: in place if it is mapped, else into a buffer of one piece."""

    def __init__(self, source: Buffer) -> None:
        self._source = source
        self._room = None if source.view is not None else memoryview(bytearray(PIECE_BYTES))

    def read(self, begin: int, end: int, name: str) -> Generator[memoryview]:
        """A piece is valid until the next. Raises WeightRefused, with `name`, if the file is too short."""
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
    """Read a little-endian unsigned number of 8 bytes; zero if the file ends before it."""
    if source.view is not None:
        return int.from_bytes(source.view[offset : offset + PROGRESS_BYTES], "little")
    try:
        return int.from_bytes(os.pread(source.descriptor, PROGRESS_BYTES, offset), "little")
    except OSError:
        return 0


def read_into(target: memoryview, source: Buffer, offset: int, name: str) -> None:
    """Raises WeightRefused, with the tensor's name, if the file is too short."""
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
            raise _unreadable(name, f"ends at {offset + filled}, before the tensor does")
        filled += count


def pieces(whole: memoryview) -> Iterator[memoryview]:
    """Cut bytes in memory into pieces for `Check.update`."""
    for start in range(0, len(whole), PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


def _unreadable(name: str, problem: str) -> WeightRefused:
    return WeightRefused(
        Reason.SOURCE_UNAVAILABLE, f"{name}: the payload {problem}", tensor=name, problem=problem
    )
