"""Uploads to a server that implements UpdateWeights."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from penstock.common.memory_file import MemoryFile
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.core.errors import ServerLost, WeightsRefused
from penstock.trainer.exchange.stream import Exchange
from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.probe import Probe
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.trainer.weights.sent import Sent
from penstock.trainer.weights.transports import (
    CheckpointFolder,
    SharedMemory,
    Stream,
    Transport,
    VersionFolders,
)
from penstock.v1 import weights_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from penstock.wire.upload import NotStaged, chunk_pieces
from penstock.wire.upload import upload as wire_upload
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    SwitchWeights,
    hello,
    serve,
    weights_of,
)
from tests.support.scripted_trainer_server import Progress, Received, ScriptedServer, refuse

KEEP = weights_pb2.IN_FLIGHT_POLICY_KEEP
SAME = weights_pb2.TENSOR_ENCODING_SAME


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


class Connected:
    """Stands in for an `Exchange` whose server is connected and up to date."""

    in_flight = KEEP

    def __init__(self, trainer_epoch: int = 17) -> None:
        self.trainer_epoch = trainer_epoch
        self.restored = asyncio.Event()
        self.restored.set()
        self.left = asyncio.Event()

    async def answer(self, wait: Awaitable[Any]) -> Any:
        return await wait


@contextlib.asynccontextmanager
async def publishing(
    server: ScriptedServer | Harness,
    *transports: Callable[..., Transport],
    probe: Probe | None = None,
    dtype: str = "float32",
    **options: Any,
) -> AsyncGenerator[Publisher]:
    compute = ComputeThread()
    own = client_options(own_connection=True)
    async with grpc.aio.insecure_channel(server.address, options=own) as channel:
        made = [make(channel) for make in transports]
        copy, exchange = WeightCopy(compute, probe), cast("Exchange", Connected())
        copy.dtype = dtype
        publisher = Publisher(copy, [Sender(channel, copy, exchange, transports=made, **options)])
        try:
            yield publisher
        finally:
            publisher.close()
            compute.close()


async def upload(publisher: Publisher, version: int) -> Sent | None:
    (sender,) = publisher.senders
    return await sender.upload(version)


async def publish(publisher: Publisher, weights: Weights, version: int) -> Sent:
    """Fill and upload a version, and report the server's switch to the publisher."""
    await publisher.fill(weights, version)
    sent = await upload(publisher, version)
    assert sent is not None
    publisher.senders[0].switched(version)
    return sent


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", [True, False])
async def test_every_byte_arrives_in_the_servers_dtype(dtype: str, shared: bool) -> None:
    weights, received = Weights(), Received()
    async with (
        ScriptedServer() as server,
        publishing(server, SharedMemory if shared else Stream, dtype=dtype) as publisher,
    ):
        server.uploads = [received.take]
        await publisher.fill(weights, 4)
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


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=8),
    chunk=st.integers(1, 900),
    piece=st.integers(1, 100),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_checksums_of_chunks_are_those_of_the_bytes_that_travel(
    lengths: list[int], chunk: int, piece: int, dtype: str
) -> None:
    tensors = [(str(index), torch.randn(length)) for index, length in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr("penstock.trainer.weights.payload.CHUNK_BYTES", chunk)
        patch.setattr("penstock.trainer.weights.payload.PIECE_BYTES", 4 * piece)
        patch.setattr("penstock.wire.upload.CHUNK_BYTES", chunk)
        payload = Payload(tensors, dtype)
        stack.callback(payload.close)
        payload.fill(tensors, in_chunks=True)
        chunks = [b"".join(pieces) for pieces in chunk_pieces([payload.file.view])]
        assert payload.chunk_checksums == tuple(map(xxhash.xxh3_64_intdigest, chunks))
        payload.fill(tensors)
        assert payload.chunk_checksums == ()


async def test_the_payload_is_reused_for_the_next_version() -> None:
    weights, first, second = Weights(), Received(), Received()
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [first.take, second.take]
        await publisher.fill(weights, 1)
        await upload(publisher, 1)
        with torch.no_grad():
            weights.tensors["b.bias"] += 1
        await publisher.fill(weights, 2)
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
        await publisher.fill(Weights(), 1)
        assert await upload(publisher, 1)
        await publisher.relabel(2)
        assert await upload(publisher, 2)
    assert "another host" in caplog.text
    assert again.header.WhichOneof("source") == "inline"
    assert bytes(received.payload) == bytes(again.payload)


async def test_an_upload_that_is_in_the_way_is_waited_out() -> None:
    async def busy(requests: AsyncIterator[Any], context: Any) -> None:
        # Read first, as a server does. A call that ends unread can look broken to a client still writing.
        await anext(requests)
        await refuse(context, grpc.StatusCode.ABORTED, "UPLOAD_IN_PROGRESS")

    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [busy, busy, Received().take]
        await publisher.fill(Weights(), 1)
        assert await upload(publisher, 1)
        assert not server.uploads


async def test_a_version_the_server_holds_already_is_not_sent_again() -> None:
    async def stale(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "WEIGHT_VERSION_STALE")

    async with ScriptedServer() as server, publishing(server) as publisher:
        await publisher.fill(Weights(), 3)
        server.uploads = [stale]
        server.info.staged_weight_versions.append(3)
        assert await upload(publisher, 3)
        server.uploads = [stale]
        del server.info.staged_weight_versions[:]
        with pytest.raises(WeightsRefused, match="version 3: WEIGHT_VERSION_STALE"):
            await upload(publisher, 3)


async def test_refusals_say_why_and_a_lost_server_is_another_matter() -> None:
    async def wrong(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "SHAPE_MISMATCH", "a.weight is odd")

    async def lost(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        await refuse(context, grpc.StatusCode.UNAVAILABLE, "DRAINING")

    async with ScriptedServer() as server, publishing(server) as publisher:
        await publisher.fill(Weights(), 1)
        server.uploads = [wrong, lost]
        with pytest.raises(WeightsRefused, match=r"SHAPE_MISMATCH: a\.weight is odd"):
            await upload(publisher, 1)
        with pytest.raises(ServerLost, match="DRAINING"):
            await upload(publisher, 1)


async def test_an_upload_that_ends_without_a_word_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)

    monkeypatch.setattr("penstock.trainer.weights.sender.FIRST_PAUSE_SECONDS", 0.01)
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [silent, Received().take]
        assert await publish(publisher, Weights(), 1)
        await publisher.fill(Weights(), 2)
        server.uploads = [silent] * 5
        with pytest.raises(WeightsRefused, match="without staging"):
            await upload(publisher, 2)
        assert not server.uploads


async def test_a_version_that_was_overtaken_is_not_uploaded() -> None:
    async with ScriptedServer() as server, publishing(server) as publisher:
        await publisher.fill(Weights(), 2)
        assert not await upload(publisher, 1)


async def test_a_dtype_torch_does_not_know_is_named() -> None:
    async with ScriptedServer() as server, publishing(server, dtype="float7") as publisher:
        with pytest.raises(WeightsRefused, match="'float7'"):
            await publisher.fill(Weights(), 1)


async def test_what_is_not_finite_keeps_its_bytes() -> None:
    # Refusing it is up to the server. The payload must not silently change.
    weights, received = Weights({"a": torch.tensor([np.inf, -np.inf, 1.0])}), Received()
    async with ScriptedServer() as server, publishing(server, dtype="bfloat16") as publisher:
        server.uploads = [received.take]
        await publisher.fill(weights, 1)
        await upload(publisher, 1)
    assert torch.equal(received.tensor("a").float(), weights.tensors["a"])


# Differences


def changing(count: int = 20_000) -> Weights:
    return Weights({"a.weight": torch.randn(count), "b.bias": torch.randn(3)})


def change(weights: Weights, elements: int = 7) -> None:
    """Change a few elements of one tensor."""
    places = torch.randperm(len(weights.tensors["a.weight"]))[:elements]
    weights.tensors["a.weight"][places] += 1e-3


def bytes_of(weights: Weights) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in weights.tensors.items()}


