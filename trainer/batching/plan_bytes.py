"""Encodes a step's plan for the other ranks as one safetensors blob, with a tensor for each field.

unmoved, rewards/FIELD, U/counts, U/B/FIELD    for update U and its micro-batch B
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import cast

import torch
from safetensors.torch import (
    load,  # pyright: ignore[reportUnknownVariableType]
    save,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor

from penstock.trainer.algorithms.batches import RewardBatch, Sequences, StepCounts
from penstock.trainer.batching.batching import MicroBatch
from penstock.trainer.batching.planning import StepPlan, Update

REWARD_FIELDS = tuple(field.name for field in fields(RewardBatch))
TENSOR_FIELDS = tuple(field.name for field in fields(MicroBatch) if field.name != "sequences")


def encode_plan(plan: StepPlan) -> bytes:
    tensors = {"unmoved": torch.tensor([plan.groups_without_gradient, plan.updates_skipped])}
    for name in REWARD_FIELDS:
        tensors[f"rewards/{name}"] = torch.as_tensor(getattr(plan.rewards, name))
    for u, update in enumerate(plan.updates):
        tensors[f"{u}/counts"] = torch.tensor([update.counts.tokens, update.counts.sequences])
        for b, batch in enumerate(update.batches):
            for name in TENSOR_FIELDS:
                tensor = cast("Tensor | None", getattr(batch, name))
                if tensor is not None:
                    tensors[f"{u}/{b}/{name}"] = tensor
            tensors[f"{u}/{b}/index"] = batch.sequences.index_N
            tensors[f"{u}/{b}/count"] = torch.tensor(batch.sequences.count)
    # Cloned, because some tensors may share memory, which the format refuses.
    return save({name: tensor.clone().contiguous() for name, tensor in tensors.items()})


def decode_plan(content: bytes) -> StepPlan:
    """Decode the output of `encode_plan`."""
    tensors = load(content)
    updates: list[Update] = []
    while f"{len(updates)}/counts" in tensors:
        u = len(updates)
        batches: list[MicroBatch] = []
        while f"{u}/{len(batches)}/count" in tensors:
            batches.append(_micro_batch(tensors, f"{u}/{len(batches)}"))
        updates.append(Update(tuple(batches), StepCounts(*map(int, tensors[f"{u}/counts"]))))
    rewards = {name: tensors[f"rewards/{name}"].numpy() for name in REWARD_FIELDS}
    return StepPlan(tuple(updates), RewardBatch(**rewards), *map(int, tensors["unmoved"]))


def _micro_batch(tensors: Mapping[str, Tensor], place: str) -> MicroBatch:
    found = {name: tensors.get(f"{place}/{name}") for name in TENSOR_FIELDS}
    sequences = Sequences(tensors[f"{place}/index"], int(tensors[f"{place}/count"]))
    return MicroBatch(**cast("dict[str, Tensor]", found), sequences=sequences)
