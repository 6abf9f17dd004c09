"""Splitting a step over ranks.

Each sequence is computed once and within the token budget. Each rank has the same number of
micro-batches and about the same work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.balancing import attention_cost, level, spread_evenly
from penstock.trainer.batching.batching import MicroBatch, Sample, TrainingGroup
from penstock.trainer.batching.planning import StepPlan, plan_step
from penstock.trainer.config.algorithm import AlgorithmConfig

costs = st.lists(st.floats(min_value=0.0, max_value=1e6), max_size=30)


@given(costs, st.integers(1, 9))
def test_ranks_differ_by_no_more_than_the_costliest_item(work: list[float], ranks: int) -> None:
    own = spread_evenly(work, ranks)
    assert len(own) == ranks
    assert sorted(index for indices in own for index in indices) == list(range(len(work)))
    loads = [sum(work[index] for index in indices) for indices in own]
    assert max(loads) - min(loads) <= max(work, default=0.0) * (1 + 1e-9)


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=9), max_size=6), st.integers(0, 20))
def test_levelled_pieces_are_as_many_as_asked_for_and_lose_nothing(
    pieces: list[list[int]], more: int
) -> None:
    count = len(pieces) + more
    levelled = level(pieces, count)
    assert len(levelled) == count
    assert [item for piece in levelled for item in piece] == [i for piece in pieces for i in piece]
    # A piece is empty only if no other piece can be halved.
    assert all(levelled) or all(len(piece) < 2 for piece in levelled)


@st.composite
def steps(draw: st.DrawFn) -> list[TrainingGroup]:
    """Groups whose siblings share a prompt, and some of them the beginning of their answers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups: list[TrainingGroup] = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = rng.integers(0, 50, int(rng.integers(1, 20)))
        samples = [sample(rng, prompt) for _ in range(draw(st.integers(1, 5)))]
        rewards = tuple(one.reward for one in samples)
        groups.append(TrainingGroup(tuple(samples), rewards, 0, 0, 0, np.zeros(0, np.int64)))
    return groups


def sample(rng: np.random.Generator, prompt: Any) -> Sample:
    answer = rng.integers(0, 3, int(rng.integers(0, 40)))
    ids = np.concatenate([prompt, answer]).astype(np.int32)
    trained = np.concatenate([np.zeros(len(prompt), np.bool_), rng.random(len(answer)) < 0.9])
    ones = np.ones(len(ids), np.float32)
    return Sample("t", ids, trained, -ones, ones, float(rng.normal()))


def plan(groups: list[TrainingGroup], budget: int, ranks: int, updates: int = 1) -> StepPlan:
    objective = Objective(AlgorithmConfig())
    return plan_step(groups, objective, token_budget=budget, ranks=ranks, update_count=updates)


def tokens_of(batches: tuple[MicroBatch, ...]) -> list[int]:
    return sorted(int(token) for batch in batches for token in batch.tokens_N)


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 5), st.integers(1, 200), st.integers(1, 3))
def test_a_plan_for_several_ranks_has_all_of_a_plan_for_one(
    groups: list[TrainingGroup], ranks: int, budget: int, updates: int
) -> None:
    alone, together = plan(groups, budget, 1, updates), plan(groups, budget, ranks, updates)
    assert together.updates_skipped == alone.updates_skipped
    assert len(together.updates) == len(alone.updates)
    for expected, update in zip(alone.updates, together.updates, strict=True):
        # Each sequence is whole, occurs once, in the same update, and is divided by the same counts.
        assert update.counts == expected.counts
        assert tokens_of(update.batches) == tokens_of(expected.batches)
        shares = [together.share(r, ranks).updates for r in range(ranks)]
        assert len({tuple(len(u.batches) for u in share) for share in shares}) == 1
        assert len(update.batches) % ranks == 0
        longest = max(len(one.token_ids) for group in groups for one in group.samples)
        for batch in update.batches:
            assert batch.token_ids_BT.numel() <= max(budget, longest)
        check_balance(update.batches, ranks, longest)


def check_balance(batches: tuple[MicroBatch, ...], ranks: int, longest: int) -> None:
    """Check that ranks differ by at most one row. A row is at most a rank's share, or one sequence."""
    loads = [
        sum(attention_cost(len(row)) for batch in batches[r::ranks] for row in rows_of(batch))
        for r in range(ranks)
    ]
    tokens = sum(len(row) for batch in batches for row in rows_of(batch))
    largest = attention_cost(max(longest, -(-tokens // ranks)))
    assert max(loads) - min(loads) <= largest + 1e-6


def rows_of(batch: MicroBatch) -> list[list[int]]:
    """The positions in each row that are not padding. No token is predicted from padding or to it."""
    if batch.is_empty:
        return []
    width = batch.token_ids_BT.shape[1]
    mask = batch.attention_mask()
    if mask is None:
        last = batch.sources_M.numpy()
        rows = [last[last // width == b] % width for b in range(batch.token_ids_BT.shape[0])]
        return [list(range(int(row.max()) + 1)) for row in rows]
    # A node sees itself and its ancestors. Padding sees only itself, at depth zero.
    seen = mask[:, 0].sum(-1)
    depths = batch.positions_BT + 1
    real = (seen == depths) & ((batch.positions_BT > 0) | (torch_arange(width) == 0))
    return [[int(i) for i in row.nonzero()] for row in real]


def torch_arange(width: int) -> Any:
    import torch

    return torch.arange(width)[None]


@settings(max_examples=30, deadline=None)
@given(steps(), st.integers(1, 4), st.integers(1, 3))
def test_a_step_whose_every_token_is_masked_is_skipped_and_counted(
    groups: list[TrainingGroup], ranks: int, updates: int
) -> None:
    masked = [mask(group) for group in groups]
    step = plan(masked, 100, ranks, updates)
    assert step.updates == () and step.trained_tokens == 0
    assert step.updates_skipped == updates
    assert step.groups_without_gradient == len(groups)
    # Groups that can be trained still are, as if the others were absent.
    mixed = plan([*masked, *groups], 100, ranks)
    assert mixed.trained_tokens == plan(groups, 100, ranks).trained_tokens


def mask(group: TrainingGroup) -> TrainingGroup:
    samples = tuple(
        Sample(
            one.trajectory_id,
            one.token_ids,
            np.zeros_like(one.trained),
            one.behaviour_logprobs,
            one.temperatures,
            one.reward,
        )
        for one in group.samples
    )
    return TrainingGroup(samples, group.rewards, 0, 0, 0, np.zeros(0, np.int64))
