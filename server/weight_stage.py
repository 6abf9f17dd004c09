"""Takes in one weight version and verifies it, before anything is touched that serves.

    check_manifest -> chunks of the stream, or a file the uploader shares -> verify -> StagedWeights

The bytes end up behind a file descriptor of this process, which the engine's process opens as
`/proc/<pid>/fd/<n>`. The files have no name: what is released, or left by a killed server, is gone.
A shared file stays the uploader's; it is read with `pread`, so that one cut short under our hands is a
refusal and not a SIGBUS.
"""

from __future__ import annotations

import asyncio
import bisect
import ctypes
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from penstock.server.engine import StagedTensor, StagedWeights, TensorMeta
from penstock.wire.reasons import Reason

SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A file without a name, as another process of this host reaches it.
DESCRIPTOR_PATH = re.compile(r"/proc/[1-9][0-9]*/fd/[0-9]+")
# statfs(2) f_type of file systems that live in memory: tmpfs, which memfd is too, ramfs, hugetlbfs.
MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6, 0x958458F6)
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Float:
    """How a dtype is laid out, as far as telling finite numbers goes."""

    bits: np.dtype[np.unsignedinteger]
    magnitude: int
    """Every bit but the sign."""
    infinity: int
    """Smallest magnitude that is not finite."""


FLOATS: Mapping[str, _Float] = {
    "float32": _Float(np.dtype("<u4"), 0x7FFF_FFFF, 0x7F80_0000),
    "bfloat16": _Float(np.dtype("<u2"), 0x7FFF, 0x7F80),
    "float16": _Float(np.dtype("<u2"), 0x7FFF, 0x7C00),
}


