"""Algorithms through a real policy and a real run: reference, proximal policy, updates, figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.trainer.algorithms.batches import StepCounts
from penstock.trainer.algorithms.objective import PolicyOutput
from penstock.trainer.batching.batching import MAX_TREE_TOKENS
from penstock.trainer.batching.planning import StepPlan
from penstock.trainer.config.algorithm import AlgorithmConfig, CriticConfig
from penstock.trainer.config.trainer import LoraConfig, ModelConfig, TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.policy.backend import learning_rate
from penstock.trainer.policy.critic import Critic, Lesson
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.policy.sharding import Sharding
from penstock.trainer.policy.token_model import TokenModel
from penstock.trainer.state.checkpoint import save_checkpoint
from tests.support.tiny_model import make_tiny_model
from tests.trainer.batching.test_batching import (
    context,
    cut,
    group,
    plan,
    read,
    trajectory,
    written,
)
from tests.trainer.state.test_checkpoint import state, weights
from tests.trainer.test_end_to_end import (
    configure,
    letters,
    records,
    serving,
    start_trainer,
    working,
)

KL_IN_LOSS = {"kl": {"kind": "loss", "coefficient": 0.5, "estimator": "k3"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


def policy_of(
    model: Path, *, lora: bool = False, dropout: float = 0.0, updates: int = 1, **algorithm: Any
) -> FsdpPolicy:
    adapter = LoraConfig(rank=4, alpha=8.0, dropout=dropout) if lora else None
    return FsdpPolicy(
        ModelConfig(path=str(model), dtype="float32", lora=adapter),
        TrainConfig(learning_rate=1e-2, updates_per_step=updates),
        total_steps=10,
        seed=0,
        algorithm=AlgorithmConfig.model_validate(algorithm),
    )


def step_of(*spreads: float, updates: int = 1, **algorithm: Any) -> StepPlan:
    """A step with one group of two answers for each spread, which is the difference of their rewards."""
    groups = [
        read(
            group(
                trajectory([context([1, 2, number]), written([9, 8, 7])], spread),
                trajectory([context([1, 2, number]), written([9, 5])], 0.0),
            )
        )
        for number, spread in enumerate(spreads)
    ]
    return plan(groups, update_count=updates, **algorithm)


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapter"])
def test_the_reference_is_the_model_the_run_began_from(
    model: Path, tmp_path: Path, lora: bool
) -> None:
    first = policy_of(model, lora=lora, **KL_IN_LOSS)
    step = step_of(1.0, -1.0, **KL_IN_LOSS)
    divergences = [first.step(step).kl_reference for _ in range(3)]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert divergences[1] is not None and divergences[1] > 1e-5
    # A resumed run uses the same reference model, which its checkpoint does not contain.
    path = save_checkpoint(tmp_path, state(), first.save, keep=1)
    expected = [first.step(step) for _ in range(2)]
    second = policy_of(model, lora=lora, **KL_IN_LOSS)
    second.load(path)
    assert [second.step(step) for _ in range(2)] == expected
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, weights(first)[name]), name


def test_an_adapter_switched_off_is_the_model_without_it(model: Path) -> None:
    policy = policy_of(model, lora=True, **KL_IN_LOSS)
    step = step_of(1.0, **KL_IN_LOSS)
    for _ in range(3):
        policy.step(step)
    (batch,) = step.updates[0].batches
    bare = policy_of(model)._outputs([batch])[0]
    torch.testing.assert_close(policy._reference_outputs([batch])[0], bare, atol=1e-5, rtol=0)
    assert not torch.allclose(policy._outputs([batch])[0], bare, atol=1e-3)


def test_kl_holds_the_policy_near_its_reference(model: Path) -> None:
    def drift(**algorithm: Any) -> float:
        policy = policy_of(model, **algorithm)
        step = step_of(1.0, -1.0, **algorithm)
        (batch,) = step.updates[0].batches
        before = policy._outputs([batch])[0]
        for _ in range(6):
            policy.step(step)
        return float((policy._outputs([batch])[0] - before).abs().mean())

    loss = {"loss": {"kind": "reinforce"}}
    kl = {"kl": {"kind": "loss", "coefficient": 20.0, "estimator": "k2"}}
    assert drift(**loss, **kl) < 0.5 * drift(**loss)


def test_penalties_make_advantages_where_rewards_have_no_spread(model: Path) -> None:
    algorithm = {
        "advantage": {"kind": "reinforce_plus_plus"},
        "kl": {"kind": "reward", "coefficient": 0.1},
    }
    step = step_of(0.0, 0.0, **algorithm)
    assert step.updates and not step.updates[0].batches[0].advantages_N.any()
    result = policy_of(model, **algorithm).step(step)
    # The behaviour policy here differs from the model, and their KL is the penalty.
    assert result.applied and result.grad_norm > 0.0
    assert result.kl_reference is not None and result.kl_reference > 0.5


def seen_by(policy: FsdpPolicy) -> list[PolicyOutput]:
    """Record the objective's inputs from now on."""
    seen: list[PolicyOutput] = []
    evaluate = policy._objective.evaluate

    def note(output: PolicyOutput, counts: Any) -> Any:
        seen.append(output)
        return evaluate(output, counts)

    policy._objective.evaluate = note  # type: ignore[method-assign]
    return seen


