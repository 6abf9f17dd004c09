"""Compares advantages, losses, KL and corrections with verl's functions.

    python -m benchmarks.training.parity

No extra of this project installs verl. `make bench-parity` installs it into a separate folder, without its
dependencies (15 MB). verl also imports ray, which `make bench-buffer` installs too.

The batches are random and in float64. Their sequences have different lengths, with environment tokens
among the policy's; some sequences are fully masked, and some groups have no spread. Each line shows the
largest difference of any advantage, weight, loss or derivative. The last line is one JSON object. The exit
status is 1 if a difference is above 1e-6.
"""
# ruff: noqa: N803, N806, N815 - a name ends with its dimensions.

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithms.advantages import advantage_function, gae
from penstock.trainer.algorithms.batches import RewardBatch, Sequences, StepCounts
from penstock.trainer.algorithms.correction import correct
from penstock.trainer.algorithms.kl import kl_loss
from penstock.trainer.algorithms.objective import Objective, PolicyOutput
from penstock.trainer.algorithms.values import value_loss, value_targets
from penstock.trainer.config.algorithm import AlgorithmConfig

TOLERANCE = 1e-6
LENGTH = 11
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"kind": "token_mean"},
    "seq-mean-token-mean": {"kind": "sequence_mean"},
    "seq-mean-token-sum-norm": {"kind": "fixed_length", "length": 7},
}
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.4},
    "gspo": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.3},
    "cispo": {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.3},
}
CLIPPED: dict[tuple[str, str | float], dict[str, Any]] = {
    ("token", 1.3): {"level": "token", "mode": "clip", "threshold": 1.3},
    ("sequence", 1.5): {"level": "sequence", "mode": "clip", "threshold": 1.5},
    ("token", "0.7_1.4"): {
        "level": "token", "mode": "mask", "quantity": "ratio", "threshold": [0.7, 1.4],
    },
}  # fmt: skip
# verl's k1 bounds the ratio of behaviour policy to trained policy; ours bounds the inverse.
MASKED: dict[tuple[str, str | float], dict[str, Any]] = {
    ("token_k1", f"{1 / 1.4}_{1 / 0.7}"): {
        "level": "token", "mode": "mask", "quantity": "ratio", "threshold": [0.7, 1.4],
        "weighted": False,
    },
    ("seq_mean_k1", f"{1 / 1.1}_{1 / 0.95}"): {
        "level": "sequence", "mode": "mask", "quantity": "ratio", "threshold": [0.95, 1.1],
        "weighted": False,
    },
    **{
        (f"{name}_{estimator}", 0.04): {
            "level": level, "mode": "mask", "quantity": "kl", "threshold": 0.04,
            "estimator": estimator,
        }
        for name, level in (("token", "token"), ("seq_mean", "sequence"))
        for estimator in ("k2", "k3")
    },
}  # fmt: skip


@dataclass
class Batch:
    """S sequences of L positions, in verl's layout, and N trained tokens, in Penstock's layout."""

    mask_SL: Tensor
    rewards: RewardBatch
    logprobs_SL: Tensor
    old_SL: Tensor
    other_SL: Tensor
    advantages_SL: Tensor

    @property
    def sequences(self) -> Sequences:
        return Sequences(torch.from_numpy(self.rewards.sequences_N), len(self.rewards.rewards_S))

    def ours(self, values_SL: Tensor) -> Tensor:
        return values_SL[self.mask_SL > 0]


def make(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(2, 7, 5).tolist(), 3]
    groups_S = np.repeat(np.arange(len(sizes)), sizes)
    count = len(groups_S)
    rewards_S = rng.normal(size=count)
    rewards_S[groups_S == len(sizes) - 1] = 0.1
    mask = rng.random((count, LENGTH)) < 0.6
    # One sequence is fully masked as too old; every other one has at least one trained token.
    mask[np.arange(count), rng.integers(0, LENGTH, count)] = True
    mask[0] = False
    near = [torch.tensor(rng.normal(-2, 0.3, mask.shape)) for _ in range(3)]
    penalties_SL = rng.normal(0, 0.1, mask.shape) * mask
    rewards = RewardBatch(
        rewards_S, groups_S, np.ones(count, np.bool_), mask.sum(1), penalties_SL[mask]
    )
    advantages_SL = torch.tensor(rng.normal(size=mask.shape))
    return Batch(torch.tensor(mask).double(), rewards, *near, advantages_SL)


