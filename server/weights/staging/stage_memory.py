"""Memory for weights: files without a name, which another process of this host can map.

A buffer is reached as `/proc/<pid>/fd/<n>`. What is released, or left by a killed server, is gone.
References are counted, because a version can be held, be the base of a delta and be loaded again, all at
once.

Here a buffer is mapped once, for as long as its memory lives: to map it anew costs more than to fill it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.common.memory_file import host_namespace
from penstock.server.core.threads import run_to_its_end
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason

SHARED_MEMORY = Path("/dev/shm")


class Buffer:
    """A descriptor with the bytes behind it; made by `StageMemory`, with one reference."""

    def __init__(
        self,
        descriptor: int,
        length_bytes: int,
        view: memoryview | None,
        *,
        owned: bool,
        ended: Callable[[Buffer], None],
    ) -> None:
        self.descriptor = descriptor
        self.length_bytes = length_bytes
        self.owned = owned
        """Whether the memory is this server's, so that nobody else writes to it."""
        self.view = view
        """Its bytes, writable where it is owned; None where they can only be read from the file."""
        self._ended = ended
        self._references = 1

    @property
    def path(self) -> Path:
        """The file, as any process of this host can open it."""
        return Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")

    @property
    def host_namespace(self) -> str:
        """Boot id and device of the file, as SharedMemorySource has them."""
        return host_namespace(self.descriptor)

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


class _File:
    """A file of ours, allocated in full, and its mapping."""

    def __init__(self, descriptor: int, length_bytes: int) -> None:
        self.descriptor = descriptor
        self.length_bytes = length_bytes
        self._mapping: mmap.mmap | None = None
        self.view = memoryview(b"")
        try:
            self._map()
        except OSError:
            os.close(descriptor)
            raise

    def resize(self, length_bytes: int) -> bool:
        """Whether it could be; closed where it could not."""
        if length_bytes == self.length_bytes:
            return True
        self._unmap()
        try:
            os.ftruncate(self.descriptor, length_bytes)
            if length_bytes:
                os.posix_fallocate(self.descriptor, 0, length_bytes)
            self.length_bytes = length_bytes
            self._map()
        except OSError:
            os.close(self.descriptor)
            return False
        return True

    def close(self) -> None:
        self._unmap()
        os.close(self.descriptor)

    def _map(self) -> None:
        if self.length_bytes:
            self._mapping = mmap.mmap(self.descriptor, self.length_bytes)
            self.view = memoryview(self._mapping)

    def _unmap(self) -> None:
        # What an array still looks into, in a traceback, is unmapped when that is gone.
        with contextlib.suppress(BufferError):
            self.view.release()
            if self._mapping is not None:
                self._mapping.close()
        self.view, self._mapping = memoryview(b""), None


class StageMemory:
    """Gives out buffers and takes them back."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is where buffers live. None means shared memory, and where that has no room the
        folder for temporary files."""
        self._folders = [folder] if folder else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        # Each live buffer, with its file where that is ours.
        self._live: dict[Buffer, _File | None] = {}
        # The largest buffer given back: its pages are there already, and new ones cost more than a copy.
        self._spare: _File | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of every buffer not yet given back that this server pays for."""
        return sum(buffer.length_bytes for buffer in self._live if buffer.owned)

    async def allocate(self, length_bytes: int) -> Buffer:
        """A buffer of this length, allocated in full. Raises WeightRefused where there is no room."""
        spare = self._take_spare(length_bytes)

        def find() -> _File:
            if spare is not None and spare.resize(length_bytes):
                return spare
            return _new_file(self._folders, length_bytes)

        file = await run_to_its_end(find, _File.close)
        buffer = Buffer(file.descriptor, length_bytes, file.view, owned=True, ended=self._take_back)
        self._live[buffer] = file
        return buffer

    def adopt(self, descriptor: int, length_bytes: int, view: memoryview | None = None) -> Buffer:
        """A buffer around somebody else's file, by a descriptor of our own."""
        buffer = Buffer(descriptor, length_bytes, view, owned=False, ended=self._take_back)
        self._live[buffer] = None
        return buffer

    def close(self) -> None:
        """Takes everything back, whoever still holds it."""
        for buffer in list(self._live):
            self._close(buffer)
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _take_spare(self, length: int) -> _File | None:
        """The spare, unless most of it would be lost or missing."""
        if self._spare is None or length < self._spare.length_bytes // 2:
            return None
        spare, self._spare = self._spare, None
        if length <= spare.length_bytes * 2:
            return spare
        # It would only be in the way of the larger one.
        spare.close()
        return None

    def _take_back(self, buffer: Buffer) -> None:
        file = self._live.get(buffer)
        if file is None or (self._spare and self._spare.length_bytes >= file.length_bytes):
            self._close(buffer)
            return
        del self._live[buffer]
        buffer.view = None
        if self._spare is not None:
            self._spare.close()
        self._spare = file

    def _close(self, buffer: Buffer) -> None:
        if buffer not in self._live:
            return  # Closed before.
        buffer.view = None
        file = self._live.pop(buffer)
        if file is not None:
            file.close()
        else:
            os.close(buffer.descriptor)


def _new_file(folders: Iterable[Path], length: int) -> _File:
    """A file without a name in the first of these folders that has room for it, allocated in full."""
    problems: list[str] = []
    for folder in folders:
        try:
            # In its full size at once: a chunk that found the disk full would come too late.
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                if length:
                    os.posix_fallocate(file.fileno(), 0, length)
                return _File(os.dup(file.fileno()), length)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise WeightRefused(
        Reason.DISK_FULL,
        f"no room for {length} bytes ({'; '.join(problems)})",
        length_bytes=length,
    )
