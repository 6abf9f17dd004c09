"""How the worker draws tokens on a CPU; imported in vLLM's worker process, before it makes its sampler.

Two things of vLLM's are replaced, because of what they cost in each step:

- The draw itself. vLLM's adds noise of its own to each logit of the vocabulary (Gumbel) and takes the
  largest, 3 ns each: 5 ms of a step of 80 at 32 sequences of a vocabulary of 49,152. `draw` inverts the
  distribution function instead, from one uniform number for each sequence: a sum over each block of the
  vocabulary finds the block, and only within that block the probabilities are added up one by one.
- The rank of a sampled token, for which all others are compared with it. Nobody here asks for it.

What is drawn from is the exponential of the very log-probabilities that are reported, after temperature and
truncation. The same seed gives the same tokens, but others than vLLM's own draw would give.
"""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

__all__ = ["BLOCK", "draw"]

BLOCK = 512
"""Tokens of which the sum is taken at once; what remains is one block, added up one by one."""

_forward_cpu = TopKTopPSampler.forward_cpu
_gather_logprobs = Sampler.gather_logprobs


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token of each row, the first at which the probabilities so far exceed `uniforms`.

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
    # What is left of the number, as a share of its block: sums are rounded, shares are not beyond one.
    share = before / sums[at, block]
    token, _ = _first_beyond(blocks[at, block].to(torch.float64), share)
    return block * BLOCK + token


def _first_beyond(weights: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the first index up to which the weights make more than its share of them, and how much of
    the share's weight is left when those before it are taken off. Never one without a weight."""
    reached = weights.cumsum(-1)
    total = reached[:, -1:]
    target = shares.unsqueeze(-1) * total
    last = (reached < total).sum(-1)
    found = torch.minimum((reached <= target).sum(-1), last)
    before = reached.gather(-1, found.unsqueeze(-1)) - weights.gather(-1, found.unsqueeze(-1))
    return found, (target - before).squeeze(-1).clamp_(min=0.0)


def _uniforms(rows: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
    """A number for each row; a row with a seed takes it from its own generator."""
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
    """As vLLM's of this name, where log-probabilities are those of what was sampled from."""
    if self.logprobs_mode != "processed_logprobs":
        return _forward_cpu(self, logits, generators, k, p)
    kept = apply_top_k_top_p(logits, k, p)
    logprobs = kept.log_softmax(dim=-1, dtype=torch.float32)
    return draw(logprobs, _uniforms(len(logprobs), generators)), logprobs


def gather_logprobs(
    logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
) -> LogprobsTensors:
    """As vLLM's of this name; where nothing but the sampled token is asked for, its rank stays zero."""
    if num_logprobs:
        return _gather_logprobs(logprobs, num_logprobs, token_ids)
    chosen = token_ids.unsqueeze(-1)
    ranks = torch.zeros_like(token_ids)
    return LogprobsTensors(chosen.to(torch.int32), logprobs.gather(-1, chosen), ranks)


TopKTopPSampler.forward_cpu = forward_cpu
Sampler.gather_logprobs = staticmethod(gather_logprobs)
