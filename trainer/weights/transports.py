"""How the bytes of a weight version reach the server: one class for each way.

    SharedMemory         the server maps the trainer's own memory; one host
    Stream               chunks, over a connection that carries nothing else
    CheckpointFolder     a folder of safetensors on a file system that both see; one for all servers
    CollectiveTransport  a group that the trainer and the engine's workers join; in a module of its own

A transport makes one call of `UpdateWeights`, from the header to the version being staged. What is sent,
when, and what follows a refusal, is the publisher's. Through shared memory the call can begin before the
payload is filled, so that the server verifies what is there while the rest is copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from penstock.common.memory_file import MemoryFile
from penstock.trainer.core.compute import ComputeThread
from penstock.trainer.core.errors import storing
from penstock.trainer.state.checkpoint import replace_folder
from penstock.trainer.weights.parcel import Parcel
from penstock.trainer.weights.payload import Payload
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason
from penstock.wire.upload import Filling, upload

MODEL_FILE = "model.safetensors"


class Transport(Protocol):
    """One way to the server."""

    @property
    def prefers_deltas(self) -> bool:
        """Whether differences pay, where the configuration leaves it open."""
        ...

    @property
    def sends_chunks(self) -> bool:
        """Whether a whole version goes in chunks, each with a checksum of its own."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes of weights sent so far; on a stream those of uploads that failed too."""
        ...

    @property
    def passing(self) -> tuple[Reason, ...]:
        """Refusals of its own that another attempt may not meet."""
        ...

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        """Names tensors and source in the header and uploads; returns once the version is staged, or
        active where this transport knows no stage.

        Raises AioRpcError, and NotStaged where the server ends the upload without a word.
        """
        ...

    def begin(self, header: weights_pb2.WeightHeader, payload: Payload) -> Ahead | None:
        """Begins to send a payload that is about to be filled; None where it has to be filled first."""
        ...

    def switched(self, weight_version: int) -> None:
        """The server samples this version now."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class Ahead:
    """An upload that began before its payload was filled; on the event loop."""

    def __init__(
        self, call: Filling, payload: Payload, weight_version: int, on_sent: Callable[[int], None]
    ) -> None:
        self._call = call
        self.payload = payload
        self._on_sent = on_sent
        self.weight_version = weight_version

    async def commit(self) -> weights_pb2.UpdateWeightsResponse:
        """The payload is filled; as `Transport.send`."""
        try:
            staged = await self._call.commit(self.payload.checksums)
        finally:
            self._call.cancel()
        self._on_sent(self.payload.length_bytes)
        return staged

    def cancel(self) -> None:
        """The server forgets what it was told."""
        self._call.cancel()


class Stream:
    """Through the connection itself."""

    prefers_deltas = True
    sends_chunks = True
    passing = ()

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """`channel` must carry nothing else, lest bulk delay what does."""
        self._channel = channel
        self.bytes_sent = 0

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        """See `Transport`."""
        header.tensors.extend(parcel.specs)
        header.inline.length_bytes = parcel.length_bytes
        checksums = () if parcel.is_delta else parcel.payload.chunk_checksums
        return await upload(
            self._channel, header, parcel.pieces, on_sent=self._count, checksums=checksums
        )

    def begin(self, header: weights_pb2.WeightHeader, payload: Payload) -> None:
        """A stream is fastest with nothing beside it."""

    def switched(self, weight_version: int) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is held."""

    def _count(self, length: int) -> None:
        self.bytes_sent += length


