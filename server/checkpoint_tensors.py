"""Names and shapes of a model's parameters, as its Hugging Face checkpoint has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from penstock.server.engine import TensorMeta

INPUT_EMBEDDING = "model.embed_tokens.weight"
OUTPUT_EMBEDDING = "lm_head.weight"
# Some checkpoints hold buffers that the model computes anyway.
COMPUTED = ("rotary_emb.inv_freq",)


def upload_tensors(folder: Path | None, config: object, *, tied: bool) -> dict[str, TensorMeta]:
    """Every tensor of a full upload, from the safetensors files of `folder`.

    Without such files the model is built without memory, on the meta device, from `config`, its
    Hugging Face configuration. Where input and output embedding are tied the latter is optional.
    """
    shapes = dict(_stored_shapes(folder)) if folder else {}
    if not shapes:
        shapes = _built_shapes(config)
    tensors = {name: TensorMeta(s, optional=name.endswith(COMPUTED)) for name, s in shapes.items()}
    if tied and (embedding := tensors.get(INPUT_EMBEDDING)):
        tensors[OUTPUT_EMBEDDING] = TensorMeta(embedding.shape, optional=True)
    return tensors


def _stored_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in _weight_files(folder):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = cast(dict[str, dict[str, list[int]]], json.loads(file.read(length)))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])


def _weight_files(folder: Path) -> list[Path]:
    """The files that make the model; a folder may hold the same weights in another format too."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = cast(Mapping[str, str], json.loads(index.read_text())["weight_map"])
        return [folder / name for name in sorted(set(weight_map.values()))]
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


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
