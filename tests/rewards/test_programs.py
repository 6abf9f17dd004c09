"""`unit_tests`: code is judged by a data set's tests, in another process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client import Task
from penstock.client.external import sandbox
from penstock.client.external.sandbox import SandboxMissing
from penstock.rewards import programs, unit_tests
from penstock.rewards.programs import called_function

TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
RIGHT = "def add(a, b):\n    return a + b"


def score(reward: Any, code: str, tests: object = TESTS, **metadata: object) -> float:
    task = Task("t", metadata={"tests": tests, **metadata})
    return reward(task, SimpleNamespace(text=f"Like this:\n```python\n{code}\n```\nDone."))


@pytest.fixture(scope="module")
def strict() -> Any:
    return unit_tests()


@pytest.fixture(scope="module")
def partial() -> Any:
    return unit_tests(partial=True, seconds=2.0)


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        (RIGHT, 1.0),
        ("def add(a, b):\n    return 3", 0.5),
        ("def add(a, b):\n    raise KeyError", 0.0),
        ("def add(a, b):\n    while True: pass", 0.0),
        ("def sub(a, b):\n    return 3", 0.0),
        ("def add(a, b) return 3", 0.0),
        ("import os\nos._exit(0)", 0.0),
        # Only values travel, so an object that equals everything does not.
        ("class E:\n    __eq__ = lambda a, b: True\nadd = lambda a, b: E()", 0.0),
        ("print('ok 3')\nimport sys\nsys.exit()", 0.0),
    ],
)
def test_code_passes_only_by_what_it_returns(partial: Any, code: str, passed: float) -> None:
    assert score(partial, code) == passed


def test_all_tests_must_pass_unless_parts_count(strict: Any) -> None:
    assert score(strict, RIGHT) == 1.0
    assert score(strict, "def add(a, b):\n    return 3") == 0.0


def test_the_last_block_counts_and_an_answer_without_one_is_wrong(strict: Any) -> None:
    assert score(strict, f"wrong\n```\nBetter:\n```py\n{RIGHT}") == 1.0
    task = Task("t", metadata={"tests": TESTS})
    assert strict(task, SimpleNamespace(text=RIGHT)) == 0.0


def test_human_eval_has_a_function_that_checks(strict: Any) -> None:
    tests = (
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n"
    )
    assert score(strict, RIGHT, tests, entry_point="add") == 1.0
    assert score(strict, "def add(a, b):\n    return 3", tests, entry_point="add") == 0.0


def test_a_test_that_trips_over_the_answer_fails_and_a_broken_one_is_told(strict: Any) -> None:
    tests = "for key in add(1, 2):\n    assert key\n"
    assert score(strict, "add = lambda a, b: None", tests) == 0.0
    with pytest.raises(ValueError, match="the tests raise ZeroDivisionError: division by zero"):
        score(strict, RIGHT, "1 / 0\nassert add(1, 2) == 3")
    with pytest.raises(TypeError, match=r"metadata\['tests'\] must be Python code"):
        score(strict, RIGHT, 5)


def test_tests_run_in_a_process_of_their_own_and_end_with_it(
    partial: Any, strict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "GRACE_SECONDS", 0.5)
    assert score(strict, RIGHT, f"import os\nassert add(os.getpid(), 0) != {os.getpid()}") == 1.0
    assert score(partial, RIGHT, "assert add(1, 2) == 3\nwhile True: pass") == 0.0
    with pytest.raises(ValueError, match="the tests end their process"):
        score(strict, RIGHT, "import os\nassert add(1, 2) == 3\nos._exit(0)")
    assert score(strict, RIGHT, "print('checks (True,)')\nassert add(1, 2) == 4") == 0.0


def test_the_function_that_the_tests_call_is_found() -> None:
    assert called_function("import math\nassert math.isclose(area(2), 3)\nassert f(1)") == "area"
    assert called_function("def help(x):\n    return x\nassert sorted(help(run(1)))") == "run"
    with pytest.raises(ValueError, match="no entry_point"):
        called_function("assert 1 == 1")


def test_without_a_sandbox_it_is_refused_only_if_one_is_required(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(SandboxMissing, match="bwrap is not installed"):
        unit_tests(sandbox="require")
    assert score(unit_tests(), RIGHT) == 1.0
    assert "runs without a sandbox" in caplog.text
    caplog.clear()
    assert score(unit_tests(sandbox="off"), RIGHT) == 1.0
    assert not caplog.records


def test_code_in_the_sandbox_does_not_see_the_users_files(tmp_path: Path) -> None:
    try:
        reward = unit_tests(sandbox="require")
    except SandboxMissing as error:
        pytest.skip(str(error))
    secret = tmp_path / "secret"
    secret.write_text("3")
    code = f"def add(a, b):\n    return int(open({str(secret)!r}).read())"
    assert score(reward, code, "assert add(1, 2) == 3") == 0.0
    assert score(unit_tests(sandbox="off"), code, "assert add(1, 2) == 3") == 1.0
