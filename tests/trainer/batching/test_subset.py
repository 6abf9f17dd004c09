"""Completing a step once advantages are known: each sequence is kept whole and unchanged, or left out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import find_packed_sequence_indices

from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import MicroBatch, TrainingGroup
from penstock.trainer.batching.planning import StepPlan, complete, plan_step
from penstock.trainer.batching.subset import keep_sequences
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.policy.fsdp import FsdpPolicy
from tests.support.tiny_model import make_tiny_model
from tests.trainer.batching.test_batching import (
    context,
    cut,
    gradients,
    group,
    policy_of,
    random_group,
    read,
    trajectory,
    written,
)

PENALIZED = {"kl": {"kind": "reward", "coefficient": 0.1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, tied=True)


@pytest.fixture(scope="module")
def policy(model: Path) -> FsdpPolicy:
    return policy_of(model)


def alone(rng: np.random.Generator) -> TrainingGroup:
    """A group of one attempt: it has no baseline, so its advantage is always zero."""
    return read(random_group(rng, siblings=1))


@pytest.mark.parametrize("share_prefixes", [True, False], ids=["trees", "chains"])
def test_what_is_left_is_computed_as_before(policy: FsdpPolicy, share_prefixes: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        groups = [read(random_group(rng)) for _ in range(2)]
        for batch in cut(groups, 70, share_prefixes):
            if batch.parents_BT is None:
                check_plain(batch)
            kept_S = torch.from_numpy(rng.random(batch.sequences.count) < 0.5)  # noqa: N806
            left = keep_sequences(batch, kept_S)
            kept_N = kept_S[batch.sequences.index_N]  # noqa: N806
            assert left.is_empty == (not kept_S.any())
            if left.is_empty:
                continue
            for name in ("behaviour_logprobs_N", "advantages_N", "tokens_N"):
                assert torch.equal(getattr(left, name), getattr(batch, name)[kept_N])
            assert left.sequences.count == int(kept_S.sum())
            assert torch.equal(left.sequences.lengths_S, batch.sequences.lengths_S[kept_S])
            found, expected = policy._outputs([left])[0], policy._outputs([batch])[0][kept_N]
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
            check_least(left)


def check_plain(batch: MicroBatch) -> None:
    """Check that transformers treats every row as one sequence. Causal attention then needs no mask."""
    assert find_packed_sequence_indices(batch.positions_BT) is None


def check_least(batch: MicroBatch) -> None:
    """Check that every row, column and prediction is needed."""
    width = batch.token_ids_BT.shape[1]
    assert torch.equal(batch.predictions_N.unique(), torch.arange(len(batch.sources_M)))
    rows, columns = batch.sources_M // width, batch.sources_M % width
    assert torch.equal(rows.unique(), torch.arange(len(batch.token_ids_BT)))
    mask = batch.attention_mask()
    if mask is None:
        assert int(columns.max()) == width - 1
        check_plain(batch)
        return
    seen = torch.zeros(batch.token_ids_BT.shape, dtype=torch.bool)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        seen[row] |= mask[row, 0, column]
        assert int(mask[row, 0, column].sum()) == int(batch.positions_BT[row, column]) + 1
    # Positions that no prediction looks at are padding, and come last.
    lengths = seen.sum(1)
    assert torch.equal(seen, torch.arange(width) < lengths.unsqueeze(1))
    assert int(lengths.max()) == width


def in_turn(plan: StepPlan, objective: Objective, ranks: int) -> list[StepPlan]:
    """The plan of each rank after all have completed their shares."""
    meeting = threading.Barrier(ranks)
    said: dict[int, np.ndarray] = {}

    def run(rank: int) -> StepPlan:
        def add(own: np.ndarray) -> np.ndarray:
            said[rank] = own
            meeting.wait(20)
            total = sum(said[r] for r in range(ranks))
            meeting.wait(20)
            return np.asarray(total)

        share = plan.share(rank, ranks)
        batches = [b for update in share.updates for b in update.batches]
        references = [b.behaviour_logprobs_N - 0.01 * b.tokens_N for b in batches]
        return complete(share, objective, references=references, sum_over_ranks=add)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_leaves_out_the_same(ranks: int) -> None:
    objective = Objective(AlgorithmConfig.model_validate(PENALIZED))
    for seed in range(5):
        rng = np.random.default_rng(seed)
        groups = [
            read(random_group(rng)),
            alone(rng),
            *(alone(rng) for _ in range(2)),
            read(random_group(rng)),
            alone(rng),
        ]
        plan = plan_step(groups, objective, token_budget=30, update_count=3, ranks=ranks)
        assert (len(plan.updates), plan.groups_without_gradient) == (3, 0)
        done = in_turn(plan, objective, ranks)
        moved_N = objective.advantages(done[0].rewards) != 0.0  # noqa: N806
        # The second update has nothing left. The others keep their original counts.
        for own in done:
            assert (own.updates_skipped, own.groups_without_gradient) == (1, 4)
            assert [u.counts for u in own.updates] == [plan.updates[n].counts for n in (0, 2)]
        for number in range(2):
            batches = [own.updates[number].batches for own in done]
            assert len({len(each) for each in batches}) == 1
            assert all(any(not b.is_empty for b in turn) for turn in zip(*batches, strict=True))
        places = [int(n) for p in done for u in p.updates for b in u.batches for n in b.tokens_N]
        assert sorted(places) == np.flatnonzero(moved_N).tolist()


def test_only_what_has_an_advantage_is_computed_when_the_reference_has_spoken(model: Path) -> None:
    rng = np.random.default_rng(1)
    groups = [read(random_group(rng)), alone(rng), read(random_group(rng)), alone(rng)]
    of_two = [groups[0], groups[2]]
    policy = policy_of(model, **PENALIZED)
    plan = plan_step(groups, policy._objective, token_budget=60)
    forward = counted(policy)
    result = policy.step(plan)
    tokens = [sum(int(s.trained.sum()) for s in g.samples) for g in groups]
    assert sum(forward) == result.tokens_computed == tokens[0] + tokens[2]
    assert (result.tokens_trained, result.groups_without_gradient) == (sum(tokens), 2)
    assert (result.updates, result.updates_skipped, result.applied) == (1, 0, True)
    assert result.kl_reference is not None
    # The gradient equals that of computing everything.
    lean = gradients(policy_of(model, **PENALIZED), plan)
    full = policy_of(model, **PENALIZED)
    full._objective.trains_everything = True
    for name, expected in gradients(full, plan).items():
        torch.testing.assert_close(lean[name], expected, atol=1e-6, rtol=1e-4)
    # It differs from the gradient without those groups in the step.
    less = gradients(
        policy_of(model, **PENALIZED), plan_step(of_two, policy._objective, token_budget=60)
    )
    assert any(not torch.allclose(lean[n], less[n], rtol=1e-3) for n in lean)


def counted(policy: FsdpPolicy) -> list[int]:
    """Record the trained tokens of each forward pass with a gradient, from now on."""
    seen: list[int] = []
    evaluate = policy._tokens.evaluate

    def note(batch: MicroBatch, **named: Any) -> Any:
        seen.append(len(batch.tokens_N))
        return evaluate(batch, **named)

    policy._tokens.evaluate = note  # type: ignore[method-assign]
    return seen


def test_an_update_to_which_no_advantage_came_is_skipped_and_counted(model: Path) -> None:
    policy = policy_of(model, **PENALIZED)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    groups = [read(group(trajectory([context([1, 2]), written([3, 4])], 1.0))) for _ in range(2)]
    plan = plan_step(groups, policy._objective, token_budget=60, update_count=2)
    assert len(plan.updates) == 2
    forward = counted(policy)
    result = policy.step(plan)
    assert forward == []
    assert (result.updates, result.updates_skipped, result.applied) == (0, 2, False)
    assert (result.groups_without_gradient, result.tokens_trained) == (2, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