def uploads(server: ScriptedServer, count: int) -> list[Received]:
    received = [Received() for _ in range(count)]
    server.uploads += [one.take for one in received]
    return received


@pytest.mark.parametrize("transport", [Stream, SharedMemory])
async def test_versions_go_as_differences_between_anchors(transport: Any) -> None:
    weights, bases = changing(), list[int]()
    held: dict[str, bytes] = {}
    async with ScriptedServer() as server:
        received = uploads(server, 6)
        async with publishing(server, transport, delta="on", anchor_every=3) as publisher:
            for version, upload in enumerate(received, 1):
                sent = await publish(publisher, weights, version)
                held = upload.tensors(held)
                assert held == bytes_of(weights)
                bases.append(upload.header.base_weight_version)
                assert sent.delta == bool(bases[-1])
                assert sent.dense_bytes == publisher.length_bytes > 80_000
                assert sent.changed_tensors == 1
                assert sent.bytes_sent == len(upload.payload)
                if sent.delta:
                    assert sent.bytes_sent < 100
                    assert sent.changed_elements_ratio == 7 / 20_003
                    assert upload.header.tensors[1].encoding == SAME
                else:
                    assert sent.bytes_sent == sent.dense_bytes
                    assert sent.changed_elements_ratio is None
                change(weights)
    assert bases == [0, 1, 2, 0, 4, 5]


