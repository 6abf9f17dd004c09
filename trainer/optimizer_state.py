"""What an optimizer remembers, as tensors of a checkpoint, and back. Keys are kind/parameter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from torch import Tensor, nn, optim

from penstock.trainer.errors import CheckpointUnusable


def optimizer_tensors(module: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter that has one, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = cast("Tensor", value).detach().cpu().contiguous()
    return tensors


def load_optimizer(
    module: nn.Module, optimizer: optim.Optimizer, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Restores what `optimizer_tensors` returned. Raises CheckpointUnusable, naming the folder."""
    parameters = dict(module.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise CheckpointUnusable(f"{folder}: the model has no parameter {name!r}")
        parameter = parameters[name]
        optimizer.state[parameter][kind] = value.to(parameter.device)
