"""Advantages against the formulas of the papers, in plain Python."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from penstock.trainer.advantage import EPSILON, group_advantages


def test_grpo_normalises_by_the_groups_mean_and_deviation() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rewards = [rng.gauss(0, 3) for _ in range(rng.randint(2, 12))]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        expected = [(reward - mean) / (deviation + EPSILON) for reward in rewards]
        assert group_advantages(rewards) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_without_the_deviation_only_the_mean_is_taken_away() -> None:
    advantages = group_advantages([1.0, 0.0, 0.0, 3.0], normalize_std=False)
    assert advantages.tolist() == [0.0, -1.0, -1.0, 2.0]
    assert advantages.dtype == np.float32


def test_equal_rewards_have_no_advantage() -> None:
    # 0.1 is no binary fraction: a mean of it may differ from it in the last digit.
    assert group_advantages([0.1] * 7).tolist() == [0.0] * 7
    assert group_advantages([5.0]).tolist() == [0.0]
    assert group_advantages([]).tolist() == []


def test_failed_siblings_have_no_part_in_it() -> None:
    advantages = group_advantages([1.0, None, 0.0, None])
    alone = group_advantages([1.0, 0.0])
    assert advantages.tolist() == [alone[0], 0.0, alone[1], 0.0]
    assert group_advantages([None, 2.0, None]).tolist() == [0.0, 0.0, 0.0]
    assert group_advantages([None, None]).tolist() == [0.0, 0.0]


def test_branches_are_measured_by_the_attempts_baseline() -> None:
    rewards = [1.0, 1.0, 1.0, 0.0]
    advantages = group_advantages(rewards, counts_in_baseline=[True, False, False, True])
    baseline = group_advantages([1.0, 0.0])
    assert advantages.tolist() == [baseline[0], baseline[0], baseline[0], baseline[1]]


def test_a_deviation_that_is_tiny_stays_finite() -> None:
    assert all(math.isfinite(a) for a in group_advantages([1e-300, 0.0]).tolist())
    assert all(math.isfinite(a) for a in group_advantages([1e300, -1e300]).tolist())
