"""The trainer's weights to the server: packed, described, uploaded over a connection of their own.

    fill (compute thread) -> header -> READY -> chunks, or nothing for shared memory -> commit ->
    STAGED

The switch itself travels on the exchange. The payload keeps the bytes of the newest version until
the next `fill`, so that a server that comes back empty can be given them again without the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import xxhash
from torch import Tensor

from penstock.trainer.compute import ComputeThread
from penstock.trainer.errors import ServerLost, WeightsRefused
from penstock.trainer.payload import Payload
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import Failure, read_failure
from penstock.wire.reasons import Reason

log = logging.getLogger(__name__)

# Every tensor of a full upload with its name, in an order that does not change.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]

CHUNK_BYTES = 1024 * 1024
UPDATE_WEIGHTS = "/penstock.v1.RolloutService/UpdateWeights"
GET_SERVER_INFO = "/penstock.v1.RolloutService/GetServerInfo"
INFO_TIMEOUT_SECONDS = 30.0
# What a server answers that cannot read this host's memory: the stream still can.
NOT_SHARED = (Reason.SOURCE_UNAVAILABLE, Reason.FIELD_INVALID)
# What passes: an upload that broke off and that the server has not noticed yet, a flipped bit, an
# epoch that a reconnection of the exchange has just outdated.
PASSING = (Reason.UPLOAD_IN_PROGRESS, Reason.CHECKSUM_MISMATCH, Reason.STALE_EPOCH)
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.2


class Publisher:
    """Uploads weight versions; one at a time."""

    def __init__(
        self, channel: grpc.aio.Channel, compute: ComputeThread, *, shared_memory: bool = True
    ) -> None:
        """`channel` must carry nothing else, lest bulk delay what does."""
        self._channel = channel
        self._compute = compute
        self._shared_memory = shared_memory
        self._payload: Payload | None = None
        self._filled_version = 0
        self._lock = asyncio.Lock()

    @property
    def filled_version(self) -> int:
        """Version whose bytes the payload holds; zero before the first."""
        return self._filled_version

    @property
    def length_bytes(self) -> int:
        """Size of one upload."""
        return self._payload.length_bytes if self._payload else 0

    async def server_info(self) -> rollout_service_pb2.GetServerInfoResponse:
        """What the server is and holds. Raises ServerLost."""
        call = self._channel.unary_unary(
            GET_SERVER_INFO,
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(rollout_service_pb2.GetServerInfoResponse),
        )
        request = rollout_service_pb2.GetServerInfoRequest()
        try:
            return await call(request, timeout=INFO_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _lost_or(error, "GetServerInfo") from error

    async def fill(self, weights: Weights, weight_version: int, dtype: str) -> None:
        """Copies weights into the payload as this version, in the dtype the server named.

        Waits for an upload that is under way.
        """
        async with self._lock:
            # Before the copy begins, so that nobody takes what it overwrites for a whole version.
            self._filled_version = weight_version
            await self._compute.run(self._fill, weights, dtype)

    def relabel(self, weight_version: int) -> None:
        """The bytes of the version before are this version's too: the step changed nothing."""
        self._filled_version = weight_version

    async def upload(
        self,
        weight_version: int,
        *,
        trainer_epoch: Callable[[], int],
        in_flight: weights_pb2.InFlightPolicy.ValueType,
    ) -> bool:
        """Stages a version on the server; returns once it is verified there.

        False means that the payload holds a newer one by now. `trainer_epoch` is asked for each
        attempt. Raises ServerLost where the server is away, and WeightsRefused where it says no.
        """
        async with self._lock:
            for attempt in range(ATTEMPTS):
                if self._filled_version != weight_version:
                    return False
                header = self._header(trainer_epoch(), in_flight)
                try:
                    await self._send(header)
                    break
                except grpc.aio.AioRpcError as error:
                    if not await self._passes(read_failure(error), attempt + 1 < ATTEMPTS):
                        raise _lost_or(error, f"version {weight_version}") from error
                    if await self._is_held():
                        break
                    await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
            return True

    def close(self) -> None:
        """Frees the payload."""
        if self._payload is not None:
            self._payload.close()
            self._payload = None

    async def _passes(self, failure: Failure, attempts_left: bool) -> bool:
        """Whether another attempt may succeed."""
        if not attempts_left or failure.code == grpc.StatusCode.UNAVAILABLE:
            return False
        if self._shared_memory and failure.reason in NOT_SHARED:
            log.warning(
                "the server cannot read this host's memory (%s); weights go through the stream",
                failure.message,
            )
            self._shared_memory = False
            return True
        if failure.reason == Reason.WEIGHT_VERSION_STALE:
            return await self._is_held()
        return failure.reason in PASSING

    async def _is_held(self) -> bool:
        """Whether the server has this version already, from an upload whose answer was lost."""
        info = await self.server_info()
        held = (info.active_weight_version, *info.staged_weight_versions)
        return self._filled_version in held

    def _fill(self, weights: Weights, dtype: str) -> None:
        if self._payload is None:
            self._payload = Payload(weights(), dtype)
        self._payload.fill(weights())

    def _header(
        self, trainer_epoch: int, in_flight: weights_pb2.InFlightPolicy.ValueType
    ) -> weights_pb2.WeightHeader:
        payload = self._payload
        if payload is None:
            raise RuntimeError("fill comes before upload")
        header = weights_pb2.WeightHeader(
            weight_version=self._filled_version,
            tensors=payload.specs,
            activation=weights_pb2.ACTIVATION_STAGED,
            in_flight=in_flight,
            trainer_epoch=trainer_epoch,
        )
        if self._shared_memory:
            header.shared_memory.name = str(payload.path)
            header.shared_memory.host_namespace = payload.host_namespace
        else:
            header.inline.length_bytes = payload.length_bytes
        return header

    async def _send(self, header: weights_pb2.WeightHeader) -> None:
        ready = asyncio.Event()
        method: grpc.aio.StreamStreamMultiCallable[
            weights_pb2.UpdateWeightsRequest, weights_pb2.UpdateWeightsResponse
        ] = self._channel.stream_stream(
            UPDATE_WEIGHTS,
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(weights_pb2.UpdateWeightsResponse),
        )
        call = method(self._requests(header, ready))
        staged = False
        async for response in call:
            if response.state == weights_pb2.WEIGHT_STATE_READY:
                ready.set()
            staged = staged or response.state == weights_pb2.WEIGHT_STATE_STAGED
        if not staged:
            raise WeightsRefused(
                f"version {header.weight_version}: the server ended the upload without staging it"
            )

    async def _requests(
        self, header: weights_pb2.WeightHeader, ready: asyncio.Event
    ) -> AsyncIterator[weights_pb2.UpdateWeightsRequest]:
        """Header, then chunks once the server is ready, then the commit."""
        payload = self._payload
        if payload is None:
            raise RuntimeError("the publisher is closed")
        # Embedding a message writes these same bytes: fields in the order of their numbers.
        digest = hashlib.sha256(header.SerializeToString(deterministic=True)).digest()
        yield weights_pb2.UpdateWeightsRequest(header=header)
        await ready.wait()
        if header.WhichOneof("source") == "inline":
            for offset in range(0, payload.length_bytes, CHUNK_BYTES):
                yield _chunk(offset, payload.slice(offset, CHUNK_BYTES))
        yield weights_pb2.UpdateWeightsRequest(
            commit=weights_pb2.WeightCommit(header_sha256=digest)
        )


def _chunk(offset: int, data: bytes) -> weights_pb2.UpdateWeightsRequest:
    chunk = weights_pb2.WeightChunk(
        offset_bytes=offset, data=data, xxh3=xxhash.xxh3_64_intdigest(data)
    )
    return weights_pb2.UpdateWeightsRequest(chunk=chunk)


def _lost_or(error: grpc.aio.AioRpcError, subject: str) -> ServerLost | WeightsRefused:
    failure = read_failure(error)
    text = f"{subject}: {failure.reason or failure.code.name}: {failure.message}"
    if failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ServerLost(text)
    return WeightsRefused(text)
