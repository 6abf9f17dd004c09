"""The objective: the loss that an `AlgorithmConfig` computes for a micro-batch, and the inputs it needs.

    loss of a token = policy loss x correction weight + KL coefficient x KL - entropy coefficient x entropy

Every backend calls `evaluate`, however it computed the log-probabilities. Suffixes as in `batches`.
"""
# ruff: noqa: N803, N806, N815 - a name ends with its dimensions.

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
from torch import Tensor

from penstock.trainer.algorithms.advantages import advantage_function
from penstock.trainer.algorithms.aggregation import aggregation
from penstock.trainer.algorithms.batches import RewardBatch, Sequences, StepCounts, TokenBatch
from penstock.trainer.algorithms.correction import Weights, correct
from penstock.trainer.algorithms.kl import estimate_kl, kl_loss
from penstock.trainer.algorithms.losses import TokenLoss, loss_function
from penstock.trainer.algorithms.values import explained_variance, value_targets
from penstock.trainer.config.algorithm import (
    AlgorithmConfig,
    CustomFunction,
    Gae,
    KlInLoss,
    KlInReward,
    NoKl,
    Uncorrected,
    ratio_is_to_proximal,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """The policy's output for the trained tokens of a micro-batch; float32, shape [N]."""

    logprobs_N: Tensor
    """Log-probabilities under the current policy; have a gradient."""
    entropies_N: Tensor
    """Have a gradient if they are in the loss."""
    behaviour_logprobs_N: Tensor
    proximal_logprobs_N: Tensor | None
    """None if the weights at the beginning of the step are the current ones."""
    reference_logprobs_N: Tensor | None
    """None if `Objective.needs_reference` is False."""
    advantages_N: Tensor
    sequences: Sequences


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over tokens, or maxima (`*_max`). Adding figures gives the figures of all their tokens."""

    tokens: int = 0
    loss: float = 0.0
    below: int | None = None
    """Tokens whose ratio was below its bound; None without a bound, like `above`."""
    above: int | None = None
    entropy: float = 0.0
    difference: float = 0.0
    """|computed - sampled log-probability|."""
    difference_max: float = 0.0
    kl: float | None = None
    """KL to the reference; None without one."""
    weight: float | None = None
    """Weight of the correction; None without one, like the next three."""
    weight_max: float | None = None
    masked: int | None = None
    clipped: int | None = None

    def __add__(self, other: Figures) -> Figures:
        sums: dict[str, int] = {}
        for name in (field.name for field in fields(Figures)):
            combine = _largest if name.endswith("_max") else add_known
            sums[name] = cast("int", combine(getattr(self, name), getattr(other, name)))
        return Figures(**sums)


class Objective:
    """The functions of one configuration. Raises ConfigInvalid if a custom function is not found."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self._advantage = advantage_function(config.advantage)
        self._loss = loss_function(config.loss)
        self._aggregate = aggregation(config.aggregation)
        self._ratio_is_to_proximal = ratio_is_to_proximal(config.correction)
        corrects = not isinstance(config.correction, Uncorrected)
        self.needs_proximal = self._ratio_is_to_proximal or corrects
        """Whether log-probabilities under the weights at the beginning of the step are needed."""
        self.needs_reference = not isinstance(config.kl, NoKl)
        self.critic = config.advantage.critic if isinstance(config.advantage, Gae) else None
        """Configuration of the critic; None without one."""
        self.advantages_wait = isinstance(config.kl, KlInReward) or self.critic is not None
        """Whether advantages depend on the reference or on the critic."""
        self.has_entropy_bonus = config.entropy_coefficient > 0.0
        """Whether entropies need a gradient."""
        self.trains_everything = (
            isinstance(config.kl, KlInLoss)
            or self.critic is not None
            or self.has_entropy_bonus
            or isinstance(config.loss, CustomFunction)
        )
        """Whether tokens without an advantage may have a gradient nevertheless, including the critic's."""

    def advantages(self, batch: RewardBatch) -> NDArray[np.float32]:
        """Returns the advantage of each trained token of a step, shape [N]."""
        return self._advantage(batch).astype(np.float32)

    def value_targets(self, batch: RewardBatch) -> NDArray[np.float32]:
        """Returns the critic's target at each trained token of a step, shape [N]."""
        config = self._config.advantage
        if not isinstance(config, Gae):
            return np.zeros(0, np.float32)
        targets_N = value_targets(batch, discount=config.discount, trace=config.trace)
        return targets_N.astype(np.float32)

    def explained_variance(self, batch: RewardBatch) -> float:
        return explained_variance(batch.values_N, self.value_targets(batch).astype(np.float64))

    def penalties(self, behaviour_logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
        """Returns the KL penalty on the reward of each token, shape [N]; zero without one."""
        kl = self._config.kl
        if not isinstance(kl, KlInReward):
            return behaviour_logprobs_N.new_zeros(behaviour_logprobs_N.shape)
        estimate_N = estimate_kl(behaviour_logprobs_N, reference_logprobs_N, kl.estimator)
        return kl.coefficient * estimate_N

    def evaluate(self, output: PolicyOutput, counts: StepCounts) -> tuple[Tensor, Figures]:
        """Returns a micro-batch's contribution to the loss of its update, a scalar, and its figures."""
        proximal_N = output.proximal_logprobs_N
        if proximal_N is None:
            proximal_N = output.logprobs_N.detach()
        behaviour_N, sequences = output.behaviour_logprobs_N, output.sequences
        old_N = proximal_N if self._ratio_is_to_proximal else behaviour_N
        result = self._loss(TokenBatch(output.logprobs_N, old_N, output.advantages_N, sequences))
        loss_N, kl_N = result.loss_N, None
        weights = correct(self._config.correction, proximal_N, behaviour_N, sequences)
        if weights is not None:
            loss_N = loss_N * weights.weights_N
        if output.reference_logprobs_N is not None:
            loss_N, kl_N = self._add_kl(loss_N, output, output.reference_logprobs_N)
        if self.has_entropy_bonus:
            loss_N = loss_N - self._config.entropy_coefficient * output.entropies_N
        loss = self._aggregate(loss_N, sequences, counts)
        return loss, _figures(loss, output, result, weights, kl_N)

    def _add_kl(
        self, loss_N: Tensor, output: PolicyOutput, reference_N: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the loss, with the KL term if there is one, and the KL at each token."""
        kl = self._config.kl
        match kl:
            case NoKl():
                return loss_N, None
            case KlInLoss():
                kl_N = kl_loss(output.logprobs_N, reference_N, kl.estimator)
                return loss_N + kl.coefficient * kl_N, kl_N.detach()
            case KlInReward():
                return loss_N, estimate_kl(output.behaviour_logprobs_N, reference_N, kl.estimator)


def _figures(
    loss: Tensor,
    output: PolicyOutput,
    result: TokenLoss,
    weights: Weights | None,
    kl_N: Tensor | None,
) -> Figures:
    difference_N = (output.logprobs_N.detach() - output.behaviour_logprobs_N).abs()
    return Figures(
        tokens=len(difference_N),
        loss=float(loss.detach()),
        below=None if result.below_N is None else int(result.below_N.sum()),
        above=None if result.above_N is None else int(result.above_N.sum()),
        entropy=float(output.entropies_N.detach().sum()),
        difference=float(difference_N.sum()),
        difference_max=float(difference_N.max()),
        kl=None if kl_N is None else float(kl_N.sum()),
        weight=None if weights is None else float(weights.weights_N.sum()),
        weight_max=None if weights is None else float(weights.weights_N.max()),
        masked=None if weights is None else int(weights.masked_N.sum()),
        clipped=None if weights is None else int(weights.clipped_N.sum()),
    )


def _largest(one: float | None, other: float | None) -> float | None:
    """Returns the larger of two, either of which may be unknown. NaN if either is NaN."""
    if one is None or other is None:
        return other if one is None else one
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def add_known(one: N | None, other: N | None) -> N | None:
    """Returns the sum of two values, either of which may be unknown; None if both are."""
    return other if one is None else one if other is None else one + other
