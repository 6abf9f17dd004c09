"""The critic's loss compared with its formula in plain Python: values and gradients."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.trainer.algorithms.values import value_loss


def by_hand(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """The loss and its derivative by the value, as in PPO's first implementation (arXiv 1707.06347)."""
    free = (value - target) ** 2
    if clip is None:
        return free / 2, value - target
    held_value = min(max(value, old - clip), old + clip)
    held = (held_value - target) ** 2
    if held > free:
        # A clipped value stays the same when the value moves, so the derivative is zero.
        return held / 2, value - target if held_value == value else 0.0
    return free / 2, value - target


@pytest.mark.parametrize("clip", [None, 0.05, 0.5, 1e6])
def test_loss_and_gradient_are_the_formulas(clip: float | None) -> None:
    rng = random.Random(0)
    rows = [(rng.gauss(0, 1), rng.gauss(0, 1), rng.gauss(0, 1)) for _ in range(200)]
    # Values that have not moved, and values that already match their target.
    rows += [(0.5, 0.5, 2.0), (0.5, 0.5, 0.5), (0.7, 0.1, 0.7)]
    values, old, targets = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    values.requires_grad_()
    loss = value_loss(values, old, targets, clip=clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    expected = [by_hand(*row, clip) for row in rows]
    assert loss.tolist() == pytest.approx([value for value, _ in expected], abs=1e-12)
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-12)
    held = sum(slope == 0.0 for _, slope in expected)
    assert held > 20 if clip in (0.05, 0.5) else held <= 3
