"""Fetching a version from another server that has it or is receiving it.

Any problem with the peer is SOURCE_UNAVAILABLE and leaves no trace of the upload. The sender of the header
may then send the bytes instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from penstock.server.weights.staging.incoming import IncomingUpload
from penstock.server.weights.staging.manifest import ManifestTensor, WeightRefused
from penstock.v1 import weights_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from penstock.wire.security import CredentialsUnusable, Security, open_channel
from penstock.wire.upload_messages import Chunk, read_upload_message

FETCH_WEIGHTS = "/penstock.v1.RolloutService/FetchWeights"


@dataclass(frozen=True, slots=True)
class PeerFetcher:
    security: Security
    silent_seconds: float
    """How long a peer may send nothing, including the time to connect."""

    async def fetch(
        self,
        source: weights_pb2.PeerSource,
        manifest: Sequence[ManifestTensor],
        upload: IncomingUpload,
    ) -> None:
        """Raises WeightRefused: SOURCE_UNAVAILABLE."""
        try:
            await self._fetch(source, manifest, upload)
        except grpc.aio.AioRpcError as error:
            failure = read_failure(error)
            name = failure.reason or failure.code.name
            raise _unavailable(source, f"{name}: {failure.message}") from error
        except TimeoutError as error:
            silent = f"it sent nothing for {self.silent_seconds:g} s"
            raise _unavailable(source, silent) from error
        except CredentialsUnusable as error:
            raise _unavailable(source, str(error)) from error
        except (WeightRefused, codec.MalformedMessage) as error:
            raise _unavailable(source, f"it sent an invalid chunk: {error}") from error

    async def _fetch(
        self,
        source: weights_pb2.PeerSource,
        manifest: Sequence[ManifestTensor],
        upload: IncomingUpload,
    ) -> None:
        async with open_channel(source.address, self.security, own_connection=True) as channel:
            method: grpc.aio.UnaryStreamMultiCallable[weights_pb2.FetchWeightsRequest, object] = (
                channel.unary_stream(
                    FETCH_WEIGHTS,
                    request_serializer=codec.encode,
                    response_deserializer=read_upload_message,
                )
            )
            specs = [
                weights_pb2.TensorSpec(
                    name=tensor.name,
                    offset_bytes=tensor.offset_bytes,
                    length_bytes=tensor.length_bytes,
                    xxh3=tensor.xxh3,
                )
                for tensor in manifest
            ]
            call = method(
                weights_pb2.FetchWeightsRequest(weight_version=source.weight_version, tensors=specs)
            )
            try:
                while True:
                    async with asyncio.timeout(self.silent_seconds):
                        answer = await call.read()
                    if answer is grpc.aio.EOF:
                        break
                    if not isinstance(answer, Chunk):
                        raise _unavailable(source, "it sent something other than a chunk")
                    upload.write_chunk(answer.offset_bytes, answer.data, answer.xxh3)
            finally:
                call.cancel()
            upload.check_complete()


def _unavailable(source: weights_pb2.PeerSource, problem: str) -> WeightRefused:
    return WeightRefused(
        Reason.SOURCE_UNAVAILABLE,
        f"version {source.weight_version} of {source.address}: {problem}",
        address=source.address,
        problem=problem,
    )
