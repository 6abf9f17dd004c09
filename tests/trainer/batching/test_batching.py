"""From delivered groups to micro-batches: masks, prefix sharing, and results that do not depend on
the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import MicroBatch, TrainingGroup, read_group
from penstock.trainer.batching.planning import StepPlan, plan_step
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.messages import Failure, Outcome, Segment, Trajectory, TrajectoryGroup
from tests.support.tiny_model import make_tiny_model


def context(ids: Sequence[int]) -> Any:
    return Segment(
        author=trajectory_pb2.AUTHOR_CONTEXT, token_ids=codec.array_bytes(np.array(ids, np.int32))
    )


def written(
    ids: Sequence[int],
    version: int = 0,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
) -> Any:
    values = np.array(logprobs if logprobs is not None else [-1.0] * len(ids), np.float32)
    return Segment(
        author=trajectory_pb2.AUTHOR_POLICY,
        token_ids=codec.array_bytes(np.array(ids, np.int32)),
        logprobs=codec.array_bytes(values, codec.LOGPROB),
        weight_version=version,
        temperature=temperature,
    )


def trajectory(segments: Sequence[Any], reward: float | None, name: str = "t") -> Any:
    outcome = (
        Outcome(failure=Failure(reason="BROKEN")) if reward is None else Outcome(reward=reward)
    )
    return Trajectory(trajectory_id=name, segments=segments, outcome=outcome)


def group(*trajectories: Any) -> Any:
    return TrajectoryGroup(group_id="g", task_id="t", trajectories=trajectories)


def read(message: Any, trainer_version: int = 0, max_lag: int = 4) -> TrainingGroup:
    return read_group(message, trainer_version=trainer_version, max_lag=max_lag)


def plan(
    groups: Sequence[TrainingGroup],
    token_budget: int = 100,
    share_prefixes: bool = True,
    update_count: int = 1,
    **algorithm: Any,
) -> StepPlan:
    return plan_step(
        groups,
        Objective(AlgorithmConfig.model_validate(algorithm)),
        token_budget=token_budget,
        share_prefixes=share_prefixes,
        update_count=update_count,
    )


def cut(groups: Sequence[TrainingGroup], *arguments: Any, **named: Any) -> list[MicroBatch]:
    step = plan(groups, *arguments, **named)
    return [batch for update in step.updates for batch in update.batches]


def random_group(rng: np.random.Generator, siblings: int = 4) -> Any:
    """Siblings with a common prompt, some common answer tokens, several turns and temperatures."""
    prompt = rng.integers(0, 256, int(rng.integers(2, 12)))
    trajectories = []
    for index in range(siblings):
        first = rng.integers(0, 2, int(rng.integers(1, 5)))
        segments = [context(prompt), written(first, 3, rng.normal(-2, 1, len(first)))]
        if rng.random() < 0.5:
            tool, second = rng.integers(0, 256, 3), rng.integers(0, 256, int(rng.integers(1, 6)))
            segments += [
                context(tool),
                written(second, 4, rng.normal(-3, 1, len(second)), temperature=0.7),
            ]
        trajectories.append(trajectory(segments, float(rng.normal()), f"t{index}"))
    return group(*trajectories)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, tied=True)


def policy_of(model: Path, **algorithm: Any) -> FsdpPolicy:
    return FsdpPolicy(
        ModelConfig(path=str(model), dtype="float32"),
        TrainConfig(max_grad_norm=1e9),
        total_steps=10,
        seed=0,
        algorithm=AlgorithmConfig.model_validate(algorithm),
    )


def gradients(policy: FsdpPolicy, step: StepPlan) -> dict[str, Any]:
    """The gradients of a step's last update, captured by optimizers that do not move the weights."""
    seen: dict[str, Any] = {}
    parts: list[tuple[str, Any]] = [("", policy)]
    if policy._critic is not None:
        parts.append(("critic.", policy._critic))
    for prefix, part in parts:

        def keep(*_: Any, prefix: str = prefix, module: Any = part._module, **__: Any) -> None:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    seen[prefix + name] = parameter.grad.clone()

        part._optimizer.step = keep
    policy.step(step)
    return seen


