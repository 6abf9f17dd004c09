"""The groups that `buffer.delivery` moves: 8 trajectories of 8,192 tokens with log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIBLINGS = 8
TOKENS = 8_192
VOCABULARY = 151_936
"""Vocabulary size of Qwen3."""
GROUP_BYTES = SIBLINGS * TOKENS * 8
SAMPLES = 16
"""Number of different trajectories; they are used in turn."""


@dataclass(frozen=True)
class Sample:
    """Token ids and log-probabilities of one trajectory."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def equals(self, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bool:
        """Whether both arrays are equal, including their types."""
        pairs = ((self.token_ids, token_ids), (self.logprobs, logprobs))
        return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@cache
def sample_of(number: int) -> Sample:
    """Returns the same sample for the same number in every process."""
    generator = np.random.default_rng(number)
    ids = generator.integers(0, VOCABULARY, TOKENS, dtype=np.int32)
    return Sample(ids, -generator.exponential(0.5, TOKENS).astype(np.float32))


def sample_number(group: int, sibling: int) -> int:
    """Number of the sample that a trajectory consists of."""
    return (group * SIBLINGS + sibling) % SAMPLES
