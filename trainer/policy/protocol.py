"""The interface between the trainer and a model with its optimizer.

`fsdp.FsdpPolicy` is the default implementation. All methods are called from the compute thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.trainer.algorithms.batches import RewardBatch
from penstock.trainer.algorithms.objective import Figures, add_known
from penstock.trainer.batching.planning import StepPlan
from penstock.trainer.core.figures import LAST, MAX, MEAN, SUM, figure, weighted
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PER_UPDATE = weighted("updates")
PER_TOKEN = weighted("tokens_computed")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Means are over the computed tokens, zero without any, and None if the configuration does not
    compute them."""

    applied: bool = figure(
        False,
        MEAN,
        "share",
        "Whether the weights changed. They stay the same without a gradient, or if it is not finite.",
    )
    updates: int = figure(0, SUM, "updates", "Optimizer updates that had something to compute.")
    updates_skipped: int = figure(
        0,
        SUM,
        "updates",
        "Optimizer updates that changed nothing because none of their tokens has a gradient. Either they "
        "were not computed, or the computed gradient was zero, as when a correction masks every token. "
        "With a critic, which learns even then, only the former count.",
    )
    updates_not_finite: int = figure(
        0,
        SUM,
        "updates",
        "Optimizer updates whose gradient was infinite or NaN; the weights stayed as they were.",
    )
    groups_without_gradient: int = figure(
        0,
        SUM,
        "groups",
        "Groups in the batch that were known to have no gradient before they were computed.",
    )
    tokens_trained: int = figure(
        0,
        SUM,
        "tokens",
        "Tokens in the loss of the computed updates, including those without a gradient.",
    )
    tokens_computed: int = figure(
        0,
        SUM,
        "tokens",
        "Tokens in the loss, without those of sequences that are skipped because they have no gradient.",
    )
    loss: float = figure(0.0, PER_UPDATE, "", "Loss of an update.")
    grad_norm: float = figure(0.0, PER_UPDATE, "", "Norm of an update's gradient, before clipping.")
    learning_rate: float | None = figure(
        None, LAST, "", "Learning rate of the last update; null without updates."
    )
    clip_fraction: float | None = figure(
        None,
        PER_TOKEN,
        "share",
        "Tokens whose importance ratio was outside the clip bounds; null if the loss does not clip.",
    )
    clip_fraction_low: float | None = figure(
        None, PER_TOKEN, "share", "Tokens with a ratio below the lower bound."
    )
    clip_fraction_high: float | None = figure(
        None, PER_TOKEN, "share", "Tokens above the upper bound, including that of `dual_clip`."
    )
    logprob_diff_mean: float = figure(
        0.0,
        PER_TOKEN,
        "nat",
        "Mean of |recomputed - sampled log-probability|. It reflects lag, and the different arithmetic of "
        "trainer and engine.",
    )
    logprob_diff_max: float | None = figure(
        None, MAX, "nat", "Largest |recomputed - sampled log-probability|."
    )
    entropy: float = figure(
        0.0, PER_TOKEN, "nat", "Entropy of the distributions that the tokens were drawn from."
    )
    kl_reference: float | None = figure(
        None, PER_TOKEN, "nat", "KL to the reference, by the configured estimator."
    )
    correction_weight_mean: float | None = figure(
        None,
        PER_TOKEN,
        "",
        "Mean weight of the off-policy correction, including masked tokens.",
    )
    correction_weight_max: float | None = figure(
        None, MAX, "", "Largest weight of the off-policy correction."
    )
    correction_masked: float | None = figure(
        None, PER_TOKEN, "share", "Tokens that the correction masked."
    )
    correction_clipped: float | None = figure(
        None, PER_TOKEN, "share", "Tokens whose weight the correction clipped."
    )
    critic_loss: float | None = figure(None, PER_UPDATE, "", "Loss of the critic's update.")
    critic_explained_variance: float | None = figure(
        None,
        PER_TOKEN,
        "share",
        "Share of the variance of the returns that the critic's values explain.",
    )


def describe_step(
    plan: StepPlan,
    figures: Figures,
    norms: Sequence[float],
    *,
    applied: bool,
    learning_rate: float,
    critic_losses: Sequence[float],
    explained_variance: Callable[[RewardBatch], float],
) -> StepResult:
    """Build the result from the summed figures of all micro-batches of a plan with advantages.

    `norms` has the gradient norm of each update, `critic_losses` the loss of each critic update, if any.
    """
    planned = StepResult(
        applied=applied,
        updates=len(norms),
        # A critic learns even if the policy's gradient is zero.
        updates_skipped=plan.updates_skipped + (0 if critic_losses else list(norms).count(0.0)),
        updates_not_finite=sum(not math.isfinite(norm) for norm in norms),
        groups_without_gradient=plan.groups_without_gradient,
        tokens_trained=plan.trained_tokens,
    )
    if not norms:
        return planned

    def share(total: float | None) -> float | None:
        return None if total is None else total / figures.tokens

    return replace(
        planned,
        tokens_computed=figures.tokens,
        loss=figures.loss / len(norms),
        grad_norm=sum(norms) / len(norms),
        learning_rate=learning_rate,
        clip_fraction=share(add_known(figures.below, figures.above)),
        clip_fraction_low=share(figures.below),
        clip_fraction_high=share(figures.above),
        logprob_diff_mean=figures.difference / figures.tokens,
        logprob_diff_max=figures.difference_max,
        entropy=figures.entropy / figures.tokens,
        kl_reference=share(figures.kl),
        correction_weight_mean=share(figures.weight),
        correction_weight_max=figures.weight_max,
        correction_masked=share(figures.masked),
        correction_clipped=share(figures.clipped),
        critic_loss=sum(critic_losses) / len(norms) if critic_losses else None,
        critic_explained_variance=explained_variance(plan.rewards) if critic_losses else None,
    )


class Policy(Protocol):
    """A model being trained."""

    @property
    def data_ranks(self) -> int:
        """Number of shares that a step's micro-batches are cut into."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Apply the plan's optimizer updates.

        An update whose gradient is zero or not finite changes nothing, including the schedule and the
        optimizer's moments.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of an upload with its Hugging Face or PEFT name, always in the same order.

        The tensors are the live ones, valid until the next `step`. Tied tensors are yielded once.
        """
        ...

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        """Return the adapter's description if the tensors are an adapter's; None for a full model."""
        ...

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute each token's log-probability but the first's, given the tokens before it.

        Temperature 1; shape [n - 1] for n tokens. Uses `tensors`, named as by `weights`, in place of the
        policy's own. The arithmetic is float32 whatever their dtype, so that only the engine's rounding
        makes a difference. Temporarily needs memory for the weights in float32.
        """
        ...

    def save_model(self, folder: Path) -> None:
        """Write a model folder that transformers loads, or an adapter's in PEFT's format, and the
        tokenizer."""
        ...

    def save(self, folder: Path) -> None:
        """Write `save_model` and the state needed to resume: optimizer, schedule, random states.

        Raises OSError if the disk refuses the write.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote. Raises CheckpointUnusable."""
        ...