class SharedMemory:
    """The payload's own memory, which the server maps; a difference gets memory for itself."""

    prefers_deltas = False
    sends_chunks = False
    passing = ()

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._difference: MemoryFile | None = None
        self.bytes_sent = 0

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        """See `Transport`."""
        file = self._pack(parcel) if parcel.is_delta else parcel.payload.file
        header.tensors.extend(parcel.specs)
        header.shared_memory.name = str(file.path)
        header.shared_memory.host_namespace = file.host_namespace
        staged = await upload(self._channel, header)
        self._count(parcel.length_bytes)
        return staged

    def begin(self, header: weights_pb2.WeightHeader, payload: Payload) -> Ahead:
        """See `Transport`."""
        payload.begin()
        header.MergeFromString(payload.announcement)
        call = Filling(self._channel, header)
        return Ahead(call, payload, header.weight_version, self._count)

    def switched(self, weight_version: int) -> None:
        """The server reads a difference no more."""
        self._release()

    def close(self) -> None:
        """Frees the memory of a difference."""
        self._release()

    def _count(self, length: int) -> None:
        self.bytes_sent += length

    def _pack(self, parcel: Parcel) -> MemoryFile:
        self._release()
        file = self._difference = MemoryFile(parcel.length_bytes)
        offset = 0
        for piece in parcel.pieces:
            file.view[offset : offset + len(piece)] = piece
            offset += len(piece)
        return file

    def _release(self) -> None:
        if self._difference is not None:
            self._difference.close()
            self._difference = None


class VersionFolders:
    """A folder for each version, whole: `<folder>/<version>/model.safetensors`."""

    def __init__(self, compute: ComputeThread, folder: Path, *, keep: int) -> None:
        """`folder` has to have the same name on every server's side. The `keep` newest stay, and always
        the one that is sampled."""
        self._compute = compute
        self._folder = folder.absolute()
        self._keep = keep
        self._written = (0, "")
        """Version and checksum of the last one."""

    async def write(self, parcel: Parcel) -> Path:
        """The folder of a version, written unless it was for another server. Raises StorageFailed."""
        return await self._compute.run(self._write, parcel)

    def keep(self, weight_version: int) -> None:
        """Removes versions beyond those to keep, but not this one."""
        with storing(self._folder):
            for version in self._versions()[: -self._keep]:
                if version != weight_version:
                    shutil.rmtree(self._folder / str(version))

    # In the compute thread, which does one thing after another.

    def _write(self, parcel: Parcel) -> Path:
        final = self._folder / str(parcel.weight_version)
        written = (parcel.weight_version, parcel.payload.digest)
        if written == self._written and final.exists():
            return final
        with storing(self._folder):
            for version in self._versions():
                # Of a run that went further, was stopped and resumed from before.
                if version > parcel.weight_version:
                    shutil.rmtree(self._folder / str(version))
        tensors = parcel.payload.tensors()
        replace_folder(
            final, lambda folder: save_file(tensors, folder / MODEL_FILE, metadata={"format": "pt"})
        )
        self._written = written
        return final

    def _versions(self) -> list[int]:
        return sorted(int(path.name) for path in self._folder.glob("*") if path.name.isdecimal())


class CheckpointFolder:
    """The folder of a version, which the server reads."""

    prefers_deltas = False
    sends_chunks = False
    passing = ()

    def __init__(self, channel: grpc.aio.Channel, folders: VersionFolders) -> None:
        """`folders` may be those of several servers."""
        self._channel = channel
        self._folders = folders
        self.bytes_sent = 0

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        """See `Transport`."""
        folder = await self._folders.write(parcel)
        for spec in parcel.specs:
            tensor = header.tensors.add()
            tensor.CopyFrom(spec)
            # Where a tensor lies, its file says itself.
            tensor.ClearField("offset_bytes")
            tensor.ClearField("length_bytes")
        header.checkpoint.path = str(folder)
        staged = await upload(self._channel, header)
        self.bytes_sent += parcel.payload.length_bytes
        return staged

    def begin(self, header: weights_pb2.WeightHeader, payload: Payload) -> None:
        """A folder is written from the payload."""

    def switched(self, weight_version: int) -> None:
        """Removes versions beyond those to keep."""
        self._folders.keep(weight_version)

    def close(self) -> None:
        """The folders stay."""
