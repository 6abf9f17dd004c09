"""The table of parameter names, and the patches that run megatron-core on a CPU. Needs no
megatron-core.
"""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.trainer.core.errors import BackendUnusable
from penstock.trainer.policy.megatron import hook as megatron_hook
from penstock.trainer.policy.megatron.names import (
    Cut,
    Shape,
    entries,
    held_entries,
    local_name,
    stage_of,
)


def make(family: str, *, tied: bool) -> PreTrainedModel:
    configuration, architecture = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    return architecture(
        configuration(
            vocab_size=37,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=tied,
        )
    )


def shape_of(family: str, model: PreTrainedModel) -> Shape:
    config = model.config
    return Shape(
        layers=4,
        heads=8,
        groups=4,
        head_dim=getattr(config, "head_dim", None) or 4,
        vocabulary=37,
        tied=config.tie_word_embeddings,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_comes_back_bit_for_bit(family: str, tied: bool, ranks: int) -> None:
    model = make(family, tied=tied)
    shape = shape_of(family, model)
    expected = dict(model.named_parameters())
    for tensor in expected.values():
        torch.nn.init.normal_(tensor)
    found: dict[str, torch.Tensor] = {}
    for entry in entries(shape):
        whole = entry.join([expected[name].detach() for name in entry.hf], shape)
        parts = [entry.take(whole, rank, ranks) for rank in range(ranks)]
        assert len({part.shape for part in parts}) == 1
        found.update(zip(entry.hf, entry.split(entry.mend(parts, shape), shape), strict=True))
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_queries_keys_and_values_lie_by_group() -> None:
    shape = Shape(1, 4, 2, 1, 8, tied=True, qk_norm=False, qkv_bias=False)
    (entry,) = (entry for entry in entries(shape) if entry.cut is Cut.QKV)
    query, key, value = torch.tensor([1, 2, 3, 4]), torch.tensor([10, 20]), torch.tensor([100, 200])
    assert entry.join([query, key, value], shape).tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_each_half_of_what_is_gated_is_cut_by_itself() -> None:
    shape = Shape(1, 1, 1, 1, 8, tied=True, qk_norm=False, qkv_bias=False)
    (entry,) = (entry for entry in entries(shape) if entry.cut is Cut.GATED)
    gate, up = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])
    assert entry.take(entry.join([gate, up], shape), 1, 2).tolist() == [3, 4, 7, 8]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_each_parameter_is_uploaded_by_one_stage(tied: bool) -> None:
    shape = Shape(4, 2, 2, 8, 37, tied=tied, qk_norm=True, qkv_bias=False)
    uploaded = list(entries(shape))
    for stage in (0, 1):
        held = list(held_entries(shape, stage, 2))
        own = [entry for entry in uploaded if stage_of(entry, shape, 2) == stage]
        # The last pipeline stage needs its own copy of a tied embedding, which it does not upload.
        extra = [entry.hf for entry in held if entry not in own]
        assert extra == ([("model.embed_tokens.weight",)] if tied and stage else [])
        names = [local_name(entry, shape, 2) for entry in held]
        assert len(set(names)) == len(names)
        layers = {name.split(".")[2] for name in names if name.startswith("decoder.layers.")}
        assert layers == {"0", "1"}


def test_cuda_is_rewritten_to_the_cpu() -> None:
    source = """
torch.distributed.barrier(group, device_ids=[torch.cuda.current_device()], timeout=1)
a = torch.zeros(1, device=torch.cuda.current_device())
b = torch.zeros(1, device='cuda')
def f(device: Union[int, str, torch.device] = "cuda", clone: bool = False): ...
assert p.type() == 'torch.cuda.BFloat16Tensor' or isinstance(p, torch.cuda.FloatTensor)
c = b.cuda()
torch.cuda.synchronize()
state = torch.cuda.get_rng_state(); torch.cuda.manual_seed(1)
if torch.cuda.is_available(): pass
"""
    rewritten = """
torch.distributed.barrier(group,  timeout=1)
a = torch.zeros(1, device=torch.device("cpu"))
b = torch.zeros(1, device='cpu')
def f(device: Union[int, str, torch.device] = "cpu", clone: bool = False): ...
assert p.type() == 'torch.BFloat16Tensor' or isinstance(p, torch.FloatTensor)
c = b.cpu()
None
state = torch.get_rng_state(); torch.manual_seed(1)
if torch.cuda.is_available(): pass
"""
    assert megatron_hook.rewrite(source) == rewritten
    assert megatron_hook.rewrite(rewritten) == rewritten


@pytest.mark.parametrize("cuda", [True, False], ids=["with CUDA", "without"])
def test_imports_are_left_alone_where_there_is_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    before = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", list(before))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    for _ in range(2):
        megatron_hook.install()
        assert len(sys.meta_path) == len(before) + (not cuda)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.metadata.version("megatron-core") == megatron_hook.VERSION
    monkeypatch.setattr(megatron_hook, "VERSION", "0.99.0")
    with pytest.raises(BackendUnusable, match=r"megatron-core 0\.16\.1 .* 0\.99\.0 is required"):
        megatron_hook.install()
