"""Makes a cgroup for each attempt, if the machine permits it.

A cgroup bounds the memory of all processes of an attempt together. It also lists these processes,
and none can leave it. The first of these that works is used:

- Version 2: below the worker's own cgroup, if it is delegated to the worker, for example by `systemd-run
  --user --scope -p Delegate=yes penstock rollout ...`. A version 2 cgroup that has processes itself cannot
  limit its children. So the worker moves into a child, `penstock-worker-PID`.
- Version 1: below the worker's own cgroup of the memory controller, if the worker can write there.

If neither works, RLIMIT_DATA bounds each process separately. The worker logs this at startup.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Cgroup:
    folder: Path
    version: int

    def was_out_of_memory(self) -> bool:
        """Returns whether the kernel killed one of its processes because of the limit."""
        name = {1: "memory.oom_control", 2: "memory.events"}[self.version]
        lines = (self.folder / name).read_text().splitlines()
        return int(dict(line.split() for line in lines).get("oom_kill", 0)) > 0

    def remove(self) -> None:
        """Removes it if it has no processes. Otherwise its keeper removes it later."""
        with suppress(OSError):
            self.folder.rmdir()


@dataclass(frozen=True)
class Cgroups:
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
    """Returns where this process can make cgroups that bound memory, or None."""
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
    # Missing if the kernel does not account for swap. Version 1 limits memory and swap together,
    # version 2 separately.
    if (cgroup.folder / swap).exists():
        (cgroup.folder / swap).write_text(str(limit_bytes if cgroup.version == 1 else 0))


def _delegate(own: Path) -> None:
    """Enables the memory controller for children. Raises OSError if it is not delegated."""
    if "memory" not in (own / "cgroup.controllers").read_text().split():
        raise OSError("the memory controller is not available")
    if "memory" in (own / "cgroup.subtree_control").read_text().split():
        return
    leaf = own / f"penstock-worker-{os.getpid()}"
    leaf.mkdir()
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    try:
        (own / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        # Another process is in this cgroup, so move back.
        (own / "cgroup.procs").write_text(str(os.getpid()))
        leaf.rmdir()
        raise


def _own_cgroups(text: str) -> dict[str, str]:
    """Returns controller -> path. Version 2 has the empty name."""
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
