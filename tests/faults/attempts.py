"""One upload, assembled in stages so that a fault can spoil any of them.

    tensors -> upload (header and payload) -> published (file or folder) -> messages -> sent

Each stage is made from the previous one when it is first used. A change made before a stage travels
on with correct checksums. A change made after it keeps the checksums of the unchanged upload.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from penstock.v1 import weights_pb2
from penstock.wire import sparse
from penstock.wire.failure import Failure, read_failure
from tests.faults.sites import EPOCH, Site, Tensors
from tests.support.harness import (
    InlineSource,
    TensorSpec,
    WeightHeader,
    messages,
)

POLICIES = {
    weights_pb2.IN_FLIGHT_POLICY_KEEP: "keep",
    weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE: "recompute",
    weights_pb2.IN_FLIGHT_POLICY_DRAIN: "drain",
    weights_pb2.IN_FLIGHT_POLICY_ABORT: "abort",
}
READY = weights_pb2.WEIGHT_STATE_READY
STAGED = weights_pb2.WEIGHT_STATE_STAGED
ACTIVE = weights_pb2.WEIGHT_STATE_ACTIVE
CODES = {
    "CHECKSUM_MISMATCH": grpc.StatusCode.DATA_LOSS,
    "BASE_VERSION_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "WEIGHT_VERSION_STALE": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_EPOCH": grpc.StatusCode.FAILED_PRECONDITION,
    "SOURCE_UNAVAILABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "WEIGHT_LOAD_FAILED": grpc.StatusCode.ABORTED,
    "WEIGHTS_INCONSISTENT": grpc.StatusCode.UNAVAILABLE,
}
"""Status codes of the reasons that are not INVALID_ARGUMENT."""


class Source(Enum):
    """How the bytes of an upload travel."""

    INLINE = "inline"
    SHARED = "shared"
    FILLING = "filling"
    CHECKPOINT = "checkpoint"
    DELTA = "delta"
    DELTA_SHARED = "delta_shared"

    @property
    def is_delta(self) -> bool:
        return self in (Source.DELTA, Source.DELTA_SHARED)

    @property
    def has_chunks(self) -> bool:
        return self in (Source.INLINE, Source.DELTA)

    @property
    def has_file(self) -> bool:
        return self in (Source.SHARED, Source.FILLING, Source.DELTA_SHARED)


@dataclass
class Packed:
    """The announced header, and its payload."""

    head: Any
    data: bytearray

    def spec(self, name: str) -> Any:
        return next(spec for spec in self.head.tensors if spec.name == name)


class Attempt:
    """One upload of the next version, with a random in-flight policy and activation."""

    def __init__(self, site: Site, source: Source, rng: random.Random) -> None:
        self.site = site
        self.source = source
        self.rng = rng
        self.before = site.active
        self.version = site.next_version()
        self.tensors: Tensors = {n: t.copy() for n, t in site.tensors(self.version).items()}
        self.base: Tensors = {n: t.copy() for n, t in site.tensors(self.before).items()}
        """The tensors that the uploader believes the server holds."""
        self.stored: Tensors | None = None
        """The tensors in a checkpoint's folder, if they differ from the announced ones."""
        self.policy = rng.choice(list(POLICIES))
        self.staged = rng.random() < 0.3
        self.has_progress = True
        """Whether a payload that is still being filled has a progress word."""
        self.takes_effect = False
        """Whether its version is active in the end."""
        self.pause_seconds: float | None = None
        self._cleanup = contextlib.ExitStack()

    def close(self) -> None:
        """Remove the published files."""
        self._cleanup.close()

    def some_tensor(self) -> str:
        return self.rng.choice(list(self.tensors))

    @cached_property
    def upload(self) -> Packed:
        """The header, and the payload it describes."""
        data, specs = bytearray(), []
        for name, tensor in self.tensors.items():
            spec, part = self._spec(name, tensor)
            if self.source is not Source.CHECKPOINT:
                spec.offset_bytes, spec.length_bytes = len(data), len(part)
                data += part
            specs.append(spec)
        staged, immediate = weights_pb2.ACTIVATION_STAGED, weights_pb2.ACTIVATION_IMMEDIATE
        head = WeightHeader(
            weight_version=self.version,
            base_weight_version=self.before if self.source.is_delta else 0,
            tensors=specs,
            activation=staged if self.staged else immediate,
            in_flight=self.policy,
            trainer_epoch=EPOCH,
        )
        if self.source.has_chunks:
            head.inline.CopyFrom(InlineSource(length_bytes=len(data)))
        return Packed(head, data)

    def _spec(self, name: str, tensor: Any) -> tuple[Any, bytes]:
        spec = TensorSpec(
            name=name,
            shape=tensor.shape,
            dtype=str(tensor.dtype),
            xxh3=xxhash.xxh3_64_intdigest(tensor.tobytes()),
            encoding=weights_pb2.TENSOR_ENCODING_RAW,
        )
        before = self.base.get(name)
        if not self.source.is_delta or before is None or before.size != tensor.size:
            return spec, tensor.tobytes()
        encoded = sparse.encode(before.ravel().view(np.uint32), tensor.ravel().view(np.uint32))
        spec.encoding = encoded.encoding
        if encoded.coding is not None:
            spec.sparse.MergeFromString(encoded.coding.SerializeToString())
        return spec, b"".join(encoded.parts)

    @cached_property
    def file(self) -> Path:
        """The published bytes: a file in shared memory, or a checkpoint's folder."""
        if self.source.has_file:
            descriptor, name = tempfile.mkstemp(dir="/dev/shm", prefix="penstock-fault-")
            os.close(descriptor)
            path = Path(name)
            self._cleanup.callback(path.unlink, missing_ok=True)
            path.write_bytes(self.upload.data)
            if self.source is Source.FILLING:
                self.tell_filled(0, path)
            return path
        folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "model.safetensors"
        save_file(self.tensors if self.stored is None else self.stored, path)
        return path

    def tell_filled(self, end_bytes: int, path: Path | None = None) -> None:
        """Write `end_bytes` to the progress word."""
        with (path or self.file).open("r+b") as file:
            file.seek(progress_offset(len(self.upload.data)))
            file.write(end_bytes.to_bytes(8, "little"))

    def some_progress(self) -> int:
        """A progress value, truthful or not."""
        length = len(self.upload.data)
        return self.rng.choice([0, self.rng.randrange(length), length, length + 1, (1 << 64) - 1])

    @cached_property
    def messages(self) -> list[Any]:
        """The requests of the stream. Publishes the bytes first if they do not travel in it."""
        head = self.upload.head
        if self.source.has_file:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            head.shared_memory.name = str(self.file)
            head.shared_memory.host_namespace = f"{boot}:{self.file.stat().st_dev}"
            if self.source is Source.FILLING:
                return self._filling(head)
        elif self.source is Source.CHECKPOINT:
            head.checkpoint.path = str(self.file.parent)
        data = bytes(self.upload.data) if self.source.has_chunks else b""
        return messages(head, data, 1 + len(data) // self.rng.randint(3, 20))

    def _filling(self, head: Any) -> list[Any]:
        """Move the checksums to the commit, and place the progress word behind the bytes."""
        head.shared_memory.filling = True
        if self.has_progress:
            head.shared_memory.progress_offset_bytes = progress_offset(len(self.upload.data))
        checksums = [spec.xxh3 for spec in head.tensors]
        for spec in head.tensors:
            spec.ClearField("xxh3")
        first, commit = messages(head, b"")
        commit.commit.tensor_xxh3.extend(checksums)
        return [first, commit]

    @property
    def chunks(self) -> list[int]:
        """Indexes of the messages that are chunks."""
        return [i for i, m in enumerate(self.messages) if m.WhichOneof("message") == "chunk"]

    async def send(self, requests: list[Any] | None = None) -> list[Any]:
        """Send the requests, with pauses at random moments; return the responses."""
        paced = self._paced(self.messages if requests is None else requests)
        found: list[Any] = []
        async for response in self.site.wire.UpdateWeights(paced):
            found.append(response)
            if response.state == ACTIVE:
                self.pause_seconds = response.pause.ToNanoseconds() / 1e9
        return found

    async def _paced(self, requests: list[Any]) -> AsyncGenerator[Any]:
        halts = {self.rng.randrange(len(requests) + 1) for _ in range(2)}
        for index, request in enumerate(requests):
            if index in halts:
                await asyncio.sleep(self.rng.uniform(0.0, 0.01))
            yield request

    async def accepted(self) -> None:
        """Check that the upload is accepted, and that its version becomes active."""
        states = [response.state for response in await self.send()]
        if self.staged:
            assert states == [READY, STAGED]
            receipt = await self.switch(self.version)
            assert not receipt.HasField("rejection"), receipt
            assert receipt.active_weight_version == self.version
            self.pause_seconds = receipt.pause.ToNanoseconds() / 1e9
        else:
            assert states == [READY, STAGED, ACTIVE]
        self.took_effect()

    def took_effect(self) -> None:
        """Record that its version is active in the end."""
        self.takes_effect = True
        if POLICIES[self.policy] != "keep":
            self.site.dropped_cache.add(self.version)

    async def switch(self, version: int) -> Any:
        """Request a version on the trainer's stream; return the receipt."""
        self.site.exchange.send(
            switch_weights={"weight_version": version, "in_flight": self.policy}
        )
        return await self.site.exchange.receive("weight_receipt", 60.0)

    async def refused(self, reason: str, **metadata: object) -> Failure:
        """Check that the upload is refused for exactly this reason, with exactly this metadata."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.send()
        failure = read_failure(caught.value)
        self.is_refusal(failure, reason, metadata)
        return failure

    def is_refusal(self, failure: Failure, reason: str, metadata: dict[str, object]) -> None:
        """Check a call's status, reason and metadata."""
        wanted = {key: str(value) for key, value in metadata.items()}
        found = {key: failure.metadata.get(key) for key in wanted}
        code = CODES.get(reason, grpc.StatusCode.INVALID_ARGUMENT)
        assert (failure.reason, failure.code, found) == (reason, code, wanted), failure

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Any, asyncio.Queue[Any]]]:
        """A stream under manual control. The server has accepted the header; queued messages
        follow, up to None.
        """
        outgoing: asyncio.Queue[Any] = asyncio.Queue()

        async def requests() -> AsyncIterator[Any]:
            yield self.messages[0]
            while (request := await outgoing.get()) is not None:
                yield request

        call = self.site.wire.UpdateWeights(requests())
        assert (await call.read()).state == READY
        try:
            yield call, outgoing
        finally:
            call.cancel()


def progress_offset(length: int) -> int:
    """The offset of the progress word for a payload of this length."""
    return -(-length // 64) * 64


def flip(data: bytearray, rng: random.Random, begin: int, end: int) -> None:
    """Flip one bit between these offsets."""
    data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)


def flip_in_file(path: Path, rng: random.Random, begin: int, end: int) -> None:
    data = bytearray(path.read_bytes())
    flip(data, rng, begin, end)
    path.write_bytes(data)


def places_in(path: Path) -> dict[str, tuple[int, int]]:
    """The (begin, end) of each tensor in a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in entries.items()
        if name != "__metadata__"
    }