def test_only_policy_tokens_that_are_young_enough_are_trained() -> None:
    old, young = written([5, 6], version=1), written([7, 8, 9], version=3)
    message = group(
        trajectory([context([1, 2]), old, context([3]), young], 1.0),
        trajectory([context([1, 2]), young], 0.0),
    )
    result = read(message, trainer_version=5, max_lag=2)
    assert result.samples[0].trained.tolist() == [False] * 5 + [True] * 3
    assert (result.masked_tokens, result.policy_tokens) == (2, 8)
    assert result.lags.tolist() == [2] * 6
    # Late tokens stay as context.
    assert result.samples[0].token_ids.tolist() == [1, 2, 5, 6, 3, 7, 8, 9]
    assert plan([result]).trained_tokens == 6


def test_a_token_ahead_of_a_restarted_trainer_is_not_late() -> None:
    message = group(
        trajectory([context([1]), written([2], version=9)], 1.0),
        trajectory([context([1]), written([3], version=9)], 0.0),
    )
    assert read(message, trainer_version=4, max_lag=0).lags.tolist() == [0, 0]


def test_failed_trajectories_are_counted_and_left_out() -> None:
    message = group(
        trajectory([context([1]), written([2])], 1.0),
        trajectory([], None),
        trajectory([context([1]), written([3])], 0.0),
    )
    result = read(message)
    assert (result.failures, len(result.samples), result.rewards) == (1, 2, (1.0, 0.0))
    assert not read(group(trajectory([], None), trajectory([], None))).samples


def test_disagreeing_arrays_are_refused() -> None:
    segment = written([1, 2, 3])
    segment.logprobs = codec.array_bytes(np.zeros(2, np.float32), codec.LOGPROB)
    with pytest.raises(codec.MalformedMessage, match="3 tokens with 2 logprobs"):
        read(group(trajectory([context([1]), segment], 1.0)))


def test_a_policy_token_that_nothing_precedes_is_not_trained() -> None:
    message = group(trajectory([written([4, 5])], 1.0), trajectory([written([4, 6])], 0.0))
    assert read(message).samples[0].trained.tolist() == [False, True]


def test_no_gradient_no_micro_batch() -> None:
    flat = read(group(*(trajectory([context([1]), written([index])], 1.0) for index in range(3))))
    late = read(
        group(*(trajectory([context([1]), written([index])], index) for index in range(3))),
        trainer_version=9,
        max_lag=1,
    )
    empty = read(group(trajectory([context([1])], 1.0), trajectory([context([1])], 0.0)))
    step = plan([flat, late, empty])
    assert (step.updates, step.trained_tokens, step.groups_without_gradient) == ((), 0, 3)


def test_a_sample_without_advantage_counts_but_costs_nothing() -> None:
    message = group(
        trajectory([context([1]), written([10, 11])], 0.0),
        trajectory([context([1]), written([20, 21])], 1.0),
        trajectory([context([1]), written([30, 31])], 2.0),
    )
    result = read(message)
    step = plan([result])
    assert (step.trained_tokens, step.updates[0].counts.sequences) == (6, 3)
    (batch,) = step.updates[0].batches
    assert len(batch.predictions_N) == 4
    assert 20 not in batch.token_ids_BT


def test_siblings_share_what_they_have_in_common() -> None:
    message = group(
        trajectory([context([1, 2, 3]), written([7, 8, 9, 4], logprobs=[-1, -2, -3, -9])], 1.0),
        trajectory([context([1, 2, 3]), written([7, 8, 5, 4], logprobs=[-4, -5, -6, -8])], 0.0),
    )
    (batch,) = cut([read(message)])
    # The last token of each answer is predicted but predicts nothing, so it takes no column.
    assert batch.token_ids_BT.tolist() == [[1, 2, 3, 7, 8, 9, 5]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5, 5]]
    mask = batch.attention_mask()
    assert mask is not None
    # The last position sees its own ancestors but not the other branch.
    assert mask[0, 0, 6].tolist() == [True] * 5 + [False, True]
    # Six distinct predictions for eight trained tokens.
    assert batch.targets_M.tolist() == [7, 8, 9, 4, 5, 4]
    assert batch.sources_M.tolist() == [2, 3, 4, 5, 4, 6]
    assert batch.predictions_N.tolist() == [0, 1, 2, 3, 0, 1, 4, 5]
    assert batch.behaviour_logprobs_N.tolist() == [-1, -2, -3, -9, -4, -5, -6, -8]


