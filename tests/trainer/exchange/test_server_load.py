"""The server's load, sampled during the steps of a run."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from penstock.trainer.exchange.server_load import LoadFigures, LoadMeter
from penstock.wire.messages import ServerLoad
from tests.support.scripted_trainer_server import ScriptedServer, unanswering


async def taken(meter: LoadMeter, start: float) -> LoadFigures:
    """The first samples that arrive."""
    async with asyncio.timeout(30):
        while not (figures := meter.take(start, time.time())).load_samples:
            await asyncio.sleep(0.005)
    return figures


async def test_a_step_has_the_samples_of_its_own_time() -> None:
    async with ScriptedServer() as server, grpc.aio.insecure_channel(server.address) as channel:
        meter = LoadMeter([channel], 0.01)
        begun = time.time()
        async with meter.running():
            idle = await taken(meter, begun)
            load = ServerLoad(
                running_turn_count=3,
                waiting_turn_count=2,
                kv_cache_usage=0.5,
                buffered_group_count=7,
            )
            server.info.load.CopyFrom(load)
            # A request sent before the change may still be answered.
            await taken(meter, begun)
            busy = await taken(meter, begun)
        assert (idle.engine_idle_ratio, idle.engine_turns_running) == (1.0, 0.0)
        assert (busy.engine_idle_ratio, busy.engine_turns_running) == (0.0, 3.0)
        assert (busy.engine_turns_waiting, busy.groups_buffered) == (2.0, 7.0)
        assert busy.engine_kv_cache_usage == pytest.approx(0.5)
        # Samples outside any step, and those already taken, are gone.
        meter.take(time.time(), time.time())
        assert meter.take(begun, time.time()) == LoadFigures()


@pytest.mark.parametrize("every", [0.0, 0.005])
async def test_a_server_that_does_not_answer_is_no_sample(every: float) -> None:
    async with unanswering() as (address, _), grpc.aio.insecure_channel(address) as channel:
        meter = LoadMeter([channel], every)
        async with meter.running():
            await asyncio.sleep(0.05)
        assert meter.take(0.0, time.time()) == LoadFigures()
