"""The default number format of server and trainer: bfloat16 if the hardware supports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.demo import settings
from penstock.server.vllm import options as vllm_options
from penstock.server.vllm.options import describe_options, engine_arguments
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.policy import loading
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.policy.loading import compute_dtype
from tests.support.tiny_model import make_tiny_model
from tests.trainer.state.test_checkpoint import plan

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("said", "has", "dtype"),
    [
        ("auto", True, torch.bfloat16),
        ("auto", False, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("float32", True, torch.float32),
    ],
)
def test_a_trainer_computes_in_what_it_was_told_or_what_is_fast(
    said: Any, has: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "computes_bfloat16", lambda device: has)
    assert compute_dtype(ModelConfig(path="m", dtype=said), CPU) is dtype


@pytest.mark.parametrize(("has", "same_as"), [(True, "bfloat16"), (False, "float32")])
def test_a_step_is_that_of_the_arithmetic_chosen(
    has: bool, same_as: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "computes_bfloat16", lambda device: has)
    folder = make_tiny_model(tmp_path, layers=1)

    def loss(**options: Any) -> float:
        config = ModelConfig(path=str(folder), **options)
        policy = FsdpPolicy(config, TrainConfig(learning_rate=1e-3), total_steps=10, seed=0)
        policy.step(plan(1))
        return policy.step(plan(2)).loss

    other = {"bfloat16": "float32", "float32": "bfloat16"}[same_as]
    assert loss() == loss(dtype=same_as) != loss(dtype=other)


def test_an_engine_is_told_float32_only_where_nobody_says_and_bfloat16_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dtype(has: bool, *options: str) -> object:
        monkeypatch.setattr(vllm_options, "computes_bfloat16", lambda device: has)
        return describe_options(engine_arguments(["--model", "m", *options])).get("dtype")

    assert dtype(False) == "float32"
    # The checkpoint's own dtype.
    assert dtype(True) is None
    assert dtype(False, "--dtype", "bfloat16") == "bfloat16"
    assert dtype(False, "--dtype", "auto") is None


def test_the_demo_says_neither_side_what_to_compute_in_but_for_the_model_it_proves(
    tmp_path: Path,
) -> None:
    for tiny in (False, True):
        scale = settings.choose_scale(settings.SUMS, tiny=tiny)
        made = settings.Plan(tmp_path, "m", tmp_path, settings.SUMS, 1, 0, "127.0.0.1:0", scale)
        assert ("--dtype" in settings.serve_command(made, None)) == tiny
        assert ("dtype" in settings.trainer_config(made, "127.0.0.1:1")) == tiny
