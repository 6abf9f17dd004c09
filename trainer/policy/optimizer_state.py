"""The optimizer and its part of a checkpoint: tensors with keys kind/parameter, and a file with the
updates applied so far and the setup that computed them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn, optim

from penstock.trainer.config.trainer import TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable
from penstock.trainer.policy.sharding import Sharding, share_of

PROGRESS_FILE = "optimizer.json"

log = logging.getLogger(__name__)


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
    module: nn.Module, optimizer: optim.Optimizer, sharding: Sharding
) -> dict[str, Tensor]:
    """Return the state of every parameter that has one, whole; empty on all ranks but rank 0."""
    return sharding.gather(
        (f"{kind}/{name}", cast("Tensor", value))
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    )


def load_optimizer(
    module: nn.Module, optimizer: optim.Optimizer, tensors: Mapping[str, Tensor], folder: Path
) -> None:
    """Restore the output of `optimizer_tensors`, or this rank's shard of it. Raises CheckpointUnusable."""
    parameters = dict(module.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise CheckpointUnusable(f"{folder}: the model has no parameter {name!r}")
        optimizer.state[parameters[name]][kind] = share_of(parameters[name], value)


def save_progress(
    folder: Path, steps: int, *, backend: str, ranks: int, dtype: torch.dtype
) -> None:
    """Write the updates applied so far and the setup; `dtype` is the forward pass's. Raises OSError."""
    progress = {
        "optimizer_steps": steps,
        "backend": backend,
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "dtype": _name(dtype),
    }
    (folder / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")


def load_progress(
    folder: Path, *, backend: str, ranks: int, dtype: torch.dtype, same_dtype: bool = False
) -> int:
    """Return the updates applied so far; log differences between that setup and this run's.

    Raises CheckpointUnusable if another backend wrote the checkpoint, or if `same_dtype` is set and
    the dtype differs. Raises OSError, ValueError or KeyError for an invalid file.
    """
    content = (folder / PROGRESS_FILE).read_text(encoding="utf-8")
    found = cast("dict[str, object]", json.loads(content))
    if (wrote := found.get("backend", backend)) != backend:
        raise CheckpointUnusable(
            f'{folder}: model.backend = "{wrote}" wrote it, and this run has "{backend}", which cannot '
            "load that optimizer; to start from the model alone, use it as model.path"
        )
    if (before := found.get("dtype", _name(dtype))) != _name(dtype):
        if same_dtype and found["optimizer_steps"]:
            raise CheckpointUnusable(
                f"{folder}: it was computed in {before}, and this run in {_name(dtype)}: "
                f'its optimizer requires model.dtype = "{before}"'
            )
        log.warning("%s was computed in %s, this run continues in %s", folder, before, _name(dtype))
    for name, count in (("ranks", ranks), ("threads", torch.get_num_threads())):
        if (before := found.get(name, count)) != count:
            log.warning(
                "%s was computed with %s %s, this run continues with %d; sums may be rounded differently",
                folder,
                before,
                name,
                count,
            )
    return int(cast("int", found["optimizer_steps"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
