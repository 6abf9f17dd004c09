"""The distribution's name: what pip is told, everywhere the same."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from penstock.common import distribution

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def texts(folders: tuple[str, ...], suffixes: set[str]) -> Iterator[str]:
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes and path.is_file():
                yield path.read_text()


def test_it_is_the_projects() -> None:
    assert PROJECT["name"] == distribution.DISTRIBUTION
    assert PROJECT["version"] == distribution.installed_version()


def test_a_hint_names_the_distribution_and_not_another_projects() -> None:
    assert distribution.pip_install("server,dev") == "pip install 'penstock-rl[server,dev]'"
    assert distribution.pip_install("server,cpu") == (
        f"pip install 'penstock-rl[server,cpu]' --extra-index-url {distribution.CPU_INDEX}"
    )
    pages = [*texts(("docs", "proto"), {".md"}), *(p.read_text() for p in ROOT.glob("*.md"))]
    code = list(texts(("clients/python", "server", "trainer"), {".py"}))
    named = re.findall(r"([\w-]*penstock[\w-]*)\[([a-z,]+)\]", "\n".join(pages))
    assert {name for name, _ in named} == {distribution.DISTRIBUTION}
    assert "penstock[" not in "\n".join(code)
    hints = re.findall(r"pip_install\(['\"]([a-z,]+)", "\n".join(code))
    extras = {extra for each in [*hints, *dict(named).values()] for extra in each.split(",")}
    assert {"command", "ray", "jetstream", "megatron"} <= extras <= EXTRAS.keys()