def largest(one: Any, other: Any) -> float:
    """Largest absolute difference; infinite if either value is NaN."""
    return float(np.nan_to_num(np.abs(np.asarray(one) - np.asarray(other)), nan=np.inf).max())


def advantages(core: Any, batch: Batch) -> Iterator[tuple[str, float]]:
    from verl.trainer.config import AlgoConfig

    rewards, mask = batch.rewards, batch.mask_SL
    scores = torch.zeros_like(mask)
    scores[mask > 0] = -torch.tensor(rewards.penalties_N)
    positions = torch.arange(LENGTH).expand_as(mask)
    last = torch.where(mask > 0, positions, -1).argmax(1)
    rows = torch.arange(len(mask))
    scores[rows, last] += torch.tensor(rewards.rewards_S)
    # The sequence without tokens cannot carry a penalty, but its reward still counts.
    index = rewards.groups_S
    theirs = {
        "grpo": lambda: core.compute_grpo_outcome_advantage(scores.clone(), mask, index),
        "dr_grpo": lambda: core.compute_grpo_outcome_advantage(
            scores.clone(), mask, index, norm_adv_by_std_in_grpo=False
        ),
        "rloo": lambda: core.compute_rloo_outcome_advantage(scores.clone(), mask, index),
        "reinforce_plus_plus": lambda: core.compute_reinforce_plus_plus_outcome_advantage(
            scores.clone(), mask, config=AlgoConfig(gamma=1.0)
        ),
        "reinforce_plus_plus_baseline": (
            lambda: core.compute_reinforce_plus_plus_baseline_outcome_advantage(
                scores.clone(), mask, index
            )
        ),
    }
    for kind in ADVANTAGES:
        config = AlgorithmConfig.model_validate({"advantage": {"kind": kind}})
        found, _ = theirs[kind]()
        yield (
            f"advantage {kind}",
            largest(advantage_function(config.advantage)(rewards), batch.ours(found)),
        )


def critics(core: Any, batch: Batch) -> Iterator[tuple[str, float]]:
    mask, rewards = batch.mask_SL, batch.rewards
    scores = torch.zeros_like(mask)
    scores[mask > 0] = -torch.tensor(rewards.penalties_N)
    last = torch.where(mask > 0, torch.arange(LENGTH).expand_as(mask), -1).argmax(1)
    some = mask.sum(1) > 0
    scores[torch.arange(len(mask))[some], last[some]] += torch.tensor(rewards.rewards_S)[some]
    # Values at untrained positions must not matter.
    values_SL = batch.other_SL
    theirs, targets_SL = core.compute_gae_advantage_return(scores, values_SL, mask, 0.97, 0.9)
    ours = replace(rewards, values_N=batch.ours(values_SL).numpy())
    setting = {"discount": 0.97, "trace": 0.9}
    yield "advantage gae", largest(gae(ours, whiten=True, **setting), batch.ours(theirs))
    targets_N = value_targets(ours, **setting)
    yield "targets gae", largest(targets_N, batch.ours(targets_SL))
    said_SL = batch.logprobs_SL.clone().requires_grad_()
    sides = batch.ours(said_SL), batch.ours(values_SL), batch.ours(targets_SL)
    our_loss = value_loss(*sides, clip=0.2).mean()
    their_loss, _ = core.compute_value_loss(said_SL, targets_SL, values_SL, mask, 0.2)
    slopes = [torch.autograd.grad(loss, said_SL)[0] for loss in (our_loss, their_loss)]
    difference = largest(our_loss.detach(), their_loss.detach())
    yield "critic's loss", max(difference, largest(*slopes))