def test_a_plain_sequence_needs_no_mask() -> None:
    message = group(
        trajectory([context([1, 2]), written([7, 8])], 1.0),
        trajectory([context([1, 2]), written([7])], 0.0),
    )
    (batch,) = cut([read(message)])
    assert batch.token_ids_BT.tolist() == [[1, 2, 7]]
    assert batch.attention_mask() is None


def test_micro_batches_respect_the_budget() -> None:
    rng = np.random.default_rng(3)
    groups = [read(random_group(rng)) for _ in range(12)]
    longest = max(len(sample.token_ids) for each in groups for sample in each.samples)
    for budget in (longest, 40, 97, 1000):
        for share in (True, False):
            for batch in cut(groups, budget, share):
                assert batch.token_ids_BT.numel() <= budget
    # A sequence that exceeds the budget alone still goes through.
    assert cut(groups, 1)


def expected_advantages(group: TrainingGroup) -> list[float]:
    rewards = np.array(group.rewards)
    return ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)).tolist()


def test_every_trained_token_keeps_its_own_figures() -> None:
    rng = np.random.default_rng(4)
    groups = [read(random_group(rng)) for _ in range(6)]
    expected = sorted(
        (int(token), round(float(logprob), 5), round(float(temperature), 5), advantage)
        for each in groups
        for sample, advantage in zip(each.samples, expected_advantages(each), strict=True)
        for token, logprob, temperature, trained in zip(
            sample.token_ids,
            sample.behaviour_logprobs,
            sample.temperatures,
            sample.trained,
            strict=True,
        )
        if trained
    )
    for share in (True, False):
        found = []
        for batch in cut(groups, 64, share):
            targets = batch.targets_M[batch.predictions_N].tolist()
            temperatures = batch.temperatures_M[batch.predictions_N].tolist()
            rows = zip(
                targets,
                batch.behaviour_logprobs_N.tolist(),
                temperatures,
                batch.advantages_N.tolist(),
                strict=True,
            )
            found += [(t, round(b, 5), round(c, 5), a) for t, b, c, a in rows]
        assert [row[:3] for row in sorted(found)] == [row[:3] for row in expected]
        assert np.allclose([row[3] for row in sorted(found)], [row[3] for row in expected])


def test_logprobs_are_those_of_the_model_run_one_sequence_at_a_time(model: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = policy_of(model)
    assert policy.supports_trees()
    rng = np.random.default_rng(5)
    each = read(random_group(rng))
    expected: list[float] = []
    for sample in each.samples:
        with torch.no_grad():
            logits = plain(torch.tensor(sample.token_ids[None].astype(np.int64))).logits[0]
        for place in np.flatnonzero(sample.trained):
            scaled = logits[place - 1] / float(sample.temperatures[place])
            logprob = torch.log_softmax(scaled, -1)[int(sample.token_ids[place])]
            expected.append(float(logprob))
    for share in (True, False):
        batches = cut([each], 10_000, share)
        with torch.no_grad():
            found = torch.cat([policy._outputs([batch])[0] for batch in batches]).tolist()
        assert sorted(found) == pytest.approx(sorted(expected), abs=2e-5)


CUT_ALIKE = {
    "default": {},
    "gspo": {"loss": {"kind": "gspo"}, "aggregation": {"kind": "sequence_mean"}},
    "fixed length": {"aggregation": {"kind": "fixed_length", "length": 9}},
    "sequence mask": {
        "loss": {"kind": "cispo"},
        "correction": {
            "level": "sequence", "mode": "mask", "quantity": "kl", "threshold": 2.0,
        },
    },
    "sequence weight": {
        "aggregation": {"kind": "sequence_mean"},
        "correction": {"level": "sequence", "mode": "clip", "threshold": 3.0},
    },
    "every term": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "loss": {"kind": "reinforce"},
        "kl": {"kind": "loss", "coefficient": 0.1},
        "entropy_coefficient": 0.01,
    },
    "critic": {"advantage": {"kind": "gae", "trace": 0.5}},
    "penalties": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "kl": {"kind": "reward", "coefficient": 0.1, "estimator": "k2"},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CUT_ALIKE)
