"""The recipes: each is a file that `penstock up` takes, says how to run it, and fits its hardware."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.launch.init import recipes
from penstock.up import checks
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
RECIPES = recipes()
CONTEXT = 32_768
PARAMETERS = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen2.5-7B": 7.62e9,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen3-0.6B": 0.6e9,
    "Qwen/Qwen3-4B": 4.02e9,
}
WORDS = 152_000
"""Of their vocabularies."""
TRAINED_BYTES, FROZEN_BYTES = 16, 4
"""Of each parameter: docs/guides/several-gpus.md."""
ON_GPUS = [name for name, text in RECIPES.items() if "\ngpu-memory-utilization =" in text]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("recipes") / "model")
    config = folder / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT})
    )
    return folder


def head(text: str) -> str:
    """The comments that a file begins with."""
    return text.partition("\n[")[0]


def data_paths(table: Any) -> Iterator[Path]:
    """The files and folders of data that a table names, at any depth."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        if key in ("jsonl", "parquet"):
            yield Path(value["path"])
        elif isinstance(value, dict | list):
            yield from data_paths(value)


def run_here(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, which loads vLLM once for all of them."""
    words = command[command.index("penstock.cli") + 1 :]
    done = CliRunner().invoke(main, words)
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


@pytest.mark.parametrize("recipe", RECIPES)
def test_init_writes_it_and_up_takes_it(
    recipe: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recipe != "default":
        known = SimpleNamespace(run=run_here, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(checks, "subprocess", known)
    monkeypatch.chdir(tmp_path)
    written = CliRunner().invoke(main, ["init", "run.toml", "--recipe", recipe])
    assert written.exit_code == 0, written.output
    text = Path("run.toml").read_text()
    assert text == RECIPES[recipe]
    for path in data_paths(tomllib.loads(text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    # The model's own name needs a hub.
    words = ["up", "run.toml", "--dry-run", "--set", f"serve.engine.model={model}"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    resolved, named = tomllib.loads(done.stdout), tomllib.loads(text)
    for key, value in named["train"]["train"].items():
        assert resolved["train"]["train"][key] == value


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_says_what_to_run_and_what_was_measured(recipe: str) -> None:
    text = RECIPES[recipe]
    assert re.search(r"^# .*(penstock up|launch\.py) ", head(text), re.MULTILINE)
    assert re.search(r"\b(Not measured|Measured)\b", head(text))
    for path in data_paths(tomllib.loads(text)["train"]):
        fetched = re.search(rf"--local-dir {re.escape(path.parts[0])}$", head(text), re.MULTILINE)
        assert fetched or recipe == "default", path


@pytest.mark.parametrize("recipe", RECIPES)
def test_its_numbers_agree(recipe: str) -> None:
    file = tomllib.loads(RECIPES[recipe])
    engine, train = file["serve"]["engine"], file["train"]
    attempts = train["data"]["group_size"] * train["train"]["groups_per_step"]
    assert file["rollout"]["concurrency"] == attempts
    assert train["data"]["sampling"]["max_tokens"] < engine["max-model-len"]
    assert train["train"].get("micro_batch_tokens", 4096) >= min(4096, engine["max-model-len"])
    if "lora" in train.get("model", {}):
        assert engine["enable-lora"] is True
        assert engine["max-lora-rank"] >= train["model"]["lora"]["rank"]
        assert engine["max-loras"] == train["staleness"]["max_lag"] + 2
    else:
        assert "enable-lora" not in engine


@pytest.mark.parametrize("recipe", ON_GPUS)
def test_it_fits_the_gpus_that_it_names(recipe: str) -> None:
    file = tomllib.loads(RECIPES[recipe])
    engine, train = file["serve"]["engine"], file["train"]
    named = re.search(r"(\w+) GPUs? of (\d+) GB", RECIPES[recipe].partition("\n")[0])
    assert named is not None
    count, room = {"one": 1, "eight": 8}[named[1]], int(named[2]) * 1e9
    parameters = PARAMETERS[engine["model"]]
    serving = engine["gpu-memory-utilization"] * room
    each = FROZEN_BYTES if "lora" in train["model"] else TRAINED_BYTES
    ranks = file["up"].get("trainer_ranks", 1)
    # Logits in float32, their gradient, and what is computed from them.
    training = each * parameters / ranks + 3 * 4 * WORDS * train["train"]["micro_batch_tokens"]
    switching = 2 * parameters
    if count == 1:
        assert serving + training + switching <= room
    else:
        assert ranks + file["engines"]["count"] == count
        assert max(serving + switching, training) <= room
    # Weights, and the cache of at least the eighth of a step's attempts that is longest.
    assert serving > 2 * parameters + room / 8


def test_the_guide_has_every_recipe() -> None:
    guide = (ROOT / "docs/guides/recipes.md").read_text()
    assert sorted(re.findall(r"^\| `([\w.-]+)` \|", guide, re.MULTILINE)) == sorted(RECIPES)
