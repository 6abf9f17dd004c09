"""A rollout server around the fake engine in a process of its own, watched from outside."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.footprint import Footprint, footprint

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60.0
SERVING = re.compile(rb"serving fake on .*:(\d+) ")


@dataclass(frozen=True)
class ServerProcess:
    """One that was started."""

    host: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self.host}:{self.port}"

    def footprint(self) -> Footprint:
        """What it holds now."""
        return footprint(self.process.pid)

    def check_alive(self) -> None:
        """It runs, and has met nothing that it did not foresee."""
        text = self.log.read_text(errors="replace")
        assert self.process.poll() is None, f"the server ended: {text[-4000:]}"
        at = text.find("Traceback")
        assert at < 0, text[max(0, at - 500) : at + 4000]


@contextlib.contextmanager
def fake_server(
    folder: Path,
    *settings: str,
    step_seconds: float = 0.0,
    host: str = "127.0.0.1",
    prefix: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> Generator[ServerProcess]:
    """Starts one with a journal in `folder`; `prefix` goes before its command, `options` behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    command = [*prefix, sys.executable, "-m", "tests.support.fake_serve", "--listen", f"{host}:0"]
    command += ["--step-seconds", str(step_seconds), *options]
    # Turns are of a few tokens.
    given = (f"journal.folder={folder / 'journal'}", "journal.refers_from_bytes=1", *settings)
    for setting in given:
        command += ["--set", setting]
    with log.open("ab") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
    assert process.stdout is not None
    try:
        match = SERVING.search(process.stdout.readline())
        assert match is not None, log.read_text(errors="replace")[-4000:]
        yield ServerProcess(host, int(match[1]), process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
