"""Estimates of a KL divergence from the tokens sampled (Schulman, "Approximating KL divergence", 2020).

With x = log p - log q at a token that p sampled, KL(p || q) is the mean of any of

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
    """KL of the policy to the other at each token, shape [N]."""
    x_N = logprobs_N - other_logprobs_N
    match estimator:
        case "k1":
            return x_N
        case "k2":
            return x_N.square() / 2
        case "k3":
            # Bounded where it is exponentiated. On the other side it pulls back however far it is.
            x_N = x_N.clamp(min=-LARGEST_LOG_RATIO)
            return torch.expm1(-x_N) + x_N
    assert_never(estimator)


def kl_loss(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """The same as a term of a loss, with a gradient.

    The gradient of k1, that of log p, has mean zero whatever the KL is: k1 lends its value and k2 its
    gradient.
    """
    if estimator != "k1":
        return estimate_kl(logprobs_N, reference_logprobs_N, estimator)
    guide_N = estimate_kl(logprobs_N, reference_logprobs_N, "k2")
    value_N = estimate_kl(logprobs_N.detach(), reference_logprobs_N, "k1")
    return value_N + guide_N - guide_N.detach()
