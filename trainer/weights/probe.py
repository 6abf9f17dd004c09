"""A fixed sequence that the trainer scores with the weights it uploads, and the engine after loading them.

The sequence is the beginning of the first trajectory that the run trains on. It stays the same for the
whole run, over restarts too, so that the figures of two steps can be compared.
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
"""Log-probability of each token but the first under these weights; see `policy.Policy.score`."""


class Probe:
    """One run's sequence, and its score under each version."""

    def __init__(
        self, score: Score, *, tokens: int, tolerance: float, token_ids: Sequence[int] = ()
    ) -> None:
        """`tokens` is its length, zero for no probe at all. `token_ids` is what a checkpoint has of it,
        and `tolerance` the mean difference allowed, in nats."""
        self._score = score
        self._tokens = tokens
        self._tolerance = tolerance
        self.token_ids = tuple(token_ids[:tokens])
        """The sequence; empty before there is one."""

    def choose(self, groups: Sequence[TrainingGroup]) -> None:
        """Takes the beginning of the first trajectory here, unless there is a sequence already.

        One shorter than the probe is taken whole; two tokens are the least that can be scored.
        """
        if not self._tokens or self.token_ids:
            return
        for group in groups:
            for sample in group.samples:
                if len(sample.token_ids) >= 2:
                    self.token_ids = tuple(map(int, sample.token_ids[: self._tokens]))
                    return

    def measure(self, tensors: Mapping[str, Tensor]) -> weights_pb2.WeightProbe | None:
        """What goes with these weights; None while there is no sequence. In the compute thread."""
        if not self.token_ids:
            return None
        logprobs = self._score(tensors, self.token_ids)
        if not np.isfinite(logprobs).all():
            # The server refuses such weights by the tensor's name, which says more.
            log.warning("the probe's score is not finite: these weights go without it")
            return None
        return weights_pb2.WeightProbe(
            token_ids=self.token_ids, logprobs=logprobs.tolist(), tolerance=self._tolerance
        )
