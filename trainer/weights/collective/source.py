"""Adapts the publisher's payload to vLLM's trainer engines, whole or as patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

from penstock.trainer.weights.collective.gloo import HashedSource
from penstock.trainer.weights.copy import Parcel
from penstock.trainer.weights.payload import Payload


class PayloadSource(HashedSource):
    """Reads the current payload, which is replaced before each update."""

    def __init__(self, device: torch.device, payload: Payload) -> None:
        """Tensors are moved to `device` one after another."""
        self._device = device
        self.payload = payload

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.payload.tensors().items()
        ]

    def xxh3(self) -> Sequence[int]:
        return self.payload.checksums

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.payload.tensors().items():
            yield name, tensor.to(self._device)


def patches_of(parcel: Parcel, device: torch.device) -> list[SparseWeightPatch]:
    """The elements that changed since the parcel's base, or all elements if the parcel is whole.

    If nothing changed, one patch repeats one value. Without patches vLLM's engine sends the server
    nothing, but the server must learn of the version.
    """
    payload, base = parcel.payload, parcel.base
    tensors, after = payload.tensors(), payload.elements()
    before = base.payload.elements() if base is not None else [None] * len(after)
    patches: list[SparseWeightPatch] = []
    for (name, tensor), new, old in zip(tensors.items(), after, before, strict=True):
        # Compares bits: as numbers, 0.0 equals -0.0, and NaN differs from itself.
        found = np.arange(len(new)) if old is None else np.flatnonzero(new != old)
        if len(found):
            places = torch.tensor(found, dtype=torch.int32)
            patches.append(_patch(name, tensor, places, device))
    if not patches:
        name, tensor = next(iter(tensors.items()))
        patches.append(_patch(name, tensor, torch.zeros(1, dtype=torch.int32), device))
    return patches


def _patch(
    name: str, tensor: torch.Tensor, places: torch.Tensor, device: torch.device
) -> SparseWeightPatch:
    values = tensor.reshape(-1)[places.long()]
    return SparseWeightPatch(name, places.to(device), values.to(device), tuple(tensor.shape))