@pytest.mark.parametrize(
    ("transport", "delta", "expected"),
    [
        (Stream, "auto", True),
        (Stream, "off", False),
        (SharedMemory, "auto", False),
        (SharedMemory, "on", True),
    ],
)
async def test_whether_differences_pay_is_the_transports_unless_told(
    transport: Any, delta: Any, expected: bool
) -> None:
    weights = changing()
    async with (
        ScriptedServer() as server,
        publishing(server, transport, delta=delta) as publisher,
    ):
        uploads(server, 2)
        await publish(publisher, weights, 1)
        change(weights)
        assert (await publish(publisher, weights, 2)).delta == expected
        # A second copy exists only if it is useful.
        assert len(publisher._copy.payloads) == 1 + expected


async def test_a_version_the_server_never_switched_to_is_no_base() -> None:
    weights = changing()
    async with ScriptedServer() as server, publishing(server, Stream) as publisher:
        first, second, third = uploads(server, 3)
        await publish(publisher, weights, 1)
        change(weights)
        await publisher.fill(weights, 2)
        await upload(publisher, 2)
        change(weights)
        await publish(publisher, weights, 3)
        assert second.header.base_weight_version == third.header.base_weight_version == 1
        assert third.tensors(first.tensors()) == bytes_of(weights)


async def test_a_step_that_changed_nothing_sends_nothing() -> None:
    weights = changing()
    async with ScriptedServer() as server, publishing(server, Stream) as publisher:
        first, second, third = uploads(server, 3)
        second.changed_tensor_count = 0
        await publish(publisher, weights, 1)
        await publisher.relabel(2)
        sent = await upload(publisher, 2)
        assert sent is not None
        assert (sent.bytes_sent, sent.delta, sent.changed_tensors) == (0, True, 0)
        assert second.header.inline.length_bytes == 0
        publisher.senders[0].switched(2)
        change(weights)
        await publish(publisher, weights, 3)
        assert third.header.base_weight_version == 2
        assert third.tensors(second.tensors(first.tensors())) == bytes_of(weights)


@pytest.mark.parametrize("reason", ["BASE_VERSION_MISMATCH", "CHECKSUM_MISMATCH", "DISK_FULL"])
async def test_a_server_with_another_base_gets_the_same_version_whole_at_once(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    refused = Received()

    async def mismatch(requests: AsyncIterator[Any], context: Any) -> None:
        refused.header = (await anext(requests)).header
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, "version 0 is held")

    weights = changing()
    async with ScriptedServer() as server, publishing(server, Stream) as publisher:
        first, again, third = Received(), Received(), Received()
        server.uploads = [first.take, mismatch, again.take, third.take]
        await publish(publisher, weights, 1)
        change(weights)
        # The second attempt follows without a pause.
        monkeypatch.setattr("penstock.trainer.weights.sender.FIRST_PAUSE_SECONDS", 1e6)
        sent = await publish(publisher, weights, 2)
        assert (sent.delta, sent.bytes_sent) == (False, sent.dense_bytes)
        assert (refused.header.base_weight_version, refused.header.weight_version) == (1, 2)
        assert (again.header.base_weight_version, again.header.weight_version) == (0, 2)
        assert again.tensors() == bytes_of(weights)
        change(weights)
        assert (await publish(publisher, weights, 3)).delta