class WeightRefused(Exception):
    """An upload is refused; what serves is as it was."""

    def __init__(self, reason: Reason, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor as the header of an upload announces it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    length_bytes: int
    xxh3: int
    """XXH3-64 of its bytes."""
    raw: bool = True
    """Whether the payload holds its bytes as they are."""


class WeightStage:
    """Takes in uploads for one model."""

    def __init__(
        self, folder: Path | None, expected: Mapping[str, TensorMeta], weight_dtype: str
    ) -> None:
        """`folder` is where inline payloads go. None means shared memory, and where that has no room
        the folder for temporary files."""
        if weight_dtype not in FLOATS:
            raise ValueError(f"weights can be {', '.join(FLOATS)}, got {weight_dtype!r}")
        self._folders = [folder] if folder else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._expected = expected
        self._weight_dtype = weight_dtype
        self._held: dict[Upload, int] = {}
        # The largest payload released: its pages are there already, and new ones cost more than a copy.
        self._spare: tuple[int, int] | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of every upload not yet released that this server pays for."""
        return sum(self._held.values())

    async def begin_inline(
        self, weight_version: int, manifest: Sequence[ManifestTensor], length_bytes: int
    ) -> Upload:
        """An upload whose payload of this length arrives in chunks. Raises WeightRefused."""
        check_manifest(manifest, self._expected, self._weight_dtype, length_bytes)
        descriptor = self._take_spare(length_bytes)
        if descriptor is None:
            descriptor = await asyncio.to_thread(allocate, self._folders, length_bytes)
        upload = Upload(self, weight_version, manifest, descriptor, length_bytes, inline=True)
        self._held[upload] = length_bytes
        return upload

    async def begin_shared(
        self,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        name: str,
        host_namespace: str,
    ) -> Upload:
        """An upload whose payload is a file in memory of this host. Raises WeightRefused."""
        descriptor, length = open_shared(name, host_namespace)
        try:
            check_manifest(manifest, self._expected, self._weight_dtype, length)
        except WeightRefused:
            os.close(descriptor)
            raise
        upload = Upload(self, weight_version, manifest, descriptor, length, inline=False)
        self._held[upload] = 0
        return upload

    def close(self) -> None:
        """Releases every upload."""
        for upload in list(self._held):
            upload.release()
        if self._spare:
            os.close(self._spare[0])
            self._spare = None

    def _take_spare(self, length: int) -> int | None:
        if self._spare is None or self._spare[1] != length:
            return None
        descriptor, self._spare = self._spare[0], None
        return descriptor

    def _forget(self, upload: Upload, descriptor: int, length: int, *, inline: bool) -> None:
        del self._held[upload]
        if inline and self._spare is None:
            self._spare = descriptor, length
        else:
            os.close(descriptor)


class Upload:
    """One version on its way in; made by `WeightStage`. A refusal releases it."""

    def __init__(
        self,
        stage: WeightStage,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        descriptor: int,
        length_bytes: int,
        *,
        inline: bool,
    ) -> None:
        self._stage = stage
        self._manifest = manifest
        self._descriptor = descriptor
        self._inline = inline
        self._received = _Intervals()
        self._released = False
        self.weight_version = weight_version
        self.length_bytes = length_bytes

    def write_chunk(self, offset_bytes: int, data: bytes, xxh3: int) -> None:
        """Takes one slice of an inline payload, in any order but each byte once.

        Raises WeightRefused.
        """
        try:
            self._check_chunk(offset_bytes, data, xxh3)
        except WeightRefused:
            self.release()
            raise
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset_bytes)
            view, offset_bytes = view[written:], offset_bytes + written

    async def verify(self) -> StagedWeights:
        """Reads everything back: complete, each tensor with its checksum, and finite.

        The event loop stays free. Raises WeightRefused.
        """
        try:
            if self._inline and (gap := self._received.first_gap(self.length_bytes)):
                raise WeightRefused(
                    Reason.FIELD_INVALID,
                    f"chunks: bytes {gap[0]} to {gap[1]} of the payload never came",
                    field="chunk.offset_bytes",
                    begin=gap[0],
                    end=gap[1],
                )
            # A descriptor of its own, so that a release meanwhile cannot pull it away.
            await asyncio.to_thread(verify_tensors, os.dup(self._descriptor), self._manifest)
        except WeightRefused:
            self.release()
            raise
        path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        tensors = tuple(
            StagedTensor(t.name, t.shape, t.dtype, t.offset_bytes, t.length_bytes)
            for t in self._manifest
        )
        return StagedWeights(self.weight_version, path, tensors)

    def release(self) -> None:
        """Gives the memory back. What was staged must not be loaded any more; safe to repeat."""
        if not self._released:
            self._released = True
            self._stage._forget(  # pyright: ignore[reportPrivateUsage]
                self, self._descriptor, self.length_bytes, inline=self._inline
            )

    def _check_chunk(self, offset: int, data: bytes, xxh3: int) -> None:
        end = offset + len(data)
        if not self._inline or self._released:
            raise WeightRefused(
                Reason.FIELD_INVALID, "chunk: this upload takes none", field="chunk"
            )
        if offset < 0 or end > self.length_bytes or not data:
            raise WeightRefused(
                Reason.FIELD_INVALID,
                f"chunk: bytes {offset} to {end} of a payload of {self.length_bytes}",
                field="chunk.offset_bytes",
                got=offset,
            )
        if not self._received.add(offset, end):
            raise WeightRefused(
                Reason.FIELD_INVALID,
                f"chunk: some of bytes {offset} to {end} had come before",
                field="chunk.offset_bytes",
                got=offset,
            )
        if (got := xxhash.xxh3_64_intdigest(data)) != xxh3:
            raise WeightRefused(
                Reason.CHECKSUM_MISMATCH,
                f"chunk at {offset}: XXH3 is {got:016x}, announced {xxh3:016x}",
                field="chunk.data",
                offset_bytes=offset,
            )


class _Intervals:
    """Disjoint byte ranges, merged where they touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> bool:
        """Adds [begin, end) unless it overlaps what is there; says whether it did."""
        at = bisect.bisect_right(self._begins, begin)
        if at and self._ends[at - 1] > begin:
            return False
        if at < len(self._begins) and self._begins[at] < end:
            return False
        follows = bool(at) and self._ends[at - 1] == begin
        precedes = at < len(self._begins) and self._begins[at] == end
        if follows and precedes:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif follows:
            self._ends[at - 1] = end
        elif precedes:
            self._begins[at] = begin
        else:
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
        return True

    def first_gap(self, length: int) -> tuple[int, int] | None:
        """The first range of [0, length) that is missing."""
        edges = [(0, 0), *zip(self._begins, self._ends, strict=True), (length, length)]
        return next(((a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]), None)


def check_manifest(
    manifest: Sequence[ManifestTensor],
    expected: Mapping[str, TensorMeta],
    weight_dtype: str,
    length_bytes: int,
) -> None:
    """That a full upload of this model is announced, inside a payload of this length.

    Raises WeightRefused.
    """
    names: set[str] = set()
    for tensor in manifest:
        if tensor.name in names:
            raise _invalid(tensor, "name", "appears twice", tensor.name)
        names.add(tensor.name)
        _check_tensor(tensor, expected.get(tensor.name), weight_dtype, length_bytes)
    missing = [n for n, meta in expected.items() if n not in names and not meta.optional]
    if missing:
        raise WeightRefused(
            Reason.TENSOR_MISSING,
            f"{len(missing)} tensors of the model are missing, first {missing[0]}",
            tensor=missing[0],
            count=len(missing),
        )
    by_offset = sorted((t for t in manifest if t.length_bytes), key=lambda t: t.offset_bytes)
    for first, second in pairwise(by_offset):
        if first.offset_bytes + first.length_bytes > second.offset_bytes:
            raise _invalid(second, "offset_bytes", f"overlaps {first.name}", second.offset_bytes)


def _check_tensor(
    tensor: ManifestTensor, expected: TensorMeta | None, weight_dtype: str, length_bytes: int
) -> None:
    name = tensor.name
    if expected is None:
        raise WeightRefused(Reason.TENSOR_UNKNOWN, f"the model has no tensor {name!r}", tensor=name)
    if tensor.shape != expected.shape:
        raise WeightRefused(
            Reason.SHAPE_MISMATCH,
            f"{name} has shape {list(expected.shape)}, got {list(tensor.shape)}",
            tensor=name,
            expected=list(expected.shape),
            got=list(tensor.shape),
        )
    if tensor.dtype != weight_dtype:
        raise WeightRefused(
            Reason.DTYPE_MISMATCH,
            f"{name} has to be {weight_dtype}, got {tensor.dtype!r}",
            tensor=name,
            expected=weight_dtype,
            got=tensor.dtype,
        )
    if not tensor.raw:
        raise _invalid(tensor, "encoding", "has to be raw", "another")
    itemsize = FLOATS[weight_dtype].bits.itemsize
    length = math.prod(tensor.shape) * itemsize
    if tensor.length_bytes != length:
        raise _invalid(tensor, "length_bytes", f"has to be {length}", tensor.length_bytes)
    if tensor.offset_bytes < 0 or tensor.offset_bytes + length > length_bytes:
        where = f"is not inside the payload of {length_bytes}"
        raise _invalid(tensor, "offset_bytes", where, tensor.offset_bytes)
    if tensor.offset_bytes % itemsize:
        raise _invalid(tensor, "offset_bytes", f"is no multiple of {itemsize}", tensor.offset_bytes)


def _invalid(tensor: ManifestTensor, field: str, problem: str, got: object) -> WeightRefused:
    return WeightRefused(
        Reason.FIELD_INVALID,
        f"{tensor.name}: {field} {problem}, got {got}",
        field=f"header.tensors.{field}",
        tensor=tensor.name,
        got=got,
    )


def allocate(folders: Iterable[Path], length: int) -> int:
    """A file without a name in the first of these folders that has room for it, allocated in full.

    Raises WeightRefused where none has.
    """
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
        f"no room for a payload of {length} bytes ({'; '.join(problems)})",
        length_bytes=length,
    )


