"""Every algorithm against `reference_algorithms`: advantages, loss and gradients agree to 1e-6.

The random groups contain environment tokens, several versions, tokens that are too old, branches
and failures. Some groups have no spread, a single attempt, or no token young enough. They are cut
into micro-batches and share prefixes as in a real step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock.trainer.algorithms.objective import Objective, PolicyOutput
from penstock.trainer.batching.batching import read_group
from penstock.trainer.batching.planning import StepPlan, complete, plan_step
from penstock.trainer.config.algorithm import AlgorithmConfig
from tests.support import reference_algorithms as reference
from tests.trainer.batching.test_batching import context, group, trajectory, written

VERSION, MAX_LAG = 6, 3
TOLERANCE = 1e-6
AGGREGATIONS = (
    {"kind": "token_mean"},
    {"kind": "sequence_mean"},
    {"kind": "fixed_length", "length": 12},
)
MASK = {"mode": "mask", "quantity": "ratio", "threshold": [0.7, 1.4]}
KL_MASK = {"mode": "mask", "quantity": "kl"}
CORRECTIONS = (
    {"level": "off", "ratio_to": "proximal"},
    {"level": "token", "mode": "clip", "threshold": 1.3},
    {"level": "sequence", "mode": "clip", "threshold": 1.5},
    {"level": "token", **MASK},
    {"level": "token", **MASK, "weighted": False},
    {"level": "sequence", **MASK, "threshold": [0.9, 1.2]},
    {"level": "sequence", **MASK, "threshold": [0.9, 1.2], "weighted": False},
    {"level": "token", **KL_MASK, "threshold": 0.05},
    {"level": "sequence", **KL_MASK, "threshold": 0.04, "estimator": "k2"},
)
LOSSES = (
    {"kind": "ppo_clip"},
    {"kind": "ppo_clip", "clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5},
    {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2},
    {"kind": "cispo", "clip_low": 0.3, "clip_high": 0.4},
    {"kind": "reinforce"},
)
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
TABLES: list[dict[str, Any]] = [
    *({"advantage": {"kind": kind}} for kind in ADVANTAGES),
    *({"loss": loss, "aggregation": each} for loss in LOSSES for each in AGGREGATIONS),
    *(
        {"advantage": {"kind": kind}, "kl": {"kind": "reward", "coefficient": 0.3}}
        for kind in ADVANTAGES
    ),
    *(
        {"kl": {"kind": where, "coefficient": 0.2, "estimator": estimator}}
        for where in ("loss", "reward")
        for estimator in ("k1", "k2", "k3")
    ),
    *(
        {"correction": correction, "loss": loss}
        for correction in CORRECTIONS
        for loss in LOSSES
        if not (loss["kind"] == "reinforce" and "ratio_to" in correction)
    ),
    {"advantage": {"kind": "gae"}},
    {"advantage": {"kind": "gae", "discount": 0.9, "trace": 0.7, "whiten": False}},
    {"advantage": {"kind": "gae", "trace": 1.0}, "kl": {"kind": "reward", "coefficient": 0.3}},
    {
        "advantage": {"kind": "rloo"},
        "loss": {"kind": "cispo"},
        "aggregation": {"kind": "sequence_mean"},
        "correction": {"level": "token", "mode": "clip", "threshold": 2.0},
        "kl": {"kind": "loss", "coefficient": 0.1},
        "entropy_coefficient": 0.05,
    },
]


def name_of(table: dict[str, Any]) -> str:
    return " ".join(
        ":".join(map(str, part.values())) if isinstance(part, dict) else str(part)
        for part in table.values()
    )


def random_groups(rng: np.random.Generator) -> list[Any]:
    return [
        *(random_group(rng, int(rng.integers(2, 6))) for _ in range(4)),
        # No spread; no spread among the attempts alone; one attempt; no token young enough; no
        # policy token.
        random_group(rng, 3, reward=0.1),
        branched(random_group(rng, 4, reward=0.1), 0.7),
        random_group(rng, 1),
        random_group(rng, 3, versions=(0, 2)),
        group(trajectory([context([1, 2])], 1.0), trajectory([context([1, 2])], 0.0)),
    ]


def branched(message: Any, reward: float) -> Any:
    """Turn two trajectories into branches of the first attempt, with this reward."""
    for one in message.trajectories[2:4]:
        one.parent_trajectory_id = "t0"
        one.outcome.reward = reward
    return message


def random_group(
    rng: np.random.Generator,
    siblings: int,
    reward: float | None = None,
    versions: tuple[int, int] = (1, 7),
) -> Any:
    prompt = rng.integers(0, 9, int(rng.integers(0, 4)))
    trajectories = []
    for index in range(siblings):
        segments = [context(prompt)] if len(prompt) else []
        for _ in range(int(rng.integers(1, 4))):
            ids = rng.integers(0, 2, int(rng.integers(1, 5)))
            logprobs = rng.normal(-2, 0.5, len(ids)).tolist()
            segments.append(written(ids.tolist(), int(rng.integers(*versions)), logprobs))
            if rng.random() < 0.5:
                segments.append(context(rng.integers(0, 9, 2).tolist()))
        one = trajectory(segments, float(rng.normal()) if reward is None else reward, f"t{index}")
        if index > 1 and rng.random() < 0.3:
            one.parent_trajectory_id = "t0"
        trajectories.append(one)
    if siblings > 2:
        trajectories.append(trajectory([], None))
    return group(*trajectories)


def evaluate(
    plan: StepPlan, objective: Objective, known: dict[str, torch.Tensor]
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The loss of a step with one update, and its gradients by log-probabilities and by entropies."""
    (update,) = plan.updates
    logprobs_N = known["logprobs"].clone().requires_grad_()  # noqa: N806
    entropies_N = known["entropies"].clone().requires_grad_()  # noqa: N806
    total = 0.0
    for batch in update.batches:
        own = batch.tokens_N
        loss, _ = objective.evaluate(
            PolicyOutput(
                logprobs_N=logprobs_N[own],
                entropies_N=entropies_N[own],
                behaviour_logprobs_N=batch.behaviour_logprobs_N.double(),
                proximal_logprobs_N=known["proximal"][own],
                reference_logprobs_N=known["reference"][own] if objective.needs_reference else None,
                advantages_N=batch.advantages_N.double(),
                sequences=batch.sequences,
            ),
            update.counts,
        )
        loss.backward()
        total += float(loss.detach())
    slopes_N = entropies_N.grad  # noqa: N806
    assert logprobs_N.grad is not None
    return total, logprobs_N.grad, torch.zeros_like(entropies_N) if slopes_N is None else slopes_N


