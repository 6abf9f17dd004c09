"""What the header of an upload says, once it is known to make sense by itself.

Whether the version is in order, and its tensors are the model's, is for `weight_versions` and the stage.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from penstock.server.engine import EngineDescription
from penstock.server.errors import FieldInvalid
from penstock.server.weight_manifest import Encoding, ManifestTensor
from penstock.server.weight_probe import Probe, read_probe
from penstock.server.weight_switch import InFlight
from penstock.v1 import weights_pb2

ENCODINGS = {
    weights_pb2.TENSOR_ENCODING_UNSPECIFIED: Encoding.RAW,
    weights_pb2.TENSOR_ENCODING_RAW: Encoding.RAW,
    weights_pb2.TENSOR_ENCODING_SAME: Encoding.SAME,
    weights_pb2.TENSOR_ENCODING_SPARSE: Encoding.SPARSE,
}
IN_FLIGHT_POLICIES = {
    weights_pb2.IN_FLIGHT_POLICY_KEEP: InFlight.KEEP,
    weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE: InFlight.RECOMPUTE,
    weights_pb2.IN_FLIGHT_POLICY_DRAIN: InFlight.DRAIN,
    weights_pb2.IN_FLIGHT_POLICY_ABORT: InFlight.ABORT,
}
ACTIVATIONS = {
    weights_pb2.ACTIVATION_UNSPECIFIED: True,
    weights_pb2.ACTIVATION_IMMEDIATE: True,
    weights_pb2.ACTIVATION_STAGED: False,
}


@dataclass(frozen=True, slots=True)
class InlineSource:
    """Bytes in the chunks of the stream."""

    length_bytes: int


@dataclass(frozen=True, slots=True)
class SharedSource:
    """Bytes in a file in memory of the same host."""

    name: str
    host_namespace: str


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Bytes in a folder of safetensors files."""

    path: str


Source = InlineSource | SharedSource | CheckpointSource


@dataclass(frozen=True, slots=True)
class Announced:
    """One upload as its header announces it."""

    weight_version: int
    base_version: int
    """Zero for a full upload."""
    trainer_epoch: int
    digest: bytes
    """SHA-256 of the header: the same again means the same upload."""
    source: Source
    manifest: tuple[ManifestTensor, ...]
    immediate: bool
    """Whether to switch on commit."""
    in_flight: InFlight | None
    """None is the server's default."""
    probe: Probe | None


def header_digest(header: weights_pb2.WeightHeader) -> bytes:
    """SHA-256 of the header as it was sent."""
    return hashlib.sha256(header.SerializeToString(deterministic=True)).digest()


def read_header(
    header: weights_pb2.WeightHeader, digest: bytes, description: EngineDescription
) -> Announced:
    """Raises FIELD_INVALID for anything unset, unknown or out of range."""
    if header.HasField("adapter"):
        raise FieldInvalid("header.adapter", "is not taken by this server; see GetServerInfo")
    source = _read_source(header)
    if isinstance(source, CheckpointSource) and header.base_weight_version:
        raise FieldInvalid(
            "header.base_weight_version",
            "must be zero with a checkpoint, which is complete",
            header.base_weight_version,
        )
    return Announced(
        weight_version=header.weight_version,
        base_version=header.base_weight_version,
        trainer_epoch=header.trainer_epoch,
        digest=digest,
        source=source,
        manifest=tuple(_read_tensor(spec) for spec in header.tensors),
        immediate=_read_activation(header.activation),
        in_flight=read_in_flight(header.in_flight),
        probe=read_probe(header.probe, description) if header.HasField("probe") else None,
    )


def read_in_flight(policy: int) -> InFlight | None:
    """The policy of a message; None is the server's default. Raises FIELD_INVALID."""
    if policy == weights_pb2.IN_FLIGHT_POLICY_UNSPECIFIED:
        return None
    known = {int(number): value for number, value in IN_FLIGHT_POLICIES.items()}
    if policy not in known:
        raise FieldInvalid("in_flight", "is unknown", policy)
    return known[policy]


def _read_activation(activation: int) -> bool:
    known = {int(number): value for number, value in ACTIVATIONS.items()}
    if activation not in known:
        raise FieldInvalid("header.activation", "is unknown", activation)
    return known[activation]


def _read_source(header: weights_pb2.WeightHeader) -> Source:
    kind = header.WhichOneof("source")
    if kind == "inline":
        length = header.inline.length_bytes
        if length < 0:
            raise FieldInvalid("header.inline.length_bytes", "must not be negative", length)
        return InlineSource(length)
    if kind == "shared_memory":
        return SharedSource(header.shared_memory.name, header.shared_memory.host_namespace)
    if kind == "checkpoint":
        return CheckpointSource(header.checkpoint.path)
    if kind is None:
        raise FieldInvalid("header.source", "must be set")
    raise FieldInvalid("header.source", "is not one this server takes; see GetServerInfo", kind)


def _read_tensor(spec: weights_pb2.TensorSpec) -> ManifestTensor:
    known = {int(number): value for number, value in ENCODINGS.items()}
    encoding = known.get(spec.encoding)
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