async def test_a_server_that_keeps_no_base_is_not_asked_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path, "weights.hold_active=false") as harness:
        sent: list[bool] = []
        weights = Weights(
            {
                "model.embed_tokens.weight": torch.randn(300, 4),
                "model.layers.0.mlp.weight": torch.randn(8, 4),
            }
        )
        exchange = await hello(harness.wire, 17)
        async with publishing(harness, Stream) as publisher:
            for version in range(1, 6):
                await publisher.fill(weights, version)
                done = await upload(publisher, version)
                assert done is not None
                sent.append(done.delta)
                exchange.send(switch_weights=SwitchWeights(weight_version=version))
                assert not (await exchange.receive("weight_receipt")).HasField("rejection")
                publisher.senders[0].switched(version)
            assert len(publisher._copy.payloads) == 1
    assert sent == [False] * 5
    # Versions 2, 3 and 4 were first tried as differences.
    assert caplog.text.count("whole") == 4
    assert caplog.text.count("the server keeps no base for differences") == 1


async def test_a_forgotten_base_is_followed_by_a_whole_version() -> None:
    weights = changing()
    async with ScriptedServer() as server, publishing(server, Stream) as publisher:
        *_, third, fourth = uploads(server, 4)
        await publish(publisher, weights, 1)
        publisher.senders[0].forget_base()
        assert not (await publish(publisher, weights, 2)).delta
        assert (await publish(publisher, weights, 3)).delta
        # Also for a version that is already filled.
        await publisher.fill(weights, 4)
        publisher.senders[0].forget_base()
        sent = await upload(publisher, 4)
        assert sent is not None and not sent.delta
        assert third.header.base_weight_version == 2
        assert fourth.tensors() == bytes_of(weights)


