"""What the trainer says while it waits: what its servers report."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from google.protobuf import duration_pb2

from penstock.trainer.exchange import waiting
from penstock.wire.messages import Wait
from tests.support.scripted_trainer_server import ScriptedServer

pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.02)
    caplog.set_level(logging.INFO)


async def said(caplog: pytest.LogCaptureFixture, words: str, times: int = 1) -> None:
    async with asyncio.timeout(20):
        while sum(words in record.getMessage() for record in caplog.records) < times:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("cause", "level"), [("NO_WORKER", logging.WARNING), ("SAMPLING", logging.INFO)]
)
async def test_a_long_wait_is_explained_again_and_again(
    cause: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedServer() as server, grpc.aio.insecure_channel(server.address) as channel:
        wait = Wait(
            cause=cause, message="why", advice="how", duration=duration_pb2.Duration(seconds=40)
        )
        server.info.waits.append(wait)
        async with waiting.saying("the groups of step 3", [(server.address, channel)]):
            await said(caplog, "waiting for the groups of step 3", times=2)
        expected = f"; {server.address}: {cause} for 40 s: why; how"
        assert caplog.records[0].getMessage().endswith(expected)
        assert {record.levelno for record in caplog.records} == {level}
        # Nothing more once it is over.
        count = len(caplog.records)
        await asyncio.sleep(0.1)
        assert len(caplog.records) == count


async def test_a_server_that_is_gone_is_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedServer() as server:
        address = server.address
    async with (
        grpc.aio.insecure_channel(address) as channel,
        waiting.saying("the groups of step 3", [(address, channel)]),
    ):
        await said(caplog, f"no answer from the server at {address}: connection refused")


async def test_a_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with waiting.saying("the groups of step 3", []):
        pass
    await asyncio.sleep(0.05)
    assert not caplog.records
