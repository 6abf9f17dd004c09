"""One weight version as packed bytes, in memory that another process of this host can read.

The memory is allocated once and reused, because fresh pages cost several times the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from torch import Tensor

from penstock.trainer.errors import WeightsRefused
from penstock.v1 import weights_pb2
from penstock.wire.memory_file import MemoryFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Copied and hashed at a time: few enough to be in the cache still when they are hashed.
PIECE_BYTES = 256 * 1024
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


class Payload:
    """Room for every tensor of a full upload, in one dtype."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], dtype: str) -> None:
        """`dtype` is a torch dtype name. Raises OSError where there is not enough memory."""
        self._dtype_name = dtype
        self._dtype = _torch_dtype(dtype)
        self._places, self.length_bytes = _lay_out(tensors, self._dtype)
        self.file = MemoryFile(self.length_bytes)
        self._specs: tuple[weights_pb2.TensorSpec, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._dtype.itemsize

    @property
    def specs(self) -> tuple[weights_pb2.TensorSpec, ...]:
        """What lies where, with checksums; as of the last `fill`."""
        return self._specs

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrites the payload; the names and shapes are those of the constructor, in their
        order."""
        specs: list[weights_pb2.TensorSpec] = []
        for place, (name, tensor) in zip(self._places, tensors, strict=True):
            if (place.name, place.shape) != (name, tuple(tensor.shape)):
                raise ValueError(f"{name} {tuple(tensor.shape)}: the payload expects {place}")
            xxh3 = self._copy(place, tensor.detach())
            specs.append(
                weights_pb2.TensorSpec(
                    name=name,
                    shape=place.shape,
                    dtype=self._dtype_name,
                    offset_bytes=place.offset,
                    length_bytes=place.length,
                    encoding=weights_pb2.TENSOR_ENCODING_RAW,
                    xxh3=xxh3,
                )
            )
        self._specs = tuple(specs)

    def _copy(self, place: _Place, tensor: Tensor) -> int:
        """Puts a tensor in its place; returns the XXH3-64 of its bytes there."""
        if tensor.dtype != self._dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            self._tensor(place).copy_(tensor)
            return xxhash.xxh3_64_intdigest(self._bytes(place))
        # What only needs a copy is not worth torch's threads.
        source = tensor.reshape(-1).view(torch.uint8).numpy()
        target = self._bytes(place)
        digest = xxhash.xxh3_64()
        for begin in range(0, place.length, PIECE_BYTES):
            piece = target[begin : begin + PIECE_BYTES]
            np.copyto(np.frombuffer(piece, np.uint8), source[begin : begin + PIECE_BYTES])
            digest.update(piece)
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