def test_the_proximal_policy_is_that_of_the_steps_beginning(model: Path) -> None:
    correction = {"correction": {"level": "token", "mode": "clip", "threshold": 1e6}}
    policy = policy_of(model, updates=2, **correction)
    step = step_of(1.0, -1.0, updates=2, **correction)
    assert [update.counts.tokens for update in step.updates] == [5, 5]
    before = [policy._outputs([update.batches[0]])[0] for update in step.updates]
    seen = seen_by(policy)
    result = policy.step(step)
    assert seen[0].proximal_logprobs_N is None
    assert torch.allclose(seen[0].logprobs_N, before[0], atol=1e-6)
    assert seen[1].proximal_logprobs_N is not None
    assert torch.equal(seen[1].proximal_logprobs_N, before[1])
    # By then the policy has already changed.
    assert not torch.allclose(seen[1].logprobs_N, before[1], atol=1e-4)
    ratios = torch.cat(
        [(old - update.batches[0].behaviour_logprobs_N).exp()
         for old, update in zip(before, step.updates, strict=True)]
    )  # fmt: skip
    assert result.correction_weight_mean == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert result.correction_weight_max == pytest.approx(float(ratios.max()), rel=1e-4)
    assert policy._steps == 2


def test_the_proximal_policy_drops_nothing_out(model: Path) -> None:
    correction = {"correction": {"level": "token", "mode": "clip", "threshold": 1e6}}
    policy = policy_of(model, lora=True, dropout=0.5, **correction)
    step = step_of(1.0, -1.0, **correction)
    # Initially an adapter adds nothing, so dropout has no effect yet.
    policy.step(step)
    (batch,) = step.updates[0].batches
    before = policy._outputs([batch])[0]
    seen = seen_by(policy)
    policy.step(step)
    assert not torch.allclose(seen[0].logprobs_N, before, atol=1e-4)
    assert seen[0].proximal_logprobs_N is not None
    assert torch.equal(seen[0].proximal_logprobs_N, before)


@pytest.mark.parametrize(("fields", "drops"), [({}, False), ({"attention_dropout": 0.1}, True)])
def test_a_models_own_dropout_is_known(fields: dict[str, Any], drops: bool) -> None:
    config = AutoConfig.for_model("qwen3", **SMALL, **fields)
    tokens = TokenModel(AutoModelForCausalLM.from_config(config), autocast=False)
    assert tokens.drops_out is drops


def test_updates_of_a_step_go_along_the_schedule() -> None:
    train = TrainConfig(learning_rate=1.0, warmup_steps=1, schedule="cosine", updates_per_step=2)
    assert [learning_rate(n, train, 3) for n in (0, 1, 2, 6)] == [0.5, 1.0, 1.0, 0.0]


def test_a_step_that_moves_nothing_moves_no_schedule(model: Path) -> None:
    train = TrainConfig(learning_rate=1.0, warmup_steps=2, schedule="cosine")
    path = ModelConfig(path=str(model), dtype="float32")
    policy = FsdpPolicy(path, train, total_steps=4, seed=0)
    spreads = 1.0, 0.0, 1.0, 1.0
    rates = [policy.step(step_of(spread)).learning_rate for spread in spreads]
    # Only steps that move something advance the schedule, so the last rate is not near zero.
    assert rates == [0.5, None, 1.0, learning_rate(2, train, 4)]
    assert rates[-1] == 1.0 and learning_rate(4, train, 4) == 0.0


