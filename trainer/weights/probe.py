"""A fixed sequence, scored by the trainer with the weights it uploads, and by the engine after loading
them.

It is the beginning of the first trajectory that the run trains on, and stays the same for the whole run,
including restarts, so that figures of different steps are comparable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from penstock.trainer.batching.batching import TrainingGroup
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

Score = Callable[[Mapping[str, Tensor], Sequence[int]], "NDArray[np.float32]"]
"""Computes each token's log-probability but the first's under these weights; see `policy.Policy.score`."""


class Probe:
    def __init__(
        self, score: Score, *, tokens: int, tolerance: float, token_ids: Sequence[int] = ()
    ) -> None:
        """`tokens` is the sequence's length; zero disables the probe. `tolerance` is the largest allowed
        mean difference in nats. `token_ids` is the sequence from a checkpoint, if any."""
        self._score = score
        self._tokens = tokens
        self._tolerance = tolerance
        self.token_ids = tuple(token_ids[:tokens])
        """The sequence; empty until it is chosen."""

    def choose(self, groups: Sequence[TrainingGroup]) -> None:
        """Choose the beginning of the first trajectory, unless there is a sequence already. A trajectory
        shorter than the probe is taken whole."""
        if not self._tokens or self.token_ids:
            return
        for group in groups:
            for sample in group.samples:
                # A score needs two tokens.
                if len(sample.token_ids) >= 2:
                    self.token_ids = tuple(map(int, sample.token_ids[: self._tokens]))
                    return

    def measure(self, tensors: Mapping[str, Tensor]) -> weights_pb2.WeightProbe | None:
        """None without a sequence. Runs in the compute thread."""
        if not self.token_ids:
            return None
        logprobs = self._score(tensors, self.token_ids)
        if not np.isfinite(logprobs).all():
            # The server refuses such weights and names the tensor, which is more informative.
            log.warning("the probe's score is not finite; sending these weights without it")
            return None
        return weights_pb2.WeightProbe(
            token_ids=self.token_ids, logprobs=logprobs.tolist(), tolerance=self._tolerance
        )
