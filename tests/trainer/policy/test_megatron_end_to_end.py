"""`penstock train --ranks` with the megatron-core backend."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.trainer.state.checkpoint import read_state, verify
from tests.support.forked_command import NURSERY
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_processes import ENVIRONMENT, nursery
from tests.trainer.test_end_to_end import (
    Trainer,
    configure,
    letters,
    records,
    sampled,
    serving,
    trained,
    working,
)

SECONDS = 250


async def start_ranks(config: Path, ranks: int, *options: str) -> Trainer:
    """Rank 0 is forked from a nursery, and starts the other as a process of its own."""
    command = ("-m", "tests.support.forked_command", "train", str(config), "--ranks", str(ranks))
    where = await asyncio.to_thread(nursery)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", NURSERY: str(where)},
    )
    return Trainer(process)


async def test_a_pipeline_of_two_ranks_goes_round(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "model", layers=2, tied=True)
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(
            tmp_path,
            tiny,
            server.address,
            model={"backend": {"kind": "megatron", "pipeline_parallel": 2}},
            # Not relative to the group, because siblings may be alike.
            algorithm={
                "advantage": {"kind": "reinforce_plus_plus"},
                "kl": {"kind": "reward", "coefficient": 0.01},
            },
            checkpoint={"every_steps": 2},
        )
        code, out, err = await (await start_ranks(path, 2)).end(SECONDS)
        assert code == 0, err
        assert len(re.findall(r"^step \d", out, re.MULTILINE)) == 3
        assert server.engine.versions == [1, 2, 3]
        # The engine has exactly the bits that were trained.
        assert sampled(server.engine) == trained(tmp_path)
    # Only rank 0 prints.
    assert f"{out}{err}".count("the model after step 3 is in") == 1
    steps = records(tmp_path)
    assert [step["weight_version"] for step in steps] == [1, 2, 3]
    assert all(step["applied"] and step["kl_reference"] is not None for step in steps)
    assert not [line for line in err.splitlines() if "Warning" in line], err
    newest = tmp_path / "out" / "checkpoints" / "step-00000003"
    verify(newest)
    assert read_state(newest).step == 3
    assert (newest / "megatron" / ".metadata").exists()
    # The checkpoint is a model that transformers loads.
    model = AutoModelForCausalLM.from_pretrained(newest, dtype=torch.float32)
    saved = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())
    assert AutoTokenizer.from_pretrained(newest).encode("a") == [97]


@pytest.mark.long
async def test_a_run_goes_on_in_another_layout_and_not_with_the_other_backend(
    tmp_path: Path,
) -> None:
    tiny = make_tiny_model(tmp_path / "model", layers=2, tied=True)
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(
            tmp_path,
            tiny,
            server.address,
            model={"backend": {"kind": "megatron", "pipeline_parallel": 2}},
            algorithm={"advantage": {"kind": "reinforce_plus_plus"}},
            checkpoint={"every_steps": 2},
        )
        code, _, err = await (await start_ranks(path, 2)).end(SECONDS)
        assert code == 0, err
        more = ("--resume", "--set", "run.steps=5", "--set")
        code, _, err = await (
            await start_ranks(path, 1, *more, "model.backend={kind = 'fsdp'}")
        ).end(SECONDS)
        assert code != 0
        assert 'model.backend = "megatron" wrote it, and this run has "fsdp"' in err
        assert server.engine.versions == [1, 2, 3]
        code, out, err = await (
            await start_ranks(path, 1, *more, "model.backend={kind = 'megatron'}")
        ).end(SECONDS)
        assert code == 0, err
        assert "was computed with 2 ranks, this run continues with 1" in err
        assert len(re.findall(r"^step \d", out, re.MULTILINE)) == 2
        assert server.engine.versions == [1, 2, 3, 4, 5]
        assert sampled(server.engine) == trained(tmp_path)
    assert [step["step"] for step in records(tmp_path)] == [1, 2, 3, 4, 5]
