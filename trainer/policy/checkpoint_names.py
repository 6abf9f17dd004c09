"""Weights in the format of a checkpoint, in which servers receive and engines load them.

For some layers, transformers computes with other tensors than the checkpoint contains, such as one tensor
for all experts of a layer, or with other names. This is the conversion that transformers does when saving,
and its inverse, one parameter at a time, so that an upload needs no second model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.loading import as_saved


class CheckpointNames:
    """Converts the parameters of one model to and from the format of its checkpoint."""

    def __init__(self, model: nn.Module, path: str) -> None:
        """`model` is whole, as loaded by transformers. Raises ConfigInvalid, naming `path`, if the
        checkpoint contains anything but its parameters, split or renamed."""
        self._model = model
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._own: dict[str, tuple[str, ...]] = {}
        """For each parameter that the checkpoint lacks, the names of the tensors that replace it."""
        for name, shape in self._shapes.items():
            found = self._saved(name, torch.empty(shape, device="meta"))
            if {key: tensor.shape for key, tensor in found.items()} != {name: shape}:
                self._own[name] = tuple(found)
            if sum(tensor.numel() for tensor in found.values()) != shape.numel():
                raise _not_its_own(path, name)
        if self._own:
            together = as_saved(
                self._model, {n: torch.empty(s, device="meta") for n, s in self._shapes.items()}
            )
            each = [key for name in self._shapes for key in self._own.get(name, (name,))]
            if sorted(together) != sorted(each):
                raise _not_its_own(path, ", ".join(sorted(set(together) ^ set(each))[:3]))

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yields what a parameter becomes in the checkpoint, in the checkpoint's order."""
        found = self._saved(name, tensor) if name in self._own else {name: tensor}
        yield from found.items()

    def parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model's parameters, given everything that `of` yielded for each, in any
        order. Raises KeyError."""
        taken = {key for keys in self._own.values() for key in keys}
        made = {key: tensor for key, tensor in tensors.items() if key not in taken}
        for name, keys in self._own.items():
            shape, first = self._shapes[name], tensors[keys[0]]
            # Saving an index in place of each element reveals where the elements go.
            places = torch.arange(shape.numel(), device=first.device).view(shape)
            flat = torch.empty(shape.numel(), dtype=first.dtype, device=first.device)
            for key, place in self._saved(name, places).items():
                flat[place.flatten()] = tensors[key].flatten()
            made[name] = flat.view(shape)
        return made

    def _saved(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return as_saved(self._model, {name: tensor})


def _not_its_own(path: str, what: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"model.path: {path!r} has other numbers in its checkpoint than in memory ({what}), so it cannot "
        "be uploaded; use model.lora to train an adapter"
    )
