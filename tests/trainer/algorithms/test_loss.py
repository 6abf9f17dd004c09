"""Each loss, aggregation, KL, entropy and correction alone, including its bounds.

The whole formulas and their gradients are checked in `test_algorithm_parity`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.trainer.algorithms import losses
from penstock.trainer.algorithms.aggregation import fixed_length, sequence_mean, token_mean
from penstock.trainer.algorithms.batches import Sequences, StepCounts, TokenBatch
from penstock.trainer.algorithms.correction import correct
from penstock.trainer.algorithms.kl import estimate_kl, kl_loss
from penstock.trainer.algorithms.losses import TokenLoss, loss_function
from penstock.trainer.algorithms.objective import Figures, Objective, PolicyOutput
from penstock.trainer.config.algorithm import AlgorithmConfig, CustomFunction, ratio_is_to_proximal
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.token_model import at_temperatures, entropies, token_logprobs


def sequences(*lengths: int) -> Sequences:
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Sequences(index, len(lengths))


def tokens(ratios: Sequence[float], advantages: Sequence[float], *lengths: int) -> TokenBatch:
    return TokenBatch(
        torch.tensor(ratios).log().requires_grad_(),
        torch.zeros(len(ratios)),
        torch.tensor(advantages),
        sequences(*(lengths or (len(ratios),))),
    )


def gradient(batch: TokenBatch, result: TokenLoss) -> list[float]:
    (found,) = torch.autograd.grad(result.loss_N.sum(), batch.logprobs_N)
    return found.tolist()


# Losses


def test_each_side_of_the_clip_has_a_bound_of_its_own() -> None:
    up = tokens([1.25, 1.35, 0.85, 0.75], [1.0] * 4)
    result = losses.ppo_clip(up, clip_low=0.2, clip_high=0.28)
    assert result.above_N is not None and result.below_N is not None
    assert result.above_N.tolist() == [False, True, False, False]
    assert not result.below_N.any()
    assert gradient(up, result) == pytest.approx([-1.25, 0.0, -0.85, -0.75])
    down = tokens([1.25, 1.35, 0.85, 0.75], [-1.0] * 4)
    result = losses.ppo_clip(down, clip_low=0.2, clip_high=0.28)
    assert result.above_N is not None and result.below_N is not None
    assert result.below_N.tolist() == [False, False, False, True]
    assert not result.above_N.any()
    assert gradient(down, result) == pytest.approx([1.25, 1.35, 0.85, 0.0])


def test_the_dual_clip_bounds_what_a_bad_token_can_do() -> None:
    batch = tokens([2.9, 3.1, 3.1], [-1.0, -1.0, 1.0])
    result = losses.ppo_clip(batch, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert result.loss_N.tolist() == pytest.approx([2.9, 3.0, -1.28])
    assert gradient(batch, result) == pytest.approx([2.9, 0.0, 0.0])
    assert result.above_N is not None and result.above_N.tolist() == [False, True, True]


def test_on_policy_every_gradient_is_that_of_reinforce() -> None:
    advantages = [1.0, -2.0, 0.5]
    for kind in ("ppo_clip", "gspo", "cispo", "reinforce"):
        config = AlgorithmConfig.model_validate({"loss": {"kind": kind}})
        batch = tokens([1.0, 1.0, 1.0], advantages, 2, 1)
        result = loss_function(config.loss)(batch)
        assert gradient(batch, result) == pytest.approx([-1.0, 2.0, -0.5]), kind


def test_gspo_clips_whole_sequences_by_the_mean_of_their_log_ratios() -> None:
    batch = tokens([2.0, 0.5, 1.0, 1.5, 1.5], [1.0] * 5, 3, 2)
    result = losses.gspo(batch, clip_low=0.1, clip_high=0.1)
    assert result.above_N is not None
    # The first sequence's ratio is 1, although each of its tokens moved.
    assert result.above_N.tolist() == [False] * 3 + [True] * 2
    assert gradient(batch, result) == pytest.approx([-1.0] * 3 + [0.0] * 2)


def test_cispo_keeps_the_gradient_of_what_it_clips() -> None:
    batch = tokens([9.0, 0.25], [1.0, 1.0])
    result = losses.cispo(batch, clip_low=0.5, clip_high=1.0)
    assert gradient(batch, result) == pytest.approx([-2.0, -0.5])
    assert result.above_N is not None and result.below_N is not None
    assert (result.above_N.tolist(), result.below_N.tolist()) == ([True, False], [False, True])


def test_a_token_that_was_all_but_impossible_stays_finite() -> None:
    for kind in ("ppo_clip", "gspo", "cispo", "reinforce"):
        config = AlgorithmConfig.model_validate({"loss": {"kind": kind}})
        batch = TokenBatch(
            torch.tensor([-200.0, -0.1], requires_grad=True),
            torch.tensor([-0.1, -300.0]),
            torch.tensor([-1.0, 0.0]),
            sequences(1, 1),
        )
        result = loss_function(config.loss)(batch)
        assert torch.isfinite(result.loss_N).all()
        assert all(map(math.isfinite, gradient(batch, result)))


def cautious(batch: TokenBatch, *, weight: float = 1.0) -> TokenLoss:
    lengths = batch.sequences.spread(batch.sequences.lengths_S)
    return TokenLoss(-weight * batch.advantages_N * batch.logprobs_N / lengths)


def scalar(batch: TokenBatch) -> TokenLoss:
    return TokenLoss(batch.logprobs_N.sum())


def still(batch: TokenBatch) -> TokenLoss:
    return TokenLoss(batch.logprobs_N.detach())


def plain(batch: TokenBatch) -> Tensor:
    return batch.logprobs_N


def test_a_loss_of_your_own_sees_sequences_and_is_checked() -> None:
    def custom(name: str, **options: Any) -> Any:
        function = f"tests.trainer.algorithms.test_loss:{name}"
        return loss_function(CustomFunction(kind="custom", function=function, options=options))

    batch = tokens([1.0, 1.0, 1.0], [1.0, 1.0, 3.0], 2, 1)
    assert gradient(batch, custom("cautious", weight=2.0)(batch)) == [-1.0, -1.0, -6.0]
    for name, words in {
        "scalar": r"shape \(\).* 3 tokens",
        "still": "without a gradient",
        "plain": "returned a Tensor",
    }.items():
        with pytest.raises(ConfigInvalid, match=f"algorithm.loss.function .*{words}"):
            custom(name)(batch)
    objective = Objective(
        AlgorithmConfig.model_validate(
            {"loss": {"kind": "custom", "function": "tests.trainer.algorithms.test_loss:cautious"}}
        )
    )
    assert objective.trains_everything


# Aggregation


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        (token_mean, (1 + 2 + 3 + 6) / 4),
        (sequence_mean, ((1 + 2 + 3) / 3 + 6) / 2),
        (lambda *batch: fixed_length(*batch, length=10), (1 + 2 + 3 + 6) / 20),
    ],
)
def test_parts_of_a_step_add_up_to_the_whole(aggregate: Any, expected: float) -> None:
    counts = StepCounts(tokens=4, sequences=2)
    loss = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert float(aggregate(loss, sequences(3, 1), counts)) == pytest.approx(expected)
    parts = aggregate(loss[:3], sequences(3), counts), aggregate(loss[3:], sequences(1), counts)
    assert float(sum(parts)) == pytest.approx(expected)


# KL and entropy


def test_kl_estimates_have_the_kl_as_their_mean() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(7).log_softmax(-1), torch.randn(7).log_softmax(-1)
    exact = float((p.exp() * (p - q)).sum())
    for estimator in ("k1", "k3"):
        mean = float((p.exp() * estimate_kl(p, q, estimator)).sum())
        assert mean == pytest.approx(exact, rel=1e-5)
    assert (estimate_kl(p, q, "k2") >= 0).all() and (estimate_kl(p, q, "k3") >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_kl_in_the_loss_pulls_as_the_kl_does(estimator: Any) -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, requires_grad=True)
    q = torch.randn(7).log_softmax(-1)
    p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    # The expectation over samples. The samples themselves have no gradient.
    estimate = (p.detach().exp() * kl_loss(p, q, estimator)).sum()
    (found,) = torch.autograd.grad(estimate, logits)
    assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-6)


@pytest.mark.parametrize(("estimator", "bounded"), [("k1", False), ("k2", False), ("k3", True)])
def test_kl_pulls_back_however_far_the_policy_went(estimator: Any, bounded: bool) -> None:
    x = torch.tensor([0.5, 19.0, 21.0, 300.0, -300.0])
    p = torch.full((5,), -0.01, requires_grad=True)
    kl = kl_loss(p, p.detach() - x, estimator)
    (slope,) = torch.autograd.grad(kl.sum(), p)
    exact = 1 - torch.exp(-x[:4]) if bounded else x[:4]
    assert slope[:4].tolist() == pytest.approx(exact.tolist(), rel=1e-5)
    # Where the exponential overflows, the estimate is bounded and has no gradient.
    assert math.isfinite(kl[4].item()) and float(slope[4]) == (0.0 if bounded else -300.0)


def test_entropy_is_that_of_the_distribution() -> None:
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [500.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, 0.0]]
    )
    logits.requires_grad_()
    found = entropies(logits)
    assert found.tolist() == pytest.approx([math.log(4), 0.0, math.log(3)], abs=1e-5)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert torch.isfinite(slope).all()


def test_logprobs_are_taken_at_each_tokens_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11)
    targets = torch.tensor([0, 3, 10, 5, 5])
    temperatures = torch.tensor([1.0, 0.7, 2.0, 1.0, 0.1])
    found = token_logprobs(at_temperatures(logits, temperatures), targets)
    for row, target, temperature, value in zip(logits, targets, temperatures, found, strict=True):
        scaled = [float(logit) / float(temperature) for logit in row]
        total = math.log(sum(math.exp(s) for s in scaled))
        assert float(value) == pytest.approx(scaled[int(target)] - total, rel=1e-4)
    assert at_temperatures(logits.bfloat16(), torch.ones(5)).dtype == torch.float32


# Correction


def weights_of(ratios: Sequence[float], *lengths: int, **setting: Any) -> Any:
    config = AlgorithmConfig.model_validate({"correction": setting}).correction
    zeros = torch.zeros(len(ratios))
    return correct(config, torch.tensor(ratios).log(), zeros, sequences(*lengths))


def test_truncated_weights_have_a_bound() -> None:
    found = weights_of([0.5, 3.0, 1.0], 2, 1, level="token", mode="clip", threshold=2.0)
    assert found.weights_N.tolist() == pytest.approx([0.5, 2.0, 1.0])
    assert found.clipped_N.tolist() == [False, True, False]
    found = weights_of([0.5, 3.0, 4.0], 2, 1, level="sequence", mode="clip", threshold=2.0)
    assert found.weights_N.tolist() == pytest.approx([1.5, 1.5, 2.0])
    assert not found.masked_N.any()


def test_masks_leave_out_what_is_outside() -> None:
    mask = {"mode": "mask", "quantity": "ratio", "threshold": [0.5, 2.0]}
    found = weights_of([0.4, 0.6, 1.9, 2.1], 4, level="token", **mask)
    assert found.weights_N.tolist() == pytest.approx([0.0, 0.6, 1.9, 0.0])
    assert found.masked_N.tolist() == [True, False, False, True]
    found = weights_of([4.0, 0.25, 3.0, 3.0], 2, 2, level="sequence", **mask)
    assert found.weights_N.tolist() == pytest.approx([4.0, 0.25, 0.0, 0.0])
    found = weights_of([0.6, 2.1], 2, level="token", weighted=False, **mask)
    assert found.weights_N.tolist() == [1.0, 0.0]
    divergence = {"mode": "mask", "quantity": "kl", "threshold": 0.1}
    # k3 is 0.095 for a ratio of 1.5, and 0.307 for a ratio of 2.
    found = weights_of([1.5, 2.0, 1.0], 3, level="token", **divergence)
    assert found.weights_N.tolist() == [1.0, 0.0, 1.0]
    found = weights_of([2.0, 1.0, 1.0, 1.0, 2.0], 4, 1, level="sequence", **divergence)
    assert found.weights_N.tolist() == [1.0] * 4 + [0.0]


def test_ratio_and_weight_together_reach_the_behaviour_policy() -> None:
    def proximal(**setting: Any) -> bool:
        return ratio_is_to_proximal(
            AlgorithmConfig.model_validate({"correction": setting}).correction
        )

    ratio = {"mode": "mask", "quantity": "ratio", "threshold": [0.5, 2.0]}
    assert proximal(level="token", mode="clip", threshold=2.0)
    assert proximal(level="sequence", **ratio)
    assert not proximal(level="sequence", weighted=False, **ratio)
    assert not proximal(level="token", mode="mask", quantity="kl", threshold=0.1)
    assert not proximal(level="off")
    assert proximal(level="off", ratio_to="proximal")


# The objective


def output(**fields: Any) -> PolicyOutput:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    known = {
        "logprobs_N": logprobs,
        "entropies_N": torch.tensor([1.0, 2.0, 3.0]),
        "behaviour_logprobs_N": torch.tensor([-1.1, -1.0, -0.5]),
        "proximal_logprobs_N": None,
        "reference_logprobs_N": None,
        "advantages_N": torch.tensor([1.0, -1.0, 2.0]),
        "sequences": sequences(2, 1),
    }
    return PolicyOutput(**{**known, **fields})


def objective(**algorithm: Any) -> Objective:
    return Objective(AlgorithmConfig.model_validate(algorithm))


def test_decoupled_the_ratio_is_to_the_proximal_policy_and_the_weight_the_rest() -> None:
    given = output(proximal_logprobs_N=torch.tensor([-1.5, -2.0, -0.5]))
    counts = StepCounts(3, 2)
    correction = {"level": "token", "mode": "clip", "threshold": 5.0}
    loss, figures = objective(correction=correction).evaluate(given, counts)
    weights = [math.exp(-0.4), math.exp(-1.0), 1.0]
    expected = -(weights[0] * 1.28 - weights[1] + 2.0 * weights[2]) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert figures.weight == pytest.approx(sum(weights), rel=1e-5)
    assert (figures.masked, figures.clipped, figures.weight_max) == (0, 0, 1.0)


def test_every_term_of_the_loss_counts() -> None:
    given = output(reference_logprobs_N=torch.tensor([-1.5, -2.0, -1.5]))
    counts = StepCounts(3, 2)
    bare, _ = objective(loss={"kind": "reinforce"}).evaluate(output(), counts)
    whole, figures = objective(
        loss={"kind": "reinforce"},
        kl={"kind": "loss", "coefficient": 0.5, "estimator": "k2"},
        entropy_coefficient=0.1,
    ).evaluate(given, counts)
    kl, entropy = (0.125 + 0.0 + 0.5) / 3, 2.0
    added = float(whole.detach()) - float(bare.detach())
    assert added == pytest.approx(0.5 * kl - 0.1 * entropy, rel=1e-4)
    assert (figures.kl, figures.entropy) == (pytest.approx(3 * kl), 6.0)


def test_figures_add_up() -> None:
    one = Figures(2, 1.0, difference_max=0.5, weight=1.0, weight_max=0.9, masked=1, clipped=0)
    two = Figures(3, 2.0, difference_max=0.2, weight=3.0, weight_max=1.5, masked=0, clipped=2)
    both = Figures() + one + two
    assert (both.tokens, both.loss, both.difference_max, both.kl) == (5, 3.0, 0.5, None)
    assert (both.weight, both.weight_max, both.masked, both.clipped) == (4.0, 1.5, 1, 2)
    assert Figures() + Figures(1) == Figures(1)
    assert (both.below, both.above) == (None, None)
    bounded = Figures(1, below=1, above=0) + Figures(2, below=2, above=1)
    assert (bounded.below, bounded.above) == (3, 1)


def test_a_largest_that_is_no_number_stays_none() -> None:
    broken, sound = (Figures(1, difference_max=v, weight_max=v) for v in (math.nan, 0.5))
    for both in (Figures() + broken + sound, Figures() + sound + broken):
        assert math.isnan(both.difference_max)
        assert both.weight_max is not None and math.isnan(both.weight_max)
