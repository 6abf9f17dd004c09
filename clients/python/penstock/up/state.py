"""The state of a `penstock up` run: written at each change, and shown by `penstock up RUN --status`.

`state.json` in the run's folder is replaced atomically. A lock on `events.log` shows whether the run is
alive, because the kernel releases it when the process ends. The lock also keeps a second `penstock up` out
of the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.up.processes import read_tail, write_files
from penstock.up.supervisor import Role

EVENTS = "events.log"
STATE = "state.json"
TAIL_BYTES = 4096


class FolderUnusable(Exception):
    """The run's folder cannot be used or read."""


class FolderInUse(FolderUnusable):
    """Another `penstock up` is running in the folder."""


@dataclass(frozen=True)
class RoleState:
    """The state of one role, as it is stored."""

    name: str
    state: str
    host: str
    """Empty before its first start."""
    pid: int
    """Process id on that host."""
    restarts: int
    since: float
    """When the state was entered, in seconds since the epoch."""
    address: str
    """Address at which it serves; empty unless it does."""
    log: str


@contextlib.contextmanager
def locked(out: Path) -> Generator[None]:
    """Locks the folder, creating it if needed. Raises FolderUnusable."""
    with _using(out):
        out.mkdir(parents=True, exist_ok=True)
        file = (out / EVENTS).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(f"another `penstock up` is running in {out}") from None
        yield


@contextlib.contextmanager
def _using(out: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise FolderUnusable(f"up.out: {error.filename or out}: {error.strerror}") from error


def holds_run(out: Path) -> bool:
    """Whether a run was ever started in the folder. Raises FolderUnusable."""
    with _using(out):
        return out.is_dir() and any(path.name == STATE for path in out.iterdir())


def is_running(out: Path) -> bool:
    """Whether a `penstock up` is running in the folder. Raises FolderUnusable."""
    try:
        with locked(out):
            return False
    except FolderInUse:
        return True


def write_state(out: Path, placement: str, roles: Sequence[Role]) -> None:
    """Stores the state of every role."""
    states = [asdict(_state(role)) for role in roles]
    told = {"pid": os.getpid(), "placement": placement, "roles": states}
    write_files({out / STATE: json.dumps(told, indent=1) + "\n"})


def _state(role: Role) -> RoleState:
    process = role.process
    return RoleState(
        role.name,
        role.state.value,
        "" if process is None else process.host,
        0 if process is None else process.pid,
        max(0, role.starts - 1),
        role.since,
        role.address,
        "" if process is None else str(process.command.log),
    )


def read_state(out: Path) -> dict[str, Any] | None:
    """The state stored last; None if there is none. Raises FolderUnusable."""
    with _using(out):
        try:
            return json.loads((out / STATE).read_text())
        except FileNotFoundError:
            return None


def last_words(log: Path) -> str:
    """The last line of a log that is not blank."""
    try:
        lines = read_tail(log, TAIL_BYTES)
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
