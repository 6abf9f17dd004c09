"""Checkpoints, and the policy they contain."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import Sample, TrainingGroup
from penstock.trainer.batching.planning import StepPlan, plan_step
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid, StorageFailed
from penstock.trainer.core.figures import aggregate, scalars
from penstock.trainer.metrics.step_record import FIGURES, StepRecord
from penstock.trainer.policy.backend import learning_rate
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.policy.loading import load_model, save_tokenizer
from penstock.trainer.policy.optimizer_state import load_progress, save_progress
from penstock.trainer.state.checkpoint import (
    TrainerState,
    read_state,
    replace_folder,
    restore,
    save_checkpoint,
)
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, tied=request.param)


def policy_of(model: Path, dtype: Any = "float32", **train: Any) -> FsdpPolicy:
    settings = TrainConfig(learning_rate=1e-3, **train)
    return FsdpPolicy(ModelConfig(path=str(model), dtype=dtype), settings, total_steps=10, seed=0)


def plan(seed: int, behaviour: float = -5.0, **algorithm: Any) -> StepPlan:
    rng = np.random.default_rng(seed)
    samples = []
    for reward in (1.0, -1.0, 0.5):
        ids = np.concatenate([[1, 2, 3], rng.integers(0, 256, 6)]).astype(np.int32)
        trained = np.arange(9) > 2
        samples.append(
            Sample(
                "t",
                ids,
                trained,
                np.where(trained, behaviour, 0).astype(np.float32),
                np.ones(9, np.float32),
                reward,
            )
        )
    group = TrainingGroup(tuple(samples), (), 0, 18, 0, np.zeros(18, np.int64))
    objective = Objective(AlgorithmConfig.model_validate(algorithm))
    return plan_step([group], objective, token_budget=1000)


def state(step: int = 3) -> TrainerState:
    return TrainerState("run", step, weight_version=4, next_index=17, outstanding=(11, 16))


def weights(policy: FsdpPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def test_a_resumed_run_goes_on_exactly(model: Path, tmp_path: Path) -> None:
    first = policy_of(model, warmup_steps=4)
    for seed in range(3):
        assert first.step(plan(seed)).applied
    path = save_checkpoint(tmp_path, state(), first.save, keep=2)
    drawn = torch.rand(3)
    expected = [first.step(plan(seed)) for seed in range(3, 6)]
    second = policy_of(model, warmup_steps=4)
    second.load(path)
    assert torch.equal(torch.rand(3), drawn)
    found = [second.step(plan(seed)) for seed in range(3, 6)]
    assert found == expected
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, weights(first)[name]), name
    assert read_state(path) == state()


def test_a_checkpoint_is_a_model_folder(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    policy.step(plan(0))
    path = save_checkpoint(tmp_path, state(), policy.save, keep=1)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    own = weights(policy)
    assert all(torch.equal(p, own[name]) for name, p in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(path).encode("a") == [97]


def test_weights_carry_hugging_face_names_once(model: Path) -> None:
    policy = policy_of(model)
    names = [name for name, _ in policy.weights()]
    saved = AutoModelForCausalLM.from_pretrained(model)
    tied = saved.config.tie_word_embeddings
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) is not tied
    assert set(names) | {"lm_head.weight"} == set(saved.state_dict())


def test_only_whole_checkpoints_are_seen_and_old_ones_go(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "x").write_text("y")

    def broken(folder: Path) -> None:
        write(folder)
        raise OSError("disk full")

    assert restore(tmp_path) is None
    for step in (1, 2, 9, 10):
        save_checkpoint(tmp_path, state(step), write, keep=2)

    def broken_tensors(folder: Path) -> None:
        write(folder)
        raise SafetensorError("disk full")

    for fails in (broken, broken_tensors):
        with pytest.raises(StorageFailed, match=r"step 11 cannot be written .*disk full"):
            save_checkpoint(tmp_path, state(11), fails, keep=2)
    # The files it had already written are removed.
    assert not list(tmp_path.glob(".unfinished*"))
    newest = restore(tmp_path)
    assert newest is not None and newest.state.step == 10
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000009", "step-00000010"]
    # A killed trainer leaves more behind, which the next save removes. A step can be saved again.
    (tmp_path / ".unfinished-step-00000011").mkdir()
    (tmp_path / ".removed-step-00000001").mkdir()
    save_checkpoint(tmp_path, state(10), write, keep=2)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    final = tmp_path / "out" / "model"
    replace_folder(final, lambda folder: (folder / "old").write_text("x") and None)
    replace_folder(final, lambda folder: (folder / "new").write_text("x") and None)
    assert [path.name for path in final.iterdir()] == ["new"]


def test_a_way_to_sample_that_transformers_reads_and_does_not_write_goes_on_as_it_was(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    path = folder / "generation_config.json"
    own = {"temperature": 0.6, "top_p": 0.9, "do_sample": False, "eos_token_id": 3}
    path.write_text(json.dumps(own))
    policy = policy_of(folder)
    for _ in range(2):
        policy.save(tmp_path / "saved")
        written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
        assert own.items() <= written.items()
    policy_of(tmp_path / "saved")


def test_what_is_no_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match=r"state\.json"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"run_id": "x"}')
    with pytest.raises(CheckpointUnusable, match="step"):
        read_state(tmp_path)
    with pytest.raises(CheckpointUnusable):
        policy_of(model).load(tmp_path)
    with pytest.raises(ConfigInvalid, match="cannot load"):
        policy_of(tmp_path)
    with pytest.raises(ConfigInvalid, match="there is no folder"):
        policy_of(tmp_path / "nothing")


def test_a_checkpoint_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = policy_of(make_tiny_model(tmp_path / "other", layers=2, hidden=32))
    other.save_model(tmp_path)
    other.save(tmp_path)
    with pytest.raises(CheckpointUnusable):
        policy_of(model).load(tmp_path)


def test_another_count_of_threads_than_before_is_worth_a_line(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_of(model)
    policy.save(tmp_path)
    policy.load(tmp_path)
    assert "threads" not in caplog.text
    progress = {"optimizer_steps": 0, "threads": 7}
    (tmp_path / "optimizer.json").write_text(json.dumps(progress))
    policy.load(tmp_path)
    assert "was computed with 7 threads, this run continues with" in caplog.text
    assert "ranks" not in caplog.text
    progress = {"optimizer_steps": 0, "backend": "fsdp", "ranks": 3, "threads": 7}
    (tmp_path / "optimizer.json").write_text(json.dumps(progress))
    policy.load(tmp_path)
    assert "was computed with 3 ranks, this run continues with 1" in caplog.text
    assert "float32" not in caplog.text
    (tmp_path / "optimizer.json").write_text(json.dumps({**progress, "dtype": "bfloat16"}))
    policy.load(tmp_path)
    assert "was computed in bfloat16, this run continues in float32" in caplog.text


def test_an_optimizer_of_another_arithmetic_is_named_where_it_cannot_be_gone_on_with(
    tmp_path: Path,
) -> None:
    kept: dict[str, Any] = {"backend": "megatron", "ranks": 1}
    save_progress(tmp_path, 3, **kept, dtype=torch.bfloat16)
    assert load_progress(tmp_path, **kept, dtype=torch.bfloat16, same_dtype=True) == 3
    with pytest.raises(CheckpointUnusable, match=r'in float32: .* model\.dtype = "bfloat16"'):
        load_progress(tmp_path, **kept, dtype=torch.float32, same_dtype=True)
    # Before the first update there is no progress that depends on the dtype.
    save_progress(tmp_path, 0, **kept, dtype=torch.bfloat16)
    assert load_progress(tmp_path, **kept, dtype=torch.float32, same_dtype=True) == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cut off", "cannot load"),
        ("another shape", "cannot load"),
        ("a field", "cannot load"),
        ("tokenizer", "cannot load"),
        ("quantized", "is quantized (fp8)"),
    ],
)
def test_a_model_that_cannot_be_used_is_said_in_a_sentence(
    model: Path, tmp_path: Path, damage: str, said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    if damage == "cut off":
        (folder / "model.safetensors").write_bytes(b"version https://git-lfs")
    elif damage == "another shape":
        config["intermediate_size"] *= 2
    elif damage == "a field":
        config["num_hidden_layers"] = "many"
    elif damage == "tokenizer":
        (folder / "tokenizer.json").write_text('{"version": "9.0"}')
    else:
        config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigInvalid, match=rf"model\.path: .*{re.escape(said)}"):
        load_model(str(folder))


def test_a_tokenizer_that_there_is_no_room_for_is_a_disk_that_is_full(tmp_path: Path) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left"):
        save_tokenizer(Full(), tmp_path)


def test_a_checkpoint_of_the_other_backend_is_named_as_one(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    policy.save(tmp_path)
    progress = json.loads((tmp_path / "optimizer.json").read_text())
    assert progress["backend"] == "fsdp"
    (tmp_path / "optimizer.json").write_text(json.dumps({**progress, "backend": "megatron"}))
    with pytest.raises(CheckpointUnusable, match=r'model\.backend = "megatron" wrote it'):
        policy.load(tmp_path)


def test_without_a_gradient_nothing_moves(model: Path) -> None:
    policy = policy_of(model, warmup_steps=5)
    before = weights(policy)
    nothing = StepPlan((), plan(0).rewards, groups_without_gradient=1)
    result = policy.step(nothing)
    assert not result.applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
    # A learning rate of zero would pull down the aggregated figure.
    line = StepRecord(1, result=result).line()
    assert "learning_rate" not in scalars(FIGURES, aggregate(FIGURES, [line]))
    # The schedule does not advance either.
    assert policy.step(plan(0)).learning_rate == pytest.approx(1e-3 / 5)


@pytest.mark.parametrize("behaviour", [-math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_thrown_away(model: Path, behaviour: float) -> None:
    policy = policy_of(model)
    before = weights(policy)
    result = policy.step(plan(0, behaviour))
    assert not result.applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
    after = policy.step(plan(0))
    assert after.applied and math.isfinite(after.grad_norm)


def test_bfloat16_is_the_arithmetic_and_not_the_weights(model: Path) -> None:
    exact, rounded = policy_of(model), policy_of(model, "bfloat16")
    step = plan(0)
    (batch,) = step.updates[0].batches
    with torch.no_grad():
        difference = (exact._outputs([batch])[0] - rounded._outputs([batch])[0]).abs()
    assert 0 < float(difference.max()) < 0.2
    rounded.step(step)
    assert all(tensor.dtype == torch.float32 for _, tensor in rounded.weights())


def test_gradient_checkpointing_changes_no_gradient(model: Path) -> None:
    plain = policy_of(model)
    config = ModelConfig(path=str(model), dtype="float32", gradient_checkpointing=True)
    checkpointed = FsdpPolicy(config, TrainConfig(learning_rate=1e-3), total_steps=10, seed=0)
    first, second = plain.step(plan(1)), checkpointed.step(plan(1))
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)


def test_repeated_steps_make_good_answers_likelier(model: Path) -> None:
    policy = policy_of(model)
    step = plan(2)
    (update,) = step.updates
    (batch,) = update.batches
    good = batch.advantages_N > 0
    with torch.no_grad():
        before = policy._outputs([batch])[0][good].mean()
        fresh = policy._outputs([batch])[0]
    on_policy = replace(batch, behaviour_logprobs_N=fresh)
    step = replace(step, updates=(replace(update, batches=(on_policy,)),))
    for _ in range(3):
        policy.step(step)
    with torch.no_grad():
        assert policy._outputs([batch])[0][good].mean() > before


def test_the_learning_rate_warms_up_and_follows_its_schedule() -> None:
    constant = TrainConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(n, constant, 10) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = TrainConfig(learning_rate=1.0, warmup_steps=2, schedule="cosine")
    rates = [learning_rate(n, cosine, 12) for n in range(13)]
    assert rates[2] == 1.0
    assert rates[7] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0.0)
