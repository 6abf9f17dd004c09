"""Python, memory, shared memory, disk, open files and ports."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import socket
import sys
from pathlib import Path

from penstock.machine.findings import GIB, Finding, State, gib

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
NEWEST_PYTHON = (3, 13)
MEMORY_BYTES = 8 * GIB
"""What `penstock demo` needs."""
DISK_BYTES, LEAST_DISK_BYTES = 10 * GIB, 1 * GIB
OPEN_FILES = 4096
PORTS = (50051, 50052)
"""Where `penstock serve` listens by default: gRPC and HTTP."""


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    found = ".".join(map(str, version))
    if version[:2] > NEWEST_PYTHON:
        newest = ".".join(map(str, NEWEST_PYTHON))
        said = f"{found}: the engine has no build for a Python later than {newest}"
        return Finding("Python", State.WARNING, said, f"make an environment with Python {newest}")
    return Finding("Python", State.OK, f"{found}, {sys.executable}")


def memory_bytes() -> int:
    """Memory of the machine, or of the container if that is less."""
    return _memory(MEMINFO, CGROUP)[1]


def _memory(meminfo: Path, cgroup: Path) -> tuple[int, int]:
    """Free bytes, and all."""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE))
    free, size = (int(sizes[name]) * 1024 for name in ("MemAvailable", "MemTotal"))
    with contextlib.suppress(OSError, ValueError):
        # "max", or the bytes that a container may use.
        limit = int((cgroup / "memory.max").read_text())
        size = min(size, limit)
        free = min(free, limit - int((cgroup / "memory.current").read_text()))
    return free, size


def check_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Finding:
    free, size = _memory(meminfo, cgroup)
    found = f"{gib(free)} of {gib(size)} free"
    if free < MEMORY_BYTES:
        said = f"{found}; the demo takes about {gib(MEMORY_BYTES)}"
        return Finding("memory", State.WARNING, said, "end other programs, or take a smaller model")
    return Finding("memory", State.OK, found)


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        hint = "mount it, or start the container with --shm-size=8g"
        return Finding("shared memory", State.MISSING, f"{folder}: {error.strerror}", hint)
    found = f"{gib(free)} free in {folder}"
    if free < GIB:
        said = f"{found}: too little for several processes of an engine, or for collectives"
        return Finding(
            "shared memory", State.WARNING, said, "start the container with --shm-size=8g"
        )
    return Finding("shared memory", State.OK, found)


def check_disk(name: str, folder: Path) -> Finding:
    """`folder` need not exist yet."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    found = f"{gib(free)} free in {folder}"
    hint = "free some, or use another disk"
    if free < LEAST_DISK_BYTES:
        return Finding(name, State.MISSING, f"{found}: too little for any model", hint)
    if free < DISK_BYTES:
        return Finding(name, State.WARNING, f"{found}: too little for larger models", hint)
    return Finding(name, State.OK, found)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"up to {soft}"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        said = f"{found}: too few for thousands of agents at one server"
        return Finding("open files", State.WARNING, said, f"ulimit -n {min(65536, hard)}")
    return Finding("open files", State.OK, found)


def check_ports(ports: tuple[int, ...] = PORTS) -> Finding:
    taken: list[str] = []
    for port in ports:
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(("127.0.0.1", port))
                bound.listen(1)
            except OSError as error:
                taken.append(f"{port}: {(error.strerror or str(error)).lower()}")
    if taken:
        hint = "give --listen 127.0.0.1:0 to penstock serve, or end what listens there"
        return Finding("ports", State.WARNING, ", ".join(taken), hint)
    return Finding("ports", State.OK, f"{' and '.join(map(str, ports))} are free")
