"""`penstock reward try`: one row, one answer, without a server."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main

SCORES = """
from penstock.client import Failed, Outcome, group_reward

def reward(task, trajectory):
    right = float(task.metadata["answer"] in trajectory.text)
    print("a function may print")
    return Outcome(right + 0.5, {"right": right, "words": len(trajectory.text.split())})

def typo(task, trajectory):
    return float(task.metadata["anwser"] in trajectory.text)

def nothing(task, trajectory):
    pass

async def asks(task, trajectory):
    await trajectory.get()

def judge(task, trajectory):
    return Failed("JUDGE_AWAY", "no answer")

@group_reward
def ranks(task, trajectories):
    return [len(trajectory.text) for trajectory in trajectories]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""
ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 2 + 3?", "answer": "5"},
    {"prompt": "Name a fruit.", "note": "any"},
    {"quiz": "1 + 1?", "right": "2"},
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tried_scores", raising=False)
    (tmp_path / "tried_scores.py").write_text(SCORES)
    lines = (json.dumps(row) + "\n" for row in ROWS[:2])
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "questions.jsonl").write_text(json.dumps(ROWS[2]) + "\n")
    return tmp_path


def attempt(reward: str, *options: str, data: str = "train.jsonl") -> Any:
    arguments = ["reward", "try", f"tried_scores.py:{reward}", "--data", data, *options]
    return CliRunner().invoke(main, arguments)


def test_it_shows_what_the_reward_was_given_and_returned() -> None:
    done = attempt("reward", "--answer", "It is 5.\nYes.")
    assert done.exit_code == 0
    *lines, time = done.stdout.splitlines()
    assert lines == [
        "row       1",
        "prompt    user: What is 2 + 3?",
        "metadata  answer = '5', data_source = 'train'",
        "answer    It is 5.",
        "          Yes.",
        "reward    1.5",
        "parts     right 1, words 4",
    ]
    assert time.startswith("time      ")
    assert time.endswith(" ms")


def test_programs_get_json() -> None:
    told = json.loads(attempt("reward", "--json").stdout)
    assert told.pop("seconds") >= 0.0
    assert told == {
        "row": 1,
        "prompt": "user: What is 2 + 3?",
        "metadata": {"answer": "5", "data_source": "train"},
        "answer": "5",
        "reward": 1.5,
        "metrics": {"right": 1.0, "words": 1.0},
    }


def test_rows_are_those_of_the_file_in_its_order() -> None:
    assert "Name a fruit." in attempt("reward", "--row", "2", "--answer", "fig").output
    done = attempt("reward", "--row", "3")
    assert (done.exit_code, done.output) == (
        2,
        "penstock reward: --row 3: train.jsonl has 2 rows\n",
    )


def test_a_row_without_an_answer_needs_one() -> None:
    done = attempt("reward", "--row", "2")
    assert (done.exit_code, done.output) == (
        2,
        "penstock reward: row 2 holds no answer, only note: give --answer TEXT\n",
    )


def test_other_columns_and_styles_are_as_in_eval() -> None:
    done = attempt(
        "compute_score",
        *("--columns", "prompt=quiz,answer=right", "--style", "verl"),
        data="questions.jsonl",
    )
    assert "reward    1.0\n" in done.output
    done = attempt("reward", data="questions.jsonl")
    assert done.exit_code == 2
    assert "or --columns prompt=quiz" in done.output


@pytest.mark.parametrize(
    ("reward", "reason", "message"),
    [
        (
            "typo",
            "KEY_ERROR",
            "'anwser'; the task's metadata has ",
        ),
        ("nothing", "REWARD_INVALID", "a reward must be a number, not NoneType"),
        ("judge", "JUDGE_AWAY", "no answer"),
        ("asks", "NEEDS_SERVER", "the reward calls the server, which a trial does not have"),
    ],
)
def test_a_failure_is_worded_as_a_worker_does(reward: str, reason: str, message: str) -> None:
    done = attempt(reward)
    assert done.exit_code == 1
    assert f"failed    {reason}\n" in done.output
    assert f"message   {message}" in done.output


def test_a_traceback_begins_in_the_users_file(caplog: pytest.LogCaptureFixture) -> None:
    attempt("typo")
    (record,) = (r for r in caplog.records if r.name == "penstock.reward")
    assert record.exc_info
    text = logging.Formatter().formatException(record.exc_info)
    assert "tried_scores.py" in text.splitlines()[1]
    assert "penstock" not in text


def test_a_group_reward_gets_a_group_of_one() -> None:
    assert "reward    2.0\n" in attempt("ranks", "--answer", "ab").output


def test_a_function_that_does_not_exist_is_named(here: Path) -> None:
    done = attempt("rewrd")
    assert (done.exit_code, done.output) == (
        2,
        "penstock reward: REWARD tried_scores.py:rewrd: tried_scores has no rewrd; did you mean reward? "
        f"({here}/tried_scores.py)\n",
    )
