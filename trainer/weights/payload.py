"""One weight version as packed bytes, in memory that another process of this host can read.

The memory is allocated once and reused, because fresh pages cost several times the copy. Its progress word
says how far `fill` has come, so that a reader who follows it closely has what is new from the cache:

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
from penstock.wire.upload import CHUNK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Copied and hashed at a time: few enough to be in the cache still when they are hashed.
PIECE_BYTES = 512 * 1024
# So that no tensor straddles a cache line it need not, whatever its dtype.
ALIGNMENT = 64
# What tells apart bit patterns of a width, whatever they mean.
_ELEMENTS = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one tensor lies in the payload."""

    name: str
    shape: tuple[int, ...]
    offset: int
    length: int


class _Chunks:
    """Checksums of a payload's chunks while it is filled: later each would be read from memory again."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._digest = xxhash.xxh3_64()
        self._position = 0
        self.checksums: list[int] = []

    def take(self, begin: int, piece: memoryview) -> None:
        """What is in the payload from `begin` on; before it there may be a gap since the last."""
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
        """`dtype` is a torch dtype name. Raises OSError where there is not enough memory."""
        self._dtype_name = dtype
        self._dtype = _torch_dtype(dtype)
        self._places, self.length_bytes = _lay_out(tensors, self._dtype)
        self.file = MemoryFile(self.length_bytes, with_progress=True)
        self._views = [np.frombuffer(self._bytes(place), np.uint8) for place in self._places]
        self._announced = tuple(map(self._announce, self._places))
        self._checksums: tuple[int, ...] = ()
        self.chunk_checksums: tuple[int, ...] = ()
        """XXH3-64 of each CHUNK_BYTES of the whole; none where the last `fill` was not asked for them."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._dtype.itemsize

    @cached_property
    def announcement(self) -> bytes:
        """What a header says of a payload that is being filled: tensors and source, serialized."""
        source = weights_pb2.SharedMemorySource(
            name=str(self.file.path),
            host_namespace=self.file.host_namespace,
            filling=True,
            progress_offset_bytes=self.file.progress_offset_bytes,
        )
        header = weights_pb2.WeightHeader(tensors=self._announced, shared_memory=source)
        return header.SerializeToString()

    @property
    def checksums(self) -> tuple[int, ...]:
        """XXH3-64 of each tensor, in the order of `specs`; as of the last `fill`."""
        return self._checksums

    @property
    def specs(self) -> tuple[weights_pb2.TensorSpec, ...]:
        """What lies where, with checksums; as of the last `fill`."""
        found: list[weights_pb2.TensorSpec] = []
        for announced, xxh3 in zip(self._announced, self._checksums, strict=True):
            spec = weights_pb2.TensorSpec(xxh3=xxh3)
            spec.MergeFrom(announced)
            found.append(spec)
        return tuple(found)

    @property
    def digest(self) -> str:
        """Checksum of the whole, equal for equal weights; as of the last `fill`."""
        digest = xxhash.xxh3_64()
        for place, xxh3 in zip(self._places, self._checksums, strict=True):
            digest.update(f"{place.name} {self._dtype_name} {xxh3:x}\n".encode())
        return digest.hexdigest()

    def begin(self) -> None:
        """Nothing of the next version is filled yet: what the progress word has to say before anybody is
        told to follow it."""
        self.file.tell_filled(0)

    def fill(self, tensors: Iterable[tuple[str, Tensor]], *, in_chunks: bool = False) -> None:
        """Overwrites the payload; the names and shapes are those of the constructor, in their order.

        With `in_chunks` it will travel so: their checksums are computed too.
        """
        self.begin()
        self.chunk_checksums = ()
        chunks = _Chunks(self.file.view) if in_chunks else None
        checksums: list[int] = []
        for index, (place, (name, tensor)) in enumerate(zip(self._places, tensors, strict=True)):
            if (place.name, place.shape) != (name, tuple(tensor.shape)):
                raise ValueError(f"{name} {tuple(tensor.shape)}: the payload expects {place}")
            checksums.append(self._copy(index, tensor.detach(), chunks))
        self._checksums = tuple(checksums)
        if chunks is not None:
            chunks.take(self.length_bytes, memoryview(b""))
            self.chunk_checksums = tuple(chunks.checksums)

    def _copy(self, index: int, tensor: Tensor, chunks: _Chunks | None) -> int:
        """Puts a tensor in its place; returns the checksum of its bytes."""
        place, target, tell_filled = self._places[index], self._views[index], self.file.tell_filled
        if tensor.dtype != self._dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            self._tensor(place).copy_(tensor)
            tell_filled(place.offset + place.length)
            if chunks is not None:
                chunks.take(place.offset, target.data)
            return xxhash.xxh3_64_intdigest(target.data)
        # What only needs a copy is not worth torch's threads.
        source = tensor.reshape(-1).view(torch.uint8).numpy()
        digest = xxhash.xxh3_64()
        for begin in range(0, place.length, PIECE_BYTES):
            piece = source[begin : begin + PIECE_BYTES]
            copied = target[begin : begin + PIECE_BYTES]
            np.copyto(copied, piece)
            tell_filled(place.offset + begin + len(copied))
            # Of what was copied, and not of the copy: it is in the cache, and a copy that went wrong is
            # noticed on the other side.
            digest.update(piece.data)
            if chunks is not None:
                chunks.take(place.offset + begin, piece.data)
        return digest.intdigest()

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name: views, which the next `fill` overwrites."""
        return {place.name: self._tensor(place) for place in self._places}

    def elements(self) -> list[NDArray[np.unsignedinteger]]:
        """Every tensor's bit patterns, flat, in the order of `specs`: views likewise."""
        patterns = _ELEMENTS[self._dtype.itemsize]
        return [np.frombuffer(self._bytes(place), patterns) for place in self._places]

    def close(self) -> None:
        """Gives the memory back once the last who reads it has let go of it."""
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
        raise WeightsRefused(f"the server wants weights in {name!r}, which is no torch dtype")
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
