"""Opening a file that an uploader shares. It must be a regular file in memory of this host.

The file remains the uploader's. A sealed file can never become shorter, so it is mapped. It stays mapped
for later versions in the same file, because mapping it again costs as much as reading it. Any other file
is read with `pread`, so that truncating it leads to a refusal and not to a SIGBUS.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path

from penstock.common import memory_file
from penstock.server.weights.staging.manifest import WeightRefused, field_refused
from penstock.wire.reasons import Reason

# Folder of the segments that shm_open(3) names.
SEGMENTS = Path("/dev/shm")
# An unnamed file, as another process on this host reaches it.
DESCRIPTOR_PATH = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")
# statfs(2) f_type of file systems in memory: tmpfs (also used by memfd), ramfs, hugetlbfs.
TMPFS = 0x01021994
MEMORY_FILE_SYSTEMS = (TMPFS, 0x858458F6, 0x958458F6)
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
# An uploader that sends deltas alternates between two files.
KEPT_MAPPINGS = 2


class SharedFiles:
    """Opens files that uploaders share, and keeps the mapped ones."""

    def __init__(self) -> None:
        # By device, inode and length, the last used one last. While a file is mapped, its inode cannot be
        # reused for another file.
        self._mapped: dict[tuple[int, int, int], memoryview] = {}

    def open(self, name: str, host_namespace: str) -> tuple[int, int, memoryview | None]:
        """Returns a new descriptor, its length, and its bytes if mappable. Raises WeightRefused."""
        descriptor, length = open_shared(name, host_namespace)
        try:
            return descriptor, length, self._view(descriptor, length)
        except OSError as error:
            os.close(descriptor)
            raise _unavailable(name, f"cannot be mapped: {error}") from error

    def forget(self) -> None:
        """Drop all mappings; those in use stay mapped until they are not."""
        self._mapped.clear()

    def _view(self, descriptor: int, length: int) -> memoryview | None:
        if not length or not _is_sealed(descriptor):
            return None
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino, length
        view = self._mapped.pop(key, None)
        if view is None:
            view = memoryview(mmap.mmap(descriptor, length, prot=mmap.PROT_READ))
        self._mapped[key] = view
        while len(self._mapped) > KEPT_MAPPINGS:
            del self._mapped[next(iter(self._mapped))]
        return view


def open_shared(name: str, host_namespace: str) -> tuple[int, int]:
    """Returns a new descriptor and the file's length. The file must be in memory of this host. It is named
    by its path, as a POSIX segment (without a slash), or as another process's descriptor. Links are not
    followed. Raises WeightRefused."""
    if name and "/" not in name:
        name = str(SEGMENTS / name)
    if not name.startswith("/"):
        problem = f"shared_memory.name must be an absolute path or a segment's name, got {name!r}"
        raise field_refused("header.shared_memory.name", problem, got=name)
    follow = 0 if DESCRIPTOR_PATH.fullmatch(name) else os.O_NOFOLLOW
    try:
        # Only a handle at first, because opening a device could have side effects.
        handle = os.open(name, os.O_PATH | os.O_CLOEXEC | follow)
    except (OSError, ValueError) as error:
        raise _unavailable(name, f"cannot be opened: {error}") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _unavailable(name, "is not a regular file")
        if _file_system(handle) not in MEMORY_FILE_SYSTEMS:
            raise _unavailable(name, "is not in memory")
        here = memory_file.host_namespace(handle)
        if host_namespace != here:
            raise _unavailable(name, f"is of another host: {host_namespace!r}, here {here!r}")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC), status.st_size
    except OSError as error:
        raise _unavailable(name, f"cannot be opened: {error}") from error
    finally:
        os.close(handle)


def _is_sealed(descriptor: int) -> bool:
    """Whether its length can never change and all of its pages are available."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False  # Its file system does not support seals.
    # A page that was punched out of a hugetlbfs file may not come back.
    return seals & SEALED == SEALED and _file_system(descriptor) == TMPFS


def _unavailable(name: str, problem: str) -> WeightRefused:
    return WeightRefused(
        Reason.SOURCE_UNAVAILABLE, f"shared memory {name!r} {problem}", name=name, problem=problem
    )


def _file_system(descriptor: int) -> int:
    """`f_type` of statfs(2), the structure's first word."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_long * 32)()
    if libc.fstatfs(descriptor, ctypes.byref(words)) != 0:
        raise OSError(ctypes.get_errno(), "fstatfs failed")
    return words[0]
