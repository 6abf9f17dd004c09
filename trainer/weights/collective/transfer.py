"""vLLM's own weight transfer under Penstock's control: its `VLLMWeightSyncClient` over `UpdateWeights`.

vLLM's trainer engines (nccl, ipc, sparse_nccl, and any that is registered) move the bytes between the
trainer and the workers. They make four requests of the inference side:

    init_weight_transfer_engine   a stream with a join; returns when the engine has joined
    start_weight_update           the header, if it lists the tensors: the engine pauses
    update_weights                the header, if it was not sent yet; then a round
    finish_weight_update          the commit; returns when the version is being sampled

Each call blocks, for `timeout_seconds` at most, and may come from any thread. Messages are JSON. Of vLLM's
own backends only ipc needs something else: handles of CUDA memory, which vLLM pickles. This side then
requires VLLM_ALLOW_INSECURE_SERIALIZATION. vLLM's own check also requires it on the server's side.

    client = PenstockWeightSyncClient("127.0.0.1:50051", "nccl")
    engine = WeightTransferTrainerFactory.trainer_init(NCCLTrainerInitInfo(...), client=client, source=...)
    client.prepare(weights_pb2.WeightHeader(weight_version=7, trainer_epoch=epoch))
    engine.send_weights()
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import grpc

from penstock.trainer.core.errors import TrainerError
from penstock.v1 import weights_pb2
from penstock.wire.failure import Failure, read_failure
from penstock.wire.security import Security, TokenSource, open_blocking_channel
from penstock.wire.upload import UPDATE_WEIGHTS

TIMEOUT_SECONDS = 300.0

UpdateInfo = Mapping[str, object] | Sequence[Mapping[str, object]]
"""In vLLM's format: one description for every worker, or one per worker."""


class WeightSyncFailed(TrainerError):
    """The server refused, was lost, or did not answer in time; `failure` has the reason."""

    def __init__(self, doing: str, failure: Failure, error: grpc.RpcError | None = None) -> None:
        super().__init__(f"{doing}: {failure.reason or failure.code.name}: {failure.message}")
        self.failure = failure
        self.error = error
        """The error from gRPC; None for a timeout on this side."""


class PenstockWeightSyncClient:
    """Implements vLLM's VLLMWeightSyncClient, with one update at a time."""

    def __init__(
        self,
        address: str,
        backend: str,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        security: Security | None = None,
    ) -> None:
        """`address` is HOST:PORT, `backend` a name in vLLM's registry. Raises CredentialsUnusable."""
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._channel, self._tokens = open_blocking_channel(address, security, own_connection=True)
        self._method: grpc.StreamStreamMultiCallable[
            weights_pb2.UpdateWeightsRequest, weights_pb2.UpdateWeightsResponse
        ] = self._channel.stream_stream(
            UPDATE_WEIGHTS,
            request_serializer=_serialize,
            response_deserializer=weights_pb2.UpdateWeightsResponse.FromString,
        )
        self.trainer_epoch = 0
        """Epoch for the next join; also set by `prepare`."""
        self._next: weights_pb2.WeightHeader | None = None
        self._stream: _Stream | None = None
        self._header_sha256 = b""
        self._result: weights_pb2.UpdateWeightsResponse | None = None

    @property
    def result(self) -> weights_pb2.UpdateWeightsResponse:
        """The server's answer to the last update: the pause and the tensors that changed."""
        if self._result is None:
            raise RuntimeError("no update has finished")
        return self._result

    def prepare(self, header: weights_pb2.WeightHeader) -> None:
        """Describe the next update, before each one. The client sets source and activation.

        Without tensors, the first round has to name everything. With the names, shapes and dtypes of all
        tensors in all rounds, the server can refuse before any byte is sent."""
        self._next = header
        self.trainer_epoch = header.trainer_epoch

    def close(self) -> None:
        self._drop()
        self._channel.close()

    # The methods that vLLM's trainer engines call.

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        """Join the collective; return when the engine has joined. Raises WeightSyncFailed."""
        join = weights_pb2.CollectiveJoin(
            backend=self._backend,
            rendezvous_json=_to_json(init_info),
            trainer_epoch=self.trainer_epoch,
        )
        stream = _Stream(self._method, f"joining the collective {self._backend!r}", self._tokens)
        stream.send(weights_pb2.UpdateWeightsRequest(join=join))
        stream.end()
        try:
            while stream.receive(self._timeout_seconds) is not None:
                pass
        finally:
            stream.cancel()

    def start_weight_update(self) -> None:
        """Pause the engine, if `prepare` named the tensors. Raises WeightSyncFailed."""
        self._drop()
        if self._prepared().tensors:
            self._begin(self._prepared().tensors)

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Send one round; return when the engine has received it. Raises WeightSyncFailed."""
        described = _without_handles(update_info)
        if self._stream is None:
            self._begin(_tensors_of(described))
        update = weights_pb2.CollectiveRound(update_json=_to_json(described))
        self._exchange(weights_pb2.UpdateWeightsRequest(round=update))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit; return when the version is being sampled. Raises WeightSyncFailed."""
        version = self._prepared().weight_version
        if weight_version not in (None, str(version)):
            raise ValueError(f"version {version} was prepared, not {weight_version}")
        if self._stream is None:
            raise RuntimeError("no update is in progress")
        commit = weights_pb2.WeightCommit(header_sha256=self._header_sha256)
        self._result = self._exchange(weights_pb2.UpdateWeightsRequest(commit=commit))
        self._next = None
        self._drop()

    def _begin(self, tensors: Sequence[weights_pb2.TensorSpec]) -> None:
        header = weights_pb2.WeightHeader()
        header.CopyFrom(self._prepared())
        header.ClearField("tensors")
        header.tensors.extend(tensors)
        header.collective.backend = self._backend
        header.activation = weights_pb2.ACTIVATION_IMMEDIATE
        self._header_sha256 = hashlib.sha256(_serialize(header)).digest()
        self._stream = _Stream(self._method, f"version {header.weight_version}", self._tokens)
        self._exchange(weights_pb2.UpdateWeightsRequest(header=header))

    def _exchange(
        self, request: weights_pb2.UpdateWeightsRequest
    ) -> weights_pb2.UpdateWeightsResponse:
        if (stream := self._stream) is None:
            raise RuntimeError("no update is in progress")
        try:
            stream.send(request)
            response = stream.receive(self._timeout_seconds)
        except WeightSyncFailed:
            self._drop()
            raise
        if response is None:
            self._drop()
            raise RuntimeError("the server ended the upload without an answer")
        return response

    def _prepared(self) -> weights_pb2.WeightHeader:
        if self._next is None:
            raise RuntimeError("prepare was not called before the update")
        return self._next

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()


