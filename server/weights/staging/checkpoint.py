"""A model's Hugging Face checkpoint: a folder of safetensors files, single or in shards with an index.

It gives the names and shapes of a model's parameters, and can be the source of a version.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from penstock.server.engine.protocol import TensorMeta
from penstock.server.weights.staging.manifest import (
    ManifestTensor,
    WeightRefused,
    dtype_mismatch,
    shape_mismatch,
)
from penstock.wire.reasons import Reason

INPUT_EMBEDDING = "model.embed_tokens.weight"
OUTPUT_EMBEDDING = "lm_head.weight"
# Buffers that some checkpoints contain although the model computes them.
COMPUTED = ("rotary_emb.inv_freq",)


def upload_tensors(folder: Path | None, config: object, *, tied: bool) -> dict[str, TensorMeta]:
    """Reads the safetensors files of `folder`. Without any, the model is built from its Hugging Face
    `config` on the meta device, which needs no memory. If the embeddings are tied, the output embedding is
    optional."""
    shapes = dict(_stored_shapes(folder)) if folder else {}
    if not shapes:
        shapes = _built_shapes(config)
    tensors = {name: TensorMeta(s, optional=name.endswith(COMPUTED)) for name, s in shapes.items()}
    if tied and (embedding := tensors.get(INPUT_EMBEDDING)):
        tensors[OUTPUT_EMBEDDING] = TensorMeta(embedding.shape, optional=True)
    return tensors


def _stored_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in weight_files(folder):
        descriptor = open_regular(path)
        try:
            for tensor in stored_tensors(descriptor):
                yield tensor.name, tensor.shape
        finally:
            os.close(descriptor)


class CheckpointUnreadable(Exception):
    """A checkpoint is missing or broken. The message names the file and the problem."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a safetensors file; row-major, little-endian."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch dtype name, or safetensors' name for a dtype that torch lacks."""
    offset_bytes: int
    """Offset from the beginning of the file."""
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    descriptors: tuple[int, ...]
    tensors: Mapping[str, tuple[int, StoredTensor]]
    """Name -> (descriptor of the file, position in it)."""

    def find(self, wanted: ManifestTensor) -> tuple[int, StoredTensor]:
        """Raises WeightRefused unless name, shape and dtype match."""
        found = self.tensors.get(wanted.name)
        if found is None:
            raise WeightRefused(
                Reason.TENSOR_MISSING,
                f"the checkpoint has no tensor {wanted.name!r}",
                tensor=wanted.name,
            )
        stored = found[1]
        if stored.shape != wanted.shape:
            raise shape_mismatch(wanted.name, wanted.shape, stored.shape)
        if stored.dtype != wanted.dtype:
            raise dtype_mismatch(wanted.name, wanted.dtype, stored.dtype)
        return found

    def find_all(
        self, manifest: Sequence[ManifestTensor]
    ) -> list[tuple[ManifestTensor, int, StoredTensor]]:
        """Raises WeightRefused."""
        return [(wanted, *self.find(wanted)) for wanted in manifest]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Blocks. Raises WeightRefused if the folder is missing or broken."""
    descriptors: list[int] = []
    tensors: dict[str, tuple[int, StoredTensor]] = {}
    try:
        for path in _files(folder):
            descriptor = open_regular(path)
            descriptors.append(descriptor)
            try:
                stored = stored_tensors(descriptor)
            except CheckpointUnreadable as error:
                raise CheckpointUnreadable(f"{path}: {error}") from error
            tensors.update({tensor.name: (descriptor, tensor) for tensor in stored})
    except (CheckpointUnreadable, OSError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise WeightRefused(
            Reason.SOURCE_UNAVAILABLE, f"checkpoint: {error}", path=folder, problem=error
        ) from error
    return Checkpoint(tuple(descriptors), tensors)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointUnreadable(f"{folder} is not a folder")
    files = weight_files(folder)
    if not files:
        raise CheckpointUnreadable(f"{folder} contains no safetensors file")
    return files


def weight_files(folder: Path) -> list[Path]:
    """The folder may also hold another format of them. Raises CheckpointUnreadable for a broken index."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = set(_Index.model_validate_json(index.read_bytes()).weight_map.values())
        except (OSError, ValidationError) as error:
            raise CheckpointUnreadable(f"{index} is not an index of safetensors files") from error
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointUnreadable(f"{index} names {outside[0]!r}, which is outside its folder")
        return [folder / name for name in sorted(names)]
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def open_regular(path: Path) -> int:
    """Returns a descriptor. Raises CheckpointUnreadable for anything but a regular file."""
    try:
        # Opening a pipe would otherwise block until a process writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise CheckpointUnreadable(f"{path} cannot be opened: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointUnreadable(f"{path} is not a regular file")
    return descriptor


def stored_tensors(descriptor: int) -> list[StoredTensor]:
    """Checks that the file contains the tensors it lists. Raises CheckpointUnreadable."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointUnreadable(f"not a safetensors file, with {size} bytes")
    try:
        entries = _HEADER.validate_json(os.pread(descriptor, length, 8))
    except ValidationError as error:
        raise CheckpointUnreadable("the header of the safetensors file is broken") from error
    begin = 8 + length
    tensors: list[StoredTensor] = []
    for name, entry in entries.items():
        if isinstance(entry, _Entry):
            tensor = entry.tensor(name, begin)
            if tensor.offset_bytes + tensor.length_bytes > size:
                raise CheckpointUnreadable(f"the file ends before the end of tensor {name}")
            tensors.append(tensor)
    return tensors


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

_Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    dtype: str
    shape: list[_Count]
    data_offsets: tuple[_Count, _Count]

    def tensor(self, name: str, begin: int) -> StoredTensor:
        first, end = self.data_offsets
        dtype, width = DTYPES.get(self.dtype, (self.dtype, None))
        if end < first or (width is not None and end - first != math.prod(self.shape) * width):
            raise CheckpointUnreadable(f"tensor {name} has {end - first} bytes in the file")
        return StoredTensor(name, tuple(self.shape), dtype, begin + first, end - first)


class _Index(BaseModel):
    weight_map: dict[str, str]


# The entry "__metadata__" is a plain table of strings.
_HEADER = TypeAdapter(dict[str, _Entry | dict[str, str]])


def _built_shapes(config: object) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoModelForCausalLM, PretrainedConfig

    with torch.device("meta"):
        model = cast(
            torch.nn.Module,
            AutoModelForCausalLM.from_config(cast(PretrainedConfig, config)),  # pyright: ignore
        )
    state = cast(Mapping[str, Any], model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