def losses(core: Any, batch: Batch) -> Iterator[tuple[str, float]]:
    from verl.workers.config import ActorConfig

    counts = StepCounts(int(batch.mask_SL.sum()), int((batch.mask_SL.sum(1) > 0).sum()))
    for name, loss in LOSSES.items():
        for mode, aggregation in AGGREGATIONS.items():
            table = {"loss": loss, "aggregation": aggregation}
            objective = Objective(AlgorithmConfig.model_validate(table))
            logprobs_SL = batch.logprobs_SL.clone().requires_grad_()
            output = PolicyOutput(
                logprobs_N=batch.ours(logprobs_SL),
                entropies_N=torch.zeros(counts.tokens),
                behaviour_logprobs_N=batch.ours(batch.old_SL),
                proximal_logprobs_N=None,
                reference_logprobs_N=None,
                advantages_N=batch.ours(batch.advantages_SL),
                sequences=batch.sequences,
            )
            ours, _ = objective.evaluate(output, counts)
            (slopes,) = torch.autograd.grad(ours, logprobs_SL)
            config = ActorConfig(
                strategy="fsdp",
                rollout_n=1,
                ppo_micro_batch_size_per_gpu=1,
                clip_ratio_low=loss["clip_low"],
                clip_ratio_high=loss["clip_high"],
                clip_ratio_c=loss.get("dual_clip", 3.0),
            )
            config.global_batch_info["loss_scale_factor"] = 7
            theirs, _ = core.get_policy_loss_fn(name)(
                batch.old_SL, logprobs_SL, batch.advantages_SL, batch.mask_SL, mode, config
            )
            (their_slopes,) = torch.autograd.grad(theirs, logprobs_SL)
            difference = max(largest(ours.detach(), theirs.detach()), largest(slopes, their_slopes))
            yield f"loss {name}, {mode}", difference


def divergences(core: Any, batch: Batch) -> Iterator[tuple[str, float]]:
    for estimator, name in (("k1", "k1+"), ("k2", "k2"), ("k3", "k3")):
        logprobs_SL = batch.logprobs_SL.clone().requires_grad_()
        ours_SL = kl_loss(logprobs_SL, batch.other_SL, estimator)  # type: ignore[arg-type]
        theirs_SL = core.kl_penalty(logprobs_SL, batch.other_SL, name)
        slopes = [torch.autograd.grad(each.sum(), logprobs_SL)[0] for each in (ours_SL, theirs_SL)]
        difference = largest(ours_SL.detach(), theirs_SL.detach())
        yield f"KL {estimator}", max(difference, largest(*slopes))


def corrections(helper: Any, batch: Batch) -> Iterator[tuple[str, float]]:
    log_ratio_SL = batch.logprobs_SL - batch.old_SL
    for theirs, table in [*CLIPPED.items(), *MASKED.items()]:
        level, threshold = theirs
        if theirs in CLIPPED:
            found_SL, _ = helper.compute_rollout_correction_weights(
                log_ratio_SL, batch.mask_SL, level, threshold
            )
        else:
            found_SL, _ = helper.compute_rollout_rejection_mask(
                log_ratio_SL, batch.mask_SL, level, threshold
            )
        config = AlgorithmConfig.model_validate({"correction": table}).correction
        sides = batch.ours(batch.logprobs_SL), batch.ours(batch.old_SL)
        ours = correct(config, *sides, batch.sequences)
        assert ours is not None
        yield f"correction {level} {threshold}", largest(ours.weights_N, batch.ours(found_SL))


@click.command(help=__doc__)
@click.option("--batches", default=50, show_default=True, help="Random batches.")
def main(batches: int) -> None:
    try:
        from verl.trainer.ppo import core_algos, rollout_corr_helper
    except ImportError as error:
        sys.exit(f"benchmarks.training.parity: {error}; see --help for how to install verl")
    worst: dict[str, float] = {}
    for seed in range(batches):
        batch = make(seed)
        for name, difference in (
            *advantages(core_algos, batch),
            *critics(core_algos, batch),
            *losses(core_algos, batch),
            *divergences(core_algos, batch),
            *corrections(rollout_corr_helper, batch),
        ):
            worst[name] = max(worst.get(name, 0.0), difference)
    for name, difference in worst.items():
        print(f"{name:<48} {difference:.1e}")
    print(json.dumps({"largest": max(worst.values()), "figures": len(worst), "batches": batches}))
    sys.exit(max(worst.values()) > TOLERANCE)


if __name__ == "__main__":
    main()