def models(rng: np.random.Generator, behaviour: Sequence[float]) -> dict[str, torch.Tensor]:
    """Random model outputs, close enough to the behaviour policy that only some bounds take effect."""
    near = {
        name: torch.tensor(np.asarray(behaviour) + rng.normal(0, 0.3, len(behaviour)))
        for name in ("logprobs", "proximal", "reference")
    }
    return {
        **near,
        "entropies": torch.tensor(rng.uniform(0, 3, len(behaviour))),
        "values": torch.tensor(rng.normal(0, 1, len(behaviour))),
    }


@pytest.mark.parametrize("table", TABLES, ids=name_of)
def test_the_step_is_that_of_the_papers(table: dict[str, Any]) -> None:
    objective = Objective(AlgorithmConfig.model_validate(table))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        messages = random_groups(rng)
        answers = reference.read(messages, VERSION, MAX_LAG)
        known = models(rng, [token.behaviour for a in answers for token in a.tokens])
        given = reference.Given(**{name: values.tolist() for name, values in known.items()})
        expected = reference.compute(answers, given, table)
        groups = [read_group(m, trainer_version=VERSION, max_lag=MAX_LAG) for m in messages]
        assert any(g.masked_tokens for g in groups) and any(g.failures for g in groups)
        plan = plan_step(groups, objective, token_budget=24)
        batches = plan.updates[0].batches
        assert len(batches) > 1
        if objective.advantages_wait:
            plan = complete(
                plan,
                objective,
                references=[known["reference"][b.tokens_N] for b in batches]
                if objective.needs_reference
                else (),
                values=[known["values"][b.tokens_N] for b in batches] if objective.critic else (),
            )
            targets = objective.value_targets(plan.rewards)
            np.testing.assert_allclose(targets, expected.targets, atol=TOLERANCE, rtol=TOLERANCE)
        assert plan.trained_tokens == sum(len(answer.tokens) for answer in answers)
        advantages = objective.advantages(plan.rewards)
        np.testing.assert_allclose(advantages, expected.advantages, atol=TOLERANCE, rtol=TOLERANCE)
        loss, slopes, entropy_slopes = evaluate(plan, objective, known)
        assert loss == pytest.approx(expected.loss, abs=TOLERANCE, rel=TOLERANCE)
        np.testing.assert_allclose(slopes, expected.slopes, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(entropy_slopes, expected.entropy_slopes, atol=TOLERANCE)


WITHOUT_WEIGHT: list[dict[str, Any]] = [
    {"kl": {"kind": "loss", "coefficient": 1e-12}},
    {"kl": {"kind": "reward", "coefficient": 1e-15}},
    {"entropy_coefficient": 1e-12},
    {
        "loss": {
            "kind": "custom",
            "function": "penstock.trainer.algorithms.losses:ppo_clip",
            "options": {"clip_low": 0.2, "clip_high": 0.28},
        }
    },
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=name_of)
@pytest.mark.parametrize("term", WITHOUT_WEIGHT, ids=name_of)
def test_a_term_without_weight_changes_nothing(
    term: dict[str, Any], aggregation: dict[str, Any]
) -> None:
    """The term makes the step compute every sequence, which must not change the weight of any of them."""
    rng = np.random.default_rng(0)
    groups = [read_group(m, trainer_version=VERSION, max_lag=MAX_LAG) for m in random_groups(rng)]
    behaviour = [x for g in groups for s in g.samples for x in s.behaviour_logprobs[s.trained]]
    known = models(rng, behaviour)
    found: list[tuple[float, torch.Tensor, torch.Tensor]] = []
    computed: list[int] = []
    for table in ({}, term):
        objective = Objective(AlgorithmConfig.model_validate({"aggregation": aggregation, **table}))
        plan = plan_step(groups, objective, token_budget=24)
        computed.append(sum(len(b.tokens_N) for u in plan.updates for b in u.batches))
        if objective.advantages_wait:
            batches = plan.updates[0].batches
            references = [known["reference"][b.tokens_N] for b in batches]
            plan = complete(plan, objective, references=references)
        found.append(evaluate(plan, objective, known))
    assert computed[0] < computed[1] == len(behaviour)
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-9)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-9, rtol=0)
