"""Advantages of one group of trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float | None],
    *,
    counts_in_baseline: Sequence[bool] | None = None,
    normalize_std: bool = True,
) -> NDArray[np.float32]:
    """Advantage of each trajectory of one group, shape [len(rewards)].

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): the reward minus the group's mean, over
    its sample standard deviation; without `normalize_std` only minus the mean (Dr. GRPO,
    2503.20783). None is a failed trajectory: it has no part in the baseline and advantage zero. So
    has every trajectory of a group whose rewards are all equal. `counts_in_baseline` leaves out
    trajectories that branch from another one, lest an attempt with many branches weigh more than
    its siblings; they still get an advantage.
    """
    advantages = np.zeros(len(rewards), np.float32)
    counted = counts_in_baseline or [True] * len(rewards)
    scored = [index for index, reward in enumerate(rewards) if reward is not None]
    values = np.array([rewards[index] for index in scored], np.float64)
    baseline = values[[counted[index] for index in scored]]
    if len(baseline) < 2:
        return advantages
    if np.all(values == baseline[0]):
        return advantages
    centred = values - baseline.mean()
    if normalize_std:
        # Rewards whose squares overflow end as zero, not as what would poison the step.
        with np.errstate(over="ignore"):
            centred /= baseline.std(ddof=1) + EPSILON
    advantages[scored] = centred
    return advantages
