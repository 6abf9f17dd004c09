"""The publisher's payload as vLLM's trainer engines take weights. Imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from vllm.distributed.weight_transfer.base import ParamMeta

from penstock.trainer.gloo_weights import HashedSource
from penstock.trainer.payload import Payload


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
