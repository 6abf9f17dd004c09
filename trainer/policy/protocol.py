"""The policy seam: what the trainer asks of a model and its optimizer, and nothing of how it is
done.

`fsdp_policy.FsdpPolicy` is the default. All methods are called from one thread, which is not the
event loop's.
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
    """What one step did; the means are over the tokens that were computed, zero where there were none,
    None where the configuration does not compute them."""

    applied: bool = figure(
        False,
        MEAN,
        "share",
        "Whether the weights changed; they do not without a gradient, or with one that is not finite.",
    )
    updates: int = figure(0, SUM, "updates", "Optimizer updates that had something to compute.")
    updates_skipped: int = figure(
        0,
        SUM,
        "updates",
        "Optimizer updates that moved nothing because no token of theirs has a gradient: they were not "
        "computed, or that is what came of it, as where a correction masks every token (with a critic, "
        "which learns all the same, only the former).",
    )
    updates_not_finite: int = figure(
        0,
        SUM,
        "updates",
        "Optimizer updates whose gradient was infinite or no number: the weights stayed as they were.",
    )
    groups_without_gradient: int = figure(
        0,
        SUM,
        "groups",
        "Groups in the batch that nothing moves, by what was known before computing them.",
    )
    tokens_trained: int = figure(
        0,
        SUM,
        "tokens",
        "Tokens in the loss of updates that were computed, those that no term of it moves included.",
    )
    tokens_computed: int = figure(
        0,
        SUM,
        "tokens",
        "Tokens in the loss, less those of sequences that no term of it moves, which are not computed.",
    )
    loss: float = figure(0.0, PER_UPDATE, "", "Loss of an update.")
    grad_norm: float = figure(0.0, PER_UPDATE, "", "Norm of an update's gradient, before clipping.")
    learning_rate: float | None = figure(
        None, LAST, "", "Of the last update; null where there was none."
    )
    clip_fraction: float | None = figure(
        None,
        PER_TOKEN,
        "share",
        "Tokens whose ratio was out of its bounds; null where the loss has none.",
    )
    clip_fraction_low: float | None = figure(
        None, PER_TOKEN, "share", "Those below the lower bound."
    )
    clip_fraction_high: float | None = figure(
        None, PER_TOKEN, "share", "Those above the upper bound, that of `dual_clip` included."
    )
    logprob_diff_mean: float = figure(
        0.0,
        PER_TOKEN,
        "nat",
        "Mean of |recomputed - sampled log-probability|: the trainer's and the engine's arithmetic, and "
        "lag.",
    )
    logprob_diff_max: float | None = figure(None, MAX, "nat", "The largest.")
    entropy: float = figure(
        0.0, PER_TOKEN, "nat", "Of the distributions that tokens were drawn from."
    )
    kl_reference: float | None = figure(
        None, PER_TOKEN, "nat", "KL to the reference, by the configured estimator."
    )
    correction_weight_mean: float | None = figure(
        None,
        PER_TOKEN,
        "",
        "Weight of the off-policy correction, those that it masks included.",
    )
    correction_weight_max: float | None = figure(None, MAX, "", "The largest.")
    correction_masked: float | None = figure(None, PER_TOKEN, "share", "Tokens that it masked.")
    correction_clipped: float | None = figure(
        None, PER_TOKEN, "share", "Tokens whose weight it cut."
    )
    critic_loss: float | None = figure(None, PER_UPDATE, "", "Loss of the critic's update.")
    critic_explained_variance: float | None = figure(
        None,
        PER_TOKEN,
        "share",
        "Part of the variance of what came of the tokens that the critic foretold.",
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
    """What the figures of all micro-batches of a plan come to, whose advantages are there. `norms` are of
    the gradients of its updates, `critic_losses` of the critic's, where there is one."""
    planned = StepResult(
        applied=applied,
        updates=len(norms),
        # A critic learns also where the policy's gradient is zero.
        updates_skipped=plan.updates_skipped + (0 if critic_losses else list(norms).count(0.0)),
        updates_not_finite=sum(not math.isfinite(norm) for norm in norms),
        groups_without_gradient=plan.groups_without_gradient,
        tokens_trained=plan.trained_tokens,
    )
    if not norms:
        return planned

    def share(total: float) -> float:
        return total / figures.tokens

    def share_if_any(total: float | None) -> float | None:
        return None if total is None else share(total)

    return replace(
        planned,
        tokens_computed=figures.tokens,
        loss=figures.loss / len(norms),
        grad_norm=sum(norms) / len(norms),
        learning_rate=learning_rate,
        clip_fraction=share_if_any(add_known(figures.below, figures.above)),
        clip_fraction_low=share_if_any(figures.below),
        clip_fraction_high=share_if_any(figures.above),
        logprob_diff_mean=share(figures.difference),
        logprob_diff_max=figures.difference_max,
        entropy=share(figures.entropy),
        kl_reference=share_if_any(figures.kl),
        correction_weight_mean=share_if_any(figures.weight),
        correction_weight_max=figures.weight_max,
        correction_masked=share_if_any(figures.masked),
        correction_clipped=share_if_any(figures.clipped),
        critic_loss=sum(critic_losses) / len(norms) if critic_losses else None,
        critic_explained_variance=explained_variance(plan.rewards) if critic_losses else None,
    )


class Policy(Protocol):
    """A model being trained."""

    def step(self, plan: StepPlan) -> StepResult:
        """One step: the optimizer updates that the plan has.

        Without any nothing changes, the schedule and the optimizer's moments included; nor by one that
        moves nothing, or whose gradient is not finite.
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
