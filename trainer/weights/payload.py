"""One weight version as packed bytes, in memory that other processes on this host can read.

The memory is allocated once and reused, because fresh pages cost several times as much as the copy. Its
progress word records how far `fill` has come. A reader that follows it closely finds new bytes in the
cache:

    begin (the word is zero) -> the upload begins -> fill (piece, word, piece, word ...) -> commit
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from torch import Tensor

from penstock.common.memory_file import MemoryFile
from penstock.trainer.core.errors import WeightsRefused
from penstock.v1 import weights_pb2
from penstock.wire import sparse
from penstock.wire.upload import CHUNK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Copied and hashed at a time; small enough to be in the cache still when it is hashed.
PIECE_BYTES = 512 * 1024
# Keeps a tensor of any dtype from straddling a cache line unnecessarily.
ALIGNMENT = 64
# Unsigned types that compare bit patterns by width, whatever the dtype.
_ELEMENTS = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class _Place:
    name: str
    shape: tuple[int, ...]
    offset: int
    length: int


class _Chunks:
    """Hashes a payload's chunks during the fill; hashing them later would read the memory again."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._digest = xxhash.xxh3_64()
        self._position = 0
        self.checksums: list[int] = []

    def take(self, begin: int, piece: memoryview) -> None:
        """Hash the piece at `begin`, and any gap between it and the previous piece."""
        self._take(self._view[self._position : begin])
        self._take(piece)

    def _take(self, piece: memoryview) -> None:
        while piece:
            room = CHUNK_BYTES - self._position % CHUNK_BYTES
            part, piece = piece[:room], piece[room:]
            self._digest.update(part)
            self._position += len(part)
            if len(part) == room or self._position == len(self._view):
                self.checksums.append(self._digest.intdigest())
                self._digest.reset()


