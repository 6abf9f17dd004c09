"""Memory for weights: unnamed files, which other processes on this host can map.

Its memory disappears when a buffer is released, and also when the server is killed. References are counted,
because a version can be held, be the base of a delta and be loaded again, all at once. This process maps a
buffer once, for as long as its memory lives, because mapping it again costs more than filling it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.server.core.aio import run_to_its_end
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason

SHARED_MEMORY = Path("/dev/shm")


@dataclass(eq=False)
class Buffer:
    """A file descriptor with its bytes; created by `StageMemory`, with one reference."""

    descriptor: int
    length_bytes: int
    view: memoryview | None
    """Its bytes, writable if owned; None if they can only be read from the file."""
    owned: bool
    """Whether the memory is this server's, so that no other process writes to it."""
    ended: Callable[[Buffer], None]
    _references: int = 1

    @property
    def path(self) -> Path:
        """A path that any process on this host can open."""
        return Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")

    def retain(self) -> None:
        if not self._references:
            raise RuntimeError("the buffer is released already")
        self._references += 1

    def release(self) -> None:
        """Remove a reference. The last one releases the memory."""
        self._references -= 1
        if not self._references:
            self.ended(self)


class _File:
    """A file of this server, allocated in full, and its mapping."""

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
        """Returns False, with the file closed, if that fails."""
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
        # If an array in a traceback still refers to it, it is unmapped when that array is gone.
        with contextlib.suppress(BufferError):
            self.view.release()
            if self._mapping is not None:
                self._mapping.close()
        self.view, self._mapping = memoryview(b""), None


class StageMemory:
    def __init__(self, folder: Path | None) -> None:
        """None means shared memory, or the folder for temporary files if shared memory has no room."""
        self._folders = [folder] if folder else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        # Each live buffer, with its file if this server owns it.
        self._live: dict[Buffer, _File | None] = {}
        # The largest file given back. Its pages are allocated, and new ones cost more than a copy.
        self._spare: _File | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all live buffers that this server owns."""
        return sum(buffer.length_bytes for buffer in self._live if buffer.owned)

    async def allocate(self, length_bytes: int) -> Buffer:
        """In full. Raises WeightRefused if there is no room."""
        spare = self._take_spare(length_bytes)

        def find() -> _File:
            if spare is not None and spare.resize(length_bytes):
                return spare
            return _new_file(self._folders, length_bytes)

        file = await run_to_its_end(find, _File.close)
        buffer = Buffer(file.descriptor, length_bytes, file.view, True, self._take_back)
        self._live[buffer] = file
        return buffer

    def adopt(self, descriptor: int, length_bytes: int, view: memoryview | None = None) -> Buffer:
        """The buffer closes `descriptor`, another process's file."""
        buffer = Buffer(descriptor, length_bytes, view, False, self._take_back)
        self._live[buffer] = None
        return buffer

    def close(self) -> None:
        """Release all buffers, including those still referenced."""
        for buffer in list(self._live):
            self._close(buffer)
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _take_spare(self, length: int) -> _File | None:
        """The spare file, unless it is much too large or much too small."""
        if self._spare is None or length < self._spare.length_bytes // 2:
            return None
        spare, self._spare = self._spare, None
        if length <= spare.length_bytes * 2:
            return spare
        # Too small: it would only take room from the larger one.
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
            return  # Closed already.
        buffer.view = None
        file = self._live.pop(buffer)
        if file is not None:
            file.close()
        else:
            os.close(buffer.descriptor)


def _new_file(folders: Iterable[Path], length: int) -> _File:
    """Create an unnamed file in the first folder that has room for it, allocated in full."""
    problems: list[str] = []
    for folder in folders:
        try:
            # Allocated at once, because a disk found full by a later chunk would be too late.
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                if length:
                    os.posix_fallocate(file.fileno(), 0, length)
                return _File(os.dup(file.fileno()), length)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    problem = f"no room for {length} bytes ({'; '.join(problems)})"
    raise WeightRefused(Reason.DISK_FULL, problem, length_bytes=length)