class _Stream:
    """One call, used one message at a time."""

    def __init__(
        self,
        method: grpc.StreamStreamMultiCallable[
            weights_pb2.UpdateWeightsRequest, weights_pb2.UpdateWeightsResponse
        ],
        doing: str,
        tokens: TokenSource | None,
    ) -> None:
        self._doing = doing
        self._requests = queue.SimpleQueue[weights_pb2.UpdateWeightsRequest | None]()
        self._answers = queue.SimpleQueue[
            weights_pb2.UpdateWeightsResponse | grpc.RpcError | None
        ]()
        metadata = None if tokens is None else tokens.metadata()
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        # gRPC's own iterator has no deadline for a single answer.
        threading.Thread(target=self._listen, name=doing, daemon=True).start()

    def send(self, request: weights_pb2.UpdateWeightsRequest) -> None:
        self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def receive(self, seconds: float) -> weights_pb2.UpdateWeightsResponse | None:
        """Return the next answer; None at the end of the stream. Raises WeightSyncFailed."""
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.cancel()
            late = Failure(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the server did not answer for {seconds:g} s"
            )
            raise WeightSyncFailed(self._doing, late) from None
        if isinstance(answer, grpc.RpcError):
            raise WeightSyncFailed(self._doing, read_failure(answer), answer) from answer
        return answer

    def cancel(self) -> None:
        """End the call if it has not ended."""
        self._requests.put(None)
        self._call.cancel()

    def _listen(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(None)
        except grpc.RpcError as error:
            self._answers.put(error)


def _serialize(message: weights_pb2.UpdateWeightsRequest | weights_pb2.WeightHeader) -> bytes:
    # Deterministic: the server hashes the header's bytes as they are within the request.
    return message.SerializeToString(deterministic=True)


def _to_json(info: UpdateInfo) -> str:
    try:
        return json.dumps(info, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TrainerError(f"the backend's message is not JSON: {error}") from error


def _tensors_of(info: UpdateInfo) -> list[weights_pb2.TensorSpec]:
    """Every tensor of a round, read from the keys that all of vLLM's backends use."""
    return list({spec.name: spec for part in _parts(info) for spec in _specs(part)}.values())


def _specs(part: Mapping[str, object]) -> Iterator[weights_pb2.TensorSpec]:
    names = cast("Sequence[str]", part.get("names", ()))
    dtypes = cast("Sequence[str]", part.get("dtype_names", ()))
    shapes = cast("Sequence[Sequence[int]]", part.get("shapes", ()))
    hashes = cast("Sequence[int]", part.get("xxh3") or [0] * len(names))
    for name, dtype, shape, xxh3 in zip(names, dtypes, shapes, hashes, strict=True):
        yield weights_pb2.TensorSpec(name=name, dtype=dtype, shape=shape, xxh3=xxh3)


def _parts(info: UpdateInfo) -> Sequence[Mapping[str, object]]:
    return [info] if isinstance(info, Mapping) else info


def _without_handles(info: UpdateInfo) -> UpdateInfo:
    """Replace handles of CUDA memory by vLLM's pickle of them. Raises TrainerError if not allowed."""
    if not any(part.get("ipc_handles") is not None for part in _parts(info)):
        return info
    from vllm import envs
    from vllm.distributed.weight_transfer import clients

    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise TrainerError(
            "ipc sends pickled memory handles, which vLLM reads only if "
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1 is set; set it for the trainer and the server"
        )
    to_json = clients._json_safe_update_payload  # pyright: ignore[reportPrivateUsage]
    return cast(UpdateInfo, to_json(cast("dict[str, object]", info)))
