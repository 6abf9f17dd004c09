"""The example of rising difficulty: its prompts, and its configuration."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.trainer.config.trainer import TrainerConfig

FOLDER = Path(__file__).parents[2] / "examples" / "math"


@pytest.fixture
def curriculum(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("curriculum")


def test_levels_rise_and_those_before_stay(curriculum: Any) -> None:
    prompts = curriculum.training(rise=400)
    levels = [prompts[index]["level"] for index in range(800)]
    assert set(levels[:40]) == {0} and set(levels[-400:]) == {0, 1, 2, 3}
    quarters = [levels[at : at + 100] for at in range(0, 400, 100)]
    means = [sum(quarter) / 100 for quarter in quarters]
    assert means == sorted(means)
    assert levels[-400:].count(3) > 250
    again = curriculum.training(rise=400)
    assert [again[index] for index in (0, 7, 399)] == [prompts[index] for index in (0, 7, 399)]


def test_evaluation_asks_of_each_level_what_it_says(curriculum: Any) -> None:
    for number in range(len(curriculum.LEVELS)):
        rows = curriculum.evaluation(number, size=8)
        assert [row["level"] for row in rows] == [number] * 8
        assert len({row["prompt"] for row in rows}) == 8
        for row in rows:
            terms = row["prompt"].rpartition(":")[2].rstrip(" =").replace("- ", "-").split()
            assert sum(int(term) for term in terms if term != "+") == int(row["answer"])


def test_nothing_is_trained_that_is_evaluated(curriculum: Any) -> None:
    asked = [row["prompt"] for number in range(4) for row in curriculum.evaluation(number)]
    assert len(asked) == len(set(asked)) == 4 * curriculum.HELD_OUT
    prompts = curriculum.training(rise=3000)
    trained = {prompts[index]["prompt"] for index in range(4000)}
    assert trained.isdisjoint(asked)
    # Of the easiest level, all other prompts: only the held-out ones are kept from training.
    first = {prompts[index]["prompt"] for index in range(4000) if prompts[index]["level"] == 0}
    assert len(first) > 120
    with pytest.raises(ValueError, match="64 of each level"):
        curriculum.evaluation(0, size=65)


def test_its_configuration_is_one(curriculum: Any) -> None:
    document = tomllib.loads((FOLDER / "run.toml").read_text())["train"]
    config = TrainerConfig.model_validate({**document, "model": {"path": "somewhere"}})
    assert config.data.python is not None and not config.data.python.shuffle
    assert [len(one.mixture) for one in config.evaluation] == [len(curriculum.LEVELS)]
