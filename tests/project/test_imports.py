"""What is loaded when: seen at run time. `test_arrows` reads who may import whom from the source."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

ROOT = Path(__file__).parents[2]
OWN = ("penstock.", "tests.", "benchmarks.")
HEAVY = ("torch", "vllm", "transformers", "pydantic", "xxhash", "click", "opentelemetry.sdk")


def test_benchmarks_and_examples_import_what_there_is():
    """Most of these files run in no test. Without this check, users would be the first to see a
    removed name.
    """
    missing: list[str] = []
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(OWN):
                continue
            module = importlib.import_module(cast("str", node.module))
            folder = hasattr(module, "__path__")
            missing += [
                f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
                for alias in node.names
                if not hasattr(module, alias.name)
                and not (folder and importlib.util.find_spec(f"{node.module}.{alias.name}"))
            ]
    assert missing == []


def loaded_by(*command: str) -> set[str]:
    """The modules that a command loads in a fresh interpreter."""
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True
    )
    return {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines() if "|" in line}


HELP = """
from click.testing import CliRunner
from penstock.cli.__main__ import main
for name in ("serve", "train", "rollout", "eval", "weights", "token", "demo", "up", "version"):
    assert CliRunner().invoke(main, [name, "--help"]).output.startswith("Usage: "), name
"""


@pytest.mark.parametrize(
    ("heavy", "command"),
    [
        (HEAVY, ("-c", "import penstock.client")),
        (HEAVY, ("-c", "import penstock; penstock.connect, penstock.__version__")),
        (("torch", "vllm"), ("-m", "penstock.cli", "version")),
        (("torch", "vllm"), ("-c", HELP)),
    ],
    ids=["client", "penstock", "version", "help"],
)
def test_neither_the_client_nor_a_help_page_loads_what_is_heavy(
    heavy: tuple[str, ...], command: tuple[str, ...]
) -> None:
    modules = loaded_by(*command)
    # A module that importlib.import_module names is not in the times, but those that it imports are.
    assert "penstock.client.client" in modules
    assert not [name for name in modules if name.startswith(heavy)]


def test_plugins_of_other_systems_load_nothing_heavy_by_themselves():
    modules = loaded_by("-c", "import penstock.client.plugins.worker")
    heavy = ("torch", "vllm", "transformers", "slime", "pydantic")
    assert not [name for name in modules if name.startswith(heavy)]


def test_a_trainer_loads_vllm_only_when_it_sends_by_a_collective():
    rooms = ("loop", "weights.publisher", "weights.collective.transfer")
    names = [f"penstock.trainer.{name}" for name in (*rooms, "weights.collective.transport")]
    assert "vllm" not in loaded_by("-c", f"import {', '.join(names)}")
