"""Uses of a critic's values: advantages, and the critic's own targets. Suffixes as in `batches`.

The trained tokens of a sequence are its time steps. The outcome's reward arrives with the last one.
"""
# ruff: noqa: N803, N806 - a name ends with its dimensions.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithms.batches import RewardBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray


def estimate_gae(batch: RewardBatch, *, discount: float, trace: float) -> NDArray[np.float64]:
    """Generalized advantage estimate of each token (arXiv 1506.02438, equation 16). `discount` is the
    paper's gamma, `trace` its lambda."""
    rewards_N = -batch.penalties_N
    ends_S = np.cumsum(batch.lengths_S)
    some_S = batch.lengths_S > 0
    rewards_N[ends_S[some_S] - 1] += batch.rewards_S[some_S]
    advantages_N = np.zeros_like(rewards_N)
    start = 0
    for end in ends_S.tolist():
        following_value = following = 0.0
        for token in range(end - 1, start - 1, -1):
            value = batch.values_N[token]
            surprise = rewards_N[token] + discount * following_value - value
            following = surprise + discount * trace * following
            advantages_N[token], following_value = following, value
        start = end
    return advantages_N


def value_targets(batch: RewardBatch, *, discount: float, trace: float) -> NDArray[np.float64]:
    """Returns the critic's targets: its values plus their advantages, shape [N]."""
    return estimate_gae(batch, discount=discount, trace=trace) + batch.values_N


def value_loss(
    values_N: Tensor, old_values_N: Tensor, targets_N: Tensor, *, clip: float | None
) -> Tensor:
    """Returns half the squared error of each token. With `clip`, the error is at least that of the
    value clipped to within `clip` of the old one, as in PPO's first implementation."""
    error_N = (values_N - targets_N).square()
    if clip is not None:
        held_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (held_N - targets_N).square())
    return error_N / 2


def explained_variance(values_N: NDArray[np.float64], targets_N: NDArray[np.float64]) -> float:
    """Returns the share of the targets' variance that the values explained; zero without variance."""
    spread = float(targets_N.var()) if len(targets_N) else 0.0
    return 1.0 - float((targets_N - values_N).var()) / spread if spread > 0.0 else 0.0
