"""Uploads, against a server that speaks UpdateWeights."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import xxhash

from penstock.trainer.compute import ComputeThread
from penstock.trainer.errors import ServerLost, WeightsRefused
from penstock.trainer.publisher import Publisher
from penstock.v1 import weights_pb2
from penstock.wire.channel import client_options
from tests.scripted_trainer_server import Progress, ScriptedServer, refuse

KEEP = weights_pb2.IN_FLIGHT_POLICY_KEEP


@dataclass
class Weights:
    tensors: dict[str, torch.Tensor] = field(
        default_factory=lambda: {
            "a.weight": torch.randn(700, 500),
            "b.bias": torch.randn(3),
            "c.weight": torch.randn(5, 7, 11),
        }
    )

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


@dataclass
class Received:
    """What one upload brought."""

    header: Any = None
    payload: bytearray = field(default_factory=bytearray)

    async def take(self, requests: AsyncIterator[Any], context: Any) -> None:
        self.header = (await anext(requests)).header
        version = self.header.weight_version
        await context.write(Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_READY))
        async for request in requests:
            if request.WhichOneof("message") == "commit":
                digest = hashlib.sha256(self.header.SerializeToString(deterministic=True)).digest()
                assert request.commit.header_sha256 == digest
                await context.write(
                    Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_STAGED)
                )
                return
            chunk = request.chunk
            assert chunk.offset_bytes == len(self.payload)
            assert 0 < len(chunk.data) <= 1 << 20
            assert chunk.xxh3 == xxhash.xxh3_64_intdigest(chunk.data)
            self.payload += chunk.data
        raise AssertionError("no commit")

    async def map(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Takes a header with a shared source, and reads the memory as another process would."""
        await self.take(requests, context)
        source = self.header.shared_memory
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        path = Path(source.name)
        assert source.host_namespace == f"{boot_id}:{path.stat().st_dev}"
        self.payload = bytearray(path.read_bytes())

    def tensor(self, name: str) -> Any:
        spec = next(spec for spec in self.header.tensors if spec.name == name)
        data = bytes(self.payload[spec.offset_bytes : spec.offset_bytes + spec.length_bytes])
        assert len(data) == spec.length_bytes
        assert spec.xxh3 == xxhash.xxh3_64_intdigest(data)
        integers = torch.frombuffer(bytearray(data), dtype=getattr(torch, spec.dtype))
        return integers.view(tuple(spec.shape))


@contextlib.asynccontextmanager
async def publishing(server: ScriptedServer, *, shared: bool = True) -> AsyncGenerator[Publisher]:
    compute = ComputeThread()
    options = client_options(own_connection=True)
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        publisher = Publisher(channel, compute, shared_memory=shared)
        try:
            yield publisher
        finally:
            publisher.close()
            compute.close()


async def upload(publisher: Publisher, version: int) -> bool:
    return await publisher.upload(version, trainer_epoch=lambda: 17, in_flight=KEEP)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [True, False])
async def test_every_byte_arrives_in_the_servers_dtype(dtype: str, shared: bool) -> None:
    weights, received = Weights(), Received()
    async with ScriptedServer() as server, publishing(server, shared=shared) as publisher:
        server.uploads = [received.map if shared else received.take]
        await publisher.fill(weights, 4, dtype)
        assert await upload(publisher, 4)
        length = publisher.length_bytes
    header = received.header
    assert (header.weight_version, header.base_weight_version, header.trainer_epoch) == (4, 0, 17)
    assert header.activation == weights_pb2.ACTIVATION_STAGED
    assert header.in_flight == KEEP
    assert [spec.name for spec in header.tensors] == list(weights.tensors)
    for name, tensor in weights.tensors.items():
        assert torch.equal(received.tensor(name), tensor.to(getattr(torch, dtype))), name
    assert len(received.payload) == length
    if not shared:
        assert header.inline.length_bytes == length