class Payload:
    """Room for every tensor of a full upload, in one dtype."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], dtype: str) -> None:
        """`dtype` is a torch dtype name. Raises OSError if there is not enough memory."""
        self._dtype_name = dtype
        self._dtype = _torch_dtype(dtype)
        self._places, self.length_bytes = _lay_out(tensors, self._dtype)
        self.file = MemoryFile(self.length_bytes, with_progress=True)
        self._views = [np.frombuffer(self._bytes(place), np.uint8) for place in self._places]
        self._announced = tuple(map(self._announce, self._places))
        self.checksums: tuple[int, ...] = ()
        """XXH3-64 of each tensor, in the order of `specs`, after the last `fill`."""
        self.chunk_checksums: tuple[int, ...] = ()
        """XXH3-64 of each CHUNK_BYTES of the payload; empty unless the last `fill` was `in_chunks`."""

    @property
    def can_differ(self) -> bool:
        return self._dtype.itemsize in sparse.WIDTHS

    @cached_property
    def announcement(self) -> bytes:
        """Serialized header of a payload that is being filled: its tensors and its source."""
        source = weights_pb2.SharedMemorySource(
            name=str(self.file.path),
            host_namespace=self.file.host_namespace,
            filling=True,
            progress_offset_bytes=self.file.progress_offset_bytes,
        )
        header = weights_pb2.WeightHeader(tensors=self._announced, shared_memory=source)
        return header.SerializeToString()

    @property
    def specs(self) -> tuple[weights_pb2.TensorSpec, ...]:
        """Location and checksum of each tensor, after the last `fill`."""
        found: list[weights_pb2.TensorSpec] = []
        for announced, xxh3 in zip(self._announced, self.checksums, strict=True):
            spec = weights_pb2.TensorSpec(xxh3=xxh3)
            spec.MergeFrom(announced)
            found.append(spec)
        return tuple(found)

    @property
    def digest(self) -> str:
        """Checksum of the whole payload, equal for equal weights, after the last `fill`."""
        digest = xxhash.xxh3_64()
        for place, xxh3 in zip(self._places, self.checksums, strict=True):
            digest.update(f"{place.name} {self._dtype_name} {xxh3:x}\n".encode())
        return digest.hexdigest()

    def begin(self) -> None:
        """Reset the progress word, before any reader is asked to follow it."""
        self.file.tell_filled(0)

    def fill(self, tensors: Iterable[tuple[str, Tensor]], *, in_chunks: bool = False) -> None:
        """Names and shapes must be those of the constructor, in the same order. `in_chunks` also computes
        `chunk_checksums`."""
        self.begin()
        self.chunk_checksums = ()
        chunks = _Chunks(self.file.view) if in_chunks else None
        checksums: list[int] = []
        for index, (place, (name, tensor)) in enumerate(zip(self._places, tensors, strict=True)):
            if (place.name, place.shape) != (name, tuple(tensor.shape)):
                raise ValueError(f"{name} {tuple(tensor.shape)}: the payload expects {place}")
            checksums.append(self._copy(index, tensor.detach(), chunks))
        self.checksums = tuple(checksums)
        if chunks is not None:
            chunks.take(self.length_bytes, memoryview(b""))
            self.chunk_checksums = tuple(chunks.checksums)

    def _copy(self, index: int, tensor: Tensor, chunks: _Chunks | None) -> int:
        """Copy a tensor to its place; return the checksum of its bytes."""
        place, target, tell_filled = self._places[index], self._views[index], self.file.tell_filled
        if tensor.dtype != self._dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            self._tensor(place).copy_(tensor)
            tell_filled(place.offset + place.length)
            if chunks is not None:
                chunks.take(place.offset, target.data)
            return xxhash.xxh3_64_intdigest(target.data)
        # A plain copy does not justify the use of torch's threads.
        source = tensor.reshape(-1).view(torch.uint8).numpy()
        digest = xxhash.xxh3_64()
        for begin in range(0, place.length, PIECE_BYTES):
            piece = source[begin : begin + PIECE_BYTES]
            copied = target[begin : begin + PIECE_BYTES]
            np.copyto(copied, piece)
            tell_filled(place.offset + begin + len(copied))
            # The source is in the cache, and the reader then notices a copy that went wrong.
            digest.update(piece.data)
            if chunks is not None:
                chunks.take(place.offset + begin, piece.data)
        return digest.intdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Views that the next `fill` overwrites."""
        return {place.name: self._tensor(place) for place in self._places}

    def elements(self) -> list[NDArray[np.unsignedinteger]]:
        """Each tensor's bit patterns, flat, in the order of `specs`, also as views."""
        patterns = _ELEMENTS[self._dtype.itemsize]
        return [np.frombuffer(self._bytes(place), patterns) for place in self._places]

    def close(self) -> None:
        """The memory is freed once the last reader has closed it too."""
        self.file.close()

    def _bytes(self, place: _Place) -> memoryview:
        return self.file.view[place.offset : place.offset + place.length]

    def _announce(self, place: _Place) -> weights_pb2.TensorSpec:
        return weights_pb2.TensorSpec(
            name=place.name,
            shape=place.shape,
            dtype=self._dtype_name,
            offset_bytes=place.offset,
            length_bytes=place.length,
            encoding=weights_pb2.TENSOR_ENCODING_RAW,
        )

    def _tensor(self, place: _Place) -> Tensor:
        return torch.frombuffer(self._bytes(place), dtype=self._dtype).view(place.shape)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsRefused(f"the server wants weights in {name!r}, which is not a torch dtype")
    return dtype


def _lay_out(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> tuple[tuple[_Place, ...], int]:
    places: list[_Place] = []
    offset = 0
    for name, tensor in tensors:
        length = tensor.numel() * dtype.itemsize
        places.append(_Place(name, tuple(tensor.shape), offset, length))
        offset += -(-length // ALIGNMENT) * ALIGNMENT
    return tuple(places), offset
