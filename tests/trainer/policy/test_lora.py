"""Training an adapter: what it computes, saves and uploads, and what it refuses."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from penstock.server.engine.protocol import AdapterLimits
from penstock.server.weights.adapter_manifest import adapter_tensors
from penstock.trainer.config.trainer import LoraConfig, ModelConfig, TrainConfig, load_config
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.policy.adapter import check_taken
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.state.checkpoint import save_checkpoint
from tests.support.harness import until
from tests.support.pools import serve_hub
from tests.support.tiny_model import make_tiny_model
from tests.trainer.config.test_config import MINIMAL, write
from tests.trainer.state.test_checkpoint import plan, policy_of, state, weights
from tests.trainer.test_end_to_end import (
    configure,
    letters,
    records,
    serving,
    start_trainer,
    tensors_of,
    working,
)

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}
TOKENS = list(b"what an adapter changes")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, tied=request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


def lora_policy(model: Path, settings: dict[str, Any] | None = None, **fields: Any) -> FsdpPolicy:
    config = ModelConfig(
        path=str(model),
        dtype="float32",
        lora=LoraConfig(**{**LORA, **(settings or {})}),
        **fields,
    )
    train = TrainConfig(learning_rate=1e-2, warmup_steps=4)
    return FsdpPolicy(config, train, total_steps=10, seed=0)


def scores(model: Any, tokens: list[int] = TOKENS) -> np.ndarray:
    """Log-probabilities of the tokens from transformers, or PEFT, alone."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


# Configuration


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank = 0\nalpha = 8", "model.lora.rank"),
        ("alpha = 8", "model.lora.rank"),
        ("rank = 4\nalpha = 0", "model.lora.alpha"),
        ("rank = 4\nalpha = 8\ndropout = 1.0", "model.lora.dropout"),
        ("rank = 4\nalpha = 8\ntarget_modules = []", "at least one layer"),
        ('rank = 4\nalpha = 8\ntarget_modules = ["lm_head"]', "lm_head is an embedding"),
        ("rank = 4\nalpha = 8\n[weights]\ntransport = 'checkpoint'", "checkpoint"),
        ("rank = 4\nalpha = 8\n[weights]\ndelta = 'on'", 'weights.delta = "on"'),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, f"{MINIMAL}\n[model.lora]\n{text}\n")
    with pytest.raises(ConfigInvalid, match="lora") as caught:
        load_config(path)
    assert said in str(caught.value)


def test_layers_that_the_model_lacks_are_refused(model: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"model\.lora: .*no_such_layer"):
        lora_policy(model, {"target_modules": ("no_such_layer",)})


def test_a_server_that_does_not_take_the_adapter_is_refused(model: Path) -> None:
    message = lora_policy(model).adapter()
    assert message is not None
    check_taken(message, 4)
    with pytest.raises(ConfigInvalid, match="--enable-lora --max-lora-rank 4"):
        check_taken(message, None)
    with pytest.raises(ConfigInvalid, match="at most 2"):
        check_taken(message, 2)


# The policy


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj"), ("layers.1.mlp.up_proj",)])
def test_what_is_uploaded_is_what_the_server_expects(model: Path, targets: Any) -> None:
    policy = lora_policy(model, {"target_modules": targets, "rank_stabilized": True})
    message = policy.adapter()
    assert message is not None
    assert (message.rank, message.alpha, message.rank_stabilized) == (4, 8.0, True)
    expected = adapter_tensors(tuple(message.target_modules), message.rank, tensors_of(model))
    uploaded = {name: tuple(tensor.shape) for name, tensor in policy.weights()}
    assert uploaded == {name: meta.shape for name, meta in expected.items()}
    assert sum(t.numel() for _, t in policy.weights()) < sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters()
    )


def test_it_begins_as_the_model_it_is_added_to(model: Path) -> None:
    policy = lora_policy(model)
    found = policy.score(weights(policy), TOKENS)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    np.testing.assert_allclose(found, scores(base), atol=1e-5)
    (batch,) = plan(0).updates[0].batches
    full = policy_of(model)._outputs([batch])[0]
    torch.testing.assert_close(policy._outputs([batch])[0], full, atol=1e-5, rtol=0)


def test_a_step_changes_the_adapter_alone(model: Path) -> None:
    policy = lora_policy(model)
    before = {name: p.clone() for name, p in policy._module.named_parameters()}
    for seed in range(2):
        assert policy.step(plan(seed)).applied
    changed = {
        name for name, p in policy._module.named_parameters() if not torch.equal(p, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}


def test_what_it_leaves_is_an_adapter_as_peft_loads_it(model: Path, tmp_path: Path) -> None:
    policy = lora_policy(model, {"rank_stabilized": True})
    for seed in range(3):
        policy.step(plan(seed))
    policy.save_model(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    own = policy.score(weights(policy), TOKENS)
    np.testing.assert_allclose(own, scores(loaded), atol=1e-5)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model)


def test_a_resumed_run_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    settings = {"dropout": 0.2}
    first = lora_policy(model, settings)
    for seed in range(3):
        assert first.step(plan(seed)).applied
    path = save_checkpoint(tmp_path, state(), first.save, keep=2)
    expected = [first.step(plan(seed)) for seed in range(3, 6)]
    second = lora_policy(model, settings)
    second.load(path)
    found = [second.step(plan(seed)) for seed in range(3, 6)]
    assert found == expected
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, weights(first)[name]), name
    # The checkpoint does not contain the base model.
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert size < 0.9 * (model / "model.safetensors").stat().st_size


