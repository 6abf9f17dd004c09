"""Activating a version on the stream that uploaded it, and the
information that a server gives a hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from penstock.common.memory_file import host_id
from penstock.v1 import weights_pb2
from penstock.wire.failure import read_failure
from penstock.wire.upload import Staging
from tests.support.fakes import EOS, TENSORS
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    UpdateWeightsRequest,
    header,
    messages,
    payload,
    serve,
    shared,
    until,
)

WeightActivation = weights_pb2.WeightActivation


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    # In memory, so that another server could read it.
    async with serve(tmp_path, "weights.stage_folder=/dev/shm") as running:
        yield running


async def told(requests: list[Any], queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    for request in requests:
        yield request
    while (request := await queue.get()) is not None:
        yield request


async def test_a_staged_version_waits_until_its_stream_says_so(server: Harness) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    call = server.wire.UpdateWeights(told(messages(*header(1, staged=True)), queue))
    assert (await call.read()).state == weights_pb2.WEIGHT_STATE_READY
    assert (await call.read()).state == weights_pb2.WEIGHT_STATE_STAGED
    assert server.serving.weights.staged_versions == [1] and server.engine.version == 0
    queue.put_nowait(UpdateWeightsRequest(activate={}))
    assert (await call.read()).state == weights_pb2.WEIGHT_STATE_ACTIVE
    assert await call.read() is grpc.aio.EOF
    assert server.engine.version == 1


async def test_the_policy_of_the_activation_is_the_one_that_counts(server: Harness) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    head, data = header(1, staged=True, in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP)
    queue.put_nowait(
        UpdateWeightsRequest(activate={"in_flight": weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE})
    )
    queue.put_nowait(None)
    async for _ in server.wire.UpdateWeights(told(messages(head, data), queue)):
        pass
    assert server.engine.version == 1 and server.engine.caches_dropped == 1


async def test_a_stream_that_ends_leaves_it_staged(server: Harness) -> None:
    await server.upload(1, staged=True)
    assert server.serving.weights.staged_versions == [1]
    # A repeated upload is recognized, and this stream can activate it.
    queue: asyncio.Queue[Any] = asyncio.Queue()
    queue.put_nowait(UpdateWeightsRequest(activate={}))
    queue.put_nowait(None)
    head, _ = header(1, staged=True)
    call = server.wire.UpdateWeights(told([UpdateWeightsRequest(header=head)], queue))
    assert [answer.state async for answer in call] == [
        weights_pb2.WEIGHT_STATE_STAGED,
        weights_pb2.WEIGHT_STATE_ACTIVE,
    ]


@pytest.mark.parametrize("second", ["chunk", "header", "commit", "nothing"])
async def test_anything_else_after_staged_is_refused_and_leaves_it_staged(
    server: Harness, second: str
) -> None:
    requests = messages(*header(1, staged=True))
    extra = (
        UpdateWeightsRequest()
        if second == "nothing"
        else next(request for request in requests if request.WhichOneof("message") == second)
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in server.wire.UpdateWeights(iter([*requests, extra])):
            pass
    assert read_failure(refused.value).reason == "FIELD_INVALID"
    assert server.serving.weights.staged_versions == [1] and server.engine.version == 0


async def test_one_that_was_let_go_of_meanwhile_is_not_switched_to(server: Harness) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    call = server.wire.UpdateWeights(told(messages(*header(1, staged=True)), queue))
    await call.read()
    await call.read()
    await server.upload(2)
    queue.put_nowait(UpdateWeightsRequest(activate={}))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert read_failure(refused.value).reason == "WEIGHT_VERSION_NOT_STAGED"
    assert server.engine.version == 2


async def test_an_older_uploader_does_not_switch_any_more(server: Harness) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    call = server.wire.UpdateWeights(
        told(messages(*header(1, staged=True, trainer_epoch=5)), queue)
    )
    await call.read()
    await call.read()
    server.serving.uploads.fence(6)
    queue.put_nowait(UpdateWeightsRequest(activate={}))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert read_failure(refused.value).reason == "STALE_EPOCH"
    assert server.engine.version == 0


async def test_another_server_takes_it_from_where_it_lies(server: Harness, tmp_path: Path) -> None:
    answers = await server.upload(1, staged=True)
    memory = answers[-1].memory
    assert memory.name
    folder = tmp_path / "other"
    folder.mkdir()
    async with serve(folder) as other:
        head, _ = header(1)
        head.shared_memory.CopyFrom(memory)
        async for answer in other.wire.UpdateWeights(iter(messages(head, b""))):
            state = answer.state
        assert state == weights_pb2.WEIGHT_STATE_ACTIVE
        assert other.engine.version == 1
        _, specs = payload(1)
        assert len(other.engine.loaded[-1].tensors) == len(specs)


async def test_what_somebody_else_shares_is_not_offered(server: Harness) -> None:
    with shared(*header(1, staged=True)) as (head, _):
        answers = [a async for a in server.wire.UpdateWeights(iter(messages(head, b"")))]
    assert answers[-1].state == weights_pb2.WEIGHT_STATE_STAGED
    assert not answers[-1].HasField("memory")


async def test_the_client_s_staging_ends_as_the_server_does(server: Harness) -> None:
    data, specs = payload(1)
    head = weights_pb2.WeightHeader.FromString(header(1, staged=True)[0].SerializeToString())
    staging = Staging(server.channel, head, [memoryview(data)])
    assert (await staging.staged()).state == weights_pb2.WEIGHT_STATE_STAGED
    active = await staging.activate(weights_pb2.IN_FLIGHT_POLICY_UNSPECIFIED)
    assert active.state == weights_pb2.WEIGHT_STATE_ACTIVE and len(specs) == 2
    again = weights_pb2.WeightHeader.FromString(header(1, staged=True)[0].SerializeToString())
    again.tensors[0].xxh3 = 1
    refused = Staging(server.channel, again, [memoryview(data)])
    with pytest.raises(grpc.aio.AioRpcError):
        await refused.staged()
    left = Staging(
        server.channel,
        weights_pb2.WeightHeader.FromString(header(2, staged=True)[0].SerializeToString()),
        [memoryview(payload(2)[0])],
    )
    await left.staged()
    left.cancel()
    await until(lambda: server.serving.weights.staged_versions == [2])
    assert server.engine.version == 1


async def test_a_server_says_what_a_hub_has_to_know(server: Harness, tmp_path: Path) -> None:
    info = await server.wire.GetServerInfo(GetServerInfoRequest())
    assert info.server_id and not info.tensors and not info.draining
    assert info.host_id == host_id()
    assert list(info.eos_token_ids) == [EOS]
    full = await server.wire.GetServerInfo(GetServerInfoRequest(with_tensors=True))
    assert full.server_id == info.server_id
    found = {t.name: (tuple(t.shape), t.optional) for t in full.tensors}
    assert found == {name: (meta.shape, meta.optional) for name, meta in TENSORS.items()}
    folder = tmp_path / "other"
    folder.mkdir()
    async with serve(folder) as other:
        another = await other.wire.GetServerInfo(GetServerInfoRequest())
        assert another.server_id != info.server_id