def test_gradients_do_not_depend_on_how_the_step_is_cut(model: Path, kind: str) -> None:
    algorithm = CUT_ALIKE[kind]
    policy = policy_of(model, **algorithm)
    if policy._critic is not None:
        # The critic's head starts at zero. Without a value, no gradient could be wrong.
        head: Any = policy._critic._tokens.model.get_output_embeddings()
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    rng = np.random.default_rng(6)
    groups = [read(random_group(rng)) for _ in range(5)]
    whole = plan(groups, 100_000, False, **algorithm)
    assert len(whole.updates[0].batches) == 1
    expected = gradients(policy, whole)
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 1e-3
    for budget, share in ((30, False), (100_000, True), (60, True), (1, True)):
        found = gradients(policy, plan(groups, budget, share, **algorithm))
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=2e-6 * max(1, largest), rtol=1e-4), (
                budget, share, name,
            )  # fmt: skip


def test_masked_tokens_leave_no_trace_in_the_gradient(model: Path) -> None:
    policy = policy_of(model)
    prompts = [1, 2, 3]
    with_late = group(
        trajectory([context(prompts), written([4, 5], version=0), written([6], version=5)], 1.0),
        trajectory([context(prompts), written([4, 5], version=0), written([7], version=5)], 0.0),
    )
    as_context = group(
        trajectory([context([*prompts, 4, 5]), written([6], version=5)], 1.0),
        trajectory([context([*prompts, 4, 5]), written([7], version=5)], 0.0),
    )
    found = []
    for message in (with_late, as_context):
        each = read(message, trainer_version=5, max_lag=2)
        found.append(gradients(policy, plan([each])))
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name


def test_a_model_whose_attention_ignores_masks_is_found_out(model: Path) -> None:
    policy = policy_of(model)
    inner = policy._tokens.model

    class Deaf:
        def __call__(self, *, attention_mask: Any, **rest: Any) -> Any:
            return inner(attention_mask=None, **rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    policy._tokens.model = Deaf()  # type: ignore[assignment]
    assert not policy.supports_trees()


def branch(segments: Sequence[Any], parent: str, count: int, name: str, reward: float = 1.0) -> Any:
    found = trajectory(segments, reward, name)
    found.parent_trajectory_id, found.parent_token_count = parent, count
    return found


def test_what_a_branch_shares_with_its_parent_is_context_there():
    root = trajectory([context([1, 2]), written([3, 4, 5])], 0.0, "root")
    child = branch([context([6]), written([7], logprobs=[-2.0])], "root", 4, "child")
    leaf = branch([written([8])], "child", 6, "leaf")
    whole = read(group(root, child, leaf)).samples
    assert [sample.token_ids.tolist() for sample in whole] == [
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 6, 7],
        [1, 2, 3, 4, 6, 7, 8],
    ]
    trained = [np.flatnonzero(sample.trained).tolist() for sample in whole]
    assert trained == [[2, 3, 4], [5], [6]]
    assert whole[1].behaviour_logprobs.tolist() == [0, 0, 0, 0, 0, -2.0]
    assert whole[1].temperatures.tolist() == [1.0] * 6
    # A branch keeps its tokens even if its parent failed.
    failed = trajectory([context([1, 2]), written([3, 4, 5])], None, "root")
    [alone] = read(group(failed, child)).samples
    assert alone.token_ids.tolist() == whole[1].token_ids.tolist()
    assert read(group(root, child, leaf)).policy_tokens == 5


def test_marks_of_a_branch_count_its_parents_tokens():
    root = trajectory([context([1, 2]), written([3])], 0.0, "root")
    child = branch([written([4, 5])], "root", 3, "child")
    for mark, trained in (([[3, 4]], [4]), ([[4]], [3]), ([[0]], []), ([[9]], [3, 4])):
        child.outcome.metadata.update({"penstock.untrained": mark})
        sample = read(group(root, child)).samples[1]
        assert np.flatnonzero(sample.trained).tolist() == trained
