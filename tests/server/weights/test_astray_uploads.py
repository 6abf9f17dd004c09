"""Uploads that are no longer answered: the server reports that it is working, and the
trainer gives up on silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from penstock.server.core.aio import said_again
from penstock.trainer.core.errors import ServerLost
from penstock.trainer.weights.transports import Stream
from penstock.v1 import weights_pb2
from penstock.wire.failure import read_failure
from penstock.wire.upload import Staging, upload
from tests.support.harness import Harness, header, messages, serve
from tests.support.scripted_trainer_server import Progress, ScriptedServer
from tests.trainer.weights.test_publisher import changing, publish, publishing

READY = weights_pb2.WEIGHT_STATE_READY
STAGED = weights_pb2.WEIGHT_STATE_STAGED
ACTIVE = weights_pb2.WEIGHT_STATE_ACTIVE


def announced(version: int, **fields: Any) -> tuple[weights_pb2.WeightHeader, bytes]:
    head, data = header(version, **fields)
    return weights_pb2.WeightHeader.FromString(head.SerializeToString()), data


def answering(*states: int, pause: float) -> Callable[[AsyncIterator[Any], Any], Awaitable[None]]:
    """An upload that is answered with these states, each after a pause, and then with nothing."""

    async def take(requests: AsyncIterator[Any], context: Any) -> None:
        version = (await anext(requests)).header.weight_version
        for state in states:
            await asyncio.sleep(pause)
            await context.write(Progress(weight_version=version, state=state))
        if STAGED not in states:
            await asyncio.Event().wait()

    return take


@pytest.mark.parametrize("states", [(), (READY,), (READY, READY)])
async def test_an_upload_that_hears_nothing_ends_as_one_whose_server_is_away(
    states: tuple[int, ...],
) -> None:
    async with ScriptedServer() as server, grpc.aio.insecure_channel(server.address) as channel:
        server.uploads = [answering(*states, pause=0.1)]
        began = time.monotonic()
        head, data = announced(1)
        with pytest.raises(grpc.aio.AioRpcError, match="sent no answer for version 1") as caught:
            await upload(channel, head, [data], silent_seconds=0.5)
        assert read_failure(caught.value).is_unanswered
        assert time.monotonic() - began >= 0.5


async def test_one_that_is_told_again_and_again_goes_on() -> None:
    async with ScriptedServer() as server, grpc.aio.insecure_channel(server.address) as channel:
        server.uploads = [answering(*[READY] * 5, *[STAGED] * 5, pause=0.3)]
        head, data = announced(1)
        answer = await upload(channel, head, [data], silent_seconds=1.0)
        assert answer.state == STAGED


async def test_a_loop_that_stood_still_takes_what_has_come_meanwhile() -> None:
    async with ScriptedServer() as server, grpc.aio.insecure_channel(server.address) as channel:
        server.uploads = [answering(READY, STAGED, pause=0.2)]
        head, data = announced(1)
        uploading = asyncio.create_task(upload(channel, head, [data], silent_seconds=0.6))
        await asyncio.sleep(0.1)
        time.sleep(1.0)  # noqa: ASYNC251
        assert (await uploading).state == STAGED


async def test_room_for_a_payload_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    head, data = announced(1)
    monkeypatch.setattr("penstock.wire.upload.ROOM_BYTES_PER_SECOND", len(data) / 20)
    async with ScriptedServer() as server, grpc.aio.insecure_channel(server.address) as channel:
        server.uploads = [answering(READY, STAGED, pause=0.2)]
        # The first answer may take another 20 s; later ones may not.
        with pytest.raises(grpc.aio.AioRpcError, match="within 0 s"):
            await upload(channel, head, [data], silent_seconds=0.1)
        assert not server.uploads


async def test_the_trainer_takes_the_server_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert upload.__kwdefaults__
    monkeypatch.setitem(upload.__kwdefaults__, "silent_seconds", 0.3)
    async with ScriptedServer() as server, publishing(server, Stream) as publisher:
        server.uploads = [answering(READY, pause=0.0)]
        with pytest.raises(ServerLost, match="sent no answer for version 1"):
            await publish(publisher, changing(), 1)


# The server's side


async def test_the_last_answer_is_said_again_until_the_end() -> None:
    heard: list[str] = []

    async def hear(word: str) -> None:
        heard.append(word)

    async with said_again(hear, 0.05) as say:
        await asyncio.sleep(0.2)
        assert heard == []
        await say("a")
        await asyncio.sleep(0.2)
        await say("b")
        assert heard.count("a") > 1 and heard.count("b") == 1
        await asyncio.sleep(0.2)
    count = len(heard)
    assert heard.count("b") > 1 and heard == sorted(heard)
    await asyncio.sleep(0.2)
    assert len(heard) == count


async def test_an_answer_is_never_cut_off_nor_begun_within_another() -> None:
    writing = 0

    async def write(word: str) -> None:
        nonlocal writing
        assert not writing
        writing += 1
        await asyncio.sleep(0.12)
        writing -= 1

    async with said_again(write, 0.05) as say:
        await say("a")
        await asyncio.sleep(0.1)
        assert writing
        await say("b")
        await asyncio.sleep(0.1)
        assert writing
    assert not writing


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.weights.upload.service.SAY_AGAIN_SECONDS", 0.05)


async def answers(harness: Harness, requests: list[Any], pause: float) -> list[int]:
    async def slowly() -> AsyncIterator[Any]:
        for request in requests:
            yield request
            await asyncio.sleep(pause)

    return [answer.state async for answer in harness.wire.UpdateWeights(slowly())]


async def test_a_server_says_that_it_still_receives(often: None, tmp_path: Any) -> None:
    async with serve(tmp_path) as harness:
        states = await answers(harness, messages(*header(1)), pause=0.2)
        assert states.count(READY) > 2 and set(states) == {READY, STAGED, ACTIVE}
        assert states == sorted(states)
        assert harness.serving.switch.active_version == 1


async def test_a_server_says_that_it_still_switches(often: None, tmp_path: Any) -> None:
    async with serve(tmp_path) as harness:
        load = harness.engine.load

        async def slowly(weights: Any) -> None:
            await asyncio.sleep(0.5)
            await load(weights)

        harness.engine.load = slowly  # type: ignore[method-assign]
        states = await answers(harness, messages(*header(1)), pause=0.0)
        assert states.count(STAGED) > 2 and states[-1] == ACTIVE


async def test_staged_is_said_again_while_its_switch_is_waited_for(
    often: None, tmp_path: Any
) -> None:
    async with serve(tmp_path) as harness:
        head, data = announced(1, staged=True)
        staging = Staging(harness.channel, head, [data])
        assert await staging.ready()
        assert (await staging.staged()).state == STAGED
        await asyncio.sleep(0.3)
        assert (await staging.activate(weights_pb2.IN_FLIGHT_POLICY_KEEP)).state == ACTIVE
