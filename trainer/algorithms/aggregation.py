"""From token losses to the loss of an update. Suffixes as in `batches`.

Denominators count the whole update, so that the gradients of micro-batches add up to its gradient, however
it is cut.
"""
# ruff: noqa: N803 - a name ends with its dimensions.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from torch import Tensor

from penstock.trainer.algorithms.batches import Sequences, StepCounts
from penstock.trainer.config.algorithm import (
    AggregationConfig,
    FixedLength,
    SequenceMean,
    TokenMean,
)

Aggregation = Callable[[Tensor, Sequences, StepCounts], Tensor]
"""Returns a micro-batch's contribution to the loss of its update, a scalar."""


def aggregation(config: AggregationConfig) -> Aggregation:
    match config:
        case TokenMean():
            return token_mean
        case SequenceMean():
            return sequence_mean
        case FixedLength():
            return partial(fixed_length, length=config.length)
    assert_never(config)


def token_mean(loss_N: Tensor, sequences: Sequences, counts: StepCounts) -> Tensor:
    """Mean over the update's tokens (DAPO, arXiv 2503.14476, equation 8)."""
    return loss_N.sum() / counts.tokens


def sequence_mean(loss_N: Tensor, sequences: Sequences, counts: StepCounts) -> Tensor:
    """Mean over sequences of the mean over their tokens (GRPO, arXiv 2402.03300, equation 3)."""
    return sequences.mean(loss_N).sum() / counts.sequences


def fixed_length(
    loss_N: Tensor, sequences: Sequences, counts: StepCounts, *, length: int
) -> Tensor:
    """Sum over tokens, divided by the number of sequences times a constant (Dr. GRPO, arXiv
    2503.20783, appendix A)."""
    return loss_N.sum() / (counts.sequences * length)
