"""UpdateWeights: header -> chunks -> commit, verified; and which versions are staged, active, accepted.

Order of an upload: header checked (order, epoch, manifest) -> READY -> payload (chunks of this stream, or
a shared file) -> commit -> every tensor verified, off the event loop, while generation goes on ->
STAGED -> with immediate activation, switched to -> ACTIVE.

What a failure does: anything refused, and a stream that ends without a commit, releases what was
staged and leaves the version in use exactly as it was. The same version and header again is answered with
what became of it. One upload runs at a time; an upload or switch of an older trainer is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from penstock.server.engine import StagedWeights
from penstock.server.errors import DomainError, FieldInvalid
from penstock.server.trainer_servicer import read_in_flight
from penstock.server.turns import TurnRunner
from penstock.server.weight_stage import ManifestTensor, Upload, WeightRefused, WeightStage
from penstock.server.weight_switch import InFlight, Switched, WeightSwitch
from penstock.v1 import weights_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason

UpdateWeightsResponse = twin(weights_pb2.UpdateWeightsResponse)

Respond = Callable[[weights_pb2.UpdateWeightsResponse], Awaitable[None]]
Requests = AsyncIterator[weights_pb2.UpdateWeightsRequest]


@dataclass(frozen=True, slots=True)
class _Staged:
    """A verified version, until it is active or makes room."""

    upload: Upload
    weights: StagedWeights
    digest: bytes
    hashes: dict[str, int]
    changed_tensor_count: int


class WeightVersions:
    """Takes uploads and switches to them."""

    def __init__(
        self,
        stage: WeightStage,
        switch: WeightSwitch,
        turns: TurnRunner,
        in_flight: InFlight,
        *,
        max_staged: int = 2,
    ) -> None:
        self._stage = stage
        self._switch = switch
        self._turns = turns
        self._in_flight = in_flight
        self._max_staged = max_staged
        self._staged: dict[int, _Staged] = {}
        self._active_digest = b""
        self._active_hashes: dict[str, int] = {}
        self._active_changed = 0
        self._epoch = 0
        self._uploading: int | None = None
        self.on_staged: Callable[[int, int], None] | None = None
        """Called with an upload's bytes and its changed tensors, for metrics."""
        self.on_switched: Callable[[Switched], None] | None = None
        """Called after every switch, for metrics."""
        self.on_trainer_version: Callable[[int], None] | None = None
        """Called when an immediate upload says which version the trainer holds."""

    @property
    def active_version(self) -> int:
        """The version now sampling."""
        return self._switch.active_version

    @property
    def staged_versions(self) -> list[int]:
        """Versions verified and not yet switched to, oldest first."""
        return sorted(self._staged)

    def fence(self, trainer_epoch: int) -> None:
        """Refuses uploads of trainers older than this one from now on."""
        self._epoch = trainer_epoch

    def close(self) -> None:
        """Releases everything staged."""
        self._staged.clear()
        self._stage.close()

    async def update_weights(self, requests: Requests, respond: Respond) -> None:
        """Takes one upload; see the module's docstring."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "header":
            raise FieldInvalid("message", "must be a header first")
        header = first.header
        digest = hashlib.sha256(header.SerializeToString(deterministic=True)).digest()
        if await self._repeated(header, digest, respond):
            return
        self._check_order(header)
        policy = read_in_flight(header.in_flight)
        immediate = _read_activation(header)
        if self._uploading is not None:
            raise DomainError(
                Reason.UPLOAD_IN_PROGRESS,
                f"version {self._uploading} is being uploaded",
                {"weight_version": self._uploading},
                retry_after_seconds=1.0,
            )
        self._uploading = header.weight_version
        try:
            staged = await self._receive(header, digest, requests, respond)
        finally:
            self._uploading = None
        if staged is None:
            return
        await respond(
            self._response(header.weight_version, weights_pb2.WEIGHT_STATE_STAGED, staged)
        )
        if immediate:
            if self.on_trainer_version is not None:
                self.on_trainer_version(header.weight_version)
            switched = await self.activate(header.weight_version, policy)
            await respond(self._active(header.weight_version, staged, switched))

    async def _repeated(
        self, header: weights_pb2.WeightHeader, digest: bytes, respond: Respond
    ) -> bool:
        version = header.weight_version
        staged = self._staged.get(version)
        if staged is not None and staged.digest == digest:
            await respond(self._response(version, weights_pb2.WEIGHT_STATE_STAGED, staged))
            if _read_activation(header):
                switched = await self.activate(version, read_in_flight(header.in_flight))
                await respond(self._active(version, staged, switched))
            return True
        if version == self.active_version and self._active_digest == digest:
            response = self._response(version, weights_pb2.WEIGHT_STATE_ACTIVE, None)
            response.changed_tensor_count = self._active_changed
            await respond(response)
            return True
        return False

    def _check_order(self, header: weights_pb2.WeightHeader) -> None:
        if header.trainer_epoch < self._epoch:
            raise DomainError(
                Reason.STALE_EPOCH,
                f"trainer epoch {header.trainer_epoch} is older than {self._epoch}",
                {"trainer_epoch": header.trainer_epoch, "current": self._epoch},
            )
        newest = max([self.active_version, *self._staged])
        if header.weight_version <= newest:
            raise DomainError(
                Reason.WEIGHT_VERSION_STALE,
                f"version {header.weight_version} is not greater than {newest}",
                {"weight_version": header.weight_version, "newest": newest},
            )
        if header.base_weight_version:
            raise DomainError(
                Reason.BASE_VERSION_MISMATCH,
                "this server takes full uploads only; base_weight_version must be 0",
                {"base_weight_version": header.base_weight_version},
            )

    async def _receive(
        self,
        header: weights_pb2.WeightHeader,
        digest: bytes,
        requests: Requests,
        respond: Respond,
    ) -> _Staged | None:
        """Stages and verifies one payload; None where the stream ended without a commit."""
        upload: Upload | None = None
        try:
            upload = await self._begin(header)
            await respond(
                self._response(header.weight_version, weights_pb2.WEIGHT_STATE_READY, None)
            )
            if not await self._payload(header, digest, upload, requests):
                upload.release()
                return None
            weights = await upload.verify()
        except WeightRefused as error:
            raise DomainError(error.reason, error.message, error.metadata) from error
        except BaseException:
            if upload is not None:
                upload.release()
            raise
        staged = self._keep(header, digest, upload, weights)
        if self.on_staged is not None:
            self.on_staged(upload.length_bytes, staged.changed_tensor_count)
        return staged

    async def _begin(self, header: weights_pb2.WeightHeader) -> Upload:
        manifest = [_read_tensor(spec) for spec in header.tensors]
        source = header.WhichOneof("source")
        if source == "inline":
            return await self._stage.begin_inline(
                header.weight_version, manifest, header.inline.length_bytes
            )
        if source == "shared_memory":
            shared = header.shared_memory
            return await self._stage.begin_shared(
                header.weight_version, manifest, shared.name, shared.host_namespace
            )
        if source is None:
            raise FieldInvalid("header.source", "must be set")
        raise FieldInvalid(
            "header.source", "is not one this server takes; see GetServerInfo", source
        )

    async def _payload(
        self,
        header: weights_pb2.WeightHeader,
        digest: bytes,
        upload: Upload,
        requests: Requests,
    ) -> bool:
        """Takes chunks up to the commit; False where the stream ends before it."""
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "chunk":
                if header.WhichOneof("source") != "inline":
                    raise FieldInvalid("chunk", "may only follow a header with an inline source")
                chunk = request.chunk
                upload.write_chunk(chunk.offset_bytes, chunk.data, chunk.xxh3)
            elif kind == "commit":
                if request.commit.header_sha256 != digest:
                    raise DomainError(
                        Reason.CHECKSUM_MISMATCH,
                        "header_sha256 is not that of the header this stream began with",
                        {"expected": digest.hex(), "actual": request.commit.header_sha256.hex()},
                    )
                return True
            else:
                raise FieldInvalid("message", "must be a chunk or the commit here", kind or "unset")
        return False

    def _keep(
        self,
        header: weights_pb2.WeightHeader,
        digest: bytes,
        upload: Upload,
        weights: StagedWeights,
    ) -> _Staged:
        hashes = {spec.name: spec.xxh3 for spec in header.tensors}
        changed = sum(self._active_hashes.get(name) != value for name, value in hashes.items())
        staged = _Staged(upload, weights, digest, hashes, changed)
        self._staged[header.weight_version] = staged
        while len(self._staged) > self._max_staged:
            self._staged.pop(min(self._staged)).upload.release()
        return staged

    async def activate(self, weight_version: int, in_flight: InFlight | None) -> Switched:
        """Switches to a staged version; one that is active already is no work.

        Raises WEIGHT_VERSION_NOT_STAGED, WEIGHTS_INCONSISTENT, ENGINE_LOST.
        """
        if weight_version == self.active_version and self._switch.trusted:
            return Switched(weight_version, 0.0)
        staged = self._staged.get(weight_version)
        if staged is None or weight_version < self.active_version:
            raise DomainError(
                Reason.WEIGHT_VERSION_NOT_STAGED,
                f"version {weight_version} is not staged",
                {"weight_version": weight_version, "active": self.active_version},
            )
        try:
            switched = await self._switch.switch(
                staged.weights, in_flight or self._in_flight, self._turns
            )
        finally:
            # Active or not to be trusted: either way it is not staged any more, nor are older ones.
            for version in [v for v in self._staged if v <= weight_version]:
                self._staged.pop(version).upload.release()
        self._active_digest, self._active_hashes = staged.digest, staged.hashes
        self._active_changed = staged.changed_tensor_count
        if self.on_switched is not None:
            self.on_switched(switched)
        return switched

    def _response(
        self, version: int, state: weights_pb2.WeightState.ValueType, staged: _Staged | None
    ) -> weights_pb2.UpdateWeightsResponse:
        return UpdateWeightsResponse(
            weight_version=version,
            state=state,
            active_weight_version=self.active_version,
            changed_tensor_count=staged.changed_tensor_count if staged else 0,
        )

    def _active(
        self, version: int, staged: _Staged, switched: Switched
    ) -> weights_pb2.UpdateWeightsResponse:
        response = self._response(version, weights_pb2.WEIGHT_STATE_ACTIVE, staged)
        response.pause.FromNanoseconds(int(switched.pause_seconds * 1e9))
        return response


def _read_activation(header: weights_pb2.WeightHeader) -> bool:
    """Whether the header asks for immediate activation."""
    if header.activation == weights_pb2.ACTIVATION_STAGED:
        return False
    if header.activation in (
        weights_pb2.ACTIVATION_IMMEDIATE,
        weights_pb2.ACTIVATION_UNSPECIFIED,
    ):
        return True
    raise FieldInvalid("header.activation", "is unknown", header.activation)


def _read_tensor(spec: weights_pb2.TensorSpec) -> ManifestTensor:
    if spec.encoding not in (
        weights_pb2.TENSOR_ENCODING_UNSPECIFIED,
        weights_pb2.TENSOR_ENCODING_RAW,
    ):
        raise FieldInvalid(
            "header.tensors.encoding", f"of {spec.name} is not one this server takes", spec.encoding
        )
    return ManifestTensor(
        spec.name,
        tuple(spec.shape),
        spec.dtype,
        spec.offset_bytes,
        spec.length_bytes,
        spec.xxh3,
    )
