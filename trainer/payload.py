"""One weight version as packed bytes, in memory that another process of this host can read.

The memory is a file without a name, which the server opens as `/proc/<pid>/fd/<n>`: it needs no
room in /dev/shm, and nothing is left of it when the trainer is killed. It is allocated once and
reused, because fresh pages cost several times the copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from penstock.trainer.errors import WeightsRefused
from penstock.v1 import weights_pb2

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# So that no tensor straddles a cache line it need not, whatever its dtype.
ALIGNMENT = 64


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
        self._descriptor = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        # Allocates every page now: a sparse file would end in SIGBUS when memory runs out.
        os.posix_fallocate(self._descriptor, 0, self.length_bytes)
        self._memory = mmap.mmap(self._descriptor, self.length_bytes)
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        device = os.fstat(self._descriptor).st_dev
        self.host_namespace = f"{BOOT_ID.read_text().strip()}:{device}"
        self._specs: tuple[weights_pb2.TensorSpec, ...] = ()

    @property
    def specs(self) -> tuple[weights_pb2.TensorSpec, ...]:
        """What lies where, with checksums; as of the last `fill`."""
        return self._specs

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrites the payload; the names and shapes are those of the constructor, in their
        order."""
        view = memoryview(self._memory)
        specs: list[weights_pb2.TensorSpec] = []
        for place, (name, tensor) in zip(self._places, tensors, strict=True):
            if (place.name, place.shape) != (name, tuple(tensor.shape)):
                raise ValueError(f"{name} {tuple(tensor.shape)}: the payload expects {place}")
            data = view[place.offset : place.offset + place.length]
            target = torch.frombuffer(data, dtype=self._dtype).view(place.shape)
            target.copy_(tensor.detach())
            specs.append(
                weights_pb2.TensorSpec(
                    name=name,
                    shape=place.shape,
                    dtype=self._dtype_name,
                    offset_bytes=place.offset,
                    length_bytes=place.length,
                    encoding=weights_pb2.TENSOR_ENCODING_RAW,
                    xxh3=xxhash.xxh3_64_intdigest(data),
                )
            )
        self._specs = tuple(specs)

    def slice(self, offset: int, length: int) -> bytes:
        """A copy of a part of the payload, shorter at its end."""
        return self._memory[offset : offset + length]

    def close(self) -> None:
        """Gives the memory back once the last who reads it has let go of it."""
        os.close(self._descriptor)


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
