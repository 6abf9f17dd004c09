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

from penstock.trainer.algorithms.objective import Figures
from penstock.trainer.planning import StepPlan
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did; the means are over tokens in the loss, zero where there were none, None where
    the configuration does not compute them."""

    applied: bool
    """Whether the weights changed; they do not without a gradient, or with one that is not
    finite."""
    loss: float = 0.0
    """Mean over the step's updates, as is the next."""
    grad_norm: float = 0.0
    """Before clipping."""
    learning_rate: float = 0.0
    """Of the last update."""
    clip_fraction: float = 0.0
    """Part of the tokens whose ratio was out of its bounds and is not in the gradient."""
    clip_fraction_low: float = 0.0
    """Those below the lower bound."""
    clip_fraction_high: float = 0.0
    """Those above the upper bound."""
    logprob_diff_mean: float = 0.0
    """Mean |recomputed - sampled log-probability|: the trainer's and the engine's arithmetic, and
    lag."""
    logprob_diff_max: float = 0.0
    entropy: float = 0.0
    """Of the distributions that tokens were drawn from, in nats."""
    kl_reference: float | None = None
    """KL to the reference, by the configured estimator."""
    correction_weight_mean: float | None = None
    """Weight of the off-policy correction, those that are masked included."""
    correction_weight_max: float | None = None
    correction_masked: float | None = None
    """Part of the tokens that it masked."""
    correction_clipped: float | None = None
    """Part of the tokens whose weight it cut."""
    critic_loss: float | None = None
    """Mean over the step's updates."""
    critic_explained_variance: float | None = None
    """Part of the variance of what came of the tokens that the critic foretold."""


def describe_step(
    figures: Figures, *, applied: bool, updates: int, grad_norm: float, learning_rate: float
) -> StepResult:
    """What the figures of all micro-batches of `updates` updates come to."""

    def share(total: float) -> float:
        return total / figures.tokens

    def share_if_any(total: float | None) -> float | None:
        return None if total is None else share(total)

    return StepResult(
        applied=applied,
        loss=figures.loss / updates,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        clip_fraction=share(figures.below + figures.above),
        clip_fraction_low=share(figures.below),
        clip_fraction_high=share(figures.above),
        logprob_diff_mean=share(figures.difference),
        logprob_diff_max=figures.difference_max,
        entropy=share(figures.entropy),
        kl_reference=share_if_any(figures.kl),
        correction_weight_mean=share_if_any(figures.weight),
        correction_weight_max=figures.weight_max,
        correction_masked=share_if_any(figures.masked),
        correction_clipped=share_if_any(figures.clipped),
    )


class Policy(Protocol):
    """A model being trained."""

    def step(self, plan: StepPlan) -> StepResult:
        """One step: the optimizer updates that the plan has.

        Without any nothing changes, the schedule and the optimizer's moments included.
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
