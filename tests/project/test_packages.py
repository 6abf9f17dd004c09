"""Every room is in the wheel and says what it is for; the sdist has the whole repository."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import policy
from email.parser import BytesParser
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


WITHOUT_CODE = ("penstock.proto", "penstock.recipes")
"""Packages of other files: the protocol, for protoc, and what `penstock init` writes."""

LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", "build", "runs", "site", "node_modules", "dist", "*.egg-info"),
    *("__pycache__", "*.pyc", ".*_cache", ".hypothesis", ".cache"),
)


def test_every_folder_with_an_init_is_a_package_of_the_project() -> None:
    assert sorted([*INITS, *WITHOUT_CODE]) == PROJECT["tool"]["setuptools"]["packages"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of a copy, because setuptools writes files next to its input."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT, symlinks=True)
    make = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run([sys.executable, "-c", make], folder / "source")
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Made of the sdist, as an index's users make it who cannot use the wheel."""
    folder = sdist.parent
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder))
    run([sys.executable, *build, str(sdist)], folder)
    return next(folder.glob("*.whl"))


def run(command: list[str], folder: Path) -> None:
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr


def test_the_wheel_has_every_file_of_the_folders(wheel: Path) -> None:
    """In a checkout a package that is not listed works. In the wheel it is missing."""
    assert wheel.name.startswith("penstock_rl-")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        str(Path(*package.split("."), path.relative_to(folder)))
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.suffix in {".py", ".pyi"} or path.name == "py.typed"
    }
    protos = {
        f"penstock/{path.relative_to(ROOT)}"
        for folder, ending in {"proto": "*.proto", "recipes": "*.toml"}.items()
        for path in (ROOT / folder).rglob(ending)
    }
    assert held == wanted | protos
    assert protos
    assert {name.split("/")[1] for name in held if name.endswith("py.typed")} == {
        name.split("/")[1] for name in wanted
    }


def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    """Its tests, examples and benchmarks then run, and another wheel can be made of it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, whose files could be listed")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - held == set()


def test_an_index_page_shows_the_readme_and_its_picture(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        shown = BytesParser(policy=policy.compat32).parsebytes(archive.read(name))
    assert shown["Description-Content-Type"] == "text/markdown"
    page = shown.get_payload()
    assert isinstance(page, str)
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", page)
    assert len(links) == len(re.findall(r"\]\([^)\s]+\)", readme)) > 10
    repository = PROJECT["project"]["urls"]["Repository"]
    for image, link in links:
        assert link.startswith("https://")
        if link.startswith(f"{repository}/"):
            kind, branch, path = link.removeprefix(f"{repository}/").split("/", 2)
            assert (kind, branch) == ("raw" if image else "blob", "main")
            assert (ROOT / path.partition("#")[0]).exists()


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
