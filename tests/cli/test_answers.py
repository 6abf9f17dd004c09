"""What programs read, as docs/reference/exit-statuses.md says: statuses, and errors and results as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.common.answers import Exit
from tests.support.reference.commands import commands

RUN = """[model]
path = "org/model"

[data.jsonl]
path = "train.jsonl"

[train]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    write({"run.toml": f"{RUN}groups_per_step = 8\n", "train.jsonl": '{"prompt": "1+1"}\n'})
    write({"score.py": "def reward(task, trajectory): return 1.0\n"})
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("score", None)


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).write_text(text)


ERRORS: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "health 127.0.0.1:9": (
        {},
        {
            "error": "connection refused",
            "where": "127.0.0.1:9",
            "hint": "is a server running there?",
            "status": 1,
        },
    ),
    "weights show 127.0.0.1:9": (
        {},
        {
            "error": "connection refused",
            "where": "127.0.0.1:9",
            "hint": "is a server running there?",
            "status": 1,
        },
    ),
    "train run.toml": (
        {"run.toml": f"{RUN}groups_per_step = 0\nlr = 1\n"},
        {
            "error": "must be at least 1, got 0",
            "where": "run.toml:8: train.groups_per_step",
            "hint": "",
            "status": 2,
            "others": [
                {
                    "error": "unknown setting",
                    "where": "run.toml:9: train.lr",
                    "hint": "did you mean train.learning_rate?",
                }
            ],
        },
    ),
    "train run.toml --set train.updates_per_step=9": (
        {},
        {
            "error": "updates_per_step must be at most groups_per_step = 8, got 9: each update needs "
            "whole groups",
            "where": "run.toml:7 with --set train.updates_per_step: train",
            "hint": "",
            "status": 2,
        },
    ),
    "serve --listen http://0.0.0.0 --model org/model": (
        {},
        {
            "error": "an address reads HOST:PORT, got 'http://0.0.0.0'",
            "where": "--listen",
            "hint": "without scheme and path it is 0.0.0.0:PORT",
            "status": 2,
        },
    ),
    "rollout --server 127.0.0.1:9 --reward score:rewrd": (
        {},
        {
            "error": "score has no rewrd",
            "where": "--reward score:rewrd",
            "hint": "did you mean reward? ({here}/score.py)",
            "status": 2,
        },
    ),
    "rollout --server 127.0.0.1:9 --concurency 3": (
        {},
        {
            "error": "no such option",
            "where": "--concurency",
            "hint": "did you mean --concurrency?",
            "status": 2,
        },
    ),
    "rollout": (
        {},
        {
            "error": "the option is missing",
            "where": "--server",
            "hint": "see penstock rollout --help",
            "status": 2,
        },
    ),
    "eval --server localhost": (
        {},
        {
            "error": "an address reads HOST:PORT, got 'localhost'",
            "where": "--server",
            "hint": "see penstock eval --help",
            "status": 2,
        },
    ),
    "demo --ranks none": (
        {},
        {
            "error": "'none' is not a valid integer range.",
            "where": "--ranks",
            "hint": "see penstock demo --help",
            "status": 2,
        },
    ),
    "up nothing.toml": (
        {},
        {
            "error": "No such file or directory (in {here})",
            "where": "nothing.toml",
            "hint": "",
            "status": 2,
        },
    ),
    "journal list .": (
        {},
        {
            "error": ". is not a journal: it holds neither LOCK nor segments",
            "where": "",
            "hint": "",
            "status": 2,
        },
    ),
    "token list --file tokens.toml": (
        {},
        {"error": "no such file", "where": "tokens.toml", "hint": "", "status": 1},
    ),
    "help weigts": (
        {},
        {
            "error": "there is no command 'weigts'",
            "where": "",
            "hint": "did you mean weights?",
            "status": 2,
        },
    ),
}
"""What a program reads, by command line."""


@pytest.mark.parametrize("command", ERRORS)
def test_programs_read_an_error_as_a_line_of_json(here: Path, command: str) -> None:
    files, answer = ERRORS[command]
    write(files)
    done = CliRunner().invoke(main, [*command.split(), "--json"], prog_name="penstock")
    assert done.stdout == ""
    read = json.loads(done.stderr.replace(str(here), "{here}"))
    assert read == answer
    assert done.exit_code == answer["status"]


def test_only_an_option_asks_for_json() -> None:
    """A word after `--` is an argument, and the next command is not asked for JSON."""
    for arguments in (["help", "--", "--json"], ["help", "weigts"]):
        done = CliRunner().invoke(main, arguments)
        assert done.stderr.splitlines()[-1].startswith("Error: there is no command")


@pytest.mark.parametrize(
    "command", ["version", "train run.toml --dry-run", "token list --file t.toml"]
)
def test_programs_read_a_result_as_json(command: str) -> None:
    write({"t.toml": ""})
    done = CliRunner().invoke(main, [*command.split(), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (
        found.keys()
        >= {
            "version": {"version"},
            "train": {"model", "data", "train"},
            "token": {"tokens", "certificates"},
        }[command.split()[0]]
    )


def test_a_command_returns_only_documented_statuses() -> None:
    """The page of the exit statuses is made of both."""
    said = {name: str(command.epilog or "") for name, command in commands()}
    for name, command in commands():
        assert isinstance(command, click.Group) or said[name].startswith("Exit status: "), name
    numbers = re.findall(r"(?:: |; )(\d+)(?= if| for|;|\.)", "\n".join(said.values()))
    assert {int(number) for number in numbers} == set(Exit)