def test_groups_that_can_move_nothing_have_their_part_of_an_update(model: Path) -> None:
    step = step_of(1.0, 0.0, 0.0, -1.0, updates=2)
    assert [update.counts.tokens for update in step.updates] == [10, 10]
    assert [update.counts.sequences for update in step.updates] == [4, 4]
    assert (step.groups_without_gradient, step.trained_tokens) == (2, 20)
    # They cost nothing: one group of each update is computed.
    computed = [sum(len(b.tokens_N) for b in update.batches) for update in step.updates]
    assert computed == [5, 5]
    # An update of only such groups is skipped, and does not affect the other update.
    step = step_of(0.0, 0.0, 1.0, 0.0, updates=2)
    assert [update.counts.tokens for update in step.updates] == [10]
    assert (step.updates_skipped, step.groups_without_gradient) == (1, 3)
    nothing = step_of(0.0, 0.0, updates=2)
    assert (nothing.updates, nothing.updates_skipped, nothing.trained_tokens) == ((), 2, 0)
    # With fewer groups than updates there are fewer updates.
    few = step_of(1.0, updates=3)
    assert (len(few.updates), few.updates_skipped) == (1, 2)


def test_an_entropy_bonus_makes_answers_less_certain(model: Path) -> None:
    bonus = {"entropy_coefficient": 1.0}
    policy = policy_of(model, **bonus)
    step = step_of(0.0, **bonus)
    entropies = [policy.step(step).entropy for _ in range(6)]
    assert entropies[-1] > entropies[0] + 0.01
    assert 0 < entropies[0] < math.log(264)


def test_a_correction_that_masks_everything_moves_nothing(model: Path) -> None:
    mask = {"level": "token", "mode": "mask", "quantity": "kl", "threshold": 1e-9}
    policy = policy_of(model, correction=mask)
    before = weights(policy)
    result = policy.step(step_of(1.0, correction=mask))
    assert (result.applied, result.correction_masked, result.correction_weight_mean) == (
        False, 1.0, 0.0,
    )  # fmt: skip
    # Only computing the update shows that nothing remains.
    assert (result.updates, result.updates_skipped, result.groups_without_gradient) == (1, 1, 0)
    assert result.loss == 0.0 and result.grad_norm == 0.0
    # If another term moves the weights, the update is not skipped.
    both = policy_of(model, correction=mask, entropy_coefficient=0.1)
    result = both.step(step_of(1.0, correction=mask, entropy_coefficient=0.1))
    assert (result.applied, result.updates_skipped) == (True, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(policy).items())


def test_a_gradient_that_is_no_number_moves_nothing_and_is_counted(model: Path) -> None:
    policy = policy_of(model, updates=2)
    before = weights(policy)
    assert policy.step(step_of(1.0, -1.0, updates=2)).updates_not_finite == 0
    moved = weights(policy)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in moved.items())
    broken = next(policy._module.parameters())
    with torch.no_grad():
        broken[2, 0] = math.nan  # Of a token in every prompt.
    result = policy.step(step_of(1.0, -1.0, updates=2))
    assert (result.applied, result.updates, result.updates_not_finite) == (False, 2, 2)
    assert result.updates_skipped == 0
    same = [torch.equal(tensor, moved[name]) for name, tensor in weights(policy).items()]
    assert same.count(False) == 1, "only the one that was broken is another"


GAE = {"advantage": {"kind": "gae", "critic": {"learning_rate": 1e-2}}}


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapter"])
def test_a_critic_learns_what_answers_are_worth_and_goes_on_exactly(
    model: Path, tmp_path: Path, lora: bool
) -> None:
    first = policy_of(model, lora=lora, updates=2, **GAE)
    step = step_of(1.0, 0.3, -1.0, updates=2, **GAE)
    results = [first.step(step) for _ in range(6)]
    # The critic starts without any knowledge.
    assert results[0].critic_explained_variance == pytest.approx(0.0, abs=1e-6)
    explained = [result.critic_explained_variance or 0.0 for result in results]
    # Two answers begin alike, so much of the reward cannot be predicted.
    assert explained[-1] > 0.1
    assert (results[-1].critic_loss or 0.0) < (results[0].critic_loss or 0.0)
    path = save_checkpoint(tmp_path, state(), first.save, keep=1)
    expected = [first.step(step) for _ in range(2)]
    second = policy_of(model, lora=lora, updates=2, **GAE)
    second.load(path)
    assert [second.step(step) for _ in range(2)] == expected
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, weights(first)[name]), name


