"""Where the demo's model comes from."""

from __future__ import annotations

import sys

import pytest

from penstock.demo import model


def test_an_environment_without_pip_has_it_from_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None if name == "pip" else name)
    monkeypatch.setenv("UV", "/opt/uv")
    assert model.pip() == ("/opt/uv", "tool", "run", "--quiet", "pip")
    # Without uv, what Python says of the missing module is the reason that a person reads.
    monkeypatch.delenv("UV")
    monkeypatch.setenv("PATH", "")
    assert model.pip() == (sys.executable, "-m", "pip")


def test_pip_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: name)
    assert model.pip() == (sys.executable, "-m", "pip")
