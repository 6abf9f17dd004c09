"""Plans a step: turns its groups into updates, with advantages, micro-batches and counts.

    groups -> RewardBatch -> advantages -> per update: PlacedSamples -> MicroBatches, StepCounts

Advantages are computed over the whole step before it is cut into updates. If rewards are penalized with
the KL to a reference, or a critic estimates values, the advantages must wait for the output of these
models. The plan then contains every sequence, with advantage zero. `complete` fills the advantages in and
removes the sequences that turn out to have no gradient.

On several ranks, an update's micro-batches are dealt out in turn, the same number to each rank. Counts and
rewards are those of the whole step on every rank.

A sequence to which no term of the objective gives a gradient costs no forward pass. It still counts toward
the boundaries of updates and toward their denominators. Otherwise one sequence's weight would depend on
whether another one happened to have a gradient. An update without any gradient is skipped and counted.
"""
# ruff: noqa: N803, N806 - a name ends with its dimensions.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithms.batches import RewardBatch, StepCounts
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import (
    EMPTY,
    MicroBatch,
    PlacedSample,
    TrainingGroup,
    build_micro_batches,
)
from penstock.trainer.batching.subset import keep_sequences

if TYPE_CHECKING:
    from numpy.typing import NDArray

SumOverRanks = Callable[["NDArray[np.float64]"], "NDArray[np.float64]"]


@dataclass(frozen=True, slots=True)
class Update:
    """The micro-batches of one optimizer update."""

    batches: tuple[MicroBatch, ...]
    counts: StepCounts
    """The denominators: all tokens and sequences of the update, including skipped ones."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    updates: tuple[Update, ...]
    """The updates that have a gradient, in order."""
    rewards: RewardBatch
    groups_without_gradient: int
    updates_skipped: int = 0
    """Updates without a gradient, because every token is masked or no advantage is nonzero."""

    def share(self, index: int, count: int) -> StepPlan:
        """Return the plan of rank `index` among `count` data-parallel ranks."""
        updates = [replace(u, batches=u.batches[index::count]) for u in self.updates]
        return replace(self, updates=tuple(updates))

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss, including those without a gradient."""
        return sum(update.counts.tokens for update in self.updates)


def plan_step(
    groups: Sequence[TrainingGroup],
    objective: Objective,
    *,
    token_budget: int,
    share_prefixes: bool = True,
    update_count: int = 1,
    ranks: int = 1,
) -> StepPlan:
    """Plan a step for `ranks` ranks, with `update_count` updates of about equally many groups."""
    rewards = reward_batch(groups)
    advantages_N = np.zeros(len(rewards.sequences_N), np.float32)
    if not objective.advantages_wait:
        advantages_N = objective.advantages(rewards)
    placed = _place(groups, rewards, advantages_N)
    everything = objective.trains_everything or objective.advantages_wait
    updates: list[Update] = []
    without = 0
    for number in range(update_count):
        start, end = (len(placed) * n // update_count for n in (number, number + 1))
        own = placed[start:end]
        needed = [[s for s in group if everything or s.advantages_K.any()] for group in own]
        without += sum(not any(len(s.advantages_K) for s in group) for group in needed)
        batches = build_micro_batches(
            needed, token_budget=token_budget, share_prefixes=share_prefixes, ranks=ranks
        )
        if batches:
            lengths = [len(placed.advantages_K) for group in own for placed in group]
            counts = StepCounts(sum(lengths), sum(length > 0 for length in lengths))
            updates.append(Update(tuple(batches), counts))
    return StepPlan(tuple(updates), rewards, without, update_count - len(updates))


def reward_batch(groups: Sequence[TrainingGroup]) -> RewardBatch:
    samples = [sample for group in groups for sample in group.samples]
    lengths_S = np.array([int(sample.trained.sum()) for sample in samples], np.int64)
    return RewardBatch(
        rewards_S=np.array([sample.reward for sample in samples], np.float64),
        groups_S=np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups]),
        counts_in_baseline_S=np.array([s.counts_in_baseline for s in samples], np.bool_),
        lengths_S=lengths_S,
        penalties_N=np.zeros(int(lengths_S.sum())),
    )


