"""Whole steps of several updates against numpy: what is cut, divided, clipped and applied.

The expected values come from `reference_algorithms`, AdamW written out, and a plain transformers
model that runs one sequence at a time. They are compared with the policy after the same groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.trainer.batching.batching import read_group
from penstock.trainer.batching.planning import plan_step
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.wire import codec
from tests.support import reference_algorithms as reference
from tests.support.tiny_model import make_tiny_model
from tests.trainer.algorithms.test_algorithm_parity import (
    MAX_LAG,
    VERSION,
    branched,
    name_of,
    random_group,
)
from tests.trainer.batching.test_batching import context, group, trajectory

STEPS, UPDATES = 2, 3
TRAIN: dict[str, Any] = {
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    # Below the norms of these gradients, so that clipping takes effect.
    "max_grad_norm": 0.3,
    # Large enough that a gradient of rounding errors alone moves nothing.
    "epsilon": 1e-2,
    "updates_per_step": UPDATES,
}
TABLES: list[dict[str, Any]] = [
    {"advantage": {"kind": "grpo"}},
    {
        "advantage": {"kind": "dr_grpo"},
        "aggregation": {"kind": "fixed_length", "length": 9},
        "kl": {"kind": "reward", "coefficient": 0.3},
    },
    {
        "advantage": {"kind": "rloo"},
        "loss": {"kind": "cispo"},
        "aggregation": {"kind": "sequence_mean"},
        "correction": {"level": "token", "mode": "clip", "threshold": 1.2},
        "kl": {"kind": "loss", "coefficient": 0.1},
        "entropy_coefficient": 0.05,
    },
    {
        "advantage": {"kind": "reinforce_plus_plus_baseline"},
        "loss": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2},
        "aggregation": {"kind": "sequence_mean"},
        "correction": {"level": "off", "ratio_to": "proximal"},
    },
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, tied=True)


def groups_of(rng: np.random.Generator) -> list[Any]:
    """Groups for three updates. In the second, group-relative advantages are all zero."""
    return [
        random_group(rng, 4),
        random_group(rng, 3, reward=0.1),
        random_group(rng, 5),
        random_group(rng, 1),
        random_group(rng, 3, versions=(0, 2)),
        group(trajectory([context([1, 2])], 1.0), trajectory([context([1, 2])], 0.0)),
        branched(random_group(rng, 4, reward=0.1), 0.7),
        random_group(rng, 4),
        random_group(rng, 2),
    ]


class Expected:
    """A model and its optimizer, written out."""

    def __init__(self, folder: Path, table: dict[str, Any]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.table = table
        self.parameters = dict(self.model.named_parameters())
        self.first_moments = {n: np.zeros(p.shape) for n, p in self.parameters.items()}
        self.second_moments = {n: np.zeros(p.shape) for n, p in self.parameters.items()}
        self.updates = 0

    def step(self, answers: Sequence[reference.Answer], cut: Sequence[int]) -> dict[str, float]:
        """Make one update for each end in `cut`, of the groups before it. Returns the figures a
        policy reports.
        """
        with torch.no_grad():
            kept, _ = self.say(self.first, answers)
            beginning, _ = self.say(self.model, answers)
        losses, norms, skipped, trained = [], [], 0, 0
        for begin, end in zip([0, *cut], cut, strict=False):
            own = [answer for answer in answers if begin <= answer.group < end]
            logprobs, entropies = self.say(self.model, answers)
            given = reference.Given(
                logprobs.tolist(), beginning.tolist(), kept.tolist(), entropies.tolist(), []
            )
            found = reference.compute(answers, given, self.table, own)
            slopes = torch.tensor([found.slopes, found.entropy_slopes], dtype=torch.float32)
            advantages = [found.advantages[t.place] for answer in own for t in answer.tokens]
            # Zero except for rounding, as when equal rewards are compared with their mean.
            still = slopes.abs().max() < 1e-9
            skipped += bool(still)
            if still and np.abs(advantages).max() < 1e-9:
                continue
            losses.append(found.loss)
            trained += sum(len(answer.tokens) for answer in own)
            if still:
                norms.append(0.0)
                continue
            loss = (slopes[0] * logprobs).sum() + (slopes[1] * entropies).sum()
            gradients = torch.autograd.grad(loss, list(self.parameters.values()))
            norms.append(self.apply(dict(zip(self.parameters, gradients, strict=True))))
        return {
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "updates": len(norms),
            "updates_skipped": skipped,
            "tokens_trained": trained,
        }

    def say(
        self, model: Any, answers: Sequence[reference.Answer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy at each trained token, in the order of the tokens' places."""
        logprobs, entropies = [], []
        for answer in answers:
            if not answer.tokens:
                continue
            logits = model(torch.tensor([answer.ids])).logits[0]
            rows = torch.log_softmax(logits, -1)[[t.position - 1 for t in answer.tokens]]
            ids = [answer.ids[t.position] for t in answer.tokens]
            logprobs.append(rows[torch.arange(len(ids)), ids])
            entropies.append(-(rows.exp() * rows).sum(-1))
        return torch.cat(logprobs), torch.cat(entropies)

    def apply(self, gradients: dict[str, torch.Tensor]) -> float:
        """AdamW (arXiv 1711.05101) with the gradient clipped to a norm. Returns the norm before
        clipping.
        """
        arrays = {name: gradient.double().numpy() for name, gradient in gradients.items()}
        norm = float(np.sqrt(sum((array**2).sum() for array in arrays.values())))
        self.updates += 1
        b1, b2 = TrainConfig().betas
        rate = TRAIN["learning_rate"]
        for name, parameter in self.parameters.items():
            g = arrays[name] * min(1.0, TRAIN["max_grad_norm"] / norm)
            m = self.first_moments[name] = b1 * self.first_moments[name] + (1 - b1) * g
            v = self.second_moments[name] = b2 * self.second_moments[name] + (1 - b2) * g**2
            steadied = np.sqrt(v / (1 - b2**self.updates)) + TRAIN["epsilon"]
            weights = parameter.detach().double().numpy()
            decay = TRAIN["weight_decay"] if weights.ndim > 1 else 0.0
            weights = weights * (1 - rate * decay) - rate * m / (1 - b1**self.updates) / steadied
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(weights))
        return norm

    def sample(self, messages: Sequence[Any], rng: np.random.Generator) -> None:
        """Give the policy's tokens log-probabilities that a behaviour policy close to this one
        would have.
        """
        answers = reference.read(messages, VERSION, MAX_LAG)
        with torch.no_grad():
            near = iter(self.say(self.model, answers)[0].numpy() + 0.0)
        for message in messages:
            for one in (t for t in message.trajectories if t.outcome.HasField("reward")):
                begun = False
                for segment in one.segments:
                    values = codec.logprobs(segment).copy()
                    if VERSION - segment.weight_version <= MAX_LAG:
                        for index in range(0 if begun else 1, len(values)):
                            values[index] = next(near) + rng.normal(0, 0.3)
                    if len(values):
                        segment.logprobs = codec.array_bytes(values, codec.LOGPROB)
                    begun = True
        assert next(near, None) is None