def test_a_checkpoint_of_another_kind_of_run_is_refused(model: Path, tmp_path: Path) -> None:
    adapter, full = lora_policy(model), policy_of(model)
    of_adapter = save_checkpoint(tmp_path / "a", state(), adapter.save, keep=1)
    of_full = save_checkpoint(tmp_path / "b", state(), full.save, keep=1)
    with pytest.raises(CheckpointUnusable, match=r"model\.lora"):
        full.load(of_adapter)
    with pytest.raises(CheckpointUnusable, match="trained all weights"):
        adapter.load(of_full)
    others: list[tuple[dict[str, Any], str]] = [
        ({"rank": 2}, "r is 4"),
        ({"alpha": 4.0}, "lora_alpha"),
        ({"rank_stabilized": True}, "use_rslora"),
        ({"target_modules": ("q_proj",)}, "one side only"),
    ]
    for settings, said in others:
        with pytest.raises(CheckpointUnusable, match=said):
            lora_policy(model, settings).load(of_adapter)


def test_prefixes_are_shared_and_activations_recomputed_as_without_an_adapter(model: Path) -> None:
    plain = lora_policy(model)
    assert lora_policy(model, {"dropout": 0.5}).supports_trees()
    saving = lora_policy(model, gradient_checkpointing=True)
    for seed in range(2):
        one, two = plain.step(plan(seed)), saving.step(plan(seed))
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert one.grad_norm > 0


# The run


async def test_a_run_uploads_its_adapter_and_nothing_stands_still(
    tiny: Path, tmp_path: Path
) -> None:
    limits = AdapterLimits(8, 2)
    async with serving(tiny, adapters=limits) as server, working(server.address, letters):
        path = configure(tmp_path, tiny, server.address, model={"lora": LORA}, run={"steps": 4})
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
        assert server.engine.versions == [1, 2, 3, 4]
        assert server.engine.loaded == []
        assert server.engine.pauses == 0
        held = server.engine.adapters[4]
    left = load_file(tmp_path / "out" / "model" / "adapter_model.safetensors")
    assert sorted(held) == sorted(left)
    for name, tensor in left.items():
        np.testing.assert_array_equal(held[name], tensor)
    assert "the adapter, as PEFT writes it, after step 4" in err
    steps = records(tmp_path)
    assert all(step["pause_seconds"] == 0.0 for step in steps)
    whole = (tiny / "model.safetensors").stat().st_size
    assert all(0 < step["upload_bytes"] < whole / 2 for step in steps)


async def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(
    tiny: Path, tmp_path: Path
) -> None:
    limits = AdapterLimits(8, 2)
    async with serving(tiny, adapters=limits) as server, working(server.address, letters):
        sections: dict[str, Any] = {"model": {"lora": LORA}, "checkpoint": {"every_steps": 1}}
        path = configure(tmp_path, tiny, server.address, run={"steps": 2}, **sections)
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
        path = configure(tmp_path, tiny, server.address, run={"steps": 4}, **sections)
        code, _, err = await (await start_trainer(path, resume=True)).end()
        assert code == 0, err
        assert "resuming after step 2" in err
        assert server.engine.versions == [1, 2, 3, 4]
    # Another server knows only the base model, so it gets the whole adapter first.
    async with serving(tiny, adapters=limits) as server, working(server.address, letters):
        path = configure(tmp_path, tiny, server.address, run={"steps": 5}, **sections)
        code, _, err = await (await start_trainer(path, resume=True)).end()
        assert code == 0, err
        assert server.engine.versions == [4, 5]
    assert [step["step"] for step in records(tmp_path)] == [1, 2, 3, 4, 5]


async def test_a_run_through_a_hub_uploads_its_adapter_to_every_engine(
    tiny: Path, tmp_path: Path
) -> None:
    limits = AdapterLimits(8, 2)
    async with (
        serving(tiny, adapters=limits) as one,
        serving(tiny, adapters=limits) as two,
        serve_hub(tmp_path / "hub", [one.address, two.address]) as (hub, pool),
        working(hub.address, letters),
    ):
        await until(lambda: len(pool.roster.rotation) == 2)
        path = configure(tmp_path, tiny, hub.address, model={"lora": LORA}, run={"steps": 4})
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
        left = load_file(tmp_path / "out" / "model" / "adapter_model.safetensors")
        for server in (one, two):
            assert server.engine.versions == [1, 2, 3, 4]
            assert server.engine.loaded == []
            assert server.engine.pauses == 0
            for name, tensor in left.items():
                np.testing.assert_array_equal(server.engine.adapters[4][name], tensor)
        assert all(member.given for member in pool.roster.members)
    steps = records(tmp_path)
    assert [step["weight_version"] for step in steps] == [1, 2, 3, 4]
    assert all(step["pause_seconds"] == 0.0 and step["lag_max"] <= 2 for step in steps)


@pytest.mark.parametrize("behind_a_hub", [False, True])
async def test_a_run_on_a_server_without_lora_ends_at_once_and_says_why(
    tiny: Path, tmp_path: Path, behind_a_hub: bool
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        address = (await stack.enter_async_context(serving(tiny))).address
        if behind_a_hub:
            hub, _ = await stack.enter_async_context(serve_hub(tmp_path / "hub", [address]))
            address = hub.address
        path = configure(tmp_path, tiny, address, model={"lora": LORA})
        code, _, err = await (await start_trainer(path)).end()
    # The exit status of an unusable configuration, with which no supervisor restarts the trainer.
    assert code == 2
    assert "--enable-lora --max-lora-rank 4" in err
