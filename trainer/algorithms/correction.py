"""Off-policy correction: weights of tokens that another policy sampled. Suffixes as in `batches`.

The ratio of the proximal policy, whose weights are those at the beginning of the step, to the behaviour
policy reflects both the token's lag and numerical differences between engine and trainer.
"""
# ruff: noqa: N803, N806, N815 - a name ends with its dimensions.

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from penstock.trainer.algorithms.batches import Sequences
from penstock.trainer.algorithms.kl import estimate_kl
from penstock.trainer.algorithms.losses import LARGEST_LOG_RATIO, log_ratio
from penstock.trainer.config.algorithm import (
    ClippedWeight,
    CorrectionConfig,
    KlMask,
    RatioMask,
    Uncorrected,
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Factor of each token's loss. Shape [N]; no gradients."""

    weights_N: Tensor
    masked_N: Tensor
    """Tokens with weight zero, bool."""
    clipped_N: Tensor
    """Tokens whose weight was clipped, bool."""


def correct(
    config: CorrectionConfig, proximal_N: Tensor, behaviour_N: Tensor, sequences: Sequences
) -> Weights | None:
    """Takes log-probabilities under both policies; returns None if uncorrected."""
    match config:
        case Uncorrected():
            return None
        case ClippedWeight():
            return clip_weights(config, proximal_N, behaviour_N, sequences)
        case RatioMask():
            return mask_by_ratio(config, proximal_N, behaviour_N, sequences)
        case KlMask():
            return mask_by_kl(config, proximal_N, behaviour_N, sequences)
    assert_never(config)


def clip_weights(
    config: ClippedWeight, proximal_N: Tensor, behaviour_N: Tensor, sequences: Sequences
) -> Weights:
    """Truncated importance sampling: the token's ratio, or the product over its sequence, capped at
    a bound (AReaL, arXiv 2505.24298; "Your efficient RL framework secretly brings you off-policy RL
    training", 2025)."""
    if config.level == "token":
        ratio_N = torch.exp(log_ratio(proximal_N, behaviour_N))
    else:
        ratio_N = _sequence_ratio(sequences, sequences.sum(proximal_N - behaviour_N))
    clipped_N = ratio_N > config.threshold
    weights_N = ratio_N.clamp(max=config.threshold)
    return Weights(weights_N, torch.zeros_like(clipped_N), clipped_N)


def mask_by_ratio(
    config: RatioMask, proximal_N: Tensor, behaviour_N: Tensor, sequences: Sequences
) -> Weights:
    """IcePop's mask (Ring-1T, arXiv 2510.18855), or a mask of sequences by the geometric mean of
    their ratios. Kept tokens are weighted by their own ratio, or by one."""
    ratio_N = torch.exp(log_ratio(proximal_N, behaviour_N))
    measured_N = ratio_N
    if config.level == "sequence":
        measured_N = _sequence_ratio(sequences, sequences.mean(proximal_N - behaviour_N))
    low, high = config.threshold
    masked_N = (measured_N < low) | (measured_N > high)
    kept_N = ratio_N if config.weighted else torch.ones_like(ratio_N)
    return Weights(kept_N.masked_fill(masked_N, 0.0), masked_N, torch.zeros_like(masked_N))


def mask_by_kl(
    config: KlMask, proximal_N: Tensor, behaviour_N: Tensor, sequences: Sequences
) -> Weights:
    """Masks tokens for which the KL of the behaviour policy to the proximal policy, or at sequence level
    its mean over the sequence, is too large."""
    kl_N = estimate_kl(behaviour_N, proximal_N, config.estimator)
    if config.level == "sequence":
        kl_N = sequences.spread(sequences.mean(kl_N))
    masked_N = kl_N > config.threshold
    weights_N = torch.ones_like(kl_N).masked_fill(masked_N, 0.0)
    return Weights(weights_N, masked_N, torch.zeros_like(masked_N))


def _sequence_ratio(sequences: Sequences, log_ratio_S: Tensor) -> Tensor:
    """Returns each sequence's bounded ratio at all its tokens, shape [N]."""
    bounded_S = log_ratio_S.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return sequences.spread(torch.exp(bounded_S))