@pytest.mark.parametrize("table", TABLES, ids=name_of)
def test_steps_of_several_updates_are_those_of_the_papers(
    model: Path, table: dict[str, Any]
) -> None:
    policy = FsdpPolicy(
        ModelConfig(path=str(model), dtype="float32"),
        TrainConfig.model_validate(TRAIN),
        total_steps=STEPS,
        seed=0,
        algorithm=AlgorithmConfig.model_validate(table),
    )
    expected = Expected(model, table)
    begun = {name: tensor.clone() for name, tensor in policy.weights()}
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        messages = groups_of(rng)
        expected.sample(messages, rng)
        groups = [read_group(m, trainer_version=VERSION, max_lag=MAX_LAG) for m in messages]
        plan = plan_step(groups, policy._objective, token_budget=40, update_count=UPDATES)
        result = policy.step(plan)
        figures = expected.step(reference.read(messages, VERSION, MAX_LAG), (3, 6, 9))
        for name, value in figures.items():
            assert getattr(result, name) == pytest.approx(value, abs=1e-6, rel=1e-4), name
        if table["advantage"]["kind"] in ("grpo", "dr_grpo"):
            assert figures["updates_skipped"] == 1
        assert figures["grad_norm"] > TRAIN["max_grad_norm"]
    for name, tensor in policy.weights():
        own = expected.parameters[name].detach()
        assert (own - begun[name]).abs().max() > 1e-3
        torch.testing.assert_close(tensor, own, atol=1e-6, rtol=0)
