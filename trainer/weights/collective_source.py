"""The publisher's payload as vLLM's trainer engines take weights: whole, or as patches. Imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

from penstock.trainer.weights.gloo import HashedSource
from penstock.trainer.weights.parcel import Parcel
from penstock.trainer.weights.payload import Payload


class PayloadSource(HashedSource):
    """What the payload holds at the time; set before each update."""

    def __init__(self, device: torch.device) -> None:
        """Tensors are handed over on `device`, one after the other."""
        self._device = device
        self.payload: Payload | None = None

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._filled.tensors().items()
        ]

    def xxh3(self) -> Sequence[int]:
        return [spec.xxh3 for spec in self._filled.specs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._filled.tensors().items():
            yield name, tensor.to(self._device)

    @property
    def _filled(self) -> Payload:
        if self.payload is None:
            raise RuntimeError("there is no payload to send")
        return self.payload


def patches_of(parcel: Parcel, device: torch.device) -> list[SparseWeightPatch]:
    """What changed since the parcel's base, by element; every element where the parcel is whole.

    At least one, the same value once more where nothing changed, since without any vLLM's engine says
    nothing to the server, which has to hear of the version.
    """
    payload, base = parcel.payload, parcel.base
    before = base.elements() if base is not None else [None] * len(payload.specs)
    patches: list[SparseWeightPatch] = []
    for (name, tensor), new, old in zip(
        payload.tensors().items(), payload.elements(), before, strict=True
    ):
        # By bits: to a comparison of numbers 0.0 and -0.0 are the same, and a NaN is always another one.
        found = np.arange(len(new)) if old is None else np.flatnonzero(new != old)
        if len(found):
            places = torch.tensor(found, dtype=torch.int32)
            patches.append(_patch(name, tensor, places, device))
    if not patches:
        name, tensor = next(iter(payload.tensors().items()))
        patches.append(_patch(name, tensor, torch.zeros(1, dtype=torch.int32), device))
    return patches


def _patch(
    name: str, tensor: torch.Tensor, places: torch.Tensor, device: torch.device
) -> SparseWeightPatch:
    values = tensor.reshape(-1)[places.long()]
    return SparseWeightPatch(name, places.to(device), values.to(device), tuple(tensor.shape))
