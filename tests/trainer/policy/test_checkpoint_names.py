"""Weights are exported under their checkpoint's names, whatever their layout in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.checkpoint_names import CheckpointNames
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.state.checkpoint import save_checkpoint
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.trainer.state.test_checkpoint import state, weights
from tests.trainer.test_algorithms import step_of

SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTURES = {
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "olmoe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
}


def made(folder: Path, architecture: str, **fields: Any) -> Path:
    """A model's folder as downloaded from a hub, with a tokenizer."""
    torch.manual_seed(0)
    make_tiny_model(folder)
    config = AutoConfig.for_model(architecture, **SMALL, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def policy_of(model: Path) -> FsdpPolicy:
    return FsdpPolicy(
        ModelConfig(path=str(model), dtype="float32"),
        TrainConfig(learning_rate=1e-2),
        total_steps=10,
        seed=0,
        algorithm=AlgorithmConfig(),
    )


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_of_experts_is_uploaded_as_its_folder_has_it(
    tmp_path: Path, architecture: str
) -> None:
    policy = policy_of(made(tmp_path / "model", architecture, **MIXTURES[architecture]))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    uploaded = weights(policy)
    assert uploaded.keys() == saved.keys()
    assert sum("experts.3." in name for name in saved) == 2 * 3
    for name, tensor in saved.items():
        assert torch.equal(uploaded[name], tensor), name

    tokens = [1, 2, 3, 9, 8, 7]
    at_first = policy.score(uploaded, tokens)
    assert policy.step(step_of(1.0, -1.0)).applied
    # The earlier upload still gives its old scores, and a new upload gives the policy's current ones.
    assert (policy.score(saved, tokens) == at_first).all()
    moved = weights(policy)
    assert any("experts" in n and not torch.equal(moved[n], saved[n]) for n in saved)
    now = policy.score(moved, tokens)
    assert abs(now - at_first).max() > 1e-3
    # A saved checkpoint does, too.
    path = save_checkpoint(tmp_path / "run", state(), policy.save, keep=1)
    again = policy_of(tmp_path / "model")
    again.load(path)
    assert (again.score(weights(again), tokens) == now).all()


def test_tensors_that_are_themselves_are_not_copied(tmp_path: Path) -> None:
    policy = policy_of(make_tiny_model(tmp_path, layers=1))
    own = dict(policy._module.named_parameters())
    for name, tensor in policy.weights():
        assert tensor.data_ptr() == own[name].data_ptr()


def test_a_checkpoint_of_other_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, layers=1))
    names = CheckpointNames(model, "m")
    first = next(iter(dict(model.named_parameters())))
    assert [name for name, _ in names.of(first, torch.zeros(1))] == [first]

    def half(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[:1] if name == first else tensor for name, tensor in tensors.items()}

    monkeypatch.setattr("penstock.trainer.policy.checkpoint_names.as_saved", half)
    with pytest.raises(ConfigInvalid, match=f"'m' has other numbers.*{first}.*model.lora"):
        CheckpointNames(model, "m")