def test_an_update_of_the_critic_alone_is_not_skipped(model: Path) -> None:
    """With an untrained critic and equal rewards, whitened advantages are zero, but the critic
    still learns.
    """
    settings = {"advantage": {**GAE["advantage"], "trace": 1.0}}
    policy = policy_of(model, **settings)
    answers = [trajectory([context([1, 2]), written([9, 8, n])], 0.5) for n in (3, 4)]
    step = plan([read(group(*answers))], **settings)
    results = [policy.step(step) for _ in range(2)]
    assert (results[0].updates, results[0].updates_skipped, results[0].applied) == (1, 0, False)
    losses = [result.critic_loss or 0.0 for result in results]
    assert losses[0] == pytest.approx(0.125)
    assert 0.0 < losses[1] < losses[0]


def test_a_critic_is_no_part_of_what_is_uploaded(model: Path, tmp_path: Path) -> None:
    plain = policy_of(model)
    policy = policy_of(model, **GAE)
    assert list(weights(policy)) == list(weights(plain))
    # It cannot load a checkpoint without a critic.
    path = save_checkpoint(tmp_path, state(), plain.save, keep=1)
    with pytest.raises(CheckpointUnusable, match="a run without a critic"):
        policy.load(path)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("gemma2", {"final_logit_softcapping": 1.0, "sliding_window": 4096}),
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
    ],
)
def test_what_a_model_does_to_its_logits_it_does_to_no_value(
    architecture: str, fields: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(architecture, **SMALL, **fields)
    critic = Critic(
        AutoModelForCausalLM.from_config(config),
        CriticConfig(learning_rate=1e-3),
        TrainConfig(),
        Sharding(),
        blocks=(),
        autocast=False,
    )
    (batch,) = step_of(1.0).updates[0].batches
    targets = torch.full((len(batch.predictions_N),), 100.0)
    with torch.no_grad():
        head = dict(critic._module.named_parameters())["lm_head.bias"]
        head.fill_(97.0)
    before = critic.values(batch)
    assert before.tolist() == pytest.approx([97.0] * len(before))
    for _ in range(3):
        critic.learn([Lesson(batch, before, targets)], StepCounts(tokens=len(before), sequences=2))
    assert ((critic.values(batch) - targets).abs() < (before - targets).abs()).all()


def test_a_critic_whose_attention_ignores_masks_is_found_out() -> None:
    torch.manual_seed(0)
    critic = Critic(
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SMALL)),
        CriticConfig(learning_rate=1e-3),
        TrainConfig(),
        Sharding(),
        blocks=(),
        autocast=False,
    )
    assert critic.supports_trees()
    inner = critic._tokens.model

    class Deaf:
        def __call__(self, *, attention_mask: Any, **rest: Any) -> Any:
            return inner(attention_mask=None, **rest)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    critic._tokens.model = Deaf()  # type: ignore[assignment]
    assert not critic.supports_trees()
    assert not any(map(torch.any, critic._head.parameters()))


def test_a_critic_decays_as_the_policy_does(model: Path) -> None:
    algorithm = AlgorithmConfig.model_validate(GAE)
    train = TrainConfig(weight_decay=0.1)
    policy = FsdpPolicy(
        ModelConfig(path=str(model)), train, total_steps=1, seed=0, algorithm=algorithm
    )
    assert policy._critic is not None
    for optimizer in (policy._optimizer, policy._critic._optimizer):
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_a_function_that_is_not_there_ends_the_run_before_it_begins(model: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"algorithm\.loss\.function no\.module:f"):
        policy_of(model, loss={"kind": "custom", "function": "no.module:f"})


