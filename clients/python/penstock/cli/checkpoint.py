"""Reads the tensors of a Hugging Face checkpoint as bytes: safetensors, single or sharded, without
torch.

A safetensors file consists of the length of its header (8 bytes, little-endian), the header, and
the data. The header is a JSON object: name -> dtype, shape, data_offsets. numpy has no bfloat16, so
it is handled as the upper half of a float32.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000

# Supported dtypes, by their name in the format and in torch, with the bytes per element.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class CheckpointUnreadable(Exception):
    """A folder is not a checkpoint, or a corrupt one; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in its file."""

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

    def length_as(self, dtype: str) -> int:
        """Returns the number of bytes that `bytes_as` returns."""
        if dtype not in _ITEMSIZE:
            raise CheckpointUnreadable(f"{self.name}: cannot convert {self.dtype} to {dtype!r}")
        return math.prod(self.shape) * _ITEMSIZE[dtype]

    def _float32(self) -> NDArray[np.float32]:
        if self.dtype == "bfloat16":
            upper = np.frombuffer(self.data, "<u2").astype("<u4")
            return (upper << 16).view("<f4")
        stored = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}[self.dtype]
        with np.errstate(over="ignore"):
            return np.frombuffer(self.data, stored).astype("<f4")


def read_checkpoint(folder: Path) -> list[StoredTensor]:
    """Returns every tensor, ordered by name. Raises CheckpointUnreadable."""
    tensors: dict[str, StoredTensor] = {}
    for path in _files(folder):
        for tensor in _read_file(path):
            if tensor.name in tensors:
                raise CheckpointUnreadable(f"{path}: {tensor.name} is also in another file")
            tensors[tensor.name] = tensor
    return [tensors[name] for name in sorted(tensors)]


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointUnreadable(f"{folder} is not a folder")
    index = folder / INDEX_FILE
    if index.exists():
        try:
            weight_map = cast("Mapping[str, str]", json.loads(index.read_text())["weight_map"])
            return [folder / name for name in sorted(set(weight_map.values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointUnreadable(f"{index}: {error!r}") from error
    single = folder / SINGLE_FILE
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointUnreadable(f"{folder} holds no safetensors file")
    return files


def _read_file(path: Path) -> Iterator[StoredTensor]:
    try:
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        length = int.from_bytes(mapped[:8], "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, len(mapped) - 8):
            raise ValueError(f"a header of {length} bytes does not fit a file of {len(mapped)}")
        header = cast("dict[str, dict[str, object]]", json.loads(bytes(mapped[8 : 8 + length])))
        data = mapped[8 + length :]
        for name, entry in header.items():
            if name != "__metadata__":
                yield _read_tensor(name, entry, data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnreadable(f"{path}: {error}") from error


def _read_tensor(name: str, entry: Mapping[str, object], data: memoryview) -> StoredTensor:
    dtype = _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ValueError(f"{name} has dtype {entry['dtype']}; supported are {', '.join(_DTYPES)}")
    shape = tuple(cast("list[int]", entry["shape"]))
    begin, end = cast("list[int]", entry["data_offsets"])
    length = math.prod(shape) * _ITEMSIZE[dtype]
    if not 0 <= begin <= end <= len(data) or end - begin != length:
        raise ValueError(
            f"{name}: bytes {begin} to {end} of {len(data)}, but its shape needs {length}"
        )
    return StoredTensor(name, dtype, shape, data[begin:end])


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view("<u4")
    # Adds half of the cut-off part, minus one if the kept part is even. Cannot overflow except for
    # NaN, which is handled separately.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")
