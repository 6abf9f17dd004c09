"""Every room is in the wheel, and says what it is for."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.project.test_arrows import FOLDERS, ROOMS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LONGEST_DOCSTRING = 10

INITS = {
    ".".join((package, *path.parent.relative_to(folder).parts)): path
    for package, folder in FOLDERS.items()
    for path in folder.rglob("__init__.py")
}
"""The `__init__.py` of each package."""


def test_every_folder_with_an_init_is_a_package_of_the_project() -> None:
    assert sorted(INITS) == PROJECT["tool"]["setuptools"]["packages"]


def test_the_wheel_has_every_file_of_the_folders(tmp_path: Path) -> None:
    """In a checkout a package that is not listed works. In the wheel it is missing."""
    source = tmp_path / "source"
    for name in ("server", "trainer", "clients/python"):
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path))
    made = subprocess.run(
        [sys.executable, *build, str(source)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        str(Path(*package.split("."), path.relative_to(folder)))
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed"
    }
    assert held == wanted
    assert {name.split("/")[1] for name in held if name.endswith("py.typed")} == {
        name.split("/")[1] for name in held
    }


@pytest.mark.parametrize("package", sorted(INITS.keys() - {"penstock.v1"}))
def test_a_room_says_in_ten_lines_what_it_is_for(package: str) -> None:
    path = INITS[package]
    source = ast.parse(path.read_text())
    said = ast.get_docstring(source)
    assert said is not None
    assert len(said.splitlines()) <= LONGEST_DOCSTRING
    assert re.search(r"\b[Uu]ses ", said)
    named = re.findall(r"`([a-z_/]+\.py)`", said)
    assert [name for name in named if not (path.parent / name).exists()] == []
    others = set(re.findall(r"`([a-z_.]+)`", said)) & set(ROOMS)
    assert package.removeprefix("penstock.") not in others
    if "client" not in package:
        assert not [node for node in source.body if isinstance(node, ast.Import | ast.ImportFrom)]
