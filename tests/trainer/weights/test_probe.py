"""The trainer's own score of a probe, compared with a separate forward pass of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.trainer.batching.batching import Sample, TrainingGroup
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.state.checkpoint import TrainerState, read_state, save_checkpoint
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.probe import Probe
from tests.support.tiny_model import make_tiny_model

TOKENS = [5, 250, 17, 17, 99, 3, 200, 64]


def independent(model: Any, token_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, -1)
    return np.asarray([float(logprobs[i, t]) for i, t in enumerate(token_ids[1:])], np.float32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trained_in", ["float32", "bfloat16"])
def test_scores_what_is_uploaded_and_not_what_is_trained(
    tmp_path: Path, tied: bool, dtype: str, trained_in: Any
) -> None:
    folder = make_tiny_model(tmp_path, tied=tied)
    settings = ModelConfig(path=str(folder), dtype=trained_in)
    policy = FsdpPolicy(settings, TrainConfig(), total_steps=1, seed=0)
    payload = Payload(policy.weights(), dtype)
    payload.fill(policy.weights())
    # The policy itself has changed since, but the payload counts.
    with torch.no_grad():
        for _, parameter in policy.weights():
            parameter.add_(0.01)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    scored = policy.score(payload.tensors(), TOKENS)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).float()
    np.testing.assert_allclose(scored, independent(served.eval(), TOKENS), atol=1e-6)
    # Scoring leaves the policy unchanged and in training mode.
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
    assert policy._module.training
    payload.close()


def group(*lengths: int) -> TrainingGroup:
    samples = tuple(
        Sample(
            "t",
            np.arange(10, 10 + n, dtype=np.int32),
            np.zeros(n, np.bool_),
            np.zeros(n, np.float32),
            np.ones(n, np.float32),
            0.0,
        )
        for n in lengths
    )
    return TrainingGroup(samples, (), 0, 0, 0, np.zeros(0, np.int64))


@pytest.mark.parametrize(
    ("tokens", "lengths", "expected"),
    [
        (4, [6, 8], (10, 11, 12, 13)),
        # A shorter sequence is taken whole; one that cannot be scored is left out.
        (4, [1, 0, 3, 8], (10, 11, 12)),
        (4, [1], ()),
        (0, [6], ()),
    ],
)
def test_the_sequence_is_the_beginning_of_a_trajectory(
    tokens: int, lengths: list[int], expected: tuple[int, ...]
) -> None:
    probe = Probe(lambda *_: np.zeros(0, np.float32), tokens=tokens, tolerance=1.0)
    probe.choose([group(*lengths)])
    assert probe.token_ids == expected
    if expected:
        probe.choose([group(*[length + 20 for length in lengths])])
        assert probe.token_ids == expected


def test_a_score_that_is_not_finite_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe(
        lambda *_: np.asarray([np.nan], np.float32), tokens=2, tolerance=1.0, token_ids=(1, 2)
    )
    assert probe.measure({}) is None
    assert "not finite" in caplog.text


def test_a_checkpoint_keeps_the_sequence_and_older_ones_have_none(tmp_path: Path) -> None:
    state = TrainerState("run", 3, 3, 17, (11,), probe=(5, 6, 7))
    path = save_checkpoint(tmp_path, state, lambda folder: None, keep=2)
    assert read_state(path) == state
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace(', "probe": [5, 6, 7]', ""))
    assert read_state(path) == replace(state, probe=())
