"""The critic: a separate model that predicts the return of the rest of a sequence, and its optimizer.

It starts as a copy of the policy's model, with a head that outputs one number in place of the output layer
and is initially zero. All its weights are trained, even if the policy is an adapter. Its values are
computed once per step, before any weights change; advantages and its targets are derived from them. In
each update it learns from the same micro-batches as the policy, after it. Suffixes as in `batching`.
"""
# ruff: noqa: N806 - a name ends with its dimensions.

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor, nn

from penstock.trainer.algorithms.batches import StepCounts
from penstock.trainer.algorithms.values import value_loss
from penstock.trainer.batching.batching import MicroBatch
from penstock.trainer.config.algorithm import CriticConfig
from penstock.trainer.config.trainer import TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable
from penstock.trainer.policy.optimizer_state import adamw, load_optimizer, optimizer_tensors
from penstock.trainer.policy.sharding import Sharding, overwrite
from penstock.trainer.policy.token_model import CausalModel, Output, TokenModel

WEIGHTS_FILE = "critic.safetensors"
OPTIMIZER_FILE = "critic_optimizer.safetensors"


class ValueHead(nn.Module):
    """Outputs one number for each position, always in float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))
        self._said: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [..., H] to [..., 1]."""
        with torch.autocast(hidden.device.type, enabled=False):
            # A copy, because the result can be a view, which a sharded model should not return.
            self._said = nn.functional.linear(hidden.float(), self.weight, self.bias).clone()
        return self._said

    def undo_scaling(self, module: nn.Module, inputs: tuple[object, ...], output: Output) -> None:
        """Restores the head's output as logits, which the model's forward pass changed. A forward hook."""
        if self._said is not None:
            output.logits, self._said = self._said, None


@dataclass(frozen=True, slots=True)
class Lesson:
    """Training data of the critic from one micro-batch."""

    batch: MicroBatch
    old_values_N: Tensor  # noqa: N815
    """Its values at the beginning of the step."""
    targets_N: Tensor  # noqa: N815


class Critic:
    """A model with float32 weights, and its optimizer."""

    def __init__(
        self,
        model: CausalModel,
        config: CriticConfig,
        train: TrainConfig,
        sharding: Sharding,
        *,
        blocks: Collection[str],
        autocast: bool,
    ) -> None:
        """Takes ownership of the model. For `blocks` see `Sharding.place`."""
        hidden_size = cast("Tensor", model.get_output_embeddings().weight).shape[1]
        self._head = head = ValueHead(hidden_size)
        model.set_output_embeddings(head)
        # Soft caps and scales apply to logits only. Registered before sharding, which hooks the
        # model's output too.
        cast("nn.Module", model).register_forward_hook(head.undo_scaling)
        self._sharding = sharding
        self._tokens = TokenModel(model, autocast=autocast, device=sharding.device)
        self._module = self._tokens.module
        self._module.train()
        sharding.place(self._module, blocks)
        self._config = config
        self._max_grad_norm = train.max_grad_norm
        self._optimizer = adamw(self._module, train, config.learning_rate)

    def supports_trees(self) -> bool:
        """Whether the model computes a prefix tree with the same results as separate sequences."""
        weight = self._head.weight
        kept = weight.detach().clone()
        try:
            with torch.no_grad():
                # Before the first step all its values are zero, however its layers treat a mask.
                weight.add_(weight.shape[1] ** -0.5)
            return self._tokens.supports_trees()
        finally:
            with torch.no_grad():
                weight.copy_(kept)

    def values(self, batch: MicroBatch) -> Tensor:
        """Returns the predicted return from each trained token on, float32, shape [N]; no gradient."""
        with torch.no_grad(), self._tokens.without_dropout():
            return self._values(batch)

    def learn(self, lessons: list[Lesson], counts: StepCounts) -> float:
        """Runs one update and returns its loss. A gradient that is not finite changes no weights."""
        total = 0.0
        for number, lesson in enumerate(lessons, start=1):
            self._sharding.accumulate(self._module, last=number == len(lessons))
            loss_N = value_loss(
                self._values(lesson.batch),
                lesson.old_values_N,
                lesson.targets_N,
                clip=None if self._config.clip == "none" else self._config.clip,
            )
            loss = loss_N.sum() / counts.tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), self._max_grad_norm)
        if math.isfinite(float(self._sharding.whole(norm))):
            self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self._optimizer.zero_grad(set_to_none=True)
        return float(self._sharding.sum(np.array([total]))[0])

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer. Raises OSError and SafetensorError."""
        weights = self._sharding.gather(self._module.named_parameters())
        tensors = optimizer_tensors(self._module, self._optimizer, self._sharding)
        if self._sharding.rank == 0:
            save_file(weights, folder / WEIGHTS_FILE)
            save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Restores exactly what `save` wrote. Raises CheckpointUnusable, OSError and SafetensorError."""
        if not (folder / WEIGHTS_FILE).exists():
            raise CheckpointUnusable(f"{folder} belongs to a run without a critic")
        saved = load_file(folder / WEIGHTS_FILE)
        own = dict(self._module.named_parameters())
        if own.keys() != saved.keys():
            raise CheckpointUnusable(f"{folder}: {WEIGHTS_FILE} belongs to another model")
        for name, parameter in own.items():
            overwrite(parameter, saved[name])
        tensors = load_file(folder / OPTIMIZER_FILE)
        load_optimizer(self._module, self._optimizer, tensors, folder)

    def _values(self, batch: MicroBatch) -> Tensor:
        values_M = self._tokens.outputs(batch).squeeze(-1)
        return values_M[batch.predictions_N.to(values_M.device)]
