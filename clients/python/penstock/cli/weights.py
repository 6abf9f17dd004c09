"""`penstock weights`: shows a server's weight versions and pushes checkpoints manually."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.cli.asking import Info, answered, server_info
from penstock.cli.checkpoint import MappedTensor, read_checkpoint
from penstock.client.client import state_of, version_of
from penstock.client.errors import from_rpc
from penstock.common.answers import show as show_result
from penstock.common.checkpoint import CheckpointUnreadable
from penstock.common.memory_file import MemoryFile
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason
from penstock.wire.security import Security, open_channel
from penstock.wire.words import IN_FLIGHT

PROGRAM = "penstock weights"
SOURCES = {
    "checkpoint": weights_pb2.WEIGHT_SOURCE_KIND_CHECKPOINT,
    "shared-memory": weights_pb2.WEIGHT_SOURCE_KIND_SHARED_MEMORY,
    "stream": weights_pb2.WEIGHT_SOURCE_KIND_INLINE,
}
"""In the order in which "auto" tries them, fewest copies first."""


class PushRefused(Exception):
    """The request cannot be carried out; the message explains why to the user."""


REFUSALS = (PushRefused, CheckpointUnreadable)


@dataclass(frozen=True)
class PushOptions:
    """The arguments and options of the command, by their names."""

    address: str
    folder: Path
    """Absolute path."""
    version: int | None
    """None means the server's newest version plus one."""
    source: str
    """A key of SOURCES, or "auto"."""
    in_flight: str | None
    """None uses the server's setting."""
    stage_only: bool
    security: Security


def show(address: str, security: Security) -> int:
    """Prints a server's weight versions. Returns the exit status."""

    async def work() -> None:
        async with open_channel(address, security) as channel:
            info = await server_info(channel)
        show_result(_table(address, info), _figures(info))

    return answered(PROGRAM, address, work(), *REFUSALS)


def push(options: PushOptions) -> int:
    """Uploads a checkpoint and switches to it, unless `stage_only` is set. Returns the exit status.

    Raises ModuleNotFoundError if xxhash is missing, before it contacts the server.
    """
    from penstock.wire.upload import NotStaged

    async def work() -> None:
        async with open_channel(options.address, options.security, own_connection=True) as channel:
            try:
                await _push(channel, options)
            except NotStaged as error:
                raise PushRefused(str(error)) from error

    return answered(PROGRAM, options.address, work(), *REFUSALS)


# push


async def _push(channel: grpc.aio.Channel, options: PushOptions) -> None:
    tensors = read_checkpoint(options.folder)
    info = await server_info(channel)
    newest = max(
        info.active_weight_version, *info.staged_weight_versions, *info.adapter_weight_versions, 0
    )
    version = newest + 1 if options.version is None else options.version
    header = weights_pb2.WeightHeader(
        weight_version=version,
        activation=weights_pb2.ACTIVATION_STAGED
        if options.stage_only
        else weights_pb2.ACTIVATION_IMMEDIATE,
        in_flight=IN_FLIGHT[options.in_flight]
        if options.in_flight
        else weights_pb2.IN_FLIGHT_POLICY_UNSPECIFIED,
        # Later than the epoch of any trainer that has started.
        trainer_epoch=time.time_ns(),
    )
    sources = _sources(options, info, tensors)
    for place, source in enumerate(sources):
        try:
            last = await _send(channel, header, source, options.folder, tensors, info.weight_dtype)
            break
        except grpc.aio.AioRpcError as error:
            failure = from_rpc(error)
            if failure.reason != Reason.SOURCE_UNAVAILABLE or place + 1 == len(sources):
                raise
            sys.stderr.write(f"penstock weights: {failure}; trying {sources[place + 1]}\n")
    else:
        raise PushRefused("the server accepts weights from none of this client's sources")
    # The server counts changes only against versions it received, not against the engine's initial
    # weights.
    is_first = not info.full_weight_version and not info.staged_weight_versions
    show_result(
        _outcome(version, last, len(tensors), is_first=is_first),
        {
            "version": version,
            "active_weight_version": last.active_weight_version,
            "pause_seconds": last.pause.ToNanoseconds() / 1e9,
            "tensors": len(tensors),
            "changed_tensors": None if is_first else last.changed_tensor_count,
        },
    )


def _sources(options: PushOptions, info: Info, tensors: Sequence[MappedTensor]) -> list[str]:
    """Returns the sources to try, in order. Raises PushRefused if the chosen one is impossible."""
    other = next((t for t in tensors if t.dtype != info.weight_dtype), None)
    if options.source == "checkpoint" and other is not None:
        raise PushRefused(
            f"{other.name} has dtype {other.dtype}, but the server needs {info.weight_dtype} and reads "
            "checkpoints without conversion: use --source stream to convert"
        )
    if options.source != "auto":
        return [options.source]
    offered = [name for name, kind in SOURCES.items() if kind in info.weight_sources]
    return [name for name in offered if name != "checkpoint" or other is None]