async def test_a_run_tells_the_figures_of_its_algorithm(model: Path, tmp_path: Path) -> None:
    async with serving(model) as server, working(server.address, letters):
        path = configure(
            tmp_path,
            model,
            server.address,
            train={"updates_per_step": 2},
            algorithm={
                "advantage": {"kind": "reinforce_plus_plus_baseline"},
                "loss": {"kind": "custom", "function": "tests.trainer.algorithms.test_loss:cautious"},
                "aggregation": {"kind": "sequence_mean"},
                "kl": {"kind": "reward", "coefficient": 0.01},
                "correction": {
                    "level": "sequence", "mode": "mask", "quantity": "ratio", "threshold": [1e-6, 1e6],
                },
                "entropy_coefficient": 0.001,
            },
        )  # fmt: skip
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
    steps = records(tmp_path)
    assert len(steps) == 3 and all(step["applied"] for step in steps)
    for step in steps:
        assert step["groups_without_gradient"] == 0
        assert step["tokens_trained"] == step["tokens"] - step["tokens_masked"]
        assert step["entropy"] > 0.0 and step["correction_weight_max"] > 0.0
        assert 0.0 <= step["correction_masked"] <= 1.0 and step["correction_clipped"] == 0.0
        # This loss has no bounds.
        assert step["clip_fraction"] is None and step["clip_fraction_low"] is None
        assert math.isfinite(step["kl_reference"])
    assert json.loads(json.dumps(steps)) == steps


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
WINDOW = 16
MOST = MAX_TREE_TOKENS


@pytest.mark.parametrize(
    ("architecture", "fields", "shares"),
    [
        ("mistral", {"sliding_window": WINDOW}, False),
        ("mistral", {"sliding_window": MOST - 1}, False),
        ("mistral", {"sliding_window": MOST}, True),
        ("mistral", {"sliding_window": None}, True),
        ("qwen2", {"sliding_window": WINDOW}, True),
        (
            "qwen2",
            {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
            False,
        ),
        (
            "qwen2",
            {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
            True,
        ),
        ("gemma3_text", {"sliding_window": WINDOW}, False),
        ("gemma3_text", {"sliding_window": WINDOW, "layer_types": ["full_attention"] * 2}, True),
        ("llama4_text", {"attention_chunk_size": WINDOW, "num_local_experts": 1}, False),
    ],
)
def test_no_prefixes_are_shared_where_a_layer_attends_to_less_than_a_tree(
    architecture: str, fields: dict[str, Any], shares: bool
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SMALL, **fields)
    tokens = TokenModel(AutoModelForCausalLM.from_config(config), autocast=False)
    assert tokens.supports_trees() is shares
    # Check that `supports_trees` is right: trees give the same results if and only if it is true.
    prompt = [n % 50 + 3 for n in range(2 * WINDOW)]
    each = read(
        group(
            trajectory([context(prompt), written([9, 8, 7])], 1.0),
            trajectory([context(prompt), written([5, 9])], 0.0),
        )
    )
    tree, chains = (
        torch.cat([tokens.logprobs(batch) for batch in cut([each], 1000, share)]).sort().values
        for share in (True, False)
    )
    if fields.get("sliding_window") != MOST - 1:
        assert torch.allclose(tree, chains, atol=1e-4) is shares


@pytest.mark.parametrize(
    ("architecture", "fields", "longest"),
    [
        ("qwen3", {}, None),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, None),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, WINDOW),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [9.0] * 8,
                },
                "original_max_position_embeddings": WINDOW,
            },
            WINDOW,
        ),
    ],
)
def test_a_sequence_whose_neighbours_would_be_turned_otherwise_is_refused(
    architecture: str, fields: dict[str, Any], longest: int | None
) -> None:
    small = {**SMALL, "max_position_embeddings": WINDOW}
    config = AutoConfig.for_model(architecture, **small, **fields)
    tokens = TokenModel(AutoModelForCausalLM.from_config(config), autocast=False)
    short, long = (
        cut([read(group(*(trajectory([context([5] * n), written([9])], r) for r in (0.0, 1.0))))],
            1000, False)[0]
        for n in (WINDOW, WINDOW + 1)
    )  # fmt: skip
    alone = tokens.logprobs(short)
    if longest is None:
        tokens.logprobs(long)
    else:
        with pytest.raises(ConfigInvalid, match=f"{WINDOW + 1} tokens: beyond {longest}"):
            tokens.logprobs(long)
    assert torch.equal(tokens.logprobs(short), alone)
