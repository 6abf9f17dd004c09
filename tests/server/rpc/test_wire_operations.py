"""Operator-facing features: reflection, health, ports, drain and server info."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from penstock.server.config.settings import AddressInUse
from penstock.server.lifecycle import bind
from penstock.server.rpc.boundary import SERVICES
from penstock.v1 import trajectory_pb2
from penstock.wire.failure import read_failure
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    LeaseTasksRequest,
    hello,
    sampling,
    serve,
)

OURS = {service.full_name for service in SERVICES}
BUF = str(Path(sys.executable).parent / "buf")


async def buf_curl(harness: Harness, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_everything(harness: Harness, version: str) -> None:
    messages: Any = reflection_pb2
    ask = harness.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=messages.ServerReflectionRequest.SerializeToString,
        response_deserializer=messages.ServerReflectionResponse.FromString,
    )
    requests = [messages.ServerReflectionRequest(list_services="")]
    requests += [
        messages.ServerReflectionRequest(file_containing_symbol=symbol)
        for symbol in (
            *OURS,
            f"grpc.reflection.{version}.ServerReflection",
            "google.rpc.ErrorInfo",
            "grpc.health.v1.Health",
        )
    ]
    answers = [answer async for answer in ask(iter(requests))]
    listed = {service.name for service in answers[0].list_services_response.service}
    assert listed >= OURS | {"grpc.health.v1.Health"}
    for answer in answers[1:]:
        assert answer.WhichOneof("message_response") == "file_descriptor_response", answer


async def test_buf_curl_calls_through_reflection(harness: Harness) -> None:
    url = f"http://{harness.address}"
    listed = await buf_curl(harness, "--list-methods", url)
    for service in SERVICES:
        for method in service.methods:
            assert f"{service.full_name}/{method.name}" in listed
    answer = await buf_curl(harness, "-d", "{}", f"{url}/penstock.v1.RolloutService/GetServerInfo")
    assert json.loads(answer)["model"] == "fake"
    request = {
        "trajectoryId": "t",
        "tokens": {"tokenIds": [1, 2, 3]},
        "samplingParams": {"maxTokens": 5, "ignoreEos": True},
    }
    answer = await buf_curl(
        harness, "-d", json.dumps(request), f"{url}/penstock.v1.RolloutService/Generate"
    )
    events = [json.loads(event) for event in answer.replace("}\n{", "}\0{").split("\0")]
    tokens = [token for e in events if "segment" in e for token in e["segment"]["tokenIds"]]
    assert tokens == expected_tokens([1, 2, 3], [0] * 5)[0]


async def health(harness: Harness, service: str) -> int:
    check = harness.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return int((await check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_tells_each_service_and_follows_the_weights(harness: Harness) -> None:
    serving, not_serving = 1, 2
    for service in ("", *OURS):
        assert await health(harness, service) == serving
    harness.engine.fail_loads = 1
    with pytest.raises(grpc.aio.AioRpcError):
        await harness.upload(1)
    for service in ("", *OURS):
        assert await health(harness, service) == not_serving
    await harness.upload(1)
    assert await health(harness, "penstock.v1.RolloutService") == serving


async def test_a_port_in_use_fails_loudly(harness: Harness) -> None:
    with pytest.raises(AddressInUse, match=str(harness.port)):
        bind(harness.address, 10)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(AddressInUse):
            bind(f"127.0.0.1:{other.getsockname()[1]}", 10)


async def test_a_stop_finishes_turns_and_refuses_new_ones(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.01) as running:
        exchange = await hello(running.wire)
        leases = running.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=1))
        turn = asyncio.ensure_future(running.generate("t", sampling_params=sampling(60)))
        await running.sampled("t")
        stopping = asyncio.ensure_future(running.life.stop())
        await asyncio.sleep(0.1)
        draining = (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.generate("u")
        found = read_failure(caught.value)
        assert (found.code, found.reason) == draining
        assert await health(running, "") == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await leases.read()
        assert read_failure(caught.value).reason == "DRAINING"
        assert (await turn).tokens == expected_tokens([1, 2, 3], [0] * 60)[0]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exchange.call.read()
        assert read_failure(caught.value).reason == "DRAINING"
        await stopping


async def test_a_stop_aborts_what_does_not_finish_in_time(tmp_path: Path) -> None:
    async with serve(tmp_path, "drain_seconds=0.2", step_seconds=0.05) as running:
        turn = asyncio.ensure_future(running.generate("t", sampling_params=sampling(400)))
        await running.sampled("t")
        async with asyncio.timeout(20):
            await running.life.stop()
        finished = (await turn).finished
        assert finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED


async def test_server_info_tells_limits_and_load(slow: Harness) -> None:
    turn = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(60)))
    await slow.sampled("t")
    info = await slow.wire.GetServerInfo(GetServerInfoRequest())
    assert info.max_context_length == 512
    assert info.vocab_size == 300
    assert info.weight_dtype == "float32"
    assert info.load.running_turn_count == 1
    assert info.load.open_trajectory_count == 1
    assert len(info.replicas) == 1
    assert info.server_version
    await turn
