"""Estimates of a KL divergence from sampled tokens (Schulman, "Approximating KL divergence", 2020).

With x = log p - log q at a token sampled from p, KL(p || q) is estimated by the mean of:

    k1   x                  unbiased, and often negative
    k2   x**2 / 2           biased, never negative; its gradient is the KL's
    k3   exp(-x) - 1 + x    unbiased, never negative
"""
# ruff: noqa: N803, N806 - a name ends with its dimensions.

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from penstock.trainer.algorithms.losses import LARGEST_LOG_RATIO
from penstock.trainer.config.algorithm import KlEstimator


def estimate_kl(logprobs_N: Tensor, other_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Returns the estimated KL of the policy to the other at each token, shape [N]."""
    x_N = logprobs_N - other_logprobs_N
    match estimator:
        case "k1":
            return x_N
        case "k2":
            return x_N.square() / 2
        case "k3":
            # Bounded on the side that is exponentiated. On the other side it pulls back from any distance.
            x_N = x_N.clamp(min=-LARGEST_LOG_RATIO)
            return torch.expm1(-x_N) + x_N
    assert_never(estimator)


def kl_loss(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Returns the same estimate as a term of a loss, with a gradient.

    The gradient of k1 is that of log p, whose mean is zero whatever the KL is. For k1 the value is
    therefore k1's, and the gradient is k2's.
    """
    if estimator != "k1":
        return estimate_kl(logprobs_N, reference_logprobs_N, estimator)
    guide_N = estimate_kl(logprobs_N, reference_logprobs_N, "k2")
    value_N = estimate_kl(logprobs_N.detach(), reference_logprobs_N, "k1")
    return value_N + guide_N - guide_N.detach()
