"""Advantages compared with the formulas of the papers, in plain Python, including edge cases."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.trainer.algorithms import advantages
from penstock.trainer.algorithms.advantages import advantage_function
from penstock.trainer.algorithms.batches import RewardBatch
from penstock.trainer.config.algorithm import CustomFunction
from penstock.trainer.core.errors import ConfigInvalid

KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def rewards_of(
    *groups: Sequence[float],
    lengths: Sequence[int] | None = None,
    counted: Sequence[bool] | None = None,
    penalties: Sequence[float] | None = None,
) -> RewardBatch:
    """Each sequence has one token unless `lengths` gives other counts."""
    count = sum(map(len, groups))
    token_counts = np.array(lengths if lengths is not None else [1] * count, np.int64)
    return RewardBatch(
        np.array([reward for group in groups for reward in group], np.float64),
        np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        np.array(counted if counted is not None else [True] * count, np.bool_),
        token_counts,
        np.array(penalties if penalties is not None else np.zeros(token_counts.sum())),
    )


def by(kind: str, batch: RewardBatch) -> list[float]:
    found: Any = getattr(advantages, kind)(batch)
    assert found.shape == (int(batch.lengths_S.sum()),)
    return found.tolist()


@pytest.mark.parametrize("kind", KINDS[:3])
def test_rewards_that_differ_by_rounding_are_equal(kind: str) -> None:
    rounded = rewards_of([0.1 + 0.2, 0.3, 0.3], [0.0, 1.0])
    assert by(kind, rounded)[:3] == [0.0, 0.0, 0.0]
    assert by(kind, rounded)[3:] == by(kind, rewards_of([0.3] * 3, [0.0, 1.0]))[3:]
    # Against attempts that differ by rounding, a branch is measured as against equal ones.
    branch = rewards_of([0.1 + 0.2, 0.3, 0.8], counted=[True, True, False])
    assert by(kind, branch)[:2] == [0.0, 0.0] and by(kind, branch)[2] > 0.49


def test_grpo_normalises_by_the_groups_mean_and_deviation() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rewards = [rng.gauss(0, 3) for _ in range(rng.randint(2, 12))]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        expected = [(reward - mean) / (deviation + 1e-6) for reward in rewards]
        assert by("grpo", rewards_of(rewards)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_dr_grpo_only_takes_the_mean_away() -> None:
    assert by("dr_grpo", rewards_of([1.0, 0.0, 0.0, 3.0])) == [0.0, -1.0, -1.0, 2.0]


def test_rloo_compares_with_the_siblings() -> None:
    assert by("rloo", rewards_of([1.0, 0.0, 5.0])) == [-1.5, -3.0, 4.5]
    # A branch is not part of the baseline, so the baseline leaves nothing out for it.
    found = by("rloo", rewards_of([1.0, 0.0, 5.0], counted=[True, True, False]))
    assert found == [1.0, -1.0, 4.5]


def test_groups_are_told_apart() -> None:
    one, other = [1.0, 0.0, 0.0], [7.0, 9.0]
    for kind in ("grpo", "dr_grpo", "rloo"):
        together = by(kind, rewards_of(one, other))
        assert together == by(kind, rewards_of(one)) + by(kind, rewards_of(other))


def test_whitening_weighs_tokens_over_the_whole_step() -> None:
    batch = rewards_of([1.0, 0.0], [4.0], lengths=[2, 1, 3])
    values = [1.0, 1.0, 0.0, 4.0, 4.0, 4.0]
    mean, variance = statistics.fmean(values), statistics.variance(values)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in values]
    assert by("reinforce_plus_plus", batch) == pytest.approx(expected, rel=1e-9)


def test_a_token_pays_the_penalties_from_itself_on() -> None:
    batch = rewards_of([1.0, 0.0], lengths=[3, 2], penalties=[0.1, 0.2, 0.3, 0.5, -0.5])
    to_go = [1 - 0.6, 1 - 0.5, 1 - 0.3, 0.0, 0.5]
    mean, variance = statistics.fmean(to_go), statistics.variance(to_go)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in to_go]
    assert by("reinforce_plus_plus", batch) == pytest.approx(expected, rel=1e-9)


def test_a_group_compares_rewards_less_all_their_penalties() -> None:
    batch = rewards_of([1.0, 0.0], lengths=[3, 2], penalties=[0.1, 0.2, 0.3, 0.5, -0.5])
    assert by("dr_grpo", batch) == pytest.approx([0.2] * 3 + [-0.2] * 2)


def test_a_group_of_one_has_no_part_in_what_is_whitened() -> None:
    kind = "reinforce_plus_plus_baseline"
    found = by(kind, rewards_of([1.0, 0.0, 0.0], [7.0], lengths=[2, 1, 4, 5]))
    assert found == [*by(kind, rewards_of([1.0, 0.0, 0.0], lengths=[2, 1, 4])), *[0.0] * 5]
    assert statistics.fmean(found[:7]) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_have_no_advantage(kind: str) -> None:
    # 0.1 has no exact binary form, so a mean of equal rewards can differ in the last digit.
    assert by(kind, rewards_of([0.1] * 7, [0.1] * 3)) == [0.0] * 10
    assert by(kind, rewards_of([5.0])) == [0.0]
    assert by(kind, rewards_of()) == []
    assert by(kind, rewards_of([])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_whose_every_token_is_masked_has_none(kind: str) -> None:
    found = by(kind, rewards_of([1.0, 0.0, 3.0], lengths=[2, 0, 1]))
    assert len(found) == 3 and all(map(math.isfinite, found)) and found[0] != found[2]


def test_branches_are_measured_by_the_attempts_baseline() -> None:
    rewards = [1.0, 1.0, 1.0, 0.0]
    found = by("grpo", rewards_of(rewards, counted=[True, False, False, True]))
    baseline = by("grpo", rewards_of([1.0, 0.0]))
    assert found == [baseline[0], baseline[0], baseline[0], baseline[1]]
    # With fewer than two attempts there is no baseline.
    assert by("grpo", rewards_of([1.0, 0.0], counted=[True, False])) == [0.0, 0.0]


@pytest.mark.parametrize("kind", ("grpo", "dr_grpo", "rloo"))
def test_a_branch_among_attempts_that_are_all_equal_is_as_far_from_them_as_it_is(kind: str) -> None:
    # 0.1 has no exact binary form. The attempts must still equal their baseline.
    rewards, counted = [0.1, 0.1, 0.1, -0.4], [True, True, True, False]
    found = by(kind, rewards_of(rewards, counted=counted))
    assert found[:3] == [0.0] * 3
    assert found[3] == pytest.approx(-math.sqrt(3) if kind == "grpo" else -0.5, rel=1e-5)


def test_no_branch_is_measured_by_a_spread_that_it_is_far_beyond() -> None:
    alike = by("grpo", rewards_of([1.0] * 4 + [0.5], counted=[True] * 4 + [False]))
    for spread in (1e-12, 1e-9, 1e-7, 1e-5):
        rewards = [1.0 + spread, 1.0, 1.0, 1.0, 0.5]
        found = by("grpo", rewards_of(rewards, counted=[True] * 4 + [False]))
        # The result is as close to the one for equal attempts as the attempts are to each other.
        assert found == pytest.approx(alike, abs=10 * spread + 1e-9)
    rng = random.Random(1)
    for _ in range(200):
        rewards = [rng.choice([0.0, 1.0, rng.gauss(0, 10)]) for _ in range(rng.randint(3, 9))]
        counted = [True, True, *(rng.random() < 0.5 for _ in rewards[2:])]
        found = by("grpo", rewards_of(rewards, counted=counted))
        assert sum(value * value for value in found) <= len(rewards) - 1 + 1e-9


def test_branches_near_the_baseline_do_not_make_attempts_louder() -> None:
    found = by("grpo", rewards_of([0.0, 1.0, *[0.5] * 30], counted=[True, True, *[False] * 30]))
    assert found == by("grpo", rewards_of([0.0, 1.0])) + [0.0] * 30


@pytest.mark.parametrize("kind", ("reinforce_plus_plus", "reinforce_plus_plus_baseline"))
def test_what_is_whitened_has_branches_in_its_deviation(kind: str) -> None:
    found = by(kind, rewards_of([1.0] * 4 + [0.5], counted=[True] * 4 + [False]))
    assert statistics.fmean(found) == pytest.approx(0.0, abs=1e-9)
    assert statistics.stdev(found) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_tiny_or_huge_stays_finite(kind: str) -> None:
    for rewards in ([1e-300, 0.0], [1e300, -1e300], [1e-9, 0.0, 0.0]):
        found = np.array(by(kind, rewards_of(rewards)), np.float64)
        assert np.isfinite(found).all()


def doubled(batch: RewardBatch, *, times: float = 2.0) -> Any:
    return batch.spread(batch.returns_S * times)


def per_sequence(batch: RewardBatch) -> Any:
    return batch.returns_S


def endless(batch: RewardBatch) -> Any:
    return batch.spread(batch.returns_S / 0.0)


def test_a_function_of_your_own_is_called_with_its_options() -> None:
    config = CustomFunction(
        kind="custom",
        function="tests.trainer.algorithms.test_advantage:doubled",
        options={"times": 3.0},
    )
    found = advantage_function(config)(rewards_of([1.0, 2.0], lengths=[2, 1]))
    assert found.tolist() == [3.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("tests.trainer.algorithms.test_advantage:per_sequence", r"shape \(2,\).* 3 tokens"),
        ("tests.trainer.algorithms.test_advantage:endless", "not finite"),
    ],
)
def test_what_it_returns_is_checked(function: str, words: str) -> None:
    estimate = advantage_function(CustomFunction(kind="custom", function=function))
    with np.errstate(divide="ignore"), pytest.raises(ConfigInvalid, match=words):
        estimate(rewards_of([1.0, 2.0], lengths=[2, 1]))


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("no.such.module:f", {}, r"cannot import no\.such\.module: ModuleNotFoundError"),
        (
            "tests.trainer.algorithms.test_advantage:nothing",
            {},
            "tests.trainer.algorithms.test_advantage has no nothing",
        ),
        ("tests.trainer.algorithms.test_advantage:KINDS", {}, "a tuple is not callable"),
        (
            "tests.trainer.algorithms.test_advantage:doubled",
            {"size": 1.0},
            r"called with \(batch, size\): .*size",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_named(
    function: str, options: dict[str, Any], words: str
) -> None:
    config = CustomFunction(kind="custom", function=function, options=options)
    with pytest.raises(ConfigInvalid, match=f"algorithm.advantage.function .*{words}"):
        advantage_function(config)
