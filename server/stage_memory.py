"""Memory for weights: files without a name, which another process of this host can map.

A buffer is reached as `/proc/<pid>/fd/<n>`. What is released, or left by a killed server, is gone.
References are counted, because a version can be held, be the base of a delta and be loaded again, all at
once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.server.threads import run_to_its_end
from penstock.server.weight_manifest import WeightRefused
from penstock.wire.reasons import Reason

SHARED_MEMORY = Path("/dev/shm")


class Buffer:
    """A descriptor with the bytes behind it; made by `StageMemory`, with one reference."""

    def __init__(
        self, descriptor: int, length_bytes: int, *, owned: bool, ended: Callable[[Buffer], None]
    ) -> None:
        self.descriptor = descriptor
        self.length_bytes = length_bytes
        self.owned = owned
        """Whether the memory is this server's, so that nobody else writes to it."""
        self._ended = ended
        self._references = 1

    @property
    def path(self) -> Path:
        """The file, as any process of this host can open it."""
        return Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")

    def retain(self) -> Buffer:
        """One more reference."""
        if not self._references:
            raise RuntimeError("the buffer is released already")
        self._references += 1
        return self

    def release(self) -> None:
        """Gives one reference back, and with the last one the memory."""
        self._references -= 1
        if not self._references:
            self._ended(self)


class StageMemory:
    """Gives out buffers and takes them back."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is where buffers live. None means shared memory, and where that has no room the
        folder for temporary files."""
        self._folders = [folder] if folder else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._live: set[Buffer] = set()
        # The largest buffer given back: its pages are there already, and new ones cost more than a copy.
        self._spare: tuple[int, int] | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of every buffer not yet given back that this server pays for."""
        return sum(buffer.length_bytes for buffer in self._live if buffer.owned)

    async def allocate(self, length_bytes: int) -> Buffer:
        """A buffer of this length, allocated in full. Raises WeightRefused where there is no room."""
        spare = self._take_spare(length_bytes)

        def find() -> int:
            if spare is not None and _resize(spare, length_bytes):
                return spare
            return _new_file(self._folders, length_bytes)

        descriptor = await run_to_its_end(find, os.close)
        return self._register(descriptor, length_bytes, owned=True)

    def adopt(self, descriptor: int, length_bytes: int) -> Buffer:
        """A buffer around somebody else's file, by a descriptor of our own."""
        return self._register(descriptor, length_bytes, owned=False)

    def close(self) -> None:
        """Takes everything back, whoever still holds it."""
        for buffer in self._live:
            os.close(buffer.descriptor)
        self._live.clear()
        if self._spare is not None:
            os.close(self._spare[0])
            self._spare = None

    def _register(self, descriptor: int, length_bytes: int, *, owned: bool) -> Buffer:
        buffer = Buffer(descriptor, length_bytes, owned=owned, ended=self._take_back)
        self._live.add(buffer)
        return buffer

    def _take_spare(self, length: int) -> int | None:
        """The spare, unless most of it would be lost or missing."""
        if self._spare is None:
            return None
        descriptor, size = self._spare
        if length < size // 2:
            return None
        self._spare = None
        if length <= size * 2:
            return descriptor
        # It would only be in the way of the larger one.
        os.close(descriptor)
        return None

    def _take_back(self, buffer: Buffer) -> None:
        if buffer not in self._live:
            return  # Closed before.
        self._live.remove(buffer)
        descriptor, length = buffer.descriptor, buffer.length_bytes
        if buffer.owned and (self._spare is None or self._spare[1] < length):
            descriptor, self._spare = self._spare[0] if self._spare else -1, (descriptor, length)
        if descriptor >= 0:
            os.close(descriptor)


def _resize(descriptor: int, length: int) -> bool:
    """Gives a file this length, allocated in full; closes it where that cannot be."""
    try:
        os.ftruncate(descriptor, length)
        if length:
            os.posix_fallocate(descriptor, 0, length)
    except OSError:
        os.close(descriptor)
        return False
    return True


def _new_file(folders: Iterable[Path], length: int) -> int:
    """A file without a name in the first of these folders that has room for it, allocated in full."""
    problems: list[str] = []
    for folder in folders:
        try:
            # In its full size at once: a chunk that found the disk full would come too late.
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                if length:
                    os.posix_fallocate(file.fileno(), 0, length)
                return os.dup(file.fileno())
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise WeightRefused(
        Reason.DISK_FULL,
        f"no room for {length} bytes ({'; '.join(problems)})",
        length_bytes=length,
    )
