"""A folder of safetensors files as the source of a version: a single file, or shards with an index."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.server.weights.staging import checkpoint_tensors
from penstock.server.weights.staging.checkpoint_tensors import CheckpointUnreadable, StoredTensor
from penstock.server.weights.staging.manifest import (
    ManifestTensor,
    WeightRefused,
    dtype_mismatch,
    shape_mismatch,
)
from penstock.wire.reasons import Reason


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint: its files and the tensors in them."""

    descriptors: tuple[int, ...]
    tensors: Mapping[str, tuple[int, StoredTensor]]
    """Name -> (descriptor of the file, position in it)."""

    def find(self, wanted: ManifestTensor) -> tuple[int, StoredTensor]:
        """Find an announced tensor. Raises WeightRefused unless name, shape and dtype match."""
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
        """Find every announced tensor. Raises WeightRefused."""
        return [(wanted, *self.find(wanted)) for wanted in manifest]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open every file of a checkpoint and read its list of tensors. Blocks.

    Raises WeightRefused if the folder is missing or broken.
    """
    descriptors: list[int] = []
    tensors: dict[str, tuple[int, StoredTensor]] = {}
    try:
        for path in _files(folder):
            descriptor = checkpoint_tensors.open_regular(path)
            descriptors.append(descriptor)
            try:
                stored = checkpoint_tensors.stored_tensors(descriptor)
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
    files = checkpoint_tensors.weight_files(folder)
    if not files:
        raise CheckpointUnreadable(f"{folder} contains no safetensors file")
    return files
