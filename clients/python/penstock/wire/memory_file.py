"""Memory without a name that another process of this host can read.

The other process opens it as `/proc/<pid>/fd/<n>`: it needs no room in /dev/shm, and nothing is left of
it when its owner is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MemoryFile:
    """A file in memory whose length can never change: who maps it needs no fear of SIGBUS."""

    def __init__(self, length_bytes: int) -> None:
        """Raises OSError where there is not enough memory."""
        self._descriptor = os.memfd_create(
            "penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        size = max(1, length_bytes)  # An empty file cannot be mapped.
        try:
            # Allocates every page now: a sparse file would end in SIGBUS when memory runs out.
            os.posix_fallocate(self._descriptor, 0, size)
            fcntl.fcntl(
                self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            )
            self._memory = mmap.mmap(self._descriptor, size)
        except OSError:
            os.close(self._descriptor)
            raise
        self.view = memoryview(self._memory)[:length_bytes]
        """Its bytes, writable."""
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        device = os.fstat(self._descriptor).st_dev
        self.host_namespace = f"{BOOT_ID.read_text().strip()}:{device}"
        """Boot id and device, as SharedMemorySource has them."""

    def close(self) -> None:
        """Gives the memory back once the last who reads it has let go of it."""
        os.close(self._descriptor)
