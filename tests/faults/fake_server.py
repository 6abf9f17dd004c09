"""A rollout server around the fake engine in a separate process, observed from outside."""

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
    """A running server process."""

    host: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def footprint(self) -> Footprint:
        return footprint(self.process.pid)

    def check_alive(self) -> None:
        """Check that it runs, and that its log has no traceback."""
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
    """Start a server with a journal in `folder`. `prefix` precedes its command, and `options`
    follow it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    command = [*prefix, sys.executable, "-m", "tests.support.fake_serve", "--listen", f"{host}:0"]
    command += ["--step-seconds", str(step_seconds), *options]
    # A low threshold, because turns are only a few tokens long.
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
