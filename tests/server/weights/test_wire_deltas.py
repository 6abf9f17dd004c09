"""Deltas over the wire: bitwise identical to the dense upload, or refused with nothing changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.server.config import settings as config
from penstock.v1 import weights_pb2
from penstock.wire.failure import read_failure
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    UpdateWeightsRequest,
    WeightHeader,
    delta,
    header,
    hello,
    messages,
    payload,
    send,
    serve,
    shared,
    weights_of,
)
from tests.support.weight_checks import MODEL_BYTES, held_bytes, no_room_for, refused, state_of

ACTIVE = weights_pb2.WEIGHT_STATE_ACTIVE
SPARSE = weights_pb2.TENSOR_ENCODING_SPARSE
SAME = weights_pb2.TENSOR_ENCODING_SAME


async def base_of(harness: Harness) -> int:
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    return info.delta_base_weight_version


async def test_a_chain_of_deltas_is_bitwise_the_dense_uploads(harness: Harness) -> None:
    assert await base_of(harness) == 0
    await harness.upload(1)
    assert await base_of(harness) == 1
    for version in range(2, 12):
        head, data = delta(version, version - 1, raw=version % 4 == 0)
        assert len(data) < MODEL_BYTES or version % 4 == 0
        responses = await send(harness, messages(head, data))
        assert responses[-1].state == ACTIVE
        assert responses[-1].changed_tensor_count == 2
        assert await base_of(harness) == version
        assert held_bytes(harness) == MODEL_BYTES
    assert harness.engine.payloads == [payload(version)[0] for version in range(1, 12)]
    assert [w.tensors for w in harness.engine.loaded] == [harness.engine.loaded[0].tensors] * 11


async def test_a_tensor_that_stays_takes_no_bytes(harness: Harness) -> None:
    await harness.upload(1)
    new = weights_of(1)
    new["model.layers.0.mlp.weight"] = weights_of(2)["model.layers.0.mlp.weight"]
    head, data = delta(2, 1, new)
    assert [spec.encoding for spec in head.tensors] == [SAME, SPARSE]
    responses = await send(harness, messages(head, data))
    assert responses[-1].changed_tensor_count == 1
    assert harness.engine.payloads[-1] == b"".join(tensor.tobytes() for tensor in new.values())


async def test_a_delta_may_come_through_shared_memory(harness: Harness) -> None:
    head, data = header(1)
    with shared(head, data) as (head, path):
        assert (await send(harness, messages(head, b"")))[-1].state == ACTIVE
        # The server has its own copy, so the uploader may overwrite the memory.
        path.write_bytes(b"\xff" * len(data))
    for version in (2, 3):
        with shared(*delta(version, version - 1)) as (head, path):
            assert (await send(harness, messages(head, b"")))[-1].state == ACTIVE
        assert harness.engine.payloads[-1] == payload(version)[0]
        assert held_bytes(harness) == MODEL_BYTES


async def test_an_update_that_changes_nothing_is_an_alarm(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    counted: list[int] = []
    harness.serving.metrics._unchanged.add = counted.append  # type: ignore[method-assign]
    await harness.upload(1)
    assert counted == []
    with caplog.at_level(logging.WARNING, "penstock.server"):
        assert "no tensor" not in caplog.text
        head, data = delta(2, 1, weights_of(1))
        assert data == b""
        responses = await send(harness, messages(head, data))
    assert [r.changed_tensor_count for r in responses] == [0, 0, 0]
    assert "version 2 changes no tensor" in caplog.text
    assert counted == [1]
    assert (await harness.generate("t")).versions == [2] * 16


Change = Callable[[Any], object]


def clear_coding(head: Any) -> None:
    head.tensors[1].ClearField("sparse")


def make_same(head: Any) -> None:
    head.tensors[1].encoding = SAME
    head.tensors[1].length_bytes = 0
    head.tensors[1].ClearField("sparse")


FIELDS: dict[str, Change] = {
    "no coding": clear_coding,
    "a negative count": lambda h: setattr(h.tensors[1].sparse, "changed_element_count", -1),
    "too many": lambda h: setattr(h.tensors[1].sparse, "changed_element_count", 33),
    "another count": lambda h: setattr(h.tensors[1].sparse, "changed_element_count", 3),
    "unknown positions": lambda h: setattr(h.tensors[1].sparse, "index_coding", 9),
    "unset positions": lambda h: setattr(h.tensors[1].sparse, "index_coding", 0),
    "positions outside": lambda h: setattr(h.tensors[1].sparse, "index_length_bytes", 1 << 40),
    "unknown compression": lambda h: setattr(h.tensors[1].sparse, "compression", 7),
    "not zstandard": lambda h: setattr(h.tensors[1].sparse, "compression", 1),
    "cut short": lambda h: setattr(h.tensors[1], "length_bytes", h.tensors[1].length_bytes - 1),
    "longer than any": lambda h: setattr(h.tensors[1], "length_bytes", 1 << 40),
    "a negative length": lambda h: setattr(h.tensors[1], "length_bytes", -1),
    "outside": lambda h: setattr(h.tensors[1], "offset_bytes", h.tensors[1].offset_bytes + 1),
    "an unknown encoding": lambda h: setattr(h.tensors[1], "encoding", 17),
    "same with bytes": lambda h: setattr(h.tensors[1], "encoding", SAME),
}
REASONS: dict[str, tuple[Change, str]] = {
    "a missing tensor": (lambda h: h.tensors.pop(1), "TENSOR_MISSING"),
    "another hash": (lambda h: setattr(h.tensors[1], "xxh3", 1), "CHECKSUM_MISMATCH"),
    "another base tensor": (make_same, "BASE_VERSION_MISMATCH"),
    "a tensor the base does not hold": (
        lambda h: h.tensors.add(
            name="lm_head.weight", shape=[300, 4], dtype="float32", encoding=SAME
        ),
        "BASE_VERSION_MISMATCH",
    ),
    "no base at all": (lambda h: setattr(h, "base_weight_version", 0), "FIELD_INVALID"),
    "an older base": (lambda h: setattr(h, "base_weight_version", 1), "BASE_VERSION_MISMATCH"),
    "a later base": (lambda h: setattr(h, "base_weight_version", 3), "BASE_VERSION_MISMATCH"),
    "a negative base": (lambda h: setattr(h, "base_weight_version", -2), "BASE_VERSION_MISMATCH"),
    "a negative payload": (lambda h: setattr(h.inline, "length_bytes", -1), "FIELD_INVALID"),
    "not a version after it": (lambda h: setattr(h, "weight_version", 2), "WEIGHT_VERSION_STALE"),
} | {name: (change, "FIELD_INVALID") for name, change in FIELDS.items()}


async def test_a_wrong_delta_is_refused_and_changes_nothing(harness: Harness) -> None:
    await harness.upload(1)
    await harness.upload(2)
    few, many = "model.layers.0.mlp.weight", "model.embed_tokens.weight"
    for name, (change, reason) in REASONS.items():
        head, data = delta(3, 2)
        change(head)
        failure = await refused(harness, messages(head, data))
        assert failure.reason == reason, name
        if name in FIELDS and name != "an unknown encoding":
            assert failure.metadata["tensor"] == few, name
        if reason == "BASE_VERSION_MISMATCH" and "tensor" not in failure.metadata:
            assert failure.metadata["active"] == failure.metadata["held"] == "2"
    for value in (np.nan, np.inf):
        new = weights_of(3)
        new[many][7, 2] = value
        failure = await refused(harness, messages(*delta(3, 2, new)))
        assert (failure.reason, failure.metadata["tensor"]) == ("NOT_FINITE", many)
    head, data = delta(3, 2)
    requests = messages(head, data)
    commit = [UpdateWeightsRequest(commit={"header_sha256": b"no"})]
    assert (await refused(harness, requests[:1] + commit)).reason == "CHECKSUM_MISMATCH"
    assert (await refused(harness, requests[:1] + requests[-1:])).reason == "FIELD_INVALID"
    assert harness.engine.payloads == [payload(1)[0], payload(2)[0]]
    assert (await send(harness, requests))[-1].state == ACTIVE
    assert harness.engine.payloads[-1] == payload(3)[0]


async def test_a_delta_is_refused_where_its_base_is_not_held(tmp_path: Path) -> None:
    async with serve(tmp_path, "weights.hold_active=false") as harness:
        await harness.upload(1)
        assert held_bytes(harness) == 0
        failure = await refused(harness, messages(*delta(2, 1)))
        assert failure.reason == "BASE_VERSION_MISMATCH"
        assert failure.metadata == {"base": "1", "active": "1", "held": "0"}


async def test_a_server_that_restarted_takes_a_dense_version_first(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        await harness.upload(1)
    async with serve(tmp_path) as harness:
        failure = await refused(harness, messages(*delta(2, 1)))
        assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
        assert failure.metadata == {"base": "1", "active": "0", "held": "0"}
        await harness.upload(2)
        assert (await send(harness, messages(*delta(3, 2))))[-1].state == ACTIVE


async def test_a_staged_version_is_no_base_until_it_is_active(harness: Harness) -> None:
    await harness.upload(1)
    staged = weights_pb2.ACTIVATION_STAGED
    await harness.upload(2, staged=True)
    assert await base_of(harness) == 1
    failure = await refused(harness, messages(*delta(3, 2)))
    assert failure.reason == "BASE_VERSION_MISMATCH"
    await send(harness, messages(*delta(3, 1, activation=staged)))
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert list(info.staged_weight_versions) == [2, 3]
    assert held_bytes(harness) == 3 * MODEL_BYTES
    exchange = await hello(harness.wire, 1 << 62)
    for version in (2, 3):
        exchange.send(switch_weights={"weight_version": version})
        receipt = await exchange.receive("weight_receipt")
        assert receipt.active_weight_version == version
        assert harness.engine.payloads[-1] == payload(version)[0]
        assert await base_of(harness) == version
    assert held_bytes(harness) == MODEL_BYTES


async def test_a_base_stays_as_it_was_while_a_delta_to_it_arrives(harness: Harness) -> None:
    await harness.upload(1)
    await harness.upload(2, staged=True)
    head, data = delta(3, 1)
    requests = messages(head, data)
    gate = asyncio.Event()

    async def halting() -> Any:
        yield requests[0]
        await gate.wait()
        for request in requests[1:]:
            yield request

    call = harness.wire.UpdateWeights(halting())
    await call.read()
    exchange = await hello(harness.wire, 1 << 62)
    exchange.send(switch_weights={"weight_version": 2})
    assert (await exchange.receive("weight_receipt")).active_weight_version == 2
    gate.set()
    states = [(await call.read()).state for _ in range(2)]
    assert states[-1] == ACTIVE
    assert harness.engine.payloads == [payload(version)[0] for version in (1, 2, 3)]
    assert held_bytes(harness) == MODEL_BYTES


async def test_an_uploader_that_vanishes_leaves_nothing_behind(harness: Harness) -> None:
    await harness.upload(1)
    before = await state_of(harness, "before")
    inline = messages(*delta(2, 1), 16)
    with shared(*delta(2, 1)) as (head, _):
        by_memory = messages(head, b"")
        for sent in (inline[:1], inline[:2], inline[:-1], by_memory[:1]):
            call = harness.wire.UpdateWeights(then_nothing(sent))
            await call.read()
            call.cancel()
            # The server accepts the next upload only once it has noticed.
            await until_idle(harness)
            assert (
                await state_of(harness, f"after-{len(sent)}-{sent[0].header.WhichOneof('source')}")
                == before
            )
    assert (await send(harness, inline))[-1].state == ACTIVE


async def then_nothing(requests: list[Any]) -> Any:
    for request in requests:
        yield request
    await asyncio.Event().wait()


async def until_idle(harness: Harness) -> None:
    async with asyncio.timeout(20):
        await harness.serving.uploads._slot.wait_free()


async def test_what_cannot_be_held_is_done_without(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    with shared(*header(1)) as (head, _), no_room_for(MODEL_BYTES):
        assert (await send(harness, messages(head, b"")))[-1].state == ACTIVE
    assert await base_of(harness) == 0
    assert held_bytes(harness) == 0
    assert "version 1 is not held" in caplog.text
    failure = await refused(harness, messages(*delta(2, 1)))
    assert failure.metadata["held"] == "0"


async def test_where_there_is_no_room_a_delta_is_refused(harness: Harness) -> None:
    await harness.upload(1)
    with no_room_for(MODEL_BYTES):
        failure = await refused(harness, messages(*delta(2, 1)))
    assert failure.reason == "DISK_FULL"
    assert (await send(harness, messages(*delta(2, 1))))[-1].state == ACTIVE


async def test_a_repeated_delta_is_no_work(harness: Harness) -> None:
    await harness.upload(1)
    requests = messages(*delta(2, 1))
    for _ in range(3):
        assert (await send(harness, requests))[-1].state == ACTIVE
    assert len(harness.engine.loaded) == 2


def test_versions_are_held_unless_told_otherwise() -> None:
    assert config.load(None, []).weights.hold_active
    assert not config.load(None, ["weights.hold_active=false"]).weights.hold_active


async def test_an_adapter_is_refused_where_none_is_taken(harness: Harness) -> None:
    head, data = header(1)
    head.adapter.rank = 8
    failure = await refused(harness, messages(head, data))
    assert failure.metadata["field"] == "header.adapter"


async def test_a_source_that_is_not_named_is_asked_for(harness: Harness) -> None:
    head = WeightHeader(weight_version=1, trainer_epoch=1 << 62)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(harness, messages(head, b""))
    assert read_failure(caught.value).metadata["field"] == "header.source"
