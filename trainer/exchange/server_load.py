"""Samples the load of the servers' engines at a fixed interval, with GetServerInfo.

Nothing waits for a sample, and one without a timely answer is skipped. A step gets the samples taken during
its own time; a short step may have none. Each sample is of one server, so means over several servers are
means per server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from penstock.trainer.core.figures import SUM, figure, weighted
from penstock.v1 import rollout_service_pb2
from penstock.wire import methods

TIMEOUT_SECONDS = 5.0
PER_SAMPLE = weighted("load_samples")


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """The mean load of a server during one step; None without samples."""

    load_samples: int = figure(0, SUM, "samples", "Number of load samples from all servers.")
    engine_idle_ratio: float | None = figure(
        None, PER_SAMPLE, "share", "Share of samples in which the engine had no running turn."
    )
    engine_turns_running: float | None = figure(
        None, PER_SAMPLE, "turns", "Turns that the engine was sampling."
    )
    engine_turns_waiting: float | None = figure(
        None, PER_SAMPLE, "turns", "Turns that waited for a slot in the engine."
    )
    engine_kv_cache_usage: float | None = figure(
        None, PER_SAMPLE, "share", "Share of the engine's key-value cache in use."
    )
    groups_buffered: float | None = figure(
        None, PER_SAMPLE, "groups", "Finished groups waiting at the server."
    )


@dataclass(eq=False)
class LoadMeter:
    channels: Sequence[grpc.aio.Channel]
    every_seconds: float
    """Interval between samples; zero takes none."""
    _samples: list[tuple[float, rollout_service_pb2.ServerLoad]] = field(default_factory=list[Any])
    """Each with its unix time."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sample the servers in this context."""
        channels = self.channels if self.every_seconds else ()
        tasks = [asyncio.create_task(self._run(channel)) for channel in channels]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take(self, start: float, end: float) -> LoadFigures:
        """Return the load from `start` to `end`, in unix seconds; discard samples before `end`."""
        own = [load for time, load in self._samples if start <= time < end]
        self._samples = [sample for sample in self._samples if sample[0] >= end]
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
        call = methods.unary(channel, rollout_service_pb2.GetServerInfoResponse)
        request = rollout_service_pb2.GetServerInfoRequest()
        while True:
            await asyncio.sleep(self.every_seconds)
            try:
                info = await call(request, timeout=TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError:
                continue
            self._samples.append((time.time(), info.load))


def _mean(values: list[float] | list[int] | list[bool]) -> float:
    return float(np.mean(values))
