"""Names of functions: a module or a file, and a call at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.common.functions import FunctionInvalid, find_function

SCORES = """
def reward(task, trajectory):
    return 1.0

def above(least=2, *, strict=False):
    return lambda task, trajectory: float(trajectory > least)

def named(*, field="answer"):
    return lambda task, trajectory: field

def number(*, field="answer"):
    return 3

def asks(*, field):
    return reward
"""
TAKEN = ("task", "trajectory")


@pytest.fixture
def scores(tmp_path: Path) -> str:
    path = tmp_path / f"{tmp_path.name.replace('-', '_')}.py"
    path.write_text(SCORES)
    return str(path)


def test_a_name_may_end_in_a_call(scores: str) -> None:
    assert find_function(f"{scores}:above(5)", TAKEN)(None, 6) == 1.0
    assert find_function(f"{scores}:above(least=7, strict=True)", TAKEN)(None, 6) == 0.0
    assert find_function(f"{scores}:named(field='a:b(c).d')", TAKEN)(None, None) == "a:b(c).d"


def test_a_function_of_named_arguments_alone_is_called_first(scores: str) -> None:
    assert find_function(f"{scores}:named", TAKEN)(None, None) == "answer"
    assert find_function(f"{scores}:reward", TAKEN)(None, None) == 1.0
    # It is a function of nothing, and asked for as one.
    assert find_function(f"{scores}:number", ())() == 3


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("named(fild='x')", r"it has no argument fild; did you mean field\?"),
        ("named(other='x')", "it has no argument other; it has field"),
        ("named(field=x)", "x: expected a literal, in quotes if a text"),
        ("named(field='x'", r"\(field='x': '\(' was never closed"),
        ("named()()", r"\(\)\(\): expected one call, at the end of the name"),
        ("named() or 1", "expected one call, at the end of the name"),
        ("number", "it returned 3, which is not a function"),
        ("asks", "missing 1 required keyword-only argument: 'field'"),
        ("above", r"it is called with \(task, trajectory\): too many positional arguments"),
        ("namd(field='x')", r"has no namd; did you mean named\?"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(scores: str, name: str, complaint: str) -> None:
    with pytest.raises(FunctionInvalid, match=complaint):
        find_function(f"{scores}:{name}", TAKEN)