def open_shared(name: str, host_namespace: str) -> tuple[int, int]:
    """A descriptor of our own for the file an uploader shares, and its length.

    The file has to live in memory of this host, and be named by its path or as another process's
    descriptor. Links are not followed. Raises WeightRefused.
    """
    if not name.startswith("/"):
        raise WeightRefused(
            Reason.FIELD_INVALID,
            f"shared_memory.name has to be an absolute path, got {name!r}",
            field="header.shared_memory.name",
            got=name,
        )
    follow = 0 if DESCRIPTOR_PATH.fullmatch(name) else os.O_NOFOLLOW
    try:
        # Only a handle at first: opening what turns out to be a device may have effects of its own.
        handle = os.open(name, os.O_PATH | os.O_CLOEXEC | follow)
    except (OSError, ValueError) as error:
        raise _unavailable(name, f"cannot be opened: {error}") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _unavailable(name, "is no regular file")
        if _file_system(handle) not in MEMORY_FILE_SYSTEMS:
            raise _unavailable(name, "does not live in memory")
        here = f"{BOOT_ID.read_text().strip()}:{status.st_dev}"
        if host_namespace != here:
            raise _unavailable(name, f"is of another host: {host_namespace!r}, here {here!r}")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC), status.st_size
    except OSError as error:
        raise _unavailable(name, f"cannot be opened: {error}") from error
    finally:
        os.close(handle)


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


def verify_tensors(descriptor: int, manifest: Iterable[ManifestTensor]) -> None:
    """That the bytes behind the descriptor, which it closes, are those announced, and all finite.

    Raises WeightRefused.
    """
    buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        for tensor in manifest:
            digest = xxhash.xxh3_64()
            finite = True
            for piece in _pieces(descriptor, tensor, buffer):
                digest.update(piece)
                finite = finite and _is_finite(piece, FLOATS[tensor.dtype])
            if (got := digest.intdigest()) != tensor.xxh3:
                raise WeightRefused(
                    Reason.CHECKSUM_MISMATCH,
                    f"{tensor.name}: XXH3 is {got:016x}, announced {tensor.xxh3:016x}",
                    tensor=tensor.name,
                )
            if not finite:
                raise WeightRefused(
                    Reason.NOT_FINITE,
                    f"{tensor.name} holds a NaN or an infinity",
                    tensor=tensor.name,
                )
    finally:
        os.close(descriptor)


def _pieces(descriptor: int, tensor: ManifestTensor, buffer: memoryview) -> Iterator[memoryview]:
    """The tensor's bytes, piece by piece in the same buffer, each a multiple of its itemsize."""
    offset, end = tensor.offset_bytes, tensor.offset_bytes + tensor.length_bytes
    while offset < end:
        wanted = buffer[: end - offset]
        filled = 0
        while filled < len(wanted):
            count = os.preadv(descriptor, [wanted[filled:]], offset + filled)
            if not count:
                raise WeightRefused(
                    Reason.SOURCE_UNAVAILABLE,
                    f"{tensor.name}: the payload ends at {offset + filled}, before the tensor does",
                    tensor=tensor.name,
                )
            filled += count
        yield buffer[:filled]
        offset += filled


def _is_finite(piece: memoryview, layout: _Float) -> bool:
    magnitudes = np.frombuffer(piece, layout.bits) & layout.bits.type(layout.magnitude)
    return int(magnitudes.max(initial=0)) < layout.infinity
