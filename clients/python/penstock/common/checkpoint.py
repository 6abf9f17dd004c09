"""What a Hugging Face checkpoint holds: safetensors files, single or in shards with an index.

A file is the length of its header (8 bytes, little-endian), the header, and the data. The header is a JSON
object: name -> dtype, shape, data_offsets.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""
# safetensors' name -> (torch's name, bytes of an element)
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class CheckpointUnreadable(Exception):
    """A checkpoint is missing or broken. The message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a safetensors file; row-major, little-endian."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch dtype name, or safetensors' name for a dtype that the reader does not know."""
    offset_bytes: int
    """From the beginning of the file."""
    length_bytes: int


def weight_files(folder: Path) -> list[Path]:
    """Empty if the folder holds another format. Raises CheckpointUnreadable for a broken index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except _BROKEN as error:
            raise CheckpointUnreadable(f"{index}: {error!r}") from error
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def stored_tensors(
    path: Path, descriptor: int, dtypes: Mapping[str, tuple[str, int]] = DTYPES
) -> list[StoredTensor]:
    """What the open file lists and contains. Raises CheckpointUnreadable."""
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes does not fit a file of {size}")
        header = json.loads(os.pread(descriptor, length, 8))
        begin = 8 + length
        return [
            _stored(name, entry, begin, size - begin, dtypes)
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except _BROKEN as error:
        raise CheckpointUnreadable(f"{path}: {error}") from error


def _stored(
    name: str,
    entry: Mapping[str, Any],
    begin: int,
    data_bytes: int,
    dtypes: Mapping[str, tuple[str, int]],
) -> StoredTensor:
    shape = tuple(entry["shape"])
    first, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, end)):
        raise ValueError(f"{name}: shape {shape}, bytes {first} to {end}")
    dtype, width = dtypes.get(entry["dtype"], (str(entry["dtype"]), 0))
    length = math.prod(shape) * width if width else end - first
    if not first <= end <= data_bytes or end - first != length:
        raise ValueError(
            f"{name}: bytes {first} to {end} of {data_bytes}, but its shape needs {length}"
        )
    return StoredTensor(name, shape, dtype, begin + first, length)
