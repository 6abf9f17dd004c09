"""Advantages: how much better than expected each token did. Suffixes as in `batches`.

Computed in float64. If all compared rewards are equal, the advantage is exactly zero, so that
rounding of a mean never produces a gradient.
"""
# ruff: noqa: N803, N806 - a name ends with its dimensions.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, assert_never

import numpy as np

from penstock.trainer.algorithms.batches import RewardBatch
from penstock.trainer.algorithms.custom import load_function
from penstock.trainer.algorithms.values import estimate_gae
from penstock.trainer.config.algorithm import (
    AdvantageConfig,
    CustomFunction,
    DrGrpo,
    Gae,
    Grpo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rloo,
)
from penstock.trainer.core.errors import ConfigInvalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEVIATION_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8
# Rewards closer than this differ only by rounding, and so would their advantages.
LEAST_SPREAD = 1e-9


AdvantageFunction = Callable[[RewardBatch], "NDArray[np.floating]"]
"""Returns the advantage of each trained token, shape [N]."""


def advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    """Raises ConfigInvalid if a custom function is not found."""
    match config:
        case Grpo():
            return grpo
        case DrGrpo():
            return dr_grpo
        case Rloo():
            return rloo
        case ReinforcePlusPlus():
            return reinforce_plus_plus
        case ReinforcePlusPlusBaseline():
            return reinforce_plus_plus_baseline
        case Gae():
            return partial(gae, discount=config.discount, trace=config.trace, whiten=config.whiten)
        case CustomFunction():
            return partial(_call_custom, config, load_function(config, "algorithm.advantage"))
    assert_never(config)


def grpo(batch: RewardBatch) -> NDArray[np.float64]:
    """The return minus its group's mean, divided by the group's sample standard deviation (DeepSeekMath,
    arXiv 2402.03300, section 4.1.2). In a group of n trajectories, none exceeds the root of n - 1."""
    return batch.spread(_by_group(batch, _normalized))


def dr_grpo(batch: RewardBatch) -> NDArray[np.float64]:
    """The return minus its group's mean (Dr. GRPO, arXiv 2503.20783)."""
    return batch.spread(_by_group(batch, _centred))


def rloo(batch: RewardBatch) -> NDArray[np.float64]:
    """The return minus the mean return of its siblings (RLOO, arXiv 2402.14740, equation 8)."""
    return batch.spread(_by_group(batch, _left_out))


def reinforce_plus_plus(batch: RewardBatch) -> NDArray[np.float64]:
    """The reward minus the penalties from the token onwards, whitened over the step (REINFORCE++,
    arXiv 2501.03262)."""
    total_N = np.cumsum(batch.penalties_N)
    before_N = total_N - batch.penalties_N
    # The cumulative sum covers the whole step, but each sequence needs its own.
    ends_S = np.cumsum(batch.lengths_S)
    up_to_S = np.concatenate([[0.0], total_N])[ends_S]
    to_go_N = batch.spread(up_to_S) - before_N
    return _whitened(batch.spread(batch.rewards_S) - to_go_N)


def reinforce_plus_plus_baseline(batch: RewardBatch) -> NDArray[np.float64]:
    """The return minus its group's mean, whitened over the step (REINFORCE++ with a baseline, arXiv
    2501.03262)."""
    found_N = batch.spread(_by_group(batch, _centred))
    # A group with nothing to compare is excluded. Otherwise whitening would subtract the mean of
    # all other groups from it.
    compared_N = batch.spread(_by_group(batch, lambda returns, _: np.ones_like(returns))) > 0
    found_N[compared_N] = _whitened(found_N[compared_N])
    return found_N


def gae(batch: RewardBatch, *, discount: float, trace: float, whiten: bool) -> NDArray[np.float64]:
    """The return from each token beyond what the critic expected (GAE, arXiv 1506.02438)."""
    found_N = estimate_gae(batch, discount=discount, trace=trace)
    return _whitened(found_N) if whiten else found_N


_OfGroup = Callable[["NDArray[np.float64]", "NDArray[np.bool_]"], "NDArray[np.float64]"]


def _by_group(batch: RewardBatch, advantages: _OfGroup) -> NDArray[np.float64]:
    """Applies the function to each group. Groups with fewer than two attempts that count get zero."""
    found_S = np.zeros(len(batch.rewards_S))
    for group in np.unique(batch.groups_S):
        own = np.flatnonzero(batch.groups_S == group)
        returns, counted = batch.returns_S[own], batch.counts_in_baseline_S[own]
        if counted.sum() < 2:
            continue
        # Returns whose squares overflow end as zero, instead of spoiling the step.
        with np.errstate(over="ignore"):
            found_S[own] = advantages(returns, counted)
    return found_S


def _are_equal(values: NDArray[np.float64]) -> bool:
    return bool(values.max() - values.min() < LEAST_SPREAD)


def _centred(returns: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    attempts = returns[counted]
    # A mean of equal numbers may differ from them in the last digit.
    if _are_equal(attempts):
        return np.where(counted, 0.0, returns - attempts[0])
    return returns - attempts.mean()


def _normalized(returns: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    centred = _centred(returns, counted)
    squares = centred**2
    # The deviation of the attempts, or that of all trajectories if branches lie farther off.
    # Attempts with equal rewards do not bound how far off a branch may be.
    attempts = squares[counted].sum() / (counted.sum() - 1)
    everyone = squares.sum() / (len(squares) - 1)
    return centred / (np.sqrt(max(attempts, everyone)) + DEVIATION_EPSILON)


def _left_out(returns: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    attempts = returns[counted]
    if _are_equal(attempts):
        return np.where(counted, 0.0, returns - attempts[0])
    # A branch is not part of the baseline, so nothing is left out for it.
    others = counted.sum() - counted
    sums = attempts.sum() - np.where(counted, returns, 0.0)
    return returns - sums / others


def _whitened(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(values_N) < 2 or _are_equal(values_N):
        return np.zeros_like(values_N)
    with np.errstate(over="ignore"):
        return (values_N - values_N.mean()) / np.sqrt(values_N.var(ddof=1) + VARIANCE_EPSILON)


def _call_custom(
    config: CustomFunction, function: Callable[..., object], batch: RewardBatch
) -> NDArray[np.floating]:
    found_N = np.asarray(function(batch, **config.options))
    where = f"algorithm.advantage.function {config.function}"
    if found_N.shape != batch.sequences_N.shape or found_N.dtype.kind not in "fiu":
        raise ConfigInvalid(
            f"{where}: returned shape {found_N.shape} of {found_N.dtype}, "
            f"not a number for each of {len(batch.sequences_N)} tokens"
        )
    if not np.isfinite(found_N).all():
        raise ConfigInvalid(f"{where}: returned an advantage that is not finite")
    return found_N
