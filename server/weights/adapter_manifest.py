"""Reads the header of an adapter upload and derives its tensors, under PEFT's names.

Each matrix [out, in] of the model that a target module names gets two tensors:

    base_model.model.<module>.lora_A.weight [rank, in]
    base_model.model.<module>.lora_B.weight [out, rank]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.server.core.errors import FieldInvalid
from penstock.server.engine.protocol import EngineDescription, TensorMeta
from penstock.v1 import weights_pb2

PREFIX = "base_model.model."
WEIGHT = ".weight"
# Matrices that are not linear layers, which adapters do not change.
EMBEDDINGS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class AdapterShape:
    lora: weights_pb2.LoraAdapter
    """From the header: the fields of PEFT's adapter_config.json."""
    tensors: Mapping[str, TensorMeta]
    """By PEFT's names."""


def read_adapter(header: weights_pb2.WeightHeader, description: EngineDescription) -> AdapterShape:
    """Raises FIELD_INVALID if this engine does not support the adapter."""
    limits = description.adapters
    if limits is None:
        raise FieldInvalid(
            "header.adapter",
            "is only accepted by a server that was started with --enable-lora, "
            "and by a hub whose engine servers were",
        )
    source = header.WhichOneof("source")
    if source not in ("inline", "shared_memory", None):
        raise FieldInvalid(
            "header.source", "must be inline or shared_memory with an adapter", source
        )
    if header.base_weight_version:
        raise FieldInvalid(
            "header.base_weight_version",
            "must be zero with an adapter, which is always uploaded whole",
            header.base_weight_version,
        )
    adapter = header.adapter
    if not 1 <= adapter.rank <= limits.max_rank:
        raise FieldInvalid(
            "header.adapter.rank",
            f"must be from 1 to {limits.max_rank}, this server's --max-lora-rank",
            adapter.rank,
        )
    if not 0 < adapter.alpha < math.inf:
        raise FieldInvalid("header.adapter.alpha", "must be positive and finite", adapter.alpha)
    targets = tuple(adapter.target_modules)
    return AdapterShape(adapter, adapter_tensors(targets, adapter.rank, description.tensors))


def adapter_tensors(
    targets: tuple[str, ...], rank: int, model: Mapping[str, TensorMeta]
) -> dict[str, TensorMeta]:
    """Raises FIELD_INVALID for a target the model lacks."""
    tensors: dict[str, TensorMeta] = {}
    found: set[str] = set()
    for name, meta in model.items():
        module = name.removesuffix(WEIGHT)
        if module == name or len(meta.shape) != 2 or module.endswith(EMBEDDINGS):
            continue
        named = [t for t in targets if module == t or module.endswith(f".{t}")]
        if named:
            found.update(named)
            rows, columns = meta.shape
            tensors[f"{PREFIX}{module}.lora_A{WEIGHT}"] = TensorMeta((rank, columns))
            tensors[f"{PREFIX}{module}.lora_B{WEIGHT}"] = TensorMeta((rows, rank))
    unknown = [target for target in targets if target not in found]
    if unknown or not targets:
        raise FieldInvalid(
            "header.adapter.target_modules",
            "must name linear layers of the model",
            unknown[0] if unknown else "none",
        )
    return tensors
