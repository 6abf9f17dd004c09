"""A model's Hugging Face checkpoint: the names and shapes of its parameters, and a source of versions."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.common.checkpoint import (
    CheckpointUnreadable,
    StoredTensor,
    stored_tensors,
    weight_files,
)
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

Stored = tuple[int, StoredTensor]
"""The descriptor of a tensor's file, and its position in it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    descriptors: tuple[int, ...]
    tensors: Mapping[str, Stored]

    def find(self, wanted: ManifestTensor) -> Stored:
        """Raises WeightRefused unless name, shape and dtype match."""
        found = self.tensors.get(wanted.name)
        if found is None:
            problem = f"the checkpoint has no tensor {wanted.name!r}"
            raise WeightRefused(Reason.TENSOR_MISSING, problem, tensor=wanted.name)
        stored = found[1]
        if stored.shape != wanted.shape:
            raise shape_mismatch(wanted.name, wanted.shape, stored.shape)
        if stored.dtype != wanted.dtype:
            raise dtype_mismatch(wanted.name, wanted.dtype, stored.dtype)
        return found

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Blocks. Raises WeightRefused if the folder is missing or broken."""
    descriptors: list[int] = []
    tensors: dict[str, Stored] = {}
    try:
        if not folder.is_dir():
            raise CheckpointUnreadable(f"{folder} is not a folder")
        files = weight_files(folder)
        if not files:
            raise CheckpointUnreadable(f"{folder} contains no safetensors file")
        for path in files:
            if path.parent != folder:
                raise CheckpointUnreadable(f"the index names {path}, which is outside its folder")
            descriptors.append(_open_regular(path))
            for tensor in stored_tensors(path, descriptors[-1]):
                tensors[tensor.name] = descriptors[-1], tensor
    except (CheckpointUnreadable, OSError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise WeightRefused(
            Reason.SOURCE_UNAVAILABLE, f"checkpoint: {error}", path=folder, problem=error
        ) from error
    return Checkpoint(tuple(descriptors), tensors)


def _open_regular(path: Path) -> int:
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


def upload_tensors(folder: Path | None, config: object, *, tied: bool) -> dict[str, TensorMeta]:
    """Reads the safetensors files of `folder`. Without any, the model is built from its Hugging Face
    `config` on the meta device, which needs no memory. If the embeddings are tied, the output embedding is
    optional. Raises WeightRefused for a broken folder."""
    shapes: dict[str, tuple[int, ...]] = {}
    if folder and weight_files(folder):
        checkpoint = open_checkpoint(folder)
        shapes = {name: stored.shape for name, (_, stored) in checkpoint.tensors.items()}
        checkpoint.close()
    if not shapes:
        shapes = _built_shapes(config)
    tensors = {name: TensorMeta(s, optional=name.endswith(COMPUTED)) for name, s in shapes.items()}
    if tied and (embedding := tensors.get(INPUT_EMBEDDING)):
        tensors[OUTPUT_EMBEDDING] = TensorMeta(embedding.shape, optional=True)
    return tensors


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
