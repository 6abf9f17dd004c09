"""The policy seam: what the trainer asks of a model and its optimizer, and nothing of how it is
done.

`fsdp_policy.FsdpPolicy` is the default. All methods are called from one thread, which is not the
event loop's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.trainer.batching import MicroBatch
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did; the means are over trained tokens, zero where there were
    none."""

    applied: bool
    """Whether the weights changed; they do not without a gradient, or with one that is not
    finite."""
    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    learning_rate: float = 0.0
    clip_fraction: float = 0.0
    """Part of the trained tokens whose gradient the ratio's clip removed."""
    logprob_diff_mean: float = 0.0
    """Mean |recomputed - sampled log-probability|: the trainer's and the engine's arithmetic, and
    lag."""
    logprob_diff_max: float = 0.0


class Policy(Protocol):
    """A model being trained."""

    def step(self, batches: Sequence[MicroBatch], token_count: int) -> StepResult:
        """One optimizer step; `token_count` is the denominator of the token mean.

        Without batches nothing changes, the schedule and the optimizer's moments included.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of an upload with its Hugging Face name, or PEFT's, always in the same order.

        The tensors are the live ones: they hold until the next `step`. Tied ones come once.
        """
        ...

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        """What the tensors are where they are those of an adapter; None where they are the model's."""
        ...

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probability of each token but the first, given those before it, at temperature 1; shape
        [n - 1], n the tokens.

        Computed with `tensors`, named as by `weights`, in place of the policy's own, whatever their dtype
        in float32 arithmetic: as exact as can be, so that only what the engine rounds sets the two
        apart. Takes memory for the weights in float32 meanwhile.
        """
        ...

    def save_model(self, folder: Path) -> None:
        """Writes a model folder that transformers loads, or an adapter's as PEFT does, tokenizer
        included."""
        ...

    def save(self, folder: Path) -> None:
        """Writes `save_model` and what it takes to go on: optimizer, schedule, every random state.

        Raises OSError where the disk does not take it.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, exactly. Raises CheckpointUnusable."""
        ...
