"""Weights by a collective: vLLM's trainer engines send to the engine's workers; the server coordinates.

The engine loads a version as it arrives. When `send` returns, the version is already being sampled, and the
later switch on the exchange does nothing. Everything that needs vLLM is imported on use.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

import grpc

from penstock.trainer.config.weights import CollectiveConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.weights.collective.transfer import PenstockWeightSyncClient, WeightSyncFailed
from penstock.trainer.weights.copy import Parcel
from penstock.trainer.weights.transports import Transport
from penstock.v1 import weights_pb2
from penstock.wire.gloo_group import GroupBroken
from penstock.wire.reasons import Reason
from penstock.wire.security import Security

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.sparse_nccl_engine import (
        SparseNCCLTrainerWeightTransferEngine,
        SparseWeightPatch,
    )

    from penstock.trainer.weights.collective.source import PayloadSource

    Engine = TrainerWeightTransferEngine[TrainerInitInfo]

SPARSE = "sparse_nccl"
# How long a step may exceed its own deadline, for transport and threading.
GRACE_SECONDS = 15.0


class CollectiveTransport(Transport):
    """It does not begin ahead, which would pause generation while the payload is filled."""

    # Each of these leaves the engine outside the group; the next attempt joins again.
    passing = (Reason.SOURCE_UNAVAILABLE, Reason.WEIGHT_LOAD_FAILED, Reason.PROBE_MISMATCH)

    def __init__(
        self, address: str, settings: CollectiveConfig, security: Security | None = None
    ) -> None:
        """`address` is the server's. `settings.timeout_seconds` also limits each step of an upload."""
        self._settings = settings
        self.prefers_deltas = settings.backend == SPARSE
        self._client = PenstockWeightSyncClient(
            address,
            settings.backend,
            timeout_seconds=settings.timeout_seconds,
            security=security,
        )
        self._engine: Engine | None = None
        self._source: PayloadSource | None = None
        self._thread = _SendingThread()

    async def send(
        self, header: weights_pb2.WeightHeader, parcel: Parcel
    ) -> weights_pb2.UpdateWeightsResponse:
        """The version is active on return. `sparse_nccl` sends patches: what changed, or every element.
        Other backends send it whole."""
        if header.HasField("adapter"):
            raise ConfigInvalid("an adapter cannot be sent by a collective")
        patches: list[SparseWeightPatch] | None = None
        if self._settings.backend == SPARSE:
            from penstock.trainer.weights.collective.source import patches_of

            patches = await asyncio.to_thread(patches_of, parcel, self._device())
        else:
            header.base_weight_version = 0
        named = None if patches is None else {patch.name for patch in patches}
        # The position of a tensor in the payload has no meaning here.
        header.tensors.extend(
            weights_pb2.TensorSpec(name=s.name, shape=s.shape, dtype=s.dtype, xxh3=s.xxh3)
            for s in parcel.payload.specs
            if named is None or s.name in named
        )
        try:
            await self._within_deadline(lambda: self._send(header, parcel, patches))
        except BaseException as error:
            # Whatever the error, the server has left the group too, or will.
            self._leave()
            if isinstance(error, WeightSyncFailed):
                raise _as_aio(error) from error
            if isinstance(error, GroupBroken):
                raise _aio_error(grpc.StatusCode.UNAVAILABLE, str(error)) from error
            raise
        self.count(
            parcel.payload.length_bytes
            if patches is None
            else sum(patch.indices.nbytes + patch.values.nbytes for patch in patches)
        )
        return self._client.result

    def close(self) -> None:
        self._leave()
        self._client.close()

    async def _within_deadline(self, work: Callable[[], None]) -> None:
        """Joining, the header, a round and the commit each have a separate deadline. Work that exceeds all
        of them hangs in an uninterruptible call, so its thread is abandoned."""
        limit = 4 * self._settings.timeout_seconds + GRACE_SECONDS
        try:
            async with asyncio.timeout(limit):
                await asyncio.wrap_future(self._thread.run(work))
        except TimeoutError:
            self._thread = _SendingThread()
            raise _aio_error(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"{self._settings.backend} did not return within {limit:g} s",
            ) from None

    def _leave(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            # Shutdown of a hanging communicator may hang too.
            self._thread.run(engine.shutdown)

    # The methods below run in the sending thread.

    def _send(
        self,
        header: weights_pb2.WeightHeader,
        parcel: Parcel,
        patches: list[SparseWeightPatch] | None,
    ) -> None:
        self._client.prepare(header)
        if patches is not None:
            if self._engine is None:
                self._engine = self._join(None)
            # Unlike every other engine, vLLM's sparse engine takes patches instead of a source.
            cast("SparseNCCLTrainerWeightTransferEngine", self._engine).send_weights(patches)
            return
        if self._engine is None or self._source is None:
            from penstock.trainer.weights.collective.source import PayloadSource

            self._source = PayloadSource(self._device(), parcel.payload)
            self._engine = self._join(self._source)
        self._source.payload = parcel.payload
        self._engine.send_weights()

    def _device(self) -> torch.device:
        import torch

        return torch.device("cpu" if self._settings.backend == "gloo" else "cuda")

    def _join(self, source: PayloadSource | None) -> Engine:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        return cast(
            "Engine",
            WeightTransferTrainerFactory.trainer_init(  # pyright: ignore[reportUnknownMemberType]
                self._init_info(), client=self._client, source=source
            ),
        )

    def _init_info(self) -> TrainerInitInfo:
        settings, address = self._settings, self._settings.master_address
        if settings.backend == "gloo":
            from penstock.trainer.weights.collective.gloo import GlooTrainerInitInfo

            return GlooTrainerInitInfo(
                address,
                settings.master_port,
                settings.world_size,
                settings.bucket_bytes,
                settings.timeout_seconds,
                rank=0,
            )
        if settings.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(
                packed=True, packed_buffer_size_bytes=settings.bucket_bytes, rank=0
            )
        meeting = (address, settings.master_port or _free_port(address), settings.world_size)
        if settings.backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            return NCCLTrainerInitInfo(
                *meeting, packed_buffer_size_bytes=settings.bucket_bytes, rank=0
            )
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo

        return SparseNCCLTrainerInitInfo(*meeting, rank=0)


class _SendingThread:
    """Runs functions one after another in one daemon thread, which does not keep the process alive."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="collective", daemon=True).start()

    def run(self, work: Callable[[], None]) -> Future[None]:
        result: Future[None] = Future()

        def settle() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                work()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(None)

        self._work.put(settle)
        return result

    def _run(self) -> None:
        while True:
            self._work.get()()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as found:
        return cast("tuple[str, int]", found.getsockname())[1]


def _as_aio(failed: WeightSyncFailed) -> grpc.aio.AioRpcError:
    trailers = cast("grpc.Call", failed.error).trailing_metadata() if failed.error else None
    return _aio_error(failed.failure.code, failed.failure.message, tuple(trailers or ()))


def _aio_error(
    code: grpc.StatusCode, message: str, trailers: tuple[tuple[str, str | bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message)
