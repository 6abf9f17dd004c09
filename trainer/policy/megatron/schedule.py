"""Runs micro-batches through a pipeline: forward only, or forward and backward.

Every rank of a copy of the model makes these calls with the same micro-batches. Ranks of another copy have
different ones, and possibly another number of them. Only the last stage knows the results for tokens;
there, all ranks that share its tensors know them. The vocabulary is cut over these ranks. Each reduces its
own columns, and only three numbers per row are summed over the ranks. Suffixes as in `batching`.
"""
# ruff: noqa: N803, N806 - a name ends with its dimensions.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed, nn

from penstock.trainer.algorithms.objective import Figures
from penstock.trainer.batching.batching import MicroBatch
from penstock.trainer.policy.megatron.model import StageModel
from penstock.trainer.policy.token_model import TokenOutput, at_temperatures

Loss = Callable[[TokenOutput], tuple[Tensor, Figures]]
"""Returns what a micro-batch adds to the loss, and its figures."""
T = TypeVar("T")


def compute_logprobs(
    stage: StageModel, module: nn.Module, batches: Sequence[MicroBatch]
) -> list[Tensor]:
    """Compute each trained token's log-probability for each micro-batch, float32, shape [N].

    Returns them on the last stage, and an empty list on the others. No gradient.
    """

    def compute(
        data: Iterator[MicroBatch], module: nn.Module
    ) -> tuple[Tensor, Callable[..., Tensor]]:
        batch = next(data)

        def collect(logits_MV: Tensor, non_loss_data: bool) -> Tensor:
            return read_tokens(stage, logits_MV, batch, entropies=False).logprobs_N

        return stage.forward(module, batch), collect

    with torch.no_grad():
        return cast("list[Tensor]", _run(module, compute, batches, forward_only=True))


def compute_gradients(
    stage: StageModel,
    module: nn.Module,
    batches: Sequence[tuple[MicroBatch, Loss]],
    *,
    entropy_gradient: bool,
) -> Figures:
    """Add the gradient of each micro-batch's loss to this rank's gradients.

    Returns the summed figures on the last stage, and empty ones on the others.
    """

    def compute(
        data: Iterator[tuple[MicroBatch, Loss]], module: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Figures]]]:
        batch, evaluate = next(data)

        def conclude(logits_MV: Tensor) -> tuple[Tensor, Tensor, Figures]:
            output = read_tokens(stage, logits_MV, batch, entropy_gradient=entropy_gradient)
            loss, figures = evaluate(output)
            # Given a third value, a token count, the schedule does not scale the loss.
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), figures

        return stage.forward(module, batch), conclude

    found = _run(module, compute, batches, forward_only=False)
    return sum(cast("list[Figures]", found), Figures())


def _run(
    module: nn.Module,
    compute: Callable[[Iterator[T], nn.Module], tuple[Tensor, object]],
    batches: Sequence[T],
    *,
    forward_only: bool,
) -> list[object]:
    if not batches:
        return []  # A schedule without a pipeline runs at least one micro-batch.
    return cast("Any", get_forward_backward_func())(
        forward_step_func=compute,
        data_iterator=iter(batches),
        model=module,
        num_microbatches=len(batches),
        # Shapes differ between micro-batches and are sent along with the tensors.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def read_tokens(
    stage: StageModel,
    logits_MV: Tensor,
    batch: MicroBatch,
    *,
    entropies: bool = True,
    entropy_gradient: bool = False,
) -> TokenOutput:
    """Compute a micro-batch's token outputs from logits whose columns are divided over the ranks.

    Without `entropies` the entropies are zero.
    """
    device = logits_MV.device
    logits_MV = at_temperatures(logits_MV, batch.temperatures_M.to(device))
    largest_M = logits_MV.detach().amax(-1)
    distributed.all_reduce(  # pyright: ignore[reportUnknownMemberType]
        largest_M, distributed.ReduceOp.MAX, stage.layout.tensor_group
    )
    shifted_MV = logits_MV - largest_M.unsqueeze(-1)
    exponentials_MV = shifted_MV.exp()
    total_M = _sum_over_columns(exponentials_MV.sum(-1))
    column_M = batch.targets_M.to(device) - stage.first_token
    own_M = (column_M >= 0) & (column_M < shifted_MV.shape[1])
    chosen_M = shifted_MV.gather(1, column_M.where(own_M, 0).unsqueeze(1)).squeeze(1)
    logprobs_M = _sum_over_columns(chosen_M.where(own_M, 0.0)) - total_M.log()
    entropies_M = torch.zeros_like(total_M)
    if entropies:
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # A product of vectors needs no third matrix of this size.
            weighted_M = torch.einsum("mv,mv->m", exponentials_MV, shifted_MV)
            entropies_M = total_M.log() - _sum_over_columns(weighted_M) / total_M
    predictions_N = batch.predictions_N.to(device)
    return TokenOutput(logprobs_M[predictions_N], entropies_M[predictions_N])


def _sum_over_columns(partial_M: Tensor) -> Tensor:
    """Sum over the ranks that share the vocabulary; each rank gets its part's gradient."""
    return cast("Any", tensor_parallel).reduce_from_tensor_model_parallel_region(partial_M)
