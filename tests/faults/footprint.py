"""The resources of a process: resident memory, open files, shared memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED = ("/dev/shm/", "/memfd:")


@dataclass(frozen=True)
class Footprint:
    """Resources at one moment."""

    resident_bytes: int
    files: int
    shared_bytes: int
    """Size of the shared-memory files that it has open or mapped, named or not, each counted once."""


def footprint(pid: int | None = None) -> Footprint:
    """Measure a process, by default this one. This one collects garbage first."""
    if pid is None:
        gc.collect()
    process = psutil.Process(pid)
    return Footprint(process.memory_info().rss, process.num_fds(), _shared_bytes(process.pid))


def _shared_bytes(pid: int) -> int:
    sizes: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(entry.readlink()).startswith(SHARED):
                status = entry.stat()
                sizes[str(status.st_ino)] = status.st_size
        except FileNotFoundError:
            continue  # Closed meanwhile.
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, _, _, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(SHARED):
            begin, end = (int(part, 16) for part in place.split("-"))
            sizes[inode] = max(sizes.get(inode, 0), end - begin)
    return sum(sizes.values())
