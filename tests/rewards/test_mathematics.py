"""`boxed`: math-verify in its own process."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.client import Task
from penstock.rewards.mathematics import Verifier, boxed, last_boxed


@pytest.fixture(scope="module")
def reward() -> Any:
    return boxed()


def score(reward: Any, answer: object, text: str) -> float:
    return reward(Task("t", metadata={"answer": answer}), SimpleNamespace(text=text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{1} or \boxed{2", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{{1}", None),
        ("2", None),
    ],
)
def test_the_last_closed_box_counts(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("1/2", r"\boxed{\frac{1}{2}}", 1.0),
        ("0.5", r"\boxed{\frac12}", 1.0),
        ("x^2+1", r"\boxed{1+x^2}", 1.0),
        (r"We see \boxed{3}.", r"\boxed{3.0}", 1.0),
        (3, r"\boxed{4}", 0.0),
        (3, "3", 0.0),
        ("3", r"\boxed{}", 0.0),
        ("3", r"\boxed{\frac{}", 0.0),
    ],
)
def test_equal_mathematics_is_right(
    reward: Any, answer: object, text: str, expected: float
) -> None:
    assert score(reward, answer, text) == expected


def test_an_endless_comparison_is_wrong_and_the_next_one_works() -> None:
    verifier = Verifier()
    assert verifier.equal("1/2", "0.5", 60.0)
    begun = time.monotonic()
    assert not verifier.equal("1", "9^{9^{9^9}}", 0.5)
    assert time.monotonic() - begun < 20
    assert verifier.equal("1/2", "0.5", 60.0)


def test_a_verifier_that_was_killed_is_started_again() -> None:
    verifier = Verifier()
    assert verifier.equal("1/2", "0.5", 60.0)
    process: Any = vars(verifier)["_process"]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert verifier.equal("1/2", "0.5", 60.0)


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"needs math-verify: pip install 'penstock-rl\[rewards\]'"
    ):
        boxed()
