"""Every room is in the wheel and says what it is for; the sdist has the whole repository."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
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


WITHOUT_CODE = ("penstock.proto",)
"""Packages of other files: the protocol, for protoc."""

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
    typed = {name.split("/")[1] for name in held if name.endswith("py.typed")}
    assert typed == {name.split("/")[1] for name in wanted} - {"__init__.py"}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The environment in which uv looks where pip is configured to look."""
    spec = importlib.util.spec_from_file_location("penstock_setup", ROOT / ".ci" / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return {**os.environ, **setup.pip_sources()}


UV = (sys.executable, "-m", "uv")
PYTHONS = ("3.11", "3.12", "3.13")


def python_of(version: str) -> str | None:
    """An interpreter of this version: pyenv's, or one on the path that runs. pyenv's shims may not."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    named = [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for path in (*named, shutil.which(f"python{version}")):
        if path and subprocess.run((path, "-c", ""), check=False).returncode == 0:
            return path
    return None


BASE = """
import json, sys
from click.testing import CliRunner
from penstock.cli.__main__ import main
for line in json.load(sys.stdin):
    done = CliRunner().invoke(main, line.split())
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    print(json.dumps([done.exit_code, done.output]))
"""
COMMANDS: dict[str, tuple[int, str]] = {
    "version": (0, "0."),
    "--help": (0, "Usage:"),
    "help rollout": (0, "--concurrency"),
    "completion bash": (0, "_PENSTOCK_COMPLETE"),
    "doctor": (1, "missing  extra server"),
    "health 127.0.0.1:9": (1, "connection refused"),
    "rollout --server 127.0.0.1:9": (2, "give --reward"),
    "rollout --server 127.0.0.1:9 --command true": (2, "penstock-rl[command]"),
    "serve --model org/model": (2, "penstock-rl[cpu]"),
    "train run.toml": (2, "penstock-rl[trainer]"),
    "eval --server 127.0.0.1:9 --task sums": (2, "penstock-rl[trainer]"),
    "demo": (2, "penstock-rl[cpu]"),
    "up run.toml": (2, "penstock-rl[cpu]"),
    "journal list .": (2, "penstock-rl[server]"),
    "token list --file tokens.toml": (2, "penstock-rl[server]"),
    "weights show 127.0.0.1:9": (1, "connection refused"),
}
"""What the base install answers, by command line."""


@pytest.mark.parametrize("version", PYTHONS)
def test_the_base_install_runs_each_command_or_names_its_extra(
    version: str, wheel: Path, sources: dict[str, str], tmp_path: Path
) -> None:
    if (python := python_of(version)) is None:
        pytest.skip(f"Python {version} is not installed")
    venv = tmp_path / "venv"
    run([python, "-m", "venv", "--without-pip", str(venv)], tmp_path)
    own = str(venv / "bin" / "python")
    installed = subprocess.run(
        (*UV, "pip", "install", "-q", "--python", own, str(wheel)),
        **(options := {"capture_output": True, "text": True, "cwd": tmp_path, "env": sources}),
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    script = subprocess.run((venv / "bin" / "penstock", "version"), **options, check=False)
    assert (script.returncode, script.stdout.strip()) == (0, PROJECT["project"]["version"])
    answers = subprocess.run(
        (own, "-c", BASE), input=json.dumps(list(COMMANDS)), **options, check=False
    )
    assert answers.returncode == 0, answers.stderr
    for line, answer in zip(COMMANDS.items(), answers.stdout.splitlines(), strict=True):
        command, (status, said) = line
        code, output = json.loads(answer)
        assert (code, said in output) == (status, True), f"{command}: {code}: {output}"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("twine", ("check", "--strict")), ("check-wheel-contents", ()), ("pyroma", ("--min", "8"))],
)
def test_the_checkers_of_an_index_find_nothing(
    tool: str, arguments: tuple[str, ...], wheel: Path, sdist: Path, sources: dict[str, str]
) -> None:
    # pyroma wants an address for mail, which this project does not have: 8 of 10.
    files = {"pyroma": [sdist], "twine": [sdist, wheel]}.get(tool, [wheel])
    checked = subprocess.run(
        (*UV, "tool", "run", tool, *arguments, *map(str, files)),
        cwd=ROOT,
        env=sources,
        capture_output=True,
        text=True,
        check=False,
    )
    if "No solution found" in checked.stderr or "Failed to fetch" in checked.stderr:
        pytest.skip(f"{tool} cannot be downloaded: {checked.stderr.strip().splitlines()[-1]}")
    assert checked.returncode == 0, checked.stdout + checked.stderr


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


@pytest.mark.parametrize("package", sorted(INITS.keys() - {"penstock", "penstock.v1"}))
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
    # vLLM reads the environment, which its room sets, when it is imported.
    if "client" not in package and package != "penstock.server.vllm":
        assert not [node for node in source.body if isinstance(node, ast.Import | ast.ImportFrom)]
