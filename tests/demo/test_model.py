"""Where the demo's model comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.demo import model


def test_an_environment_without_pip_has_it_from_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None if name == "pip" else name)
    uv = tmp_path / "uv"
    uv.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert model.pip() == (str(uv), "tool", "run", "--quiet", "pip")
    # Without uv, what Python says of the missing module is the reason that a person reads.
    uv.unlink()
    assert model.pip() == (sys.executable, "-m", "pip")


def test_pip_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: name)
    assert model.pip() == (sys.executable, "-m", "pip")
