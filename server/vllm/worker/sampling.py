"""How the worker draws tokens on a CPU; imported in vLLM's worker process before it makes its sampler.

Two parts of vLLM are replaced because of their cost in each step:

- The draw itself. vLLM adds Gumbel noise to each logit of the vocabulary and takes the largest, at 3 ns
  each. That is 5 ms of a step of 80 ms at 32 sequences and a vocabulary of 49,152. `draw` inverts the
  distribution function instead, with one uniform number per sequence. The sums over blocks of the
  vocabulary find the block, and only within it the probabilities are accumulated one by one.
- The rank of a sampled token, for which all others are compared with it. Penstock does not use it.

Tokens are drawn from the exponential of exactly the log-probabilities that are reported, after temperature
and truncation. The same seed gives the same tokens, but not those of vLLM's own draw.
"""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

BLOCK = 512
"""Tokens per block sum. The vocabulary's remainder is one shorter block."""

_forward_cpu = TopKTopPSampler.forward_cpu
_gather_logprobs = Sampler.gather_logprobs


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token per row: the first at which the cumulative probability exceeds `uniforms`.

    `logprobs` [rows, vocabulary], float32, each row summing to one as probabilities; -inf is never drawn.
    `uniforms` [rows], float64 in [0, 1). Returns ids [rows], int64.
    """
    rows, vocabulary = logprobs.shape
    count = -(-vocabulary // BLOCK)
    padded = torch.empty((rows, count * BLOCK), dtype=torch.float32)
    padded[:, vocabulary:] = 0.0
    torch.exp(logprobs, out=padded[:, :vocabulary])
    blocks = padded.view(rows, count, BLOCK)
    sums = blocks.sum(-1)
    block, before = _first_beyond(sums.to(torch.float64), uniforms)
    at = torch.arange(rows)
    # The rest of the uniform as a share of its block. Sums are rounded, but a share never exceeds one.
    share = before / sums[at, block]
    token, _ = _first_beyond(blocks[at, block].to(torch.float64), share)
    return block * BLOCK + token


def _first_beyond(weights: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find in each row the first index at which the cumulative weight exceeds its share of the total.

    Also returns how much of the share's weight remains after subtracting the weights before that index.
    Never finds an index without weight.
    """
    reached = weights.cumsum(-1)
    total = reached[:, -1:]
    target = shares.unsqueeze(-1) * total
    last = (reached < total).sum(-1)
    found = torch.minimum((reached <= target).sum(-1), last)
    before = reached.gather(-1, found.unsqueeze(-1)) - weights.gather(-1, found.unsqueeze(-1))
    return found, (target - before).squeeze(-1).clamp_(min=0.0)


def _uniforms(rows: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """A uniform number for each row; a row with a seed draws it from its own generator."""
    numbers = torch.rand(rows, dtype=torch.float64)
    for row, generator in generators.items():
        numbers[row] = torch.rand((), generator=generator, dtype=torch.float64)
    return numbers


def forward_cpu(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replaces vLLM's method if log-probabilities are those of the sampled distribution."""
    if self.logprobs_mode != "processed_logprobs":
        return _forward_cpu(self, logits, generators, k, p)
    kept = apply_top_k_top_p(logits, k, p)
    logprobs = kept.log_softmax(dim=-1, dtype=torch.float32)
    return draw(logprobs, _uniforms(len(logprobs), generators)), logprobs


def gather_logprobs(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """Replaces vLLM's method. If only the sampled token is requested, its rank stays zero."""
    if num_logprobs:
        return _gather_logprobs(logprobs, num_logprobs, token_ids)
    chosen = token_ids.unsqueeze(-1)
    ranks = torch.zeros_like(token_ids)
    return LogprobsTensors(chosen.to(torch.int32), logprobs.gather(-1, chosen), ranks)


TopKTopPSampler.forward_cpu = forward_cpu
Sampler.gather_logprobs = staticmethod(gather_logprobs)
