"""One copy of the weights for several servers, each of which gets a delta or a whole version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch

from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.exchange.stream import Exchange
from penstock.trainer.state.checkpoint import replace_folder
from penstock.trainer.weights.copy import WeightCopy, difference
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.trainer.weights.sent import Sent
from penstock.trainer.weights.transports import (
    CheckpointFolder,
    SharedMemory,
    Stream,
    VersionFolders,
)
from penstock.wire.channel import client_options
from tests.support.scripted_trainer_server import ScriptedServer
from tests.trainer.weights.test_publisher import (
    Connected,
    Weights,
    bytes_of,
    change,
    changing,
    uploads,
)


@contextlib.asynccontextmanager
async def publishing_to(
    *servers: ScriptedServer, transport: Any = Stream, **options: Any
) -> AsyncGenerator[Publisher]:
    compute = ComputeThread()
    async with contextlib.AsyncExitStack() as stack:
        copy, senders = WeightCopy(compute), list[Sender]()
        copy.dtype = "float32"
        for server in servers:
            own = client_options(own_connection=True)
            channel = grpc.aio.insecure_channel(server.address, options=own)
            await stack.enter_async_context(channel)
            exchange = cast("Exchange", Connected())
            made = [transport(channel)]
            senders.append(Sender(channel, copy, exchange, transports=made, **options))
        publisher = Publisher(copy, senders)
        try:
            yield publisher
        finally:
            publisher.close()
            compute.close()


async def upload_to_all(publisher: Publisher, version: int) -> list[Sent]:
    sent = await asyncio.gather(*(sender.upload(version) for sender in publisher.senders))
    return [one for one in sent if one is not None]


async def test_a_version_is_packed_once_and_each_server_is_sent_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, made = changing(), list[int]()

    def counting(payload: Any, version: int, base: Any) -> Any:
        made.append(version)
        return difference(payload, version, base)

    monkeypatch.setattr("penstock.trainer.weights.copy.difference", counting)
    async with ScriptedServer() as first, ScriptedServer() as second:
        received = [uploads(server, 4) for server in (first, second)]
        async with publishing_to(first, second) as publisher:
            deltas: list[list[bool]] = []
            for version in range(1, 5):
                await publisher.fill(weights, version)
                if version == 3:
                    # This server was restarted, so it lost its base. The trainer still has it for
                    # the other server.
                    publisher.senders[1].forget_base()
                deltas.append([sent.delta for sent in await upload_to_all(publisher, version)])
                for sender in publisher.senders:
                    sender.switched(version)
                last = bytes_of(weights)
                change(weights)
            assert len(publisher._copy.payloads) == 2
        assert deltas == [[False, False], [True, True], [True, False], [True, True]]
        assert made == [2, 3, 4]
        for own in received:
            held: dict[str, bytes] = {}
            for one in own:
                held = one.tensors(held)
            assert held == last


async def test_a_server_that_has_switched_first_changes_no_base_of_the_other() -> None:
    weights = changing()
    async with ScriptedServer() as first, ScriptedServer() as second:
        received = [uploads(server, 3) for server in (first, second)]
        async with publishing_to(first, second) as publisher:
            await publisher.fill(weights, 1)
            await upload_to_all(publisher, 1)
            publisher.senders[0].switched(1)
            # The second server is lost before it answers, and gets the version again.
            publisher.senders[1].forget_base()
            again = await publisher.senders[1].upload(1)
            assert again is not None and not again.delta
            publisher.senders[1].switched(1)
            change(weights)
            await publisher.fill(weights, 2)
            assert [sent.delta for sent in await upload_to_all(publisher, 2)] == [True, True]
        last = (received[0][1], received[1][2])
        assert [one.header.base_weight_version for one in last] == [1, 1]
        assert received[1][2].tensors(received[1][1].tensors()) == bytes_of(weights)


async def test_servers_on_this_host_read_and_follow_the_same_memory() -> None:
    weights = Weights()
    async with ScriptedServer() as first, ScriptedServer() as second:
        received = [uploads(server, 2) for server in (first, second)]
        async with publishing_to(first, second, transport=SharedMemory) as publisher:
            await publisher.fill(weights, 1)
            await upload_to_all(publisher, 1)
            with torch.no_grad():
                weights.tensors["b.bias"] += 1
            await publisher.fill(weights, 2, uploads=True)
            assert len(await upload_to_all(publisher, 2)) == 2
    names = {one.header.shared_memory.name for own in received for one in own}
    assert len(names) == 1
    for own in received:
        assert torch.equal(own[1].tensor("b.bias"), weights.tensors["b.bias"])


async def test_a_checkpoint_folder_is_written_once_for_all_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def counting(final: Path, write: Callable[[Path], None]) -> None:
        written.append(final.name)
        replace_folder(final, write)

    monkeypatch.setattr("penstock.trainer.weights.transports.replace_folder", counting)
    compute = ComputeThread()
    folders = VersionFolders(compute, tmp_path, keep=1)
    async with ScriptedServer() as first, ScriptedServer() as second:
        received = [uploads(server, 2) for server in (first, second)]
        async with publishing_to(
            first, second, transport=lambda channel: CheckpointFolder(channel, folders)
        ) as publisher:
            for version in (1, 2):
                await publisher.fill(changing(), version)
                await upload_to_all(publisher, version)
                for sender in publisher.senders:
                    sender.switched(version)
    compute.close()
    assert written == ["1", "2"] and [path.name for path in tmp_path.iterdir()] == ["2"]
    paths = {one.header.checkpoint.path for own in received for one in own}
    assert paths == {str(tmp_path / "1"), str(tmp_path / "2")}
