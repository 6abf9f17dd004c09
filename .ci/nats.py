"""Puts a NATS server where the tests find one: `.venv/bin/python .ci/nats.py`.

The machine's own is used where it has one. Else Debian's package is unpacked, and installed nowhere: of it
`.venv/share/nats/nats-server` is kept. A second run takes a fraction of a second.

Where it cannot be had the reason is printed on one line, and the exit status is 0 all the same: only the
tests of the journal on JetStream need it, and are skipped.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHARE = Path(__file__).resolve().parent.parent / ".venv" / "share" / "nats"
PROGRAM = SHARE / "nats-server"
PACKAGE = "nats-server"
DOWNLOAD_SECONDS = 120


class NotHere(Exception):
    """It cannot be had on this machine; the message says why."""


def find_server() -> Path | None:
    """The program, where there is one."""
    found = shutil.which("nats-server")
    return Path(found) if found else PROGRAM if PROGRAM.exists() else None


def fetch_server() -> None:
    """Unpacks Debian's. Raises NotHere."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotHere(f"neither nats-server nor {tool} is on this machine")
    with tempfile.TemporaryDirectory(dir=SHARE) as name:
        folder = Path(name)
        run(["apt-get", "-q", "download", PACKAGE], folder)
        for package in folder.glob("*.deb"):
            run(["dpkg-deb", "-x", package.name, "."], folder)
        found = [path for path in folder.glob("usr/*bin/nats-server") if path.is_file()]
        if not found:
            raise NotHere(f"Debian's package {PACKAGE} holds no nats-server")
        found[0].rename(PROGRAM)


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


def main() -> None:
    """Makes it ready, or says why not."""
    SHARE.mkdir(parents=True, exist_ok=True)
    with (SHARE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if find_server() is not None:
            return
        try:
            fetch_server()
        except NotHere as error:
            print(f"nats: the tests of JetStream are left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
