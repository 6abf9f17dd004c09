"""A cgroup for each attempt, where the machine lets this process make some: a bound on memory for all of
its processes together, and a list of them that none can leave.

Where they come from, the first that works:

- version 2: below the worker's own cgroup, if that is delegated to it, as
  `systemd-run --user --scope -p Delegate=yes penstock rollout ...` does. Version 2 divides nothing among
  children of a cgroup that has processes itself, so the worker moves into one, `penstock-worker-PID`.
- version 1: below the worker's own cgroup of the memory controller, if it may write there.

Where neither works RLIMIT_DATA bounds each process by itself, and the worker says so when it starts.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cgroup:
    """One attempt's."""

    folder: Path
    version: int

    def was_out_of_memory(self) -> bool:
        """Whether the kernel killed one of its processes for the limit."""
        name, key = {1: ("memory.oom_control", "oom_kill"), 2: ("memory.events", "oom_kill")}[
            self.version
        ]
        for line in (self.folder / name).read_text().splitlines():
            words = line.split()
            if words[0] == key:
                return int(words[1]) > 0
        return False

    def remove(self) -> None:
        """Once it has no processes. Left where it has: its keeper removes it."""
        with suppress(OSError):
            self.folder.rmdir()


@dataclass(frozen=True)
class Cgroups:
    """Where an attempt's cgroup is made."""

    parent: Path
    version: int
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def make(self, limit_bytes: int) -> Cgroup:
        """Raises OSError."""
        folder = self.parent / f"penstock-{os.getpid()}-{next(self._number)}"
        folder.mkdir()
        made = Cgroup(folder, self.version)
        try:
            _limit(made, limit_bytes)
        except OSError:
            made.remove()
            raise
        return made


def find_cgroups() -> Cgroups | None:
    """Where this process may make cgroups that bound memory; None where it may not."""
    own = _own_cgroups(_joined())
    for version, mounts in ((2, _mounts("cgroup2")), (1, _mounts("cgroup"))):
        path = own.get("" if version == 2 else "memory")
        for mount in mounts:
            if path is None:
                continue
            found = Cgroups(mount / path.lstrip("/"), version)
            try:
                if version == 2:
                    _delegate(found.parent)
                found.make(1 << 30).remove()
            except OSError:
                continue
            return found
    return None


def _limit(cgroup: Cgroup, limit_bytes: int) -> None:
    memory, swap = {
        1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        2: ("memory.max", "memory.swap.max"),
    }[cgroup.version]
    (cgroup.folder / memory).write_text(str(limit_bytes))
    # Not there where the kernel counts no swap. Version 1 counts both together, version 2 each.
    if (cgroup.folder / swap).exists():
        (cgroup.folder / swap).write_text(str(limit_bytes if cgroup.version == 1 else 0))


def _delegate(own: Path) -> None:
    """Has the children of a cgroup bound memory. Raises OSError where it is not ours to divide."""
    if "memory" not in (own / "cgroup.controllers").read_text().split():
        raise OSError("the memory controller is not there")
    if "memory" in (own / "cgroup.subtree_control").read_text().split():
        return
    leaf = own / f"penstock-worker-{os.getpid()}"
    leaf.mkdir()
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    try:
        (own / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        # Another process is in it: back to where we were.
        (own / "cgroup.procs").write_text(str(os.getpid()))
        leaf.rmdir()
        raise


def _own_cgroups(text: str) -> dict[str, str]:
    """Controller -> path; that of version 2 under the empty name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounts(kind: str) -> list[Path]:
    mounts: list[Path] = []
    for line in _mounted().splitlines():
        _, folder, found, options, *_ = line.split()
        if found == kind and (kind == "cgroup2" or "memory" in options.split(",")):
            mounts.append(Path(folder))
    return mounts


def _joined() -> str:
    return Path("/proc/self/cgroup").read_text()


def _mounted() -> str:
    return Path("/proc/self/mounts").read_text()
