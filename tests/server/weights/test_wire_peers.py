"""A version taken from another server: whole, or while it still arrives there; refusals,
and cleanup after failures."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import xxhash

from penstock.v1 import weights_pb2
from penstock.wire.failure import Failure, read_failure
from tests.support.authorities import make_authorities
from tests.support.harness import (
    FetchWeightsRequest,
    Harness,
    header,
    messages,
    payload,
    send,
    serve,
    until,
)

FetchWeightsResponse = weights_pb2.FetchWeightsResponse
SILENT = "peers.silent_seconds=0.4"


@pytest_asyncio.fixture
async def giver(tmp_path: Path) -> AsyncGenerator[Harness]:
    (tmp_path / "giver").mkdir()
    async with serve(tmp_path / "giver") as running:
        yield running


@pytest_asyncio.fixture
async def taker(tmp_path: Path) -> AsyncGenerator[Harness]:
    (tmp_path / "taker").mkdir()
    async with serve(tmp_path / "taker", SILENT) as running:
        yield running


def from_peer(
    version: int, address: str, theirs: int, *, content: int | None = None, **fields: Any
) -> Any:
    """The header of a version whose bytes are at a peer. They are those of
    version `content`, if it is given."""
    head, _ = header(version, **fields)
    del head.tensors[:]
    head.tensors.extend(payload(version if content is None else content)[1])
    head.peer.address, head.peer.weight_version = address, theirs
    return head


async def take(taker: Harness, head: Any) -> list[Any]:
    return await send(taker, messages(head, b""))


async def refused(taker: Harness, head: Any) -> Failure:
    """The failure of a refused upload from a peer, after checking that it left nothing behind."""
    before = taker.engine.version, taker.serving.weights.staged_versions
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await take(taker, head)
    assert before == (taker.engine.version, taker.serving.weights.staged_versions)
    assert taker.serving.uploads.arriving is None
    return read_failure(caught.value)


def loaded(server: Harness) -> dict[str, bytes]:
    """The tensors of the engine's last load."""
    weights, data = server.engine.loaded[-1], server.engine.payloads[-1]
    return {t.name: data[t.offset_bytes : t.offset_bytes + t.length_bytes] for t in weights.tensors}


def tensors_of(version: int) -> dict[str, bytes]:
    data, specs = payload(version)
    return {s.name: data[s.offset_bytes : s.offset_bytes + s.length_bytes] for s in specs}


async def test_a_version_is_taken_from_a_server_that_holds_it(
    giver: Harness, taker: Harness
) -> None:
    await giver.upload(3)
    answers = await take(taker, from_peer(8, giver.address, 3, content=3))
    assert [answer.state for answer in answers] == [
        weights_pb2.WEIGHT_STATE_READY,
        weights_pb2.WEIGHT_STATE_STAGED,
        weights_pb2.WEIGHT_STATE_ACTIVE,
    ]
    assert taker.engine.version == 8 and loaded(taker) == tensors_of(3) == loaded(giver)


async def test_a_version_is_taken_from_a_server_that_has_it_staged(
    giver: Harness, taker: Harness
) -> None:
    await giver.upload(1, staged=True)
    await take(taker, from_peer(1, giver.address, 1))
    assert loaded(taker) == tensors_of(1) and giver.engine.version == 0


async def test_what_was_taken_is_handed_on(giver: Harness, taker: Harness, tmp_path: Path) -> None:
    await giver.upload(1)
    await take(taker, from_peer(1, giver.address, 1))
    (tmp_path / "third").mkdir()
    async with serve(tmp_path / "third") as third:
        await take(third, from_peer(1, taker.address, 1))
        assert loaded(third) == tensors_of(1)


@pytest.mark.parametrize("gap", [0, 4, 3 << 20])
async def test_each_side_has_its_own_layout(giver: Harness, taker: Harness, gap: int) -> None:
    await giver.upload(1)
    head = from_peer(1, giver.address, 1)
    place = gap
    for spec in reversed(head.tensors):
        spec.offset_bytes = place
        place += spec.length_bytes + gap
    await take(taker, head)
    assert loaded(taker) == tensors_of(1)


