"""The loss against a plain Python rendering of its formulas."""

from __future__ import annotations

import math
import random

import pytest
import torch

from penstock.trainer.loss import policy_loss, token_logprobs, token_mean


def reference_loss(
    logprob: float, behaviour: float, advantage: float, low: float, high: float
) -> float:
    ratio = math.exp(logprob - behaviour)
    bounded = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, bounded * advantage)


def reference_gradient(
    logprob: float, behaviour: float, advantage: float, low: float, high: float
) -> float:
    ratio = math.exp(logprob - behaviour)
    cut = ratio > 1 + high if advantage > 0 else ratio < 1 - low
    return 0.0 if cut else -ratio * advantage


def test_loss_gradient_and_clip_agree_with_the_formula() -> None:
    rng = random.Random(1)
    tokens = [(rng.gauss(-2, 1), rng.gauss(-2, 1), rng.gauss(0, 1)) for _ in range(200)]
    logprobs, behaviour, advantages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    logprobs = logprobs.clone().requires_grad_()
    result = policy_loss(logprobs, behaviour, advantages, clip_low=0.2, clip_high=0.28)
    result.loss_N.sum().backward()
    expected = [reference_loss(*token, 0.2, 0.28) for token in tokens]
    assert result.loss_N.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    gradients = [reference_gradient(*token, 0.2, 0.28) for token in tokens]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradients, rel=1e-4, abs=1e-6)
    cut = [gradient == 0.0 for gradient in gradients]
    assert result.clipped_N.tolist() == cut
    assert 0 < sum(cut) < len(cut)


def test_the_upper_bound_is_a_bound_of_its_own() -> None:
    ratios = torch.tensor([1.25, 1.35, 0.85, 0.75]).log()
    behaviour = torch.zeros(4)
    up = policy_loss(ratios, behaviour, torch.ones(4), clip_low=0.2, clip_high=0.28)
    assert up.clipped_N.tolist() == [False, True, False, False]
    down = policy_loss(ratios, behaviour, -torch.ones(4), clip_low=0.2, clip_high=0.28)
    assert down.clipped_N.tolist() == [False, False, False, True]


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    result = policy_loss(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    token_mean(result.loss_N, 3).backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -advantages / 3)


def test_token_mean_of_parts_adds_up_to_the_whole() -> None:
    loss = torch.arange(10.0)
    parts = token_mean(loss[:3], 10) + token_mean(loss[3:], 10)
    assert float(parts) == pytest.approx(float(loss.mean()))


def test_logprobs_are_taken_at_each_tokens_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11)
    targets = torch.tensor([0, 3, 10, 5, 5])
    temperatures = torch.tensor([1.0, 0.7, 2.0, 1.0, 0.1])
    found = token_logprobs(logits, targets, temperatures)
    for row, target, temperature, value in zip(logits, targets, temperatures, found, strict=True):
        scaled = [float(logit) / float(temperature) for logit in row]
        total = math.log(sum(math.exp(s) for s in scaled))
        assert float(value) == pytest.approx(scaled[int(target)] - total, rel=1e-4)
    assert token_logprobs(logits.bfloat16(), targets, torch.ones(5)).dtype == torch.float32
