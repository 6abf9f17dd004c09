"""Converts the optimizer's state to tensors of a checkpoint and back. Keys are kind/parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from torch import Tensor, nn, optim

from penstock.trainer.config.trainer import TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable
from penstock.trainer.policy.sharding import share_of


def adamw(module: nn.Module, train: TrainConfig, learning_rate: float) -> optim.AdamW:
    """Create AdamW for a module's trained parameters; only matrices have weight decay."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    return optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=train.betas,
        eps=train.epsilon,
        fused=True,
    )


def optimizer_tensors(
    module: nn.Module,
    optimizer: optim.Optimizer,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    keep: bool = True,
) -> dict[str, Tensor]:
    """Return the state of every parameter that has one, on the CPU, made whole by `whole`.

    Without `keep` the result is empty, for a rank that only contributes its shards.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensor = whole(cast("Tensor", value).detach())
            if keep:
                tensors[f"{key}/{name}"] = tensor.cpu().contiguous()
    return tensors


def load_optimizer(
    module: nn.Module, optimizer: optim.Optimizer, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Restore the output of `optimizer_tensors`, or this rank's shard of it.

    Raises CheckpointUnusable, which names the folder.
    """
    parameters = dict(module.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise CheckpointUnusable(f"{folder}: the model has no parameter {name!r}")
        parameter = parameters[name]
        optimizer.state[parameter][kind] = share_of(parameter, value)
