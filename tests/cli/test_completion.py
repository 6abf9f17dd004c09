"""Shells complete every command and option."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from tests.support.reference.commands import commands


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock we", "weights"),
        ("penstock rollout --conc", "--concurrency"),
        ("penstock serve --http", "--http-listen"),
        ("penstock eval --prom", "--prompts"),
        ("penstock demo --ti", "--tiny"),
    ],
)
def test_shells_complete_commands_and_options(line: str, expected: str) -> None:
    asked: dict[str, Any] = {
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    done = CliRunner().invoke(main, env=asked, prog_name="penstock")
    assert f"plain,{expected}\n" in done.output


LEAVES = {name: each for name, each in commands() if not isinstance(each, click.Group)}


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_is_completed(name: str) -> None:
    asked: dict[str, Any] = {
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": f"{name} --",
        "COMP_CWORD": str(len(name.split())),
    }
    done = CliRunner().invoke(main, env=asked, prog_name="penstock")
    told = {line.removeprefix("plain,") for line in done.output.splitlines()}
    options = [each for each in LEAVES[name].params if isinstance(each, click.Option)]
    assert options
    assert told >= {opt for each in options for opt in each.opts if opt.startswith("--")}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("doc",), "doctor"),
        (("serve", "--http"), "--http-listen"),
        (("token", "create", "--role", "tr"), "trainer"),
    ],
)
def test_bash_completes(words: tuple[str, ...], expected: str) -> None:
    """The script in the shell that it is for."""
    script = (
        'source <(penstock completion bash); COMP_WORDS=(penstock "$@"); COMP_CWORD=$#; '
        '_penstock_completion penstock "${@: -1}"; echo "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ("bash", "-c", script, "bash", *words),
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == ([expected], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_the_command(shell: str) -> None:
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"_PENSTOCK_COMPLETE={shell}_complete" in done.output
