"""A model without its own weights, which scores with the weights it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from penstock.trainer.policy.loading import outline
from penstock.trainer.policy.token_model import CausalModel, TokenModel

CPU = torch.device("cpu")


def test_buffers_that_come_with_the_weights_are_there(tmp_path: Path) -> None:
    """Such buffers choose the experts. With zeros instead, other experts would answer."""
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    model: Any = Glm4MoeForCausalLM(config).eval()
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 1
    biases[0].copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    config.save_pretrained(tmp_path)
    weights = {name: p.detach() for name, p in cast("nn.Module", model).named_parameters()}
    tokens = list(range(3, 20))
    wanted = TokenModel(cast("CausalModel", model), autocast=False).score(weights, tokens)
    buffers = dict(cast("nn.Module", model).named_buffers())
    found = outline(str(tmp_path), CPU, buffers).score(weights, tokens)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    with pytest.raises(AssertionError):
        bare = outline(str(tmp_path), CPU).score(weights, tokens)
        torch.testing.assert_close(bare, wanted, atol=1e-3, rtol=0)
