"""The example of functions written for slime: trainer and worker processes, with the fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from penstock.trainer.config.trainer import load_config
from tests.support.tiny_model import make_tiny_model
from tests.trainer.test_end_to_end import serving, tensors_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins"
ROOT = Path(__file__).parents[2]


def table(path: Path, folder: Path, **changes: Any) -> Path:
    """A copy of one of the example's files with some values changed."""
    document: dict[str, Any] = tomllib.loads(path.read_text())
    for name, value in changes.items():
        old = document.get(name)
        document[name] = {**old, **value} if isinstance(old, dict) else value
    changed = folder / path.name
    changed.write_text(tomli_w.dumps(document))
    return changed


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=EXAMPLE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )


async def reward(args: Any, sample: Any, **kwargs: Any) -> dict[str, float]:
    """Reward by position in the data: the fake engine makes siblings alike, and never writes a number."""
    assert sample.metadata["turns"] == 2
    return {"score": float(sample.index % 2) * (sample.group_index % 2), "right": 0.0}


def test_the_examples_configuration_is_one_that_the_trainer_reads() -> None:
    config = load_config(EXAMPLE / "second_chance.toml")
    assert config.groups.filter is not None
    assert config.groups.filter.style == "slime"


@pytest.mark.timeout(180)
async def test_the_example_trains_on_the_groups_that_its_filter_keeps(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "model", layers=1)
    assert tensors_of(tiny)
    async with serving(tiny) as server:
        args = table(EXAMPLE / "args.toml", tmp_path, hf_checkpoint=str(tiny))
        rows = tmp_path / "rows.jsonl"
        lines = [json.dumps({"prompt": f"{n} + {n} = ?", "answer": str(2 * n)}) for n in range(64)]
        rows.write_text("\n".join(lines))
        config = table(
            EXAMPLE / "second_chance.toml",
            tmp_path,
            server={"address": server.address},
            run={"out": str(tmp_path / "out"), "steps": 2},
            model={"path": str(tiny), "dtype": "float32", "threads": 1},
            train={"groups_per_step": 2},
            data={
                "group_size": 2,
                "sampling": {"max_tokens": 8},
                "jsonl": {"path": str(rows), "shuffle": False},
            },
        )
        document = tomllib.loads(config.read_text())
        del document["data"]["reasoning_gym"]
        config.write_text(tomli_w.dumps(document))
        worker = await start(
            *("rollout", "--server", server.address, "--style", "slime", "--args", str(args)),
            *("--generate", "second_chance:generate"),
            *("--reward", "tests.system.test_plugins_end_to_end:reward"),
        )
        trainer = await start("train", str(config))
        said, _ = await asyncio.wait_for(trainer.communicate(), 120)
        worker.terminate()
        told, _ = await asyncio.wait_for(worker.communicate(), 30)
        assert trainer.returncode == 0, said.decode()
        assert worker.returncode == 0, told.decode()
    steps = [json.loads(x) for x in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step["groups"] for step in steps] == [2, 2]
    # Of every two consecutive prompts, one has the same reward for both attempts.
    dropped = [step["groups_dropped"] for step in steps]
    assert all(set(counts) <= {"FILTER:all_0.0"} for counts in dropped)
    assert sum(sum(counts.values()) for counts in dropped) >= 1
    assert all(step["reward_mean"] == 0.5 for step in steps)
    assert b"TOKENS" not in told
