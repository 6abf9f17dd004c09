"""Weights as a checkpoint has them, which is how a server takes them and an engine loads them.

transformers computes some layers with other tensors than their checkpoint has: the experts of a mixture are
one tensor of a layer in memory and one each in its files, and other models have other names. What it does
when it saves is done here, one parameter at a time, so that an upload needs no second model; what it does
when it loads is the inverse of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.loading import as_saved


class CheckpointNames:
    """What the parameters of one model are in its checkpoint."""

    def __init__(self, model: nn.Module, path: str) -> None:
        """`model` is as transformers has loaded it, whole. Raises ConfigInvalid, with its `path`, where its
        checkpoint is not its parameters, cut or renamed."""
        self._model = model
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self._own: dict[str, tuple[str, ...]] = {}
        """Of each parameter that is not itself there, what it is instead."""
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
        """What a parameter is in the checkpoint, in its order."""
        if name not in self._own:
            yield name, tensor
            return
        found = self._saved(name, tensor)
        for key in self._own[name]:
            yield key, found[key]

    def parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's parameters out of what `of` gave of each, in any order. Raises KeyError."""
        taken = {key for keys in self._own.values() for key in keys}
        made = {key: tensor for key, tensor in tensors.items() if key not in taken}
        for name, keys in self._own.items():
            shape, first = self._shapes[name], tensors[keys[0]]
            # Where each number of the parameter is there, by having its place saved in its stead.
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
        f"model.path: {path!r} has other numbers in its checkpoint than in memory ({what}), which cannot "
        "be uploaded; model.lora trains an adapter of it"
    )
