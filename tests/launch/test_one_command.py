"""One command trains a model of random weights with vLLM, and the file that it leaves continues the run."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.up.up import up
from tests.support.tiny_model import make_tiny_model
from tests.support.up_with_fakes import programs

ROOT = Path(__file__).parents[2]
REWARD = '''"""Ten lines of a reward."""

VOWELS = set("aeiou")


def score(task, trajectory):
    wanted = task.metadata["answer"]
    text = trajectory.text.lower()
    share = sum(letter in VOWELS for letter in text) / max(1, len(text))
    return share + float(wanted in text)
'''


def penstock(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def steps(run: Path) -> list[int]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["step"] for record in records if "step" in record]


@pytest.mark.timeout(600)
def test_a_model_a_file_and_a_function_are_all_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
    rows = [{"question": f"{n} plus 1?", "answer": f"so\n#### {n + 1}"} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.py").write_text(REWARD)
    said = penstock(
        *(tmp_path, "train", "--model", str(model), "--data", "train.jsonl"),
        *("--reward", "my.py:score", "--steps", "2", "--max-tokens", "16", "--out", "runs/first"),
        # To clear the gigabytes that are the default takes five seconds.
        *("--set", f"serve.engine.kv_cache_memory_bytes={1 << 25}"),
    )
    run = tmp_path / "runs" / "first"
    assert (run / "run.toml").read_text() in said
    assert "the trained model is in runs/first/model\n" in said
    assert "to continue: penstock up runs/first/run.toml --resume --set train.run.steps=N" in said
    before = (model / "model.safetensors").read_bytes()
    assert (run / "model" / "model.safetensors").read_bytes() != before
    assert steps(run) == [1, 2]
    assert tomllib.loads((run / "run.toml").read_text())["train"]["run"]["steps"] == 2
    # From another folder: the file names everything by its whole path.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path / "runs")
    assert up(Path("first/run.toml"), ["train.run.steps=3"], True, False, programs()) == 0
    assert steps(run) == [1, 2, 3]
