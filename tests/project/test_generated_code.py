"""The committed stubs are generated from proto/, and proto/ passes buf's rules."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
COMMITTED = ROOT / "clients" / "python" / "penstock" / "v1"
HANDWRITTEN = {"__init__.py", "py.typed"}

pytestmark = pytest.mark.skipif(
    shutil.which("buf", path=str(BIN)) is None, reason="needs the extra `dev`"
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_generating_the_stubs_again_gives_no_difference(tmp_path: Path) -> None:
    # The target that `make gen` runs, into another folder.
    result = run("make", "--no-print-directory", "gen-into", f"STUBS={tmp_path}")
    assert result.returncode == 0, result.stderr
    generated = tmp_path / "penstock" / "v1"
    names = {path.name for path in generated.iterdir()}
    assert names
    assert names == {path.name for path in COMMITTED.glob("*.py*")} - HANDWRITTEN
    _, different, unreadable = filecmp.cmpfiles(generated, COMMITTED, sorted(names), shallow=False)
    assert (different, unreadable) == ([], []), "run `make gen` and commit what it changes"


def test_the_protocol_follows_bufs_rules() -> None:
    result = run("buf", "lint")
    assert result.returncode == 0, result.stdout


def test_the_protocol_is_formatted() -> None:
    result = run("buf", "format", "--diff", "--exit-code")
    assert result.returncode == 0, result.stdout
