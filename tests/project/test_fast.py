"""What `make test-fast` leaves out is there to be left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.slow import FILES, FOLDERS, TESTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_is_left_out_has_tests(folder: str) -> None:
    assert list((ROOT / folder).rglob("test_*.py"))


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_left_out_is_there(file: str) -> None:
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("name", TESTS)
def test_a_test_that_is_left_out_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    assert file not in FILES
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert test in {node.name for node in tree.body if isinstance(node, functions)}
