"""What the functions take. Suffixes: N trained tokens, S sequences.

Tokens lie sequence by sequence in `RewardBatch`, and in any order in `TokenBatch`, which is of one
micro-batch. A sequence is never cut: a micro-batch that has one of its tokens has all.
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
    """Every sequence of a step: what advantages are made of. Failed trajectories are not among
    them."""

    rewards_S: NDArray[np.float64]
    groups_S: NDArray[np.int64]
    """Which group each is of, counted from zero."""
    counts_in_baseline_S: NDArray[np.bool_]
    """False for a trajectory that branches from another: it has no part in a baseline, lest an attempt with
    many branches weigh more than its siblings."""
    lengths_S: NDArray[np.int64]
    """Trained tokens of each; zero where all are masked."""
    penalties_N: NDArray[np.float64]
    """What each token's reward loses to the KL penalty; zero without one."""
    values_N: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """What the critic said at each token; empty without one."""

    @cached_property
    def sequences_N(self) -> NDArray[np.int64]:
        """Which sequence each token is of."""
        return np.repeat(np.arange(len(self.rewards_S)), self.lengths_S)

    @cached_property
    def returns_S(self) -> NDArray[np.float64]:
        """The reward of each sequence less all its penalties."""
        if not self.penalties_N.any():
            return self.rewards_S
        return self.rewards_S - self.sum(self.penalties_N)

    def sum(self, values_N: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over the tokens of each sequence, shape [S]."""
        sums = np.zeros(len(self.rewards_S))
        np.add.at(sums, self.sequences_N, values_N)
        return sums

    def spread(self, values_S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Each sequence's value at all its tokens, shape [N]."""
        return values_S[self.sequences_N]


@dataclass(frozen=True)
class Sequences:
    """Which of `count` sequences each of N tokens is of."""

    index_N: Tensor
    """int64, from zero."""
    count: int

    @cached_property
    def lengths_S(self) -> Tensor:
        """Tokens of each, float32."""
        return self.sum(torch.ones_like(self.index_N, dtype=torch.float32))

    def sum(self, values_N: Tensor) -> Tensor:
        """Sum over the tokens of each sequence, shape [S]."""
        return values_N.new_zeros(self.count).index_add(0, self.index_N, values_N)

    def mean(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens of each sequence, shape [S]; zero where there are none."""
        return self.sum(values_N) / self.lengths_S.clamp(min=1.0)

    def spread(self, values_S: Tensor) -> Tensor:
        """Each sequence's value at all its tokens, shape [N]."""
        return values_S[self.index_N]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of a micro-batch: what losses are made of. All float32, shape [N]."""

    logprobs_N: Tensor
    """Under the policy being computed; has a gradient."""
    old_logprobs_N: Tensor
    """What the ratio is to: the behaviour policy's, or the proximal policy's."""
    advantages_N: Tensor
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The denominators of one optimizer update: those of all its micro-batches together."""

    tokens: int
    """Trained tokens in the loss."""
    sequences: int
    """Sequences with at least one of them."""
