"""From the groups of a step to its updates: advantages, what has a gradient, micro-batches, counts.

    groups -> RewardBatch -> advantages -> per update: PlacedSamples -> MicroBatches, StepCounts

Advantages are made of the whole step, before it is cut into updates. Where rewards are penalized with
the KL to a reference, or measured by a critic, they can be made only when that has spoken: the plan then
has every sequence, with advantage zero, and `complete` fills advantages in, and leaves those out that
only the reference needed.

On several ranks the micro-batches of an update are those of all of them in turn, as many for each: those
of rank r of n are `batches[r::n]`, which is what `StepPlan.share` takes. Counts and rewards are of the
whole step on every rank.

A sequence that no term of the objective gives a gradient costs no forward pass. It counts all the same, in
what the update is cut from and divided by: lest what others weigh depend on it, or on a term that gives it
one. An update in which nothing has a gradient is skipped, and counted.
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
    """One optimizer update."""

    batches: tuple[MicroBatch, ...]
    counts: StepCounts
    """What its sums are divided by: all its tokens and sequences, those that are not computed included."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step computes."""

    updates: tuple[Update, ...]
    """Those that have a gradient, in their order."""
    rewards: RewardBatch
    groups_without_gradient: int
    updates_skipped: int = 0
    """Those that have none, because every token is masked or no advantage moves them."""

    def share(self, index: int, count: int) -> StepPlan:
        """What the one of `count` ranks computes whose number this is."""
        updates = [replace(u, batches=u.batches[index::count]) for u in self.updates]
        return replace(self, updates=tuple(updates))

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss, those included that no term of it moves."""
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
    """Plans a step of `update_count` updates, each of about as many groups, for so many ranks."""
    rewards = reward_batch(groups)
    advantages_N = np.zeros(len(rewards.sequences_N), np.float32)
    if not objective.advantages_wait:
        advantages_N = objective.advantages(rewards)
    placed = _place(groups, rewards, advantages_N)
    everything = objective.trains_everything or objective.advantages_wait
    updates: list[Update] = []
    for number in range(update_count):
        start, end = (len(placed) * n // update_count for n in (number, number + 1))
        own = placed[start:end]
        needed = [[s for s in group if everything or s.advantages_K.any()] for group in own]
        batches = build_micro_batches(
            needed, token_budget=token_budget, share_prefixes=share_prefixes, ranks=ranks
        )
        if batches:
            updates.append(Update(tuple(batches), _count(own)))
    without = sum(not _has_gradient(group, everything) for group in placed)
    return StepPlan(tuple(updates), rewards, without, update_count - len(updates))


def reward_batch(groups: Sequence[TrainingGroup]) -> RewardBatch:
    """Every sample of the groups, in their order."""
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
    """The plan with the advantages that waited: for the reference's log-probabilities of each micro-batch,
    for the critic's values, or both; each of shape [N], in the order of the micro-batches. What turns out
    to have no gradient is left out. Where these are a rank's share, `sum_over_ranks` makes what each rank
    knows what all know."""
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
    updates = [
        replace(
            update,
            batches=tuple(
                replace(batch, advantages_N=advantages_N[batch.tokens_N])
                for batch in update.batches
            ),
        )
        for update in plan.updates
    ]
    plan = replace(plan, updates=tuple(updates), rewards=rewards)
    if objective.trains_everything:
        return plan
    return _leave_out(plan, advantages_N.numpy() != 0.0, sum_over_ranks)


def by_place(plan: StepPlan, values: Sequence[Tensor]) -> Tensor:
    """What is known of the tokens of each micro-batch, of which there is at least one, in the order of the
    step's tokens, so that it is found again in what `complete` leaves; zero for those of other ranks."""
    found_N = values[0].new_zeros(len(plan.rewards.sequences_N))
    batches = (batch for update in plan.updates for batch in update.batches)
    for batch, own_N in zip(batches, values, strict=True):
        found_N[batch.tokens_N.to(found_N.device)] = own_N
    return found_N


def _leave_out(
    plan: StepPlan, moved_N: NDArray[np.bool_], sum_over_ranks: SumOverRanks
) -> StepPlan:
    """The plan without sequences none of whose tokens is moved. Each rank still has as many micro-batches
    as any other."""
    left: list[list[MicroBatch]] = []
    for update in plan.updates:
        kept = [
            keep_sequences(b, b.sequences.sum((b.advantages_N != 0.0).float()) > 0.0)
            for b in update.batches
        ]
        left.append([batch for batch in kept if not batch.is_empty])
    # At [u, k], on how many ranks more than k are left of update u; there are no more than sequences.
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
        own: list[PlacedSample] = []
        for sample in group.samples:
            end = ends[index]
            own.append(PlacedSample(sample, advantages_N[first:end], first))
            first, index = end, index + 1
        placed.append(own)
    return placed


def _has_gradient(group: Sequence[PlacedSample], everything: bool) -> bool:
    return any(len(s.advantages_K) and (everything or s.advantages_K.any()) for s in group)


def _count(groups: Sequence[Sequence[PlacedSample]]) -> StepCounts:
    lengths = [len(placed.advantages_K) for group in groups for placed in group]
    return StepCounts(sum(lengths), sum(length > 0 for length in lengths))
