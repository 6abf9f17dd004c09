"""The clients in other languages, built by `.ci/clients.py`, for tests that run them.

A test that needs a language is skipped, with the reason, if its tools are not available on this
machine.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("penstock_clients", ROOT / ".ci" / "clients.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


clients = _load()


@dataclass(frozen=True)
class Language:
    """How programs of a language run on this machine."""

    name: str
    environment: Mapping[str, str]
    folder: Path

    def program(self, name: str) -> tuple[str, ...]:
        """The command of "life" (the agent of test_languages.py) or of "agent" (the example)."""
        if self.name == "python":
            return (sys.executable, "-m", f"tests.support.{name}")
        if self.name == "openai":
            return (sys.executable, "-m", f"tests.support.{name}_openai")
        if self.name == "go":
            return (str(clients.BIN / name),)
        place = {"life": "test", "agent": "examples"}[name]
        return (self.tool("node"), str(self.folder / "dist" / place / f"{name}.js"))

    def own_tests(self) -> tuple[str, ...]:
        """The command of the client's own test suite. It prints a
        line for each test that passes."""
        if self.name == "go":
            return (str(clients.BIN / "penstock.test"), "-test.v")
        # Not `node --test`: its child process survives when it is killed.
        return (self.tool("node"), "--test-reporter=tap", "dist/test/client.test.js")

    def tool(self, name: str) -> str:
        """The path of one of the language's tools."""
        found = clients.shutil.which(name, path=self.environment["PATH"])
        assert found is not None
        return str(found)


@functools.cache
def language(name: str) -> Language:
    """A language whose client is built. Skips the test if its tools are not available."""
    try:
        if name == "typescript":
            return Language(name, clients.typescript(), clients.TYPESCRIPT)
        if name == "go":
            return Language(name, clients.go(), clients.GO_MODULE)
        return Language(name, clients.os.environ, ROOT)
    except clients.NotHere as error:
        pytest.skip(f"{name}: {error}")


async def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path = ROOT,
    seconds: float = 120,
) -> str:
    """Run a program to its end and return its output. The program is killed
    if this coroutine ends early."""
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(environment), cwd=folder, stdout=output, stderr=output
        )
        try:
            async with asyncio.timeout(seconds):
                status: int | str = await process.wait()
        except TimeoutError:
            status = f"still running after {seconds:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        output.seek(0)
        printed = output.read().decode(errors="replace")
    assert status == 0, f"{status}\n{printed}"
    return printed