async def _send(
    channel: grpc.aio.Channel,
    announced: weights_pb2.WeightHeader,
    source: str,
    folder: Path,
    tensors: Sequence[MappedTensor],
    dtype: str,
) -> weights_pb2.UpdateWeightsResponse:
    from penstock.wire.upload import upload

    header = weights_pb2.WeightHeader()
    header.CopyFrom(announced)
    if source == "checkpoint":
        header.tensors.extend(_specs(tensors, dtype, placed=False))
        header.checkpoint.path = str(folder)
        return await upload(channel, header)
    header.tensors.extend(_specs(tensors, dtype, placed=True))
    length = sum(spec.length_bytes for spec in header.tensors)
    if source == "stream":
        header.inline.length_bytes = length
        return await upload(channel, header, _converted(tensors, dtype))
    try:
        file = MemoryFile(length)
    except OSError as error:
        raise PushRefused(
            f"cannot allocate {length} bytes of shared memory: {error.strerror}"
        ) from error
    try:
        for spec, data in zip(header.tensors, _converted(tensors, dtype), strict=True):
            file.view[spec.offset_bytes : spec.offset_bytes + spec.length_bytes] = data
        header.shared_memory.name = str(file.path)
        header.shared_memory.host_namespace = file.host_namespace
        return await upload(channel, header)
    finally:
        file.close()


def _specs(
    tensors: Sequence[MappedTensor], dtype: str, *, placed: bool
) -> Iterator[weights_pb2.TensorSpec]:
    """Yields the header's entry for each tensor, in the server's dtype.

    If `placed`, the entries locate the tensors one after the other in a payload. Otherwise the
    tensors are located by their files.
    """
    import xxhash

    offset = 0
    for tensor, data in zip(tensors, _converted(tensors, dtype), strict=True):
        length = len(data)
        yield weights_pb2.TensorSpec(
            name=tensor.name,
            shape=tensor.shape,
            dtype=dtype,
            offset_bytes=offset if placed else 0,
            length_bytes=length if placed else 0,
            encoding=weights_pb2.TENSOR_ENCODING_RAW,
            xxh3=xxhash.xxh3_64_intdigest(data),
        )
        offset += length


def _converted(tensors: Sequence[MappedTensor], dtype: str) -> Iterator[memoryview]:
    # One at a time, because two copies of the model may not fit in memory.
    return (tensor.bytes_as(dtype) for tensor in tensors)


def _outcome(
    version: int, last: weights_pb2.UpdateWeightsResponse, count: int, *, is_first: bool
) -> str:
    changed = f"{last.changed_tensor_count} of {count} tensors changed"
    if is_first:
        changed = f"{count} tensors, with no previous version to compare to"
    elif not last.changed_tensor_count:
        changed = "unchanged! no tensor differs from the previous version"
    if last.state == weights_pb2.WEIGHT_STATE_ACTIVE:
        pause = last.pause.ToNanoseconds() / 1e9
        return f"version {version} is active; pause {pause:.3f} s; {changed}"
    return f"version {version} is staged, version {last.active_weight_version} is active; {changed}"


# show


def _figures(info: Info) -> dict[str, object]:
    lora = info.lora if info.HasField("lora") else None
    return {
        "server_version": info.server_version,
        "model": info.model,
        "active_weight_version": info.active_weight_version,
        "full_weight_version": info.full_weight_version,
        "staged_weight_versions": list(info.staged_weight_versions),
        "delta_base_weight_version": info.delta_base_weight_version,
        "adapter_weight_versions": list(info.adapter_weight_versions),
        "lora": {"max_rank": lora.max_rank, "max_adapters": lora.max_adapters} if lora else None,
        "weight_dtype": info.weight_dtype,
        "weight_sources": _source_names(info),
        "replicas": [
            {
                "address": replica.address,
                "state": state_of(replica),
                "active_weight_version": version_of(replica),
                "running_turn_count": replica.load.running_turn_count,
                "waiting_turn_count": replica.load.waiting_turn_count,
                "problem": replica.problem,
            }
            for replica in info.replicas
        ],
    }


def _table(address: str, info: Info) -> str:
    lora = "not enabled"
    if info.HasField("lora"):
        lora = _listed(info.adapter_weight_versions) + (
            f" (rank up to {info.lora.max_rank}, {info.lora.max_adapters} at a time)"
        )
    active = f"version {info.active_weight_version}"
    if info.active_weight_version in info.adapter_weight_versions:
        active += f", an adapter on version {info.full_weight_version}"
    rows = [
        ("server", f"{address}, release {info.server_version}"),
        ("model", info.model),
        ("active", active),
        ("staged", _listed(info.staged_weight_versions)),
        ("delta base", _listed([v for v in (info.delta_base_weight_version,) if v])),
        ("adapters", lora),
        ("dtype", info.weight_dtype),
        ("sources", ", ".join(_source_names(info))),
    ]
    lines = [f"{name:<12}{value}" for name, value in rows]
    lines += ["", f"{'replica':<24}{'state':<14}{'version':>8}{'running':>9}{'waiting':>9}"]
    for replica in info.replicas:
        version = version_of(replica)
        lines.append(
            f"{replica.address or '(the server itself)':<24}{state_of(replica):<14}"
            f"{'-' if version is None else version:>8}{replica.load.running_turn_count:>9}"
            f"{replica.load.waiting_turn_count:>9}{'  ' if replica.problem else ''}{replica.problem}"
        )
    return "\n".join(lines)


def _listed(versions: Sequence[int]) -> str:
    return ", ".join(f"version {version}" for version in versions) or "none"


def _source_names(info: Info) -> list[str]:
    names = [weights_pb2.WeightSourceKind.Name(kind) for kind in info.weight_sources]
    return [name.removeprefix("WEIGHT_SOURCE_KIND_").lower().replace("_", " ") for name in names]
