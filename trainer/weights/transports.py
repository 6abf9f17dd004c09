"""How the bytes of a weight version reach the server, with one class per transport.

A transport makes one call of `UpdateWeights`, from the header until the version is staged. The sender
decides what to send and when, and how to react to a refusal. Through shared memory the call can begin
before the payload is filled. The server then verifies the first tensors while the rest is copied.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from penstock.common.memory_file import MemoryFile
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.core.errors import storing
from penstock.trainer.state.checkpoint import replace_folder
from penstock.trainer.weights.copy import Parcel
from penstock.trainer.weights.payload import Payload
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason
from penstock.wire.upload import Filling, upload

MODEL_FILE = "model.safetensors"


class Transport:
    """A way to send weights to one server."""

    prefers_deltas: bool = False
    """Whether differences are sent if the configuration says "auto"."""
    sends_chunks: bool = False
    """Whether a whole version is sent in chunks that each have a checksum."""
    passing: tuple[Reason, ...] = ()
    """Transient refusals that are particular to this transport."""
    bytes_sent: int = 0
    """Bytes of weights so far; on a stream, failed uploads are included."""

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        """Complete the header with tensors and source, and upload.

        Returns once the version is staged, or active if the transport does not stage. Raises AioRpcError,
        and NotStaged if the server ends the upload without an error.
        """
        raise NotImplementedError

    def begin(self, header: weights_pb2.WeightHeader, payload: Payload) -> Filling | None:
        """Begin to send a payload that is about to be filled; None if it must be filled first."""
        return None

    def switched(self, weight_version: int) -> None:
        """Note that the server samples this version now."""

    def close(self) -> None:
        """Free the transport's resources."""

    def count(self, length: int) -> None:
        self.bytes_sent += length


class Stream(Transport):
    """Sends chunks. It does not begin ahead: a stream is fastest if nothing else runs during it."""

    prefers_deltas = True
    sends_chunks = True

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """`channel` must carry nothing else: a bulk transfer would delay other calls."""
        self._channel = channel

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        header.tensors.extend(parcel.specs)
        header.inline.length_bytes = parcel.length_bytes
        checksums = () if parcel.is_delta else parcel.payload.chunk_checksums
        return await upload(
            self._channel, header, parcel.pieces, on_sent=self.count, checksums=checksums
        )


class SharedMemory(Transport):
    """Lets a server on this host map the payload's memory. A difference gets separate memory."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._difference: MemoryFile | None = None

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        file = self._pack(parcel) if parcel.is_delta else parcel.payload.file
        header.tensors.extend(parcel.specs)
        header.shared_memory.name = str(file.path)
        header.shared_memory.host_namespace = file.host_namespace
        staged = await upload(self._channel, header)
        self.count(parcel.length_bytes)
        return staged

    def begin(self, header: weights_pb2.WeightHeader, payload: Payload) -> Filling:
        payload.begin()
        header.MergeFromString(payload.announcement)
        return Filling(self._channel, header)

    def switched(self, weight_version: int) -> None:
        # The server no longer reads the last difference.
        self.close()

    def _pack(self, parcel: Parcel) -> MemoryFile:
        self.close()
        file = self._difference = MemoryFile(parcel.length_bytes)
        offset = 0
        for piece in parcel.pieces:
            file.view[offset : offset + len(piece)] = piece
            offset += len(piece)
        return file

    def close(self) -> None:
        if self._difference is not None:
            self._difference.close()
            self._difference = None


class VersionFolders:
    """One folder per whole version: `<folder>/<version>/model.safetensors`."""

    def __init__(self, compute: ComputeThread, folder: Path, *, keep: int) -> None:
        """`folder` must have the same path for every server. The `keep` newest versions stay, and so does
        the sampled one."""
        self._compute = compute
        self._folder = folder.absolute()
        self._keep = keep
        self._written = (0, "")
        """Version and checksum that were written last."""

    async def write(self, parcel: Parcel) -> Path:
        """Return a version's folder; write it unless another server's upload did. Raises StorageFailed."""
        return await self._compute.run(self._write, parcel)

    def keep(self, weight_version: int) -> None:
        """Remove older versions, except this one."""
        with storing(self._folder):
            for version in self._versions()[: -self._keep]:
                if version != weight_version:
                    shutil.rmtree(self._folder / str(version))

    # The following run in the compute thread, one at a time.

    def _write(self, parcel: Parcel) -> Path:
        final = self._folder / str(parcel.weight_version)
        written = (parcel.weight_version, parcel.payload.digest)
        if written == self._written and final.exists():
            return final
        with storing(self._folder):
            for version in self._versions():
                # Left by a run that went further, was stopped, and resumed from an earlier step.
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


class CheckpointFolder(Transport):
    """Has the server read a version's folder on a shared file system, which stays."""

    def __init__(self, channel: grpc.aio.Channel, folders: VersionFolders) -> None:
        """`folders` may be shared with other servers' transports."""
        self._channel = channel
        self._folders = folders

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        folder = await self._folders.write(parcel)
        for spec in parcel.specs:
            tensor = header.tensors.add()
            tensor.CopyFrom(spec)
            # The safetensors file itself records where each tensor lies.
            tensor.ClearField("offset_bytes")
            tensor.ClearField("length_bytes")
        header.checkpoint.path = str(folder)
        staged = await upload(self._channel, header)
        self.count(parcel.payload.length_bytes)
        return staged

    def switched(self, weight_version: int) -> None:
        self._folders.keep(weight_version)