async def test_the_payload_is_reused_for_the_next_version() -> None:
    weights, first, second = Weights(), Received(), Received()
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [first.map, second.map]
        await publisher.fill(weights, 1, "float32")
        await upload(publisher, 1)
        with torch.no_grad():
            weights.tensors["b.bias"] += 1
        await publisher.fill(weights, 2, "float32")
        await upload(publisher, 2)
    assert first.header.shared_memory.name == second.header.shared_memory.name
    assert torch.equal(second.tensor("b.bias"), weights.tensors["b.bias"])
    assert not torch.equal(first.tensor("b.bias"), weights.tensors["b.bias"])


async def test_a_server_that_cannot_see_this_memory_gets_a_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def elsewhere(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        await refuse(
            context, grpc.StatusCode.INVALID_ARGUMENT, "SOURCE_UNAVAILABLE", "another host"
        )

    received, again = Received(), Received()
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [elsewhere, received.take, again.take]
        await publisher.fill(Weights(), 1, "float32")
        assert await upload(publisher, 1)
        publisher.relabel(2)
        assert await upload(publisher, 2)
    assert "another host" in caplog.text
    assert again.header.WhichOneof("source") == "inline"
    assert bytes(received.payload) == bytes(again.payload)


async def test_an_upload_that_is_in_the_way_is_waited_out() -> None:
    async def busy(requests: AsyncIterator[Any], context: Any) -> None:
        await refuse(context, grpc.StatusCode.ABORTED, "UPLOAD_IN_PROGRESS")

    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [busy, busy, Received().map]
        await publisher.fill(Weights(), 1, "float32")
        assert await upload(publisher, 1)
        assert not server.uploads


async def test_a_version_the_server_holds_already_is_not_sent_again() -> None:
    async def stale(requests: AsyncIterator[Any], context: Any) -> None:
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "WEIGHT_VERSION_STALE")

    async with ScriptedServer() as server, publishing(server) as publisher:
        await publisher.fill(Weights(), 3, "float32")
        server.uploads = [stale]
        server.info.staged_weight_versions.append(3)
        assert await upload(publisher, 3)
        server.uploads = [stale]
        del server.info.staged_weight_versions[:]
        with pytest.raises(WeightsRefused, match="version 3: WEIGHT_VERSION_STALE"):
            await upload(publisher, 3)


async def test_refusals_say_why_and_a_lost_server_is_another_matter() -> None:
    async def wrong(requests: AsyncIterator[Any], context: Any) -> None:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "SHAPE_MISMATCH", "a.weight is odd")

    async def lost(requests: AsyncIterator[Any], context: Any) -> None:
        await refuse(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")

    async def silent(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)

    async with ScriptedServer() as server, publishing(server) as publisher:
        await publisher.fill(Weights(), 1, "float32")
        server.uploads = [wrong, lost, silent]
        with pytest.raises(WeightsRefused, match=r"SHAPE_MISMATCH: a\.weight is odd"):
            await upload(publisher, 1)
        with pytest.raises(ServerLost, match="DRAINING"):
            await upload(publisher, 1)
        with pytest.raises(WeightsRefused, match="without staging"):
            await upload(publisher, 1)


async def test_a_version_that_was_overtaken_is_not_uploaded() -> None:
    async with ScriptedServer() as server, publishing(server) as publisher:
        await publisher.fill(Weights(), 2, "float32")
        assert not await upload(publisher, 1)


async def test_a_dtype_torch_does_not_know_is_named() -> None:
    async with ScriptedServer() as server, publishing(server) as publisher:
        with pytest.raises(WeightsRefused, match="'float7'"):
            await publisher.fill(Weights(), 1, "float7")


async def test_what_is_not_finite_keeps_its_bytes() -> None:
    # Refusing it is the server's part: the payload must not quietly become something else.
    weights, received = Weights({"a": torch.tensor([np.inf, -np.inf, 1.0])}), Received()
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [received.map]
        await publisher.fill(weights, 1, "bfloat16")
        await upload(publisher, 1)
    assert torch.equal(received.tensor("a").float(), weights.tensors["a"])