class Arriving:
    """An upload that stops after its first chunk until the test lets it continue or fail."""

    def __init__(
        self, server: Harness, version: int, chunk_bytes: int, *, backwards: bool = False
    ) -> None:
        self._requests = messages(*header(version, staged=True), chunk_bytes)
        if backwards:
            self._requests[2:-1] = reversed(self._requests[2:-1])
        self._on: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._call = server.wire.UpdateWeights(self._sent())
        self.answers = asyncio.ensure_future(self._read())

    async def _sent(self) -> AsyncIterator[Any]:
        for request in self._requests[:2]:
            yield request
        if await self._on:
            for request in self._requests[2:]:
                yield request

    async def _read(self) -> list[int]:
        return [answer.state async for answer in self._call]

    def go_on(self) -> None:
        self._on.set_result(True)

    def give_up(self) -> None:
        self._call.cancel()
        if not self._on.done():
            self._on.set_result(False)


async def arriving(
    server: Harness, version: int, chunk_bytes: int = 64, *, backwards: bool = False
) -> Arriving:
    upload = Arriving(server, version, chunk_bytes, backwards=backwards)
    await until(lambda: server.serving.uploads.arriving is not None)
    half = server.serving.uploads.arriving
    assert half is not None and await half.wait_for(chunk_bytes)
    return upload


async def test_a_version_is_handed_on_while_it_arrives(giver: Harness, taker: Harness) -> None:
    # Chunks large enough for the first tensor, of which the peer requests a piece.
    first = payload(2)[1][0].length_bytes
    upload = await arriving(giver, 2, first)
    taking = asyncio.ensure_future(take(taker, from_peer(2, giver.address, 2)))
    await until(lambda: taker.serving.uploads.arriving is not None)
    here = taker.serving.uploads.arriving
    assert here is not None and await here.wait_for(first)
    assert not taking.done() and not upload.answers.done()
    upload.go_on()
    await taking
    assert loaded(taker) == tensors_of(2)
    assert (await upload.answers)[-1] == weights_pb2.WEIGHT_STATE_STAGED


async def test_a_version_that_arrives_in_any_order_is_handed_on(
    giver: Harness, taker: Harness
) -> None:
    upload = await arriving(giver, 2, backwards=True)
    taking = asyncio.ensure_future(take(taker, from_peer(2, giver.address, 2)))
    await until(lambda: taker.serving.uploads.arriving is not None)
    # The peer has its request, and waits for the bytes that arrive last.
    await asyncio.sleep(0.1)
    upload.go_on()
    await taking
    assert loaded(taker) == tensors_of(2)


async def test_an_upload_that_ends_ends_those_that_follow_it(
    giver: Harness, taker: Harness
) -> None:
    upload = await arriving(giver, 2)
    taking = asyncio.ensure_future(refused(taker, from_peer(2, giver.address, 2)))
    await until(lambda: taker.serving.uploads.arriving is not None)
    upload.give_up()
    failure = await taking
    assert failure.reason == "SOURCE_UNAVAILABLE"
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await upload.answers
    # The same number is free on both sides.
    await giver.upload(2)
    await take(taker, from_peer(2, giver.address, 2))
    assert loaded(taker) == tensors_of(2)


async def test_a_peer_that_stops_in_between_is_given_up(giver: Harness, taker: Harness) -> None:
    upload = await arriving(giver, 2)
    failure = await refused(taker, from_peer(2, giver.address, 2))
    assert failure.reason == "SOURCE_UNAVAILABLE" and "0.4 s" in failure.message
    upload.go_on()
    assert (await upload.answers)[-1] == weights_pb2.WEIGHT_STATE_STAGED


async def test_who_takes_it_may_vanish(giver: Harness, taker: Harness) -> None:
    upload = await arriving(giver, 2)
    call = taker.wire.UpdateWeights(iter(messages(from_peer(2, giver.address, 2), b"")))
    assert (await call.read()).state == weights_pb2.WEIGHT_STATE_READY
    call.cancel()
    await until(lambda: taker.serving.uploads.arriving is None)
    upload.go_on()
    await upload.answers
    await taker.upload(2)
    assert loaded(taker) == tensors_of(2)


async def test_a_peer_without_it_is_named(giver: Harness, taker: Harness) -> None:
    await giver.upload(1)
    failure = await refused(taker, from_peer(2, giver.address, 2))
    assert failure.reason == "SOURCE_UNAVAILABLE" and failure.metadata["address"] == giver.address
    assert "WEIGHT_VERSION_NOT_STAGED" in failure.message


