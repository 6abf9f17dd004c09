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
# So that the progress word has a cache line to itself.
PROGRESS_ALIGNMENT = 64
PROGRESS_BYTES = 8


def host_id() -> str:
    """Boot id of this host."""
    return BOOT_ID.read_text().strip()


def host_namespace(descriptor: int) -> str:
    """Boot id of this host and device of a file, as SharedMemorySource has them."""
    return f"{host_id()}:{os.fstat(descriptor).st_dev}"


class MemoryFile:
    """A file in memory whose length can never change: who maps it needs no fear of SIGBUS."""

    def __init__(self, length_bytes: int, *, with_progress: bool = False) -> None:
        """With a progress word behind its bytes, where another process is to follow how they are filled.

        Raises OSError where there is not enough memory.
        """
        self._descriptor = os.memfd_create(
            "penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        # An empty file cannot be mapped, and a word at zero would be none.
        size = max(1, length_bytes)
        place = -(-size // PROGRESS_ALIGNMENT) * PROGRESS_ALIGNMENT
        if with_progress:
            size = place + PROGRESS_BYTES
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
        self.progress_offset_bytes = place if with_progress else 0
        """Where the progress word is, as SharedMemorySource has it; zero where there is none."""
        # A view of one number stores it at once, and not byte by byte.
        self._progress = memoryview(self._memory)[place:size].cast("Q") if with_progress else None
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        self.host_namespace = host_namespace(self._descriptor)
        """Boot id and device, as SharedMemorySource has them."""

    def tell_filled(self, end_bytes: int) -> None:
        """Says in the progress word, where there is one, that all bytes before this one are there."""
        if self._progress is not None:
            self._progress[0] = end_bytes

    def close(self) -> None:
        """Gives the memory back once the last who reads it has let go of it."""
        os.close(self._descriptor)
