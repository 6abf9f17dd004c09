"""The policy-gradient loss. Suffixes: N trained tokens, M distinct predictions, V vocabulary."""
# ruff: noqa: N803, N806, N815 - a name ends with its dimensions.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of each trained token, and what the clip did."""

    loss_N: Tensor
    """What to minimize; has a gradient."""
    clipped_N: Tensor
    """Tokens whose gradient the clip removed, bool."""


def policy_loss(
    logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with bounds of its own on each side.

    The ratio is taken to the policy that sampled the token, whose log-probability came over the
    wire. `clip_high` above `clip_low` is DAPO's clip-higher (2503.14476, equation 10). All shapes
    [N], float32.
    """
    ratio_N = torch.exp(logprobs_N - behaviour_logprobs_N)
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    free_N, held_N = ratio_N * advantages_N, bounded_N * advantages_N
    return PolicyLoss(-torch.minimum(free_N, held_N), (held_N < free_N).detach())


def token_mean(loss_N: Tensor, token_count: int) -> Tensor:
    """Sum over `token_count`, the trained tokens of the whole step (DAPO, 2503.14476, equation 8).

    The count is the step's and not the micro-batch's, so that the gradients of micro-batches add
    up to that of the step however it is cut.
    """
    return loss_N.sum() / token_count


def token_logprobs(logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor) -> Tensor:
    """log softmax(logits / temperature) at each target: float32, shape [M]."""
    logits_MV = logits_MV.float()
    if bool((temperatures_M != 1.0).any()):
        logits_MV = logits_MV / temperatures_M.unsqueeze(-1)
    return -cross_entropy(logits_MV, targets_M, reduction="none")
