"""Inputs of the functions in this package. Suffixes: N trained tokens, S sequences.

Tokens are ordered by sequence in `RewardBatch`, and in any order in `TokenBatch`, which belongs to one
micro-batch. A micro-batch has all tokens of a sequence or none.
"""
# ruff: noqa: N802, N803, N815 - a name ends with its dimensions.

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RewardBatch:
    """Every sequence of a step, as input to advantages. Failed trajectories are excluded."""

    rewards_S: NDArray[np.float64]
    groups_S: NDArray[np.int64]
    """Index of each sequence's group, from zero."""
    counts_in_baseline_S: NDArray[np.bool_]
    """False for a branch. Branches do not enter a baseline, because an attempt with many branches
    would otherwise weigh more than its siblings."""
    lengths_S: NDArray[np.int64]
    """Number of trained tokens of each sequence; zero if all are masked."""
    penalties_N: NDArray[np.float64]
    """KL penalty subtracted from each token's reward; zero without one."""
    values_N: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """The critic's value at each token; empty without a critic."""

    @cached_property
    def sequences_N(self) -> NDArray[np.int64]:
        """Index of each token's sequence."""
        return np.repeat(np.arange(len(self.rewards_S)), self.lengths_S)

    @cached_property
    def returns_S(self) -> NDArray[np.float64]:
        """Each sequence's reward minus all its penalties."""
        if not self.penalties_N.any():
            return self.rewards_S
        return self.rewards_S - self.sum(self.penalties_N)

    def sum(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the sum over the tokens of each sequence, shape [S]."""
        sums = np.zeros(len(self.rewards_S))
        np.add.at(sums, self.sequences_N, values_N)
        return sums

    def spread(self, values_S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns each sequence's value at all its tokens, shape [N]."""
        return values_S[self.sequences_N]


@dataclass(frozen=True)
class Sequences:
    """Assigns each of N tokens to one of `count` sequences."""

    index_N: Tensor
    """From zero, int64."""
    count: int

    @cached_property
    def lengths_S(self) -> Tensor:
        return self.sum(torch.ones_like(self.index_N, dtype=torch.float32))

    def sum(self, values_N: Tensor) -> Tensor:
        """Returns the sum over the tokens of each sequence, shape [S]."""
        return values_N.new_zeros(self.count).index_add(0, self.index_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Returns the mean over the tokens of each sequence, shape [S]; zero without tokens."""
        return self.sum(values_N) / self.lengths_S.clamp(min=1.0)

    def spread(self, values_S: Tensor) -> Tensor:
        """Returns each sequence's value at all its tokens, shape [N]."""
        return values_S[self.index_N]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of a micro-batch, as input to losses. All float32, shape [N]."""

    logprobs_N: Tensor
    """Log-probabilities under the current policy; have a gradient."""
    old_logprobs_N: Tensor
    """Denominator of the ratio: log-probabilities of the behaviour policy, or of the proximal policy."""
    advantages_N: Tensor
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Denominators of one optimizer update, counted over all its micro-batches."""

    tokens: int
    """Trained tokens in the loss."""
    sequences: int
    """Sequences with at least one trained token."""
