"""vLLM's weight transfer over gloo, trainer side: for CPUs, and for hosts without NCCL.

The flow is that of vLLM's own nccl engine. The workers are asked to join while this end is opened. Then,
for each version, they learn what to expect, and it is broadcast. Every wait has a deadline, and ends early
if the server reports a failure.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar, cast

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from penstock.wire.gloo_group import GlooGroup, GroupBroken, Meeting, buckets, bytes_of, lay_out

T = TypeVar("T")

BACKEND = "gloo"
BUCKET_BYTES = 64 * 1024 * 1024
TIMEOUT_SECONDS = 300.0
# How long the server may take to report why it broke a group.
GRACE_SECONDS = 5.0


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """Where the group meets, and settings that both sides must share."""

    backend: ClassVar[str] = BACKEND

    master_address: str
    """Address of this host, as reachable by the workers."""
    master_port: int
    """Zero picks a free port."""
    world_size: int
    """Number of processes: this one and every worker of the engine."""
    bucket_bytes: int = BUCKET_BYTES
    """Length of one broadcast. This side allocates two buffers of it."""
    timeout_seconds: float = TIMEOUT_SECONDS
    """Longest time for the meeting, and for each round."""


class HashedSource(WeightSource):
    """A source with checksums, which the workers verify."""

    @abstractmethod
    def xxh3(self) -> Sequence[int]:
        """Returns the XXH3-64 of each tensor's bytes, in the order of `metadata`."""


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """Rank 0 sends. Other ranks of the trainer only help to materialize the weights."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(
        self,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource,
        init_info: GlooTrainerInitInfo,
    ) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._source = source
        self._bucket_bytes = init_info.bucket_bytes
        self._timeout_seconds = init_info.timeout_seconds
        self._group: GlooGroup | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> GlooTrainerWeightTransferEngine:
        """Meets the workers. Raises GroupBroken, and the errors of the client."""
        if source is None:
            raise ValueError("gloo sends from a WeightSource, but none was given")
        engine = cls(client=client, source=source, init_info=init_info)
        if engine.is_sender:
            engine._meet(init_info)
        return engine

    def _meet(self, init_info: GlooTrainerInitInfo) -> None:
        meeting = Meeting(
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
            init_info.timeout_seconds,
        )
        worker_info: dict[str, object] = {
            "master_address": init_info.master_address,
            "master_port": meeting.port,
            # The workers' ranks follow the trainer's single rank.
            "rank_offset": 1,
            "world_size": init_info.world_size,
            "bucket_bytes": init_info.bucket_bytes,
            "timeout_seconds": init_info.timeout_seconds,
        }
        joining = _start(lambda: self.client.init_weight_transfer_engine(worker_info))
        self._group = _unless_failed(joining, _start(meeting.lead))
        joining.result()

    def send_weights(self) -> None:
        """Sends one version in one round. Raises GroupBroken, and the errors of the client."""
        meta = self._source.metadata()
        if not self.is_sender:
            for _ in self._source:
                pass
            return
        self.client.start_weight_update()
        hashes = self._source.xxh3() if isinstance(self._source, HashedSource) else ()
        self.send_round(meta, self._source, hashes)
        self.client.finish_weight_update()

    def send_round(
        self,
        meta: Sequence[ParamMeta],
        tensors: Iterable[tuple[str, torch.Tensor]],
        xxh3: Sequence[int] = (),
    ) -> None:
        """Sends one round of an update that the caller begins and finishes. `meta` describes these tensors.
        Raises as `send_weights`."""
        info: dict[str, object] = {
            "names": [entry.name for entry in meta],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in meta],
            "shapes": [list(entry.shape) for entry in meta],
        }
        if xxh3:
            info["xxh3"] = list(xxh3)
        group = self._group
        if group is None:
            raise RuntimeError("trainer_init comes before send_weights")
        began = time.monotonic()
        receiving = _start(lambda: self.client.update_weights(info))
        try:
            sending: Future[None] | None = None
            for bucket in _fill_buckets(meta, tensors, self._bucket_bytes):
                if sending is not None:
                    _unless_failed(receiving, sending)
                sending = _start(partial(group.broadcast, bucket))
            if sending is not None:
                _unless_failed(receiving, sending)
        except GroupBroken:
            # If the server broke the group, its call reports why.
            left = self._timeout_seconds - (time.monotonic() - began)
            wait({receiving}, max(left, GRACE_SECONDS))
            if receiving.done():
                receiving.result()
            raise
        except BaseException:
            # Leaving the group ends the workers' wait for the rest.
            group = self._group = None
            raise
        receiving.result()

    def shutdown(self) -> None:
        # Releasing the group leaves it.
        self._group = None


def _fill_buckets(
    meta: Sequence[ParamMeta], tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[torch.Tensor]:
    """Yields the concatenated bytes of the tensors in buckets. There are two buffers, so that one bucket
    can be sent while the next is filled. Each is overwritten two buckets later."""
    lengths = [torch.Size(entry.shape).numel() * entry.dtype.itemsize for entry in meta]
    offsets, total = lay_out(lengths)
    room, other = [torch.zeros(min(bucket_bytes, total), dtype=torch.uint8) for _ in range(2)]
    cuts = buckets(total, bucket_bytes)
    begin, end = next(cuts, (0, 0))
    for offset, data in zip(offsets, _checked(meta, tensors), strict=True):
        done = 0
        while done < len(data):
            while offset + done >= end:
                yield room[: end - begin]
                room, other = other, room
                begin, end = next(cuts)
            count = min(len(data) - done, end - offset - done)
            at = offset + done - begin
            room[at : at + count] = data[done : done + count]
            done += count
    while begin < end:
        yield room[: end - begin]
        room, other = other, room
        begin, end = next(cuts, (0, 0))


def _checked(
    meta: Sequence[ParamMeta], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[torch.Tensor]:
    """Yields each tensor's bytes, after checking that it is the announced one."""
    for entry, (name, tensor) in zip(meta, tensors, strict=True):
        found = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
        if found != ParamMeta(entry.name, entry.dtype, tuple(entry.shape)):
            raise ValueError(f"{entry} was announced, but {found} was sent")
        yield bytes_of(tensor).cpu()


def _start(work: Callable[[], T]) -> Future[T]:
    """Runs the work in a daemon thread: gloo cannot be interrupted, only abandoned."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="gloo", daemon=True).start()
    return result


def _unless_failed(rpc: Future[None], work: Future[T]) -> T:
    """Returns the result of the work. Raises the error of the call if the call fails first."""
    pending = {cast("Future[object]", rpc), cast("Future[object]", work)}
    while not work.done():
        pending = wait(pending, return_when=FIRST_COMPLETED).not_done
        if rpc.done() and not work.done():
            rpc.result()
    return work.result()


WeightTransferTrainerFactory.register_engine(  # pyright: ignore[reportUnknownMemberType]
    BACKEND, GlooTrainerWeightTransferEngine
)
