"""A separate NATS server with JetStream, for tests that kill, stop and restart it."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.server.config.journal import JournalSection
from tests.support.ports import HeldPort

# The program fetched by `.ci/programs.py`, used if the machine has none installed.
FETCHED = Path(__file__).resolve().parents[2] / ".venv" / "share" / "programs" / "nats-server"
START_SECONDS = 20.0
SYNCS_FROM = (2, 10)
"""The first version that can sync each write before it acknowledges it."""


def find_program() -> str:
    """The path of nats-server; skips the test if it is not found."""
    pytest.importorskip("nats", reason="nats-py is not installed (the extra jetstream)")
    # Benchmarks call this too, and their PATH does not include the fetched programs.
    found = shutil.which("nats-server") or shutil.which(FETCHED)
    if found is None:
        pytest.skip("there is no nats-server; .ci/programs.py fetches one")
    return found


@functools.cache
def version_of(program: str) -> tuple[int, ...]:
    """The version that the program prints, such as (2, 15, 1)."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v(\d+)\.(\d+)\.(\d+)", said)
    assert found, said
    return tuple(int(number) for number in found.groups())


@dataclass
class NatsServer:
    """One server across any number of restarts, on fixed ports and one folder."""

    program: str
    folder: Path
    held: HeldPort = field(default_factory=HeldPort)
    held_for_monitor: HeldPort = field(default_factory=HeldPort)
    """Keep the ports reserved between two starts."""
    extra: str = ""
    """Additional configuration."""
    sync: bool = True
    """Whether it syncs each write, if its version can."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.held.number

    @property
    def monitor_port(self) -> int:
        """The HTTP monitoring port."""
        return self.held_for_monitor.number

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor(self) -> str:
        """The URL of the monitoring endpoint."""
        return f"http://127.0.0.1:{self.monitor_port}"

    @property
    def durability(self) -> str:
        """The strongest durability that a journal on this server may promise."""
        syncs = self.sync and version_of(self.program) >= SYNCS_FROM
        return "fsync" if syncs else "process"

    def start(self) -> None:
        """Start the server; return when it is ready."""
        sync = "sync_interval: always" if self.durability == "fsync" else ""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats.conf"
        config.write_text(
            f'host: "127.0.0.1"\nport: {self.port}\nhttp: "127.0.0.1:{self.monitor_port}"\n'
            # More than the disk has: each stream reserves space, and none of them uses it.
            f'jetstream {{ store_dir: "{self.folder / "store"}", max_file_store: 1TB\n{sync} }}\n'
            f"{self.extra}\n"
        )
        with (self.folder / "nats.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, "-c", str(config)], stdout=log, stderr=log
            )
        until = time.monotonic() + START_SECONDS
        while not self._ready():
            assert self.process.poll() is None and time.monotonic() < until, self.log
            time.sleep(0.01)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.monitor}/healthz", timeout=2).close()
            return True
        return False

    @property
    def log(self) -> str:
        """The last 4,000 characters printed by all of its starts."""
        return (self.folder / "nats.log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """Send SIGKILL; return when the process is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, as an operator does; return when the process is gone."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait()
            self.process = None

    def section(self, stream: str, **settings: object) -> JournalSection:
        """The journal section of a server's configuration, for a journal on this server."""
        return JournalSection.model_validate(
            {"url": self.url, "stream": stream, **self._promise, **settings}
        )

    def settings(self, stream: str) -> tuple[str, ...]:
        """The settings for a server whose journal is on this server."""
        return (
            f"journal.url={self.url}",
            f"journal.stream={stream}",
            *(f"journal.{name}={value}" for name, value in self._promise.items()),
            "journal.segment_bytes=1048576",
            "journal.max_bytes=1073741824",
        )

    @property
    def _promise(self) -> dict[str, str]:
        synced = {"monitor": self.monitor} if self.durability == "fsync" else {}
        return {"durability": self.durability, **synced}


@contextlib.contextmanager
def nats_server(folder: Path, extra: str = "", *, sync: bool = True) -> Generator[NatsServer]:
    """A NATS server that runs until the end of the block."""
    server = NatsServer(find_program(), folder, extra=extra, sync=sync)
    server.start()
    try:
        yield server
    finally:
        server.kill()