async def test_other_weights_under_that_number_are_seen_before_a_byte_is_sent(
    giver: Harness, taker: Harness
) -> None:
    await giver.upload(1)
    failure = await refused(taker, from_peer(1, giver.address, 1, content=2))
    assert failure.reason == "SOURCE_UNAVAILABLE" and "CHECKSUM_MISMATCH" in failure.message


async def test_nobody_there_is_told(taker: Harness) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    failure = await refused(taker, from_peer(1, address, 1))
    assert failure.reason == "SOURCE_UNAVAILABLE" and failure.metadata["address"] == address


async def test_a_peer_that_says_nothing_is_given_up(taker: Harness) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        failure = await refused(taker, from_peer(1, address, 1))
    assert failure.reason == "SOURCE_UNAVAILABLE" and "0.4 s" in failure.message


@contextlib.asynccontextmanager
async def scripted(answers: Iterable[bytes]) -> AsyncGenerator[str]:
    """A peer that answers every request with these bytes."""

    async def fetch(_: bytes, __: Any) -> AsyncIterator[bytes]:
        for answer in answers:
            yield answer

    server = grpc.aio.server()
    handlers = {"FetchWeights": grpc.unary_stream_rpc_method_handler(fetch)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("penstock.v1.RolloutService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def chunk(offset: int, data: bytes, xxh3: int | None = None) -> bytes:
    found = xxhash.xxh3_64_intdigest(data) if xxh3 is None else xxh3
    message = FetchWeightsResponse()
    message.chunk.offset_bytes, message.chunk.data, message.chunk.xxh3 = offset, data, found
    return message.SerializeToString()


def _flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


LIES: dict[str, Callable[[bytes], Sequence[bytes]]] = {
    "nothing": lambda data: [],
    "a part": lambda data: [chunk(0, data[:-1])],
    "too much": lambda data: [chunk(0, data + b"x")],
    "twice": lambda data: [chunk(0, data), chunk(0, data)],
    "a wrong checksum": lambda data: [chunk(0, data, 1)],
    "no chunk": lambda data: [b""],
    "garbage": lambda data: [b"\xff\xff"],
    "an empty chunk": lambda data: [chunk(0, b"")],
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_peer_that_sends_something_else_is_refused(taker: Harness, lie: str) -> None:
    async with scripted(LIES[lie](payload(1)[0])) as address:
        failure = await refused(taker, from_peer(1, address, 1))
    assert failure.reason == "SOURCE_UNAVAILABLE" and failure.metadata["address"] == address
    await taker.upload(1)
    assert loaded(taker) == tensors_of(1)


async def test_other_bytes_are_found_by_the_checksums_of_the_header(taker: Harness) -> None:
    async with scripted([chunk(0, _flipped(payload(1)[0]))]) as address:
        failure = await refused(taker, from_peer(1, address, 1))
    assert failure.reason == "CHECKSUM_MISMATCH" and "model.embed_tokens" in failure.message


async def test_in_any_order_is_taken(taker: Harness) -> None:
    data = payload(1)[0]
    async with scripted([chunk(100, data[100:]), chunk(0, data[:100])]) as address:
        await take(taker, from_peer(1, address, 1))
    assert loaded(taker) == tensors_of(1)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("header.peer.address", lambda head: setattr(head.peer, "address", "nowhere")),
        ("header.peer.weight_version", lambda head: setattr(head.peer, "weight_version", 0)),
        ("header.base_weight_version", lambda head: setattr(head, "base_weight_version", 1)),
    ],
)
async def test_a_header_that_cannot_be_is_refused(
    giver: Harness, taker: Harness, field: str, change: Callable[[Any], None]
) -> None:
    head = from_peer(2, giver.address, 2)
    change(head)
    failure = await refused(taker, head)
    assert failure.reason == "FIELD_INVALID" and failure.metadata["field"] == field


async def test_chunks_do_not_come_from_the_stream_as_well(giver: Harness, taker: Harness) -> None:
    await giver.upload(1)
    head = from_peer(1, giver.address, 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(taker, messages(head, payload(1)[0]))
    assert read_failure(caught.value).reason == "FIELD_INVALID"
    assert taker.engine.version == 0


# FetchWeights alone


async def fetched(server: Harness, version: int, specs: Sequence[Any]) -> bytes:
    data = b""
    call = server.wire.FetchWeights(FetchWeightsRequest(weight_version=version, tensors=specs))
    async for answer in call:
        assert answer.chunk.offset_bytes == len(data)
        assert answer.chunk.xxh3 == xxhash.xxh3_64_intdigest(answer.chunk.data)
        data += answer.chunk.data
    return data


async def test_any_client_can_fetch(giver: Harness) -> None:
    await giver.upload(1)
    data, specs = payload(1)
    assert await fetched(giver, 1, specs) == data
    last = specs[-1]
    last.offset_bytes = 0
    assert await fetched(giver, 1, [last]) == tensors_of(1)[last.name]
    assert await fetched(giver, 1, []) == b""
    last.offset_bytes = len(data)
    assert await fetched(giver, 1, [last]) == bytes(len(data)) + tensors_of(1)[last.name]


def _overlap(specs: Sequence[Any]) -> None:
    specs[1].offset_bytes = specs[0].offset_bytes + specs[0].length_bytes - 4


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("TENSOR_UNKNOWN", lambda specs: setattr(specs[0], "name", "other")),
        ("CHECKSUM_MISMATCH", lambda specs: setattr(specs[0], "length_bytes", 4)),
        ("CHECKSUM_MISMATCH", lambda specs: setattr(specs[0], "xxh3", 4)),
        ("FIELD_INVALID", _overlap),
        ("FIELD_INVALID", lambda specs: setattr(specs[0], "offset_bytes", -1)),
        ("FIELD_INVALID", lambda specs: setattr(specs[-1], "offset_bytes", 1 << 40)),
        ("FIELD_INVALID", lambda specs: setattr(specs[-1], "offset_bytes", (1 << 63) - 1)),
    ],
)
async def test_what_is_not_here_is_not_handed_out(
    giver: Harness, reason: str, change: Callable[[Sequence[Any]], None]
) -> None:
    await giver.upload(1)
    specs = payload(1)[1]
    change(specs)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetched(giver, 1, specs)
    assert read_failure(caught.value).reason == reason


