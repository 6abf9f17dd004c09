"""Losses per token. Suffixes as in `batches`.

The aggregation weights tokens, and the correction accounts for stale ones.
"""
# ruff: noqa: N803, N806, N815 - a name ends with its dimensions.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import torch
from torch import Tensor

from penstock.trainer.algorithms.batches import TokenBatch
from penstock.trainer.algorithms.custom import load_function
from penstock.trainer.config.algorithm import (
    Cispo,
    CustomFunction,
    Gspo,
    LossConfig,
    PpoClip,
    Reinforce,
)
from penstock.trainer.core.errors import ConfigInvalid

# e^20 is far beyond every bound; a larger ratio would only risk overflow.
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each trained token, and the effect of clipping on it."""

    loss_N: Tensor
    """Loss to minimize; has a gradient."""
    below_N: Tensor | None = None
    """Tokens that get no gradient because their ratio is below the bound, bool; None without a bound."""
    above_N: Tensor | None = None
    """Tokens that get no gradient because their ratio is above the bound."""


LossFunction = Callable[[TokenBatch], TokenLoss]


def loss_function(config: LossConfig) -> LossFunction:
    """Raises ConfigInvalid if a custom function is not found."""
    match config:
        case PpoClip():
            return partial(
                ppo_clip,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                dual_clip=config.dual_clip,
            )
        case Gspo():
            return partial(gspo, clip_low=config.clip_low, clip_high=config.clip_high)
        case Cispo():
            return partial(cispo, clip_low=config.clip_low, clip_high=config.clip_high)
        case Reinforce():
            return reinforce
        case CustomFunction():
            return partial(_call_custom, config, load_function(config, "algorithm.loss"))
    assert_never(config)


def log_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Returns the log of the ratio, bounded so that its exponential is finite."""
    return (logprobs_N - old_logprobs_N).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def ppo_clip(
    batch: TokenBatch, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with a separate bound on each side.

    `clip_high` above `clip_low` is DAPO's clip-higher (2503.14476, equation 10). `dual_clip` also
    bounds the ratio for negative advantages, which the surrogate does not (1912.09729, equation 5).
    """
    ratio_N = torch.exp(log_ratio(batch.logprobs_N, batch.old_logprobs_N))
    return _surrogate(ratio_N, batch.advantages_N, clip_low, clip_high, dual_clip)


def gspo(batch: TokenBatch, *, clip_low: float, clip_high: float) -> TokenLoss:
    """The surrogate of the sequence's ratio, the geometric mean of its tokens' ratios (GSPO, arXiv
    2507.18071, equation 14, GSPO-token)."""
    mean_S = batch.sequences.mean((batch.logprobs_N - batch.old_logprobs_N).detach())
    bounded_S = mean_S.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    # The sequence's value, with the gradient of the token's own log-probability.
    log_ratio_N = batch.sequences.spread(bounded_S) + batch.logprobs_N - batch.logprobs_N.detach()
    return _surrogate(torch.exp(log_ratio_N), batch.advantages_N, clip_low, clip_high, None)


def cispo(batch: TokenBatch, *, clip_low: float, clip_high: float) -> TokenLoss:
    """REINFORCE weighted by the clipped ratio, which has no gradient (CISPO, MiniMax-M1, arXiv
    2506.13585, equations 4 and 5)."""
    ratio_N = torch.exp(log_ratio(batch.logprobs_N.detach(), batch.old_logprobs_N))
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss_N = -ratio_N.clamp(low, high) * batch.advantages_N * batch.logprobs_N
    return TokenLoss(loss_N, ratio_N < low, ratio_N > high)


def reinforce(batch: TokenBatch) -> TokenLoss:
    """The policy gradient (Williams, 1992)."""
    return TokenLoss(-batch.advantages_N * batch.logprobs_N)


def _surrogate(
    ratio_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    free_N, held_N = ratio_N * advantages_N, bounded_N * advantages_N
    gain_N = torch.minimum(free_N, held_N)
    cut_N = held_N < free_N
    above_N = cut_N & (advantages_N > 0)
    if dual_clip is not None:
        least_N = dual_clip * advantages_N
        deep_N = (advantages_N < 0) & (gain_N < least_N)
        gain_N = torch.where(deep_N, least_N, gain_N)
        above_N = above_N | deep_N
    return TokenLoss(-gain_N, (cut_N & (advantages_N < 0)).detach(), above_N.detach())


def _call_custom(
    config: CustomFunction, function: Callable[..., object], batch: TokenBatch
) -> TokenLoss:
    found = function(batch, **config.options)
    where = f"algorithm.loss.function {config.function}"
    if not isinstance(found, TokenLoss):
        raise ConfigInvalid(f"{where}: returned a {type(found).__name__}, not a TokenLoss")
    if found.loss_N.shape != batch.logprobs_N.shape:
        raise ConfigInvalid(
            f"{where}: returned shape {tuple(found.loss_N.shape)}, "
            f"not a loss for each of {len(batch.logprobs_N)} tokens"
        )
    if not found.loss_N.requires_grad:
        raise ConfigInvalid(f"{where}: returned a loss without a gradient")
    return found
