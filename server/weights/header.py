"""Reading the header of an upload, and checking everything that does not depend on the server's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.engine.protocol import EngineDescription
from penstock.server.weights.adapter_manifest import AdapterShape, read_adapter
from penstock.server.weights.probe import Probe, read_probe
from penstock.server.weights.staging.manifest import Encoding, ManifestTensor
from penstock.server.weights.switch import InFlight
from penstock.v1 import weights_pb2
from penstock.wire.channel import split_address
from penstock.wire.reasons import Reason
from penstock.wire.upload_messages import Header
from penstock.wire.words import IN_FLIGHT

ENCODINGS: Mapping[int, Encoding] = {
    weights_pb2.TENSOR_ENCODING_UNSPECIFIED: Encoding.RAW,
    weights_pb2.TENSOR_ENCODING_RAW: Encoding.RAW,
    weights_pb2.TENSOR_ENCODING_SAME: Encoding.SAME,
    weights_pb2.TENSOR_ENCODING_SPARSE: Encoding.SPARSE,
}
IN_FLIGHT_POLICIES: Mapping[int, InFlight | None] = {
    weights_pb2.IN_FLIGHT_POLICY_UNSPECIFIED: None,
    **{policy: InFlight(word) for word, policy in IN_FLIGHT.items()},
}
ACTIVATIONS: Mapping[int, bool] = {
    weights_pb2.ACTIVATION_UNSPECIFIED: True,
    weights_pb2.ACTIVATION_IMMEDIATE: True,
    weights_pb2.ACTIVATION_STAGED: False,
}
Source = Literal["inline", "shared_memory", "checkpoint", "collective", "peer"]


@dataclass(frozen=True, slots=True)
class Announced:
    header: weights_pb2.WeightHeader
    weight_version: int
    base_version: int
    """Zero for a full upload."""
    trainer_epoch: int
    digest: bytes
    """SHA-256 of the header as sent. Equal digests mean the same upload, except if the payload is still
    being filled: then the checksums are in the commit."""
    source: Source
    """The field of the header that describes it."""
    manifest: tuple[ManifestTensor, ...]
    immediate: bool
    """Whether to switch on commit."""
    in_flight: InFlight | None
    """None means the server's default."""
    probe: Probe | None
    adapter: AdapterShape | None = None
    """None for full weights."""

    @property
    def filling(self) -> bool:
        """The checksums then come with the commit."""
        return self.header.shared_memory.filling

    def read_commit(self, commit: weights_pb2.WeightCommit) -> tuple[int, ...]:
        """Returns XXH3-64 of each tensor, in the manifest's order. Raises CHECKSUM_MISMATCH or
        FIELD_INVALID."""
        if commit.header_sha256 != self.digest:
            raise DomainError(
                Reason.CHECKSUM_MISMATCH,
                "header_sha256 is not that of the header this stream began with",
                {"expected": self.digest.hex(), "actual": commit.header_sha256.hex()},
            )
        count = len(self.manifest) if self.filling else 0
        if len(commit.tensor_xxh3) != count:
            raise FieldInvalid(
                "commit.tensor_xxh3",
                f"must have {count} checksums after this header",
                len(commit.tensor_xxh3),
            )
        return tuple(commit.tensor_xxh3) or tuple(tensor.xxh3 for tensor in self.manifest)


def read_header(received: Header, description: EngineDescription) -> Announced:
    """Raises FIELD_INVALID for anything unset, unknown or out of range."""
    header = received.message
    adapter = read_adapter(header, description) if header.HasField("adapter") else None
    source = _read_source(header)
    if source in ("checkpoint", "peer") and header.base_weight_version:
        raise FieldInvalid(
            "header.base_weight_version",
            "must be zero with a checkpoint or a peer, which provide all tensors in full",
            header.base_weight_version,
        )
    if source == "peer" and adapter is not None:
        raise FieldInvalid("header.peer", "may not be the source of an adapter")
    if header.shared_memory.filling:
        _check_filling(header)
    immediate = ACTIVATIONS.get(header.activation)
    if immediate is None:
        raise FieldInvalid("header.activation", "is unknown", header.activation)
    if source == "collective" and not immediate:
        raise FieldInvalid(
            "header.activation",
            "must be immediate with a collective, whose bytes go straight into the engine",
            header.activation,
        )
    return Announced(
        header=header,
        weight_version=header.weight_version,
        base_version=header.base_weight_version,
        trainer_epoch=header.trainer_epoch,
        digest=received.sha256,
        source=source,
        manifest=tuple(_read_tensor(spec) for spec in header.tensors),
        immediate=immediate,
        in_flight=read_in_flight(header.in_flight),
        probe=read_probe(header.probe, description) if header.HasField("probe") else None,
        adapter=adapter,
    )


def read_in_flight(policy: int) -> InFlight | None:
    """None means the server's default. Raises FIELD_INVALID."""
    if policy not in IN_FLIGHT_POLICIES:
        raise FieldInvalid("in_flight", "is unknown", policy)
    return IN_FLIGHT_POLICIES[policy]


def _read_source(header: weights_pb2.WeightHeader) -> Source:
    source = header.WhichOneof("source")
    if source is None:
        raise FieldInvalid("header.source", "must be set")
    length, shared, peer = header.inline.length_bytes, header.shared_memory, header.peer
    if length < 0:
        raise FieldInvalid("header.inline.length_bytes", "must not be negative", length)
    place = shared.progress_offset_bytes
    if place and not shared.filling:
        raise FieldInvalid(
            "header.shared_memory.progress_offset_bytes", "may only be set with filling", place
        )
    if source == "peer":
        try:
            split_address(peer.address)
        except ValueError as error:
            raise FieldInvalid("header.peer.address", str(error), peer.address) from error
        if peer.weight_version < 1:
            problem = "must be a version that was uploaded"
            raise FieldInvalid("header.peer.weight_version", problem, peer.weight_version)
    return source


def _check_filling(header: weights_pb2.WeightHeader) -> None:
    if header.base_weight_version:
        raise FieldInvalid(
            "header.base_weight_version",
            "must be zero while memory is still being filled: a delta must be complete first",
            header.base_weight_version,
        )
    for spec in header.tensors:
        if spec.xxh3:
            raise FieldInvalid(
                "header.tensors.xxh3",
                f"of {spec.name} must be zero while memory is still being filled: the commit has it",
                spec.xxh3,
            )


def _read_tensor(spec: weights_pb2.TensorSpec) -> ManifestTensor:
    encoding = ENCODINGS.get(spec.encoding)
    if encoding is None:
        raise FieldInvalid(
            "header.tensors.encoding", f"of {spec.name} is unknown", int(spec.encoding)
        )
    return ManifestTensor(
        spec.name,
        tuple(spec.shape),
        spec.dtype,
        spec.offset_bytes,
        spec.length_bytes,
        spec.xxh3,
        encoding,
        spec.sparse if spec.HasField("sparse") else None,
    )
