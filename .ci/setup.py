"""Sets up `.venv` in this checkout: `python3 .ci/setup.py [cpu|cuda]`, or `make setup [ENGINE=cuda]`.

Each step runs only if its inputs changed, so a second run takes a fraction of a second:

1. Create the virtual environment, again if it belongs to another checkout or has lost its Python.
2. Install uv, in the version that `uv.lock` names.
3. Install what `uv.lock` names for the extras of this project and for the engine, except torch.
4. Install torch: what the lock names for CUDA, and its CPU build for a CPU.
5. Install this project in editable mode, in a form that type checkers can follow: a folder of links to
   the package folders. New and deleted files then need no set-up. It is installed from a folder of links
   in `.venv`, because setuptools writes files next to its input.

Without an argument the engine is that of the last set-up, or else `cuda` if an NVIDIA driver is loaded.

torch's CPU build is not on PyPI. Its local version (`2.13.0+cpu`) is first looked up where pip is
configured to look. That finds a local copy, and a plain registry reports "no such version" immediately.
Only then PyTorch's own index is tried.

The output of uv and pip goes to `.venv/setup.log` and is shown only on failure. Concurrent runs wait for
each other.
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
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "penstock-setup.json"
LOG = VENV / "setup.log"
PROJECT = VENV / "project"
"""The folder that is installed: links to this checkout, and files that setuptools writes next to them."""

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
ENGINES = ("cpu", "cuda")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
EXTRAS = ("server", "trainer", "megatron", "dev")
INPUTS = ("pyproject.toml", "setup.py", "uv.lock")
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOG_LINES_SHOWN = 40
# pip's configuration, by the variable that gives uv the same.
SOURCES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def main(arguments: list[str]) -> None:
    """Brings `.venv` up to date, or exits with an error message of one line."""
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"setup: penstock needs Python 3.11 to 3.13, and {sys.executable} is {version};"
            " name another with `make PYTHON=python3.11 ...`"
        )
    if sys.platform != "linux":
        sys.exit(f"setup: the engine's CPU build supports Linux only, and this is {sys.platform}")
    if arguments and arguments[0] not in ENGINES:
        sys.exit(f"setup: ENGINE must be one of {', '.join(ENGINES)}, not {arguments[0]}")
    with one_at_a_time():
        bring_up_to_date(arguments[0] if arguments else None)


def bring_up_to_date(engine: str | None = None) -> None:
    """Runs the steps whose inputs changed since the last run."""
    done = read_stamp()
    if VENV.exists() and not belongs_here(done):
        say(".venv belongs to another checkout or has lost its Python; creating it again")
        shutil.rmtree(VENV)
        done = {}
    engine = engine or done.get("engine") or detect_engine()
    if done.get("engine", engine) != engine:
        say(f".venv has the engine for {done['engine']}; creating it again for {engine}")
        shutil.rmtree(VENV)
    wanted = {"root": str(ROOT), "engine": engine, "environment": environment_digest()}
    if done == wanted and linked_packages() is not None:
        return
    started = time.monotonic()
    if not PYTHON.exists():
        say("creating .venv")
        run([sys.executable, "-m", "venv", str(VENV)], "could not create .venv")
    # From here on, an interrupted run can be continued and a moved checkout detected.
    STAMP.write_text(json.dumps({"root": str(ROOT), "engine": engine}))
    LOG.unlink(missing_ok=True)
    install_everything(engine)
    link_packages()
    STAMP.write_text(json.dumps(wanted))
    say(f"ready after {time.monotonic() - started:.0f} s")


def detect_engine() -> str:
    """`cuda` if this machine has an NVIDIA driver, which is reported."""
    if not NVIDIA_DRIVER.exists():
        return "cpu"
    say(
        "found an NVIDIA driver; installing the CUDA builds (`make setup ENGINE=cpu` for the others)"
    )
    return "cuda"


def install_everything(engine: str) -> None:
    """Runs steps 2 to 5, without the links to package folders."""
    sources = pip_sources()
    say(f"installing what uv.lock names for {engine} (half a minute to two minutes the first time)")
    if not call(
        [str(PYTHON), "-m", "pip", "--no-input", "install", f"uv=={locked('uv')}"], sources
    ):
        fail("pip could not install uv")
    requirements = VENV / "requirements.txt"
    extras = [argument for extra in (*EXTRAS, engine) for argument in ("--extra", extra)]
    pruned = ("--prune", "torch") if engine == "cpu" else ()
    export = ("export", "--frozen", "--no-emit-project", *extras, *pruned, "-o", str(requirements))
    uv(sources, *export)
    uv(sources, "pip", "install", "--no-deps", "-r", str(requirements))
    if engine == "cpu":
        install_torch(sources)
    link_project()
    # An older checkout has this project under a name that is another project's on PyPI.
    uv(sources, "pip", "uninstall", "penstock")
    uv(sources, "pip", "install", *editable())


def install_torch(sources: dict[str, str]) -> None:
    """Installs the CPU build from pip's configured sources, else from PyTorch's index."""
    install = [str(VENV / "bin" / "uv"), "pip", "install", "--no-deps", TORCH]
    if call(install, sources):
        return
    say(f"pip's configured sources have no {TORCH}; trying {TORCH_CPU_INDEX}")
    if not call([*install, "--index", TORCH_CPU_INDEX], sources):
        fail(
            f"{TORCH} is neither in pip's configured sources nor at {TORCH_CPU_INDEX}."
            "\nSave its wheel in a folder and name that folder: PIP_FIND_LINKS=/folder make setup"
        )


def editable() -> list[str]:
    """Arguments for an editable install by links, which pyright follows, not by an import hook."""
    return ["--no-deps", "--config-settings", "editable_mode=strict", "-e", str(PROJECT)]


def pip_sources() -> dict[str, str]:
    """Environment variables that make uv look where pip is configured to look."""
    found: dict[str, str] = {}
    listed = run([str(PYTHON), "-m", "pip", "config", "list"], "could not read pip's configuration")
    # A later line wins, as in pip: the machine's files, the user's, and the environment.
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        variable = SOURCES.get(name.rpartition(".")[2])
        if variable is not None and variable not in os.environ:
            found[variable] = value.strip("'\"")
    if "UV_INDEX" in found:
        # pip takes the best version of all indexes, uv by default that of the first that has any.
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return found


def locked(name: str) -> str:
    """The version of a distribution in `uv.lock`."""
    import tomllib  # Imported late, so that an older Python gets far enough to report its age.

    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return next(package["version"] for package in packages if package["name"] == name)


def link_project() -> None:
    """Creates the folder that is installed."""
    PROJECT.mkdir(exist_ok=True)
    folders = {Path(folder).parts[0] for folder in package_folders().values()}
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", *sorted(folders)):
        link(PROJECT / name, ROOT / name)


def link_packages() -> None:
    """Replaces setuptools' links to files by one link per package folder."""
    links = linked_packages()
    if links is None:
        sys.exit("setup: this project was installed without the requested folder of links")
    for package, folder in package_folders().items():
        # `penstock` itself is a folder of links: server and trainer are elsewhere in the checkout.
        if "." in package:
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
    for path in (*(ROOT / name for name in INPUTS), Path(__file__).resolve()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def uv(sources: dict[str, str], *arguments: str) -> None:
    """Runs uv; on failure, exits with the end of its output."""
    if not call([str(VENV / "bin" / "uv"), *arguments], sources):
        fail(f"uv {arguments[0]} failed; its full output is in {LOG}")


def call(command: list[str], sources: dict[str, str]) -> bool:
    """Runs a command, and appends its output to the log."""
    environment = {**os.environ, **sources, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_USER": "0"}
    # With any of these, pip or Python would look for packages outside .venv, or put them there.
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON"):
        environment.pop(name, None)
    environment["VIRTUAL_ENV"] = str(VENV)
    with LOG.open("a") as log:
        print("$", *command, file=log, flush=True)
        result = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    return result.returncode == 0


def fail(complaint: str) -> NoReturn:
    """Exits with the end of the log."""
    lines = LOG.read_text().splitlines()[-LOG_LINES_SHOWN:]
    sys.exit("\n".join([*lines, f"setup: {complaint}"]))


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
    main(sys.argv[1:])