async def test_without_memory_for_two_every_version_goes_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = changing()
    async with ScriptedServer() as server, publishing(server, Stream) as publisher:
        uploads(server, 3)
        await publish(publisher, weights, 1)
        (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:     70 kB\n")
        monkeypatch.setattr("penstock.trainer.weights.copy.MEMORY_INFO", tmp_path / "meminfo")
        assert [(await publish(publisher, weights, v)).delta for v in (2, 3)] == [False, False]
        assert len(publisher._copy.payloads) == 1
    assert caplog.text.count("no memory for a second copy") == 1


async def test_bytes_of_attempts_that_failed_are_counted() -> None:
    async def breaks(requests: AsyncIterator[Any], context: Any) -> None:
        header = (await anext(requests)).header
        version = header.weight_version
        await context.write(Progress(weight_version=version, state=weights_pb2.WEIGHT_STATE_READY))
        await anext(requests)
        await refuse(context, grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH")

    async with ScriptedServer() as server, publishing(server, Stream) as publisher:
        server.uploads = [breaks, Received().take]
        sent = await publish(publisher, changing(100_000), 1)
        assert sent.bytes_sent == 2 * sent.dense_bytes


# Uploads that begin before the payload is filled


class Halting(Weights):
    """Weights whose second tensor waits for the test, except on the first pass that reads the names."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self._known = False

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(self.tensors.items()):
            assert not index or not self._known or self.go_on.wait(20)
            yield name, tensor
        self._known = True


async def test_the_server_sees_what_is_filled_while_the_rest_is_still_copied() -> None:
    weights, first_tensor = Halting(), 700 * 500 * 4

    def goes_on() -> None:
        # Continue only after the server has received the whole first tensor.
        if received.progress[-1] >= first_tensor:
            weights.go_on.set()

    received = Received(on_progress=goes_on)
    async with ScriptedServer() as server, publishing(server, SharedMemory) as publisher:
        server.uploads = [received.take]
        async with asyncio.timeout(20):
            await publisher.fill(weights, 1, uploads=True)
        sent = await upload(publisher, 1)
        assert sent is not None
        assert (sent.bytes_sent, sent.delta) == (publisher.length_bytes, False)
    assert first_tensor in received.progress
    assert received.progress == sorted(received.progress)
    for name, tensor in weights.tensors.items():
        assert torch.equal(received.tensor(name), tensor)
    assert received.header.trainer_epoch == 17


@pytest.mark.parametrize("reason", ["UPLOAD_IN_PROGRESS", "FIELD_INVALID", "SOURCE_UNAVAILABLE"])
async def test_what_was_begun_and_refused_is_sent_again_when_it_is_filled(reason: str) -> None:
    async def refuses(requests: AsyncIterator[Any], context: Any) -> None:
        header = (await anext(requests)).header
        assert header.shared_memory.filling
        await refuse(context, grpc.StatusCode.ABORTED, reason)

    weights, received = Weights(), Received()
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [refuses, received.take]
        await publisher.fill(weights, 1, uploads=True)
        assert await upload(publisher, 1)
    assert received.header.WhichOneof("source") == "shared_memory"
    assert not received.header.shared_memory.filling
    assert torch.equal(received.tensor("a.weight"), weights.tensors["a.weight"])


async def test_a_server_that_was_lost_since_it_was_begun_is_sent_all_of_it() -> None:
    async def breaks(requests: AsyncIterator[Any], context: Any) -> None:
        await anext(requests)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    weights, received = Weights(), Received()
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [breaks, breaks, received.take]
        await publisher.fill(weights, 1, uploads=True)
        with pytest.raises(ServerLost):
            await upload(publisher, 1)
        assert await upload(publisher, 1)
    assert torch.equal(received.tensor("c.weight"), weights.tensors["c.weight"])


@pytest.mark.parametrize("how", ["filled again", "relabelled", "closed", "failed"])
async def test_what_was_begun_and_is_of_no_use_any_more_ends_without_a_commit(how: str) -> None:
    begun, ended = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def forgotten(requests: AsyncIterator[Any], context: Any) -> None:
        header = (await anext(requests)).header
        try:
            # The call can be cancelled while this message is written.
            begun.set()
            await context.write(
                Progress(weight_version=header.weight_version, state=weights_pb2.WEIGHT_STATE_READY)
            )
            async for _ in requests:
                raise AssertionError("nothing was to be committed")
        finally:
            ended.set_result(header.weight_version)

    class Broken(Weights):
        def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a.weight", self.tensors["a.weight"]
            raise ArithmeticError

    weights, received = Weights(), Received()
    async with ScriptedServer() as server, publishing(server) as publisher:
        server.uploads = [forgotten, received.take]
        async with asyncio.timeout(20):
            if how == "failed":
                await publisher.fill(weights, 0)
                with pytest.raises(ArithmeticError):
                    await publisher.fill(Broken(), 1, uploads=True)
            else:
                await publisher.fill(weights, 1, uploads=True)
                await begun.wait()
            if how == "filled again":
                await publisher.fill(weights, 2)
            if how == "relabelled":
                await publisher.relabel(2)
            if how == "closed":
                publisher.close()
            if how != "failed":
                assert await ended == 1
            if how in ("filled again", "relabelled"):
                assert await upload(publisher, 2)
                assert received.header.weight_version == 2


async def test_a_version_goes_through_a_real_server_while_it_is_filled(harness: Harness) -> None:
    async with publishing(harness, SharedMemory) as publisher:
        for version in (1, 2):
            tensors = {n: torch.from_numpy(t) for n, t in weights_of(version).items()}
            await publisher.fill(Weights(tensors), version, uploads=True)
            sent = await upload(publisher, version)
            assert sent is not None and sent.changed_tensors == len(tensors)
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert list(info.staged_weight_versions) == [1, 2]


# Other transports


async def test_a_checkpoint_folder_for_each_version_of_which_the_newest_stay(
    tmp_path: Path,
) -> None:
    def checkpoints(channel: Any) -> CheckpointFolder:
        return CheckpointFolder(channel, VersionFolders(compute, tmp_path / "weights", keep=2))

    compute, weights = ComputeThread(), changing()
    kept: list[list[str]] = []
    async with ScriptedServer() as server, publishing(server, checkpoints) as publisher:
        received = uploads(server, 4)
        # Left by a run that had gone further.
        (tmp_path / "weights" / "17").mkdir(parents=True)
        for version, upload in enumerate(received, 1):
            sent = await publish(publisher, weights, version)
            assert (sent.delta, sent.bytes_sent) == (False, sent.dense_bytes)
            folder = Path(upload.header.checkpoint.path)
            assert folder == tmp_path / "weights" / str(version)
            stored = load_file(folder / "model.safetensors")
            for spec in upload.header.tensors:
                assert torch.equal(stored[spec.name], weights.tensors[spec.name])
                assert spec.xxh3 == xxhash.xxh3_64_intdigest(stored[spec.name].numpy().tobytes())
                assert (spec.offset_bytes, spec.length_bytes) == (0, 0)
            kept.append(sorted(path.name for path in folder.parent.iterdir()))
            change(weights)
    compute.close()
    assert kept == [["1"], ["1", "2"], ["2", "3"], ["3", "4"]]


async def test_the_version_in_use_outlives_newer_ones(tmp_path: Path) -> None:
    compute = ComputeThread()
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        folders = CheckpointFolder(channel, VersionFolders(compute, tmp_path, keep=1))
        for version in (1, 2, 10):
            (tmp_path / str(version)).mkdir()
        folders.switched(2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "2"]
    compute.close()


async def test_memory_that_was_shared_can_be_neither_cut_nor_grown() -> None:
    file = MemoryFile(100)
    try:
        with pytest.raises(PermissionError):
            os.truncate(file.path, 50)
        with pytest.raises(PermissionError):
            os.truncate(file.path, 200)
        assert len(file.path.read_bytes()) == len(file.view) == 100
        assert file.progress_offset_bytes == 0
    finally:
        file.close()


@pytest.mark.parametrize("length", [0, 1, 64, 100])
async def test_behind_shared_memory_is_a_little_endian_word(length: int) -> None:
    file = MemoryFile(length, with_progress=True)
    try:
        place = 128 if length > 64 else 64
        assert (len(file.view), file.progress_offset_bytes) == (length, place)
        file.tell_filled(0x0102030405060708)
        assert file.path.read_bytes() == bytes([*[0] * place, 8, 7, 6, 5, 4, 3, 2, 1])
    finally:
        file.close()


async def test_requests_are_the_bytes_protobuf_writes() -> None:
    heard: list[bytes] = []

    async def listen(requests: AsyncIterator[Any], context: Any) -> None:
        async for request in requests:
            heard.append(request.SerializeToString())
            if request.WhichOneof("message") == "header":
                await context.write(Progress(state=weights_pb2.WEIGHT_STATE_READY))

    sizes: list[int] = []
    rng = np.random.default_rng(0)
    # Many small pieces share a chunk, and a large piece is split.
    pieces = [rng.bytes(size) for size in (3, 0, 127, 128, 3 << 20, 16_384, 1 << 20, 5)]
    payload = b"".join(pieces)
    header = weights_pb2.WeightHeader(weight_version=300, trainer_epoch=1 << 62)
    async with ScriptedServer() as server:
        server.uploads = [listen]
        options = client_options(own_connection=True)
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            with pytest.raises(NotStaged):
                await wire_upload(channel, header, pieces, on_sent=sizes.append)
    chunks = [
        weights_pb2.WeightChunk(offset_bytes=at, data=data, xxh3=xxhash.xxh3_64_intdigest(data))
        for at in range(0, len(payload), 2 << 20)
        for data in [payload[at : at + (2 << 20)]]
    ]
    digest = hashlib.sha256(header.SerializeToString(deterministic=True)).digest()
    assert sizes == [len(chunk.data) for chunk in chunks]
    assert heard == [
        weights_pb2.UpdateWeightsRequest(header=header).SerializeToString(),
        *(weights_pb2.UpdateWeightsRequest(chunk=c).SerializeToString() for c in chunks),
        weights_pb2.UpdateWeightsRequest(
            commit=weights_pb2.WeightCommit(header_sha256=digest)
        ).SerializeToString(),
    ]


async def test_the_probe_is_scored_with_the_very_bytes_that_travel() -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def score(tensors: Any, token_ids: Any) -> Any:
        seen.append({name: tensor.clone() for name, tensor in tensors.items()})
        return np.asarray([-0.5, -0.25], np.float32)

    weights, (first, second) = changing(), (Received(), Received())
    probe = Probe(score, tokens=3, tolerance=0.125, token_ids=(5, 6, 7, 8))
    async with (
        ScriptedServer() as server,
        publishing(server, Stream, probe=probe, dtype="bfloat16") as publisher,
    ):
        server.uploads = [first.take, second.take]
        await publisher.fill(weights, 1)
        await upload(publisher, 1)
        await publisher.relabel(2)
        await upload(publisher, 2)
    (tensors,) = seen
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensors[name], tensor.to(torch.bfloat16))
    for received in (first, second):
        probe_sent = received.header.probe
        assert codec.token_ids(probe_sent).tolist() == [5, 6, 7]
        assert codec.logprobs(probe_sent).tolist() == [-0.5, -0.25]
        assert probe_sent.tolerance == 0.125
