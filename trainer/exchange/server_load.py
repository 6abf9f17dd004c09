"""What the servers' engines are busy with, sampled: whether one idles is known to its server alone.

A sample is taken every so many seconds while the run goes on, of what GetServerInfo says at that
moment. It measures, and nothing waits for it: a sample that the server does not answer in time is left
out. A step gets the samples of its own time; a short one may have none. Each sample is of one server: means
over several are means of a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from penstock.trainer.core.figures import SUM, figure, weighted
from penstock.v1 import rollout_service_pb2
from penstock.wire import codec

GET_SERVER_INFO = "/penstock.v1.RolloutService/GetServerInfo"
TIMEOUT_SECONDS = 5.0
PER_SAMPLE = weighted("load_samples")


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The load of a server over one step; None without a sample."""

    load_samples: int = figure(0, SUM, "samples", "How often a server was asked for its load.")
    engine_idle_ratio: float | None = figure(
        None, PER_SAMPLE, "share", "Samples in which the engine had no turn to sample."
    )
    engine_turns_running: float | None = figure(
        None, PER_SAMPLE, "turns", "Turns the engine was sampling."
    )
    engine_turns_waiting: float | None = figure(
        None, PER_SAMPLE, "turns", "Turns that waited for a place in the engine."
    )
    engine_kv_cache_usage: float | None = figure(
        None, PER_SAMPLE, "share", "Part of the engine's cache that was taken."
    )
    groups_buffered: float | None = figure(
        None, PER_SAMPLE, "groups", "Finished groups that waited at the server."
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    load: rollout_service_pb2.ServerLoad


class LoadMeter:
    """Samples servers."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], every_seconds: float) -> None:
        """Zero seconds take no sample."""
        self._channels = channels
        self._every = every_seconds
        self._samples: list[_Sample] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Samples meanwhile."""
        channels = self._channels if self._every else ()
        tasks = [asyncio.create_task(self._run(channel)) for channel in channels]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, start: float, end: float) -> LoadFigures:
        """What was sampled in this time, in unix seconds; nothing before its end is kept."""
        own = [s.load for s in self._samples if start <= s.time < end]
        self._samples = [s for s in self._samples if s.time >= end]
        if not own:
            return LoadFigures()
        return LoadFigures(
            load_samples=len(own),
            engine_idle_ratio=_mean([not load.running_turn_count for load in own]),
            engine_turns_running=_mean([load.running_turn_count for load in own]),
            engine_turns_waiting=_mean([load.waiting_turn_count for load in own]),
            engine_kv_cache_usage=_mean([load.kv_cache_usage for load in own]),
            groups_buffered=_mean([load.buffered_group_count for load in own]),
        )

    async def _run(self, channel: grpc.aio.Channel) -> None:
        call: grpc.aio.UnaryUnaryMultiCallable[
            rollout_service_pb2.GetServerInfoRequest, rollout_service_pb2.GetServerInfoResponse
        ] = channel.unary_unary(
            GET_SERVER_INFO,
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(rollout_service_pb2.GetServerInfoResponse),
        )
        request = codec.twin(rollout_service_pb2.GetServerInfoRequest)()
        while True:
            await asyncio.sleep(self._every)
            try:
                info = await call(request, timeout=TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError:
                continue
            self._samples.append(_Sample(time.time(), info.load))


def _mean(values: list[float] | list[int] | list[bool]) -> float:
    return float(np.mean(values))