def complete(
    plan: StepPlan,
    objective: Objective,
    *,
    references: Sequence[Tensor] = (),
    values: Sequence[Tensor] = (),
    sum_over_ranks: SumOverRanks = lambda own: own,
) -> StepPlan:
    """Fill in the advantages that waited, and remove the sequences that turn out to have no gradient.

    `references` and `values` have one tensor of shape [N] per micro-batch, in the plan's order. If the
    plan is a rank's share, `sum_over_ranks` adds each rank's part up for all ranks.
    """
    batches = [batch for update in plan.updates for batch in update.batches]
    rewards = plan.rewards
    if references:
        taken = [
            objective.penalties(batch.behaviour_logprobs_N, reference_N.cpu())
            for batch, reference_N in zip(batches, references, strict=True)
        ]
        penalties_N = by_place(plan, taken).double().numpy()
        rewards = replace(rewards, penalties_N=sum_over_ranks(penalties_N))
    if values:
        values_N = by_place(plan, values).double().cpu().numpy()
        rewards = replace(rewards, values_N=sum_over_ranks(values_N))
    advantages_N = torch.from_numpy(objective.advantages(rewards))  # pyright: ignore[reportUnknownMemberType]
    updates: list[Update] = []
    for update in plan.updates:
        filled = [replace(b, advantages_N=advantages_N[b.tokens_N]) for b in update.batches]
        updates.append(replace(update, batches=tuple(filled)))
    plan = replace(plan, updates=tuple(updates), rewards=rewards)
    if objective.trains_everything:
        return plan
    return _leave_out(plan, advantages_N.numpy() != 0.0, sum_over_ranks)


def by_place(plan: StepPlan, values: Sequence[Tensor]) -> Tensor:
    """Arrange values of the micro-batches' tokens in the order of the step's tokens, which `complete`
    keeps.

    Tokens of other ranks are zero. The plan must have at least one micro-batch.
    """
    found_N = values[0].new_zeros(len(plan.rewards.sequences_N))
    batches = (batch for update in plan.updates for batch in update.batches)
    for batch, own_N in zip(batches, values, strict=True):
        found_N[batch.tokens_N.to(found_N.device)] = own_N
    return found_N


def _leave_out(
    plan: StepPlan, moved_N: NDArray[np.bool_], sum_over_ranks: SumOverRanks
) -> StepPlan:
    """Remove the sequences without a moved token, keeping as many micro-batches on each rank."""
    left: list[list[MicroBatch]] = []
    for update in plan.updates:
        kept = [
            keep_sequences(b, b.sequences.sum((b.advantages_N != 0.0).float()) > 0.0)
            for b in update.batches
        ]
        left.append([batch for batch in kept if not batch.is_empty])
    # [u, k]: number of ranks with more than k micro-batches left in update u. There cannot be more
    # micro-batches than sequences.
    longer = np.zeros((len(left), len(plan.rewards.rewards_S)))
    for row, own in zip(longer, left, strict=True):
        row[: len(own)] = 1.0
    counts = np.count_nonzero(sum_over_ranks(longer), axis=1).tolist()
    updates = [
        replace(update, batches=(*own, *[EMPTY] * (count - len(own))))
        for update, own, count in zip(plan.updates, left, counts, strict=True)
        if count
    ]
    groups_N = plan.rewards.groups_S[plan.rewards.sequences_N]
    still = len(np.unique(groups_N)) - len(np.unique(groups_N[moved_N]))
    return replace(
        plan,
        updates=tuple(updates),
        groups_without_gradient=plan.groups_without_gradient + still,
        updates_skipped=plan.updates_skipped + len(plan.updates) - len(updates),
    )


def _place(
    groups: Sequence[TrainingGroup], rewards: RewardBatch, advantages_N: NDArray[np.float32]
) -> list[list[PlacedSample]]:
    ends = np.cumsum(rewards.lengths_S).tolist()
    placed: list[list[PlacedSample]] = []
    first = index = 0
    for group in groups:
        placed.append([])
        for sample in group.samples:
            end = ends[index]
            placed[-1].append(PlacedSample(sample, advantages_N[first:end], first))
            first, index = end, index + 1
    return placed
