"""Anonymous memory that another process of this host can map.

The other process opens it as `/proc/<pid>/fd/<n>`. It takes no room in /dev/shm, and nothing is left behind
if its owner is killed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Gives the progress word its own cache line.
PROGRESS_ALIGNMENT = 64
PROGRESS_BYTES = 8


def host_id() -> str:
    return BOOT_ID.read_text().strip()


def host_namespace(descriptor: int) -> str:
    """Boot id of this host and device of a file, in the format of SharedMemorySource."""
    return f"{host_id()}:{os.fstat(descriptor).st_dev}"


class MemoryFile:
    """A file in memory of fixed length. Its length is sealed, so mapping it cannot cause SIGBUS."""

    def __init__(self, length_bytes: int, *, with_progress: bool = False) -> None:
        """`with_progress` adds a progress word, so that another process can follow as it is filled.

        Raises OSError if there is not enough memory.
        """
        self._descriptor = os.memfd_create(
            "penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        # An empty file cannot be mapped, and offset zero means that there is no progress word.
        size = max(1, length_bytes)
        place = -(-size // PROGRESS_ALIGNMENT) * PROGRESS_ALIGNMENT
        if with_progress:
            size = place + PROGRESS_BYTES
        try:
            # Allocates every page now. A sparse file would cause SIGBUS when memory runs out.
            os.posix_fallocate(self._descriptor, 0, size)
            fcntl.fcntl(
                self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            )
            self._memory = mmap.mmap(self._descriptor, size)
        except OSError:
            os.close(self._descriptor)
            raise
        self.view = memoryview(self._memory)[:length_bytes]
        """The file's bytes, writable."""
        self.progress_offset_bytes = place if with_progress else 0
        """Offset of the progress word, as in SharedMemorySource; zero if there is none."""
        # A cast view stores the number in one write, not byte by byte.
        self._progress = memoryview(self._memory)[place:size].cast("Q") if with_progress else None
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        self.host_namespace = host_namespace(self._descriptor)
        """Boot id and device, as in SharedMemorySource."""

    def tell_filled(self, end_bytes: int) -> None:
        """Records in the progress word, if there is one, that all bytes before `end_bytes` are filled."""
        if self._progress is not None:
            self._progress[0] = end_bytes

    def close(self) -> None:
        """Closes the file; its memory is freed once the last reader has closed it too."""
        os.close(self._descriptor)
