"""Receives weight versions through a gloo group, inside vLLM's worker process like vLLM's backends.

Received tensors are kept and checked in separate memory. Only `finish_weight_update` changes the
model, so an update that breaks off, or differs from its announcement, changes nothing. vLLM finds
the backend as "gloo", through `weight_engine`, which connects the two.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import cast

import torch
import xxhash
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from penstock.server.vllm.worker.reload import reload_model
from penstock.server.weights.staging.manifest import WeightRefused, checksum_mismatch
from penstock.wire.gloo_group import GlooGroup, GroupBroken, buckets, bytes_of, join_group, lay_out
from penstock.wire.reasons import Reason

BACKEND = "gloo"


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    """Rank of the first worker. The trainer's processes have the ranks below."""
    world_size: int
    timeout_seconds: float = 300.0
    """Longest time for joining, and for each round."""
    bucket_bytes: int = 64 << 20
    """Size of one broadcast, the same on both sides."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds must be positive, got {self.timeout_seconds}")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    xxh3: list[int] = field(default_factory=list[int])
    """XXH3-64 of each tensor, or empty."""

    def __post_init__(self) -> None:
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes)}
        lengths |= {len(self.xxh3)} if self.xxh3 else set()
        if len(lengths) != 1:
            raise ValueError(
                f"names, dtype_names, shapes and xxh3 have different lengths: {lengths}"
            )


@dataclass(frozen=True)
class _Incoming:
    """A tensor of a round. Its bytes have arrived once the round has come to `end`."""

    name: str
    tensor: torch.Tensor
    end: int
    xxh3: int | None


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False
    stages_first = True
    """Until `finish_weight_update` the model is unchanged."""

    _group: GlooGroup | None = None
    _bucket_bytes: int
    _received: dict[str, torch.Tensor]

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = join_group(
            init_info.master_address,
            init_info.master_port,
            init_info.rank_offset + worker,
            init_info.world_size,
            init_info.timeout_seconds,
        )
        self._bucket_bytes = init_info.bucket_bytes

    def start_weight_update(self) -> None:
        self._received = {}

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Always reads the whole round, so the group stays in step. Raises GroupBroken, or WeightRefused
        for the first tensor that differs from its announcement."""
        if self._group is None:
            raise RuntimeError("no group was joined")
        expected, memory = _expect(update_info)
        problem: WeightRefused | None = None
        deadline = time.monotonic() + self._group.timeout_seconds
        waiting = iter(expected)
        tensor = next(waiting, None)
        for begin, end in buckets(len(memory), self._bucket_bytes):
            left = deadline - time.monotonic()
            if left <= 0:
                raise GroupBroken(f"the round took longer than {self._group.timeout_seconds:g} s")
            self._group.broadcast(memory[begin:end], left)
            while tensor is not None and tensor.end <= end:
                problem = problem or _check(tensor)
                tensor = next(waiting, None)
        if problem is not None:
            raise problem
        self._received |= {incoming.name: incoming.tensor for incoming in expected}

    def finish_weight_update(self) -> None:
        tensors, self._received = self._received, {}
        reload_model(self.model, self.model_config, tensors.items())

    def shutdown(self) -> None:
        self._group = None
        self._received = {}


def _expect(update_info: GlooUpdateInfo) -> tuple[list[_Incoming], torch.Tensor]:
    """Allocates the tensors of a round as views of one block of memory."""
    dtypes = [cast(torch.dtype, getattr(torch, name)) for name in update_info.dtype_names]
    lengths = [
        math.prod(shape) * dtype.itemsize
        for shape, dtype in zip(update_info.shapes, dtypes, strict=True)
    ]
    offsets, total = lay_out(lengths)
    memory = torch.empty(total, dtype=torch.uint8)
    hashes: list[int | None] = list(update_info.xxh3) or [None] * len(lengths)
    expected = [
        _Incoming(
            name, memory[offset : offset + length].view(dtype).view(shape), offset + length, xxh3
        )
        for name, dtype, shape, offset, length, xxh3 in zip(
            update_info.names, dtypes, update_info.shapes, offsets, lengths, hashes, strict=True
        )
    ]
    return expected, memory


def _check(incoming: _Incoming) -> WeightRefused | None:
    name, tensor = incoming.name, incoming.tensor
    if incoming.xxh3 is not None:
        got = xxhash.xxh3_64_intdigest(bytes_of(tensor).numpy().data)
        if got != incoming.xxh3:
            return checksum_mismatch(name, incoming.xxh3, got)
    if not bool(torch.isfinite(tensor).all()):
        return WeightRefused(Reason.NOT_FINITE, f"{name} holds a NaN or an infinity", tensor=name)
    return None


WeightTransferEngineFactory.register_engine(  # pyright: ignore[reportUnknownMemberType]
    BACKEND, GlooWeightTransferEngine
)
