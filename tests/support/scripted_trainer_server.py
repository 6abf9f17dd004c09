"""The trainer-facing side of a server on a real port. Tests script the answer to each call."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
import xxhash
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from penstock.v1 import (
    rollout_service_pb2,
    task_service_pb2,
    trainer_service_pb2,
    weights_pb2,
)
from penstock.wire import codec, sparse
from penstock.wire.channel import server_options
from penstock.wire.messages import ExchangeResponse as Response
from penstock.wire.messages import GetServerInfoResponse as ServerInfo
from penstock.wire.messages import SubmitTasksResponse as Submitted
from penstock.wire.messages import UpdateWeightsResponse as Progress
from penstock.wire.reasons import DOMAIN

Upload = Callable[[AsyncIterator[Any], Any], Awaitable[None]]


async def refuse(
    context: Any, code: grpc.StatusCode, reason: str, message: str = "no", **metadata: str
) -> None:
    """End a call with a status from the error table."""
    status = status_pb2.Status(code=code.value[0], message=message)
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    status.details.append(packed)
    await context.abort(
        code, message, trailing_metadata=(("grpc-status-details-bin", status.SerializeToString()),)
    )


@dataclass
class Received:
    """One received upload, checked as a server would check it."""

    changed_tensor_count: int = 1
    """The number of changed tensors that the server reports."""
    header: Any = None
    payload: bytearray = field(default_factory=bytearray)
    progress: list[int] = field(default_factory=list)
    """Every value of the progress word, from the first."""
    on_progress: Callable[[], None] = lambda: None
    """Called when some, but not all, of the bytes have arrived."""

    async def take(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Receive an upload whose payload is in chunks or elsewhere."""
        self.header = (await anext(requests)).header
        version = self.header.weight_version
        await context.write(Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_READY))
        following = asyncio.create_task(self._follow())
        async for request in requests:
            if request.WhichOneof("message") == "commit":
                digest = hashlib.sha256(self.header.SerializeToString(deterministic=True)).digest()
                assert request.commit.header_sha256 == digest
                following.cancel()
                self._take_checksums(request.commit.tensor_xxh3)
                if self.header.WhichOneof("source") == "shared_memory":
                    self._map()
                await context.write(
                    Progress(
                        weight_version=version,
                        state=weights_pb2.WEIGHT_STATE_STAGED,
                        changed_tensor_count=self.changed_tensor_count,
                    )
                )
                return
            chunk = request.chunk
            assert chunk.offset_bytes == len(self.payload)
            assert 0 < len(chunk.data) <= 2 << 20
            assert chunk.xxh3 == xxhash.xxh3_64_intdigest(chunk.data)
            self.payload += chunk.data
        raise AssertionError("no commit")

    async def _follow(self) -> None:
        """Read the progress word while it changes."""
        source = self.header.shared_memory
        if not source.filling:
            return
        with Path(source.name).open("rb", buffering=0) as file:
            while True:
                file.seek(source.progress_offset_bytes)
                said = int.from_bytes(file.read(8), "little")
                if said != (self.progress or [None])[-1]:
                    self.progress.append(said)
                if 0 < said < source.progress_offset_bytes:
                    self.on_progress()
                await asyncio.sleep(0.001)

    def _take_checksums(self, checksums: Any) -> None:
        """Take the commit's checksums for a header that has none."""
        filling = self.header.shared_memory.filling
        assert len(checksums) == (len(self.header.tensors) if filling else 0)
        for spec, xxh3 in zip(self.header.tensors if filling else (), checksums, strict=True):
            assert not spec.xxh3
            spec.xxh3 = xxh3

    def _map(self) -> None:
        """Read the memory as another process would."""
        source = self.header.shared_memory
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        path = Path(source.name)
        assert source.host_namespace == f"{boot_id}:{path.stat().st_dev}"
        self.payload = bytearray(path.read_bytes())
        if not self.header.base_weight_version:
            # A whole payload is followed by a progress word; a delta is not.
            del self.payload[-8:]

    def tensors(self, base: dict[str, bytes] | None = None) -> dict[str, bytes]:
        """The bytes of every tensor of this version, with deltas applied to the base."""
        result: dict[str, bytes] = {}
        for spec in self.header.tensors:
            data = bytes(self.payload[spec.offset_bytes : spec.offset_bytes + spec.length_bytes])
            assert len(data) == spec.length_bytes
            if spec.encoding == weights_pb2.TENSOR_ENCODING_SAME:
                assert base is not None and not data
                data = base[spec.name]
            elif spec.encoding == weights_pb2.TENSOR_ENCODING_SPARSE:
                assert base is not None
                bits = {"float32": "<u4", "bfloat16": "<u2"}[spec.dtype]
                target = np.frombuffer(bytearray(base[spec.name]), bits)
                sparse.apply(target, spec.sparse, data)
                data = target.tobytes()
            assert spec.xxh3 == xxhash.xxh3_64_intdigest(data), spec.name
            result[spec.name] = data
        return result

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of a whole version."""
        spec = next(spec for spec in self.header.tensors if spec.name == name)
        flat = torch.frombuffer(bytearray(self.tensors()[name]), dtype=getattr(torch, spec.dtype))
        return flat.view(tuple(spec.shape))


class Session:
    """One Exchange stream, from the server's end."""

    def __init__(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.requests = requests
        self.context = context

    async def receive(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(10):
            request = await anext(self.requests)
        assert request.WhichOneof("message") == kind, request
        return getattr(request, kind)

    async def send(self, **fields: Any) -> None:
        await self.context.write(Response(**fields))


class ScriptedServer:
    """Serves on its own port inside a `with` block; handles the `sessions` in order."""

    def __init__(self, *sessions: Callable[[Session], Awaitable[None]], port: int = 0) -> None:
        self._sessions = list(sessions)
        self._wanted_port = port
        self.failures: list[BaseException] = []
        self.uploads: list[Upload] = []
        self.tasks: list[Any] = []
        self.info = ServerInfo(weight_dtype="float32")
        self.pending: Callable[[int], int] = lambda submitted: submitted

    async def __aenter__(self) -> ScriptedServer:
        self.server = grpc.aio.server(options=server_options())
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self._wanted_port}")
        self.server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "penstock.v1.TrainerService",
                    {
                        "Exchange": grpc.stream_stream_rpc_method_handler(
                            self._exchange,
                            codec.decoder(trainer_service_pb2.ExchangeRequest),
                            codec.encode,
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    "penstock.v1.RolloutService",
                    {
                        "UpdateWeights": grpc.stream_stream_rpc_method_handler(
                            self._update,
                            codec.decoder(weights_pb2.UpdateWeightsRequest),
                            codec.encode,
                        ),
                        "GetServerInfo": grpc.unary_unary_rpc_method_handler(
                            self._info,
                            codec.decoder(rollout_service_pb2.GetServerInfoRequest),
                            codec.encode,
                        ),
                    },
                ),
                grpc.method_handlers_generic_handler(
                    "penstock.v1.TaskService",
                    {
                        "SubmitTasks": grpc.unary_unary_rpc_method_handler(
                            self._submit,
                            codec.decoder(task_service_pb2.SubmitTasksRequest),
                            codec.encode,
                        )
                    },
                ),
            )
        )
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)
        if self.failures:
            raise self.failures[0]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _exchange(self, requests: AsyncIterator[Any], context: Any) -> None:
        try:
            await self._sessions.pop(0)(Session(requests, context))
        except AssertionError as error:
            self.failures.append(error)
            raise

    async def _update(self, requests: AsyncIterator[Any], context: Any) -> None:
        try:
            await self.uploads.pop(0)(requests, context)
        except AssertionError as error:
            self.failures.append(error)
            raise

    async def _info(self, request: Any, context: Any) -> Any:
        return self.info

    async def _submit(self, request: Any, context: Any) -> Any:
        self.tasks += request.tasks
        return Submitted(
            accepted_count=len(request.tasks), pending_count=self.pending(len(self.tasks))
        )


@contextlib.asynccontextmanager
async def unanswering() -> AsyncGenerator[tuple[str, asyncio.Event]]:
    """A port that accepts connections but never answers. Yields its address and an event that is
    set by the first connection."""
    reached = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        reached.set()

    listener = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", reached
    finally:
        listener.close()
        for writer in writers:
            writer.close()
