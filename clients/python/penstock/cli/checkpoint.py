"""Reads the tensors of a Hugging Face checkpoint as bytes, without torch.

numpy has no bfloat16, so it is handled as the upper half of a float32.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.common.checkpoint import DTYPES, CheckpointUnreadable, stored_tensors, weight_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DTYPES = {name: DTYPES[name] for name in ("F64", "F32", "F16", "BF16")}
_ITEMSIZE = dict(_DTYPES.values())


@dataclass(frozen=True, slots=True)
class MappedTensor:
    name: str
    dtype: str
    """Torch dtype name."""
    shape: tuple[int, ...]
    data: memoryview
    """Row-major, little-endian. The file is memory-mapped, so bytes are read on access."""

    def bytes_as(self, dtype: str) -> memoryview:
        """Returns its bytes in another dtype, rounded to nearest, ties to even.

        Raises CheckpointUnreadable for an unsupported dtype.
        """
        if dtype == self.dtype:
            return self.data
        values = self._float32()
        if dtype == "float32":
            return _bytes(values)
        if dtype == "bfloat16":
            return _bytes(_to_bfloat16(values))
        if dtype == "float16":
            # Overflows become infinite. The server refuses them and names the tensor.
            with np.errstate(over="ignore"):
                return _bytes(values.astype("<f2"))
        raise CheckpointUnreadable(f"{self.name}: cannot convert {self.dtype} to {dtype!r}")

    def _float32(self) -> NDArray[np.float32]:
        if self.dtype == "bfloat16":
            upper = np.frombuffer(self.data, "<u2").astype("<u4")
            return (upper << 16).view("<f4")
        stored = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}[self.dtype]
        with np.errstate(over="ignore"):
            return np.frombuffer(self.data, stored).astype("<f4")


def read_checkpoint(folder: Path) -> list[MappedTensor]:
    """Returns every tensor, ordered by name. Raises CheckpointUnreadable."""
    if not folder.is_dir():
        raise CheckpointUnreadable(f"{folder} is not a folder")
    files = weight_files(folder)
    if not files:
        raise CheckpointUnreadable(f"{folder} holds no safetensors file")
    tensors: dict[str, MappedTensor] = {}
    for path in files:
        for tensor in _read_file(path):
            if tensor.name in tensors:
                raise CheckpointUnreadable(f"{path}: {tensor.name} is also in another file")
            tensors[tensor.name] = tensor
    return [tensors[name] for name in sorted(tensors)]


def _read_file(path: Path) -> Iterator[MappedTensor]:
    try:
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            stored = stored_tensors(path, file.fileno(), _DTYPES)
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(f"{path}: {error}") from error
    for tensor in stored:
        if tensor.dtype not in _ITEMSIZE:
            problem = f"has dtype {tensor.dtype}; supported are {', '.join(_DTYPES)}"
            raise CheckpointUnreadable(f"{path}: {tensor.name} {problem}")
        data = mapped[tensor.offset_bytes : tensor.offset_bytes + tensor.length_bytes]
        yield MappedTensor(tensor.name, tensor.dtype, tensor.shape, data)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view("<u4")
    # Adds half of the cut-off part, minus one if the kept part is even. Cannot overflow except for
    # NaN, which is handled separately.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")