@pytest.mark.parametrize("version", [0, 1, 2, -1])
async def test_a_version_that_is_not_here_is_not_handed_out(giver: Harness, version: int) -> None:
    await giver.upload(3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fetched(giver, version, payload(1)[1])
    failure = read_failure(caught.value)
    if version < 1:
        assert failure.reason == "FIELD_INVALID" and failure.metadata["field"] == "weight_version"
    else:
        assert failure.reason == "WEIGHT_VERSION_NOT_STAGED"
        assert failure.code == grpc.StatusCode.FAILED_PRECONDITION


async def test_what_is_let_go_of_meanwhile_is_still_handed_out_to_its_end(
    giver: Harness, taker: Harness
) -> None:
    await giver.upload(1)
    held = giver.serving.weights.complete(1)
    assert held is not None
    data, specs = payload(1)
    call = giver.wire.FetchWeights(FetchWeightsRequest(weight_version=1, tensors=specs))
    found = (await call.read()).chunk.data
    await giver.upload(2)
    while (answer := await call.read()) is not grpc.aio.EOF:
        found += answer.chunk.data
    assert found == data
    await until(lambda: not held.buffer._references)


async def test_a_peer_is_shown_who_asks(tmp_path: Path) -> None:
    made = make_authorities(tmp_path / "secrets")
    (tmp_path / "admin-token").write_text(made.tokens["admin"])
    (tmp_path / "agent-token").write_text(made.tokens["agent"])
    names = "giver", "stranger", "agent", "friend"
    for name in names:
        (tmp_path / name).mkdir()
    ca = f"peers.ca={made.ca}"
    settings = {
        "stranger": [ca],
        "agent": [ca, f"peers.token_file={tmp_path / 'agent-token'}"],
        "friend": [ca, f"peers.token_file={tmp_path / 'admin-token'}"],
    }
    async with contextlib.AsyncExitStack() as stack:
        opened = serve(tmp_path / "giver", *made.settings(), security=made.security("admin"))
        giver = await stack.enter_async_context(opened)
        await giver.upload(1)
        for name, given in settings.items():
            taker = await stack.enter_async_context(serve(tmp_path / name, *given))
            head = from_peer(1, giver.address, 1)
            if name == "friend":
                await take(taker, head)
                assert loaded(taker) == tensors_of(1)
            else:
                failure = await refused(taker, head)
                assert failure.reason == "SOURCE_UNAVAILABLE", name
                wanted = "TOKEN_MISSING" if name == "stranger" else "ROLE_NOT_ALLOWED"
                assert wanted in failure.message, failure
