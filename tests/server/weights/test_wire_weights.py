"""Uploads and switches over the wire: refused whole or activated whole, with a
policy for turns in flight."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from google.protobuf.internal.encoder import _VarintBytes

from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire.failure import read_failure
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    InlineSource,
    TensorSpec,
    UpdateWeightsRequest,
    WeightChunk,
    WeightCommit,
    WeightHeader,
    header,
    hello,
    hold_back_switches,
    messages,
    payload,
    sampling,
    send,
    until,
    upload,
)

UpdateWeightsResponse = weights_pb2.UpdateWeightsResponse
TURN_TOKENS = 300
"""Long enough that an upload arrives mid-turn, however busy the machine."""
NUMBERS = itertools.count()
STATES = {
    weights_pb2.WEIGHT_STATE_READY: "ready",
    weights_pb2.WEIGHT_STATE_STAGED: "staged",
    weights_pb2.WEIGHT_STATE_ACTIVE: "active",
}


async def refusal(harness: Harness, requests: list[Any]) -> tuple[grpc.StatusCode, str]:
    """Send an upload that must be refused, and check that it changes nothing."""
    number = next(NUMBERS)
    before = await harness.generate(f"before-{number}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(harness, requests)
    found = read_failure(caught.value)
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert info.active_weight_version == 0
    assert list(info.staged_weight_versions) == []
    after = await harness.generate(f"after-{number}")
    assert after.tokens == before.tokens
    assert harness.engine.loaded == []
    return found.code, found.reason


async def test_an_upload_goes_ready_staged_active(harness: Harness) -> None:
    responses = await harness.upload(1)
    assert [STATES[r.state] for r in responses] == ["ready", "staged", "active"]
    assert [r.active_weight_version for r in responses] == [0, 0, 1]
    assert responses[-1].HasField("pause")
    assert responses[-1].changed_tensor_count == 2
    assert harness.engine.loaded[0].weight_version == 1
    turn = await harness.generate("t")
    assert turn.versions == [1] * 16
    assert turn.tokens == expected_tokens([1, 2, 3], [1] * 16)[0]


async def test_a_header_may_have_its_fields_in_any_order(harness: Harness) -> None:
    # Go's protobuf writes the members of a oneof last.
    head, data = header(1, staged=True)
    plain = WeightHeader.FromString(head.SerializeToString())
    plain.ClearField("inline")
    last = WeightHeader(inline=head.inline).SerializeToString()
    raw = plain.SerializeToString() + last
    assert WeightHeader.FromString(raw) == head and raw != head.SerializeToString()
    commit = WeightCommit(header_sha256=hashlib.sha256(raw).digest())
    requests = [
        UpdateWeightsRequest(header=WeightHeader()).SerializeToString()[:1]
        + _VarintBytes(len(raw))
        + raw,
        *(message.SerializeToString() for message in messages(head, data)[1:-1]),
        UpdateWeightsRequest(commit=commit).SerializeToString(),
    ]
    call = harness.channel.stream_stream("/penstock.v1.RolloutService/UpdateWeights")
    responses = [UpdateWeightsResponse.FromString(raw) async for raw in call(iter(requests))]
    assert [STATES[r.state] for r in responses] == ["ready", "staged"]


async def test_a_staged_version_waits_for_its_switch(harness: Harness) -> None:
    responses = await harness.upload(1, staged=True)
    assert [STATES[r.state] for r in responses] == ["ready", "staged"]
    assert (await harness.generate("t")).versions == [0] * 16
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert list(info.staged_weight_versions) == [1]


async def test_a_switch_is_answered_once_it_is_written_down(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = await hello(harness.wire, 1 << 62)
    await harness.upload(1, staged=True)
    written = hold_back_switches(harness, monkeypatch)
    exchange.send(switch_weights={"weight_version": 1})
    await until(lambda: harness.engine.loaded != [])
    await exchange.nothing()
    # The engine already samples with the new version.
    assert (await harness.generate("t")).versions[-1] == 1
    written.set_result([])
    assert (await exchange.receive("weight_receipt")).active_weight_version == 1


async def test_the_same_upload_again_is_no_work(harness: Harness) -> None:
    await harness.upload(1, staged=True)
    again = await harness.upload(1, staged=True)
    assert [STATES[r.state] for r in again] == ["staged"]
    await harness.upload(2)
    again = await harness.upload(2)
    assert [STATES[r.state] for r in again] == ["active"]
    assert [w.weight_version for w in harness.engine.loaded] == [2]


async def test_shared_memory_is_verified_and_may_be_unlinked(harness: Harness) -> None:
    head, data = header(1, staged=True)
    path = Path(f"/dev/shm/penstock-test-{os.getpid()}")
    path.write_bytes(data)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        shared = {"name": str(path), "host_namespace": f"{boot}:{path.stat().st_dev}"}
        head, _ = header(1, staged=True, inline=None, shared_memory=shared)
        responses = await send(harness, messages(head, b""))
        assert [STATES[r.state] for r in responses] == ["ready", "staged"]
        elsewhere = {**shared, "host_namespace": "another:1"}
        head, _ = header(2, staged=True, inline=None, shared_memory=elsewhere)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(harness, messages(head, b""))
        assert read_failure(caught.value).reason == "SOURCE_UNAVAILABLE"
    finally:
        path.unlink()
    exchange = await hello(harness.wire)
    exchange.send(switch_weights={"weight_version": 1})
    assert (await exchange.receive("weight_receipt")).active_weight_version == 1


async def test_what_is_wrong_with_an_upload_is_said_and_nothing_changes(
    harness: Harness,
) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    data, specs = payload(1)

    def changed(index: int = 0, **fields: Any) -> list[Any]:
        copies = [TensorSpec.FromString(spec.SerializeToString()) for spec in specs]
        for name, value in fields.items():
            if name == "shape":
                copies[index].ClearField("shape")
                copies[index].shape.extend(value)
            else:
                setattr(copies[index], name, value)
        return copies

    def upload_of(tensors: list[Any], body: bytes = data) -> list[Any]:
        head, _ = header(1, tensors=tensors, inline=InlineSource(length_bytes=len(body)))
        return messages(head, body)

    nan = np.full((8, 4), np.nan, np.float32).tobytes()
    first = specs[0].length_bytes
    poisoned = data[:first] + nan
    cases = {
        "TENSOR_UNKNOWN": upload_of(changed(name="other")),
        "TENSOR_MISSING": upload_of(specs[:1], data[:first]),
        "SHAPE_MISMATCH": upload_of(changed(shape=[4, 300])),
        "DTYPE_MISMATCH": upload_of(changed(dtype="bfloat16")),
        "NOT_FINITE": upload_of(changed(1, xxh3=xxhash.xxh3_64_intdigest(nan)), poisoned),
    }
    for reason, requests in cases.items():
        assert await refusal(harness, requests) == (invalid, reason)
    lost = grpc.StatusCode.DATA_LOSS
    assert await refusal(harness, upload_of(changed(xxh3=1))) == (lost, "CHECKSUM_MISMATCH")
    good = upload_of(specs)
    broken = list(good)
    broken[1] = UpdateWeightsRequest(
        chunk=WeightChunk(offset_bytes=0, data=b"x" * 4096, xxh3=broken[1].chunk.xxh3)
    )
    assert await refusal(harness, broken) == (lost, "CHECKSUM_MISMATCH")
    assert await refusal(harness, [good[0], *good[2:]]) == (invalid, "FIELD_INVALID")
    wrong = UpdateWeightsRequest(commit={"header_sha256": b"no"})
    assert await refusal(harness, [*good[:-1], wrong]) == (lost, "CHECKSUM_MISMATCH")
    assert await refusal(harness, good[1:]) == (invalid, "FIELD_INVALID")
    assert await refusal(harness, [good[0], good[0]]) == (invalid, "FIELD_INVALID")
    head, body = header(1, base_weight_version=5)
    assert await refusal(harness, messages(head, body)) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "BASE_VERSION_MISMATCH",
    )
    # A stream that ends without a commit changes nothing, and the next upload succeeds.
    assert [STATES[r.state] for r in await send(harness, good[:-1])] == ["ready"]
    assert harness.engine.loaded == []
    assert [STATES[r.state] for r in await send(harness, good)][-1] == "active"


async def test_versions_only_grow_and_older_trainers_are_refused(harness: Harness) -> None:
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    await harness.upload(5)
    for version in (5, 4, 0, -1):
        # The same version with other content does not count as a repetition.
        head, data = header(version, in_flight=weights_pb2.IN_FLIGHT_POLICY_DRAIN)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(harness, messages(head, data))
        found = read_failure(caught.value)
        assert (found.code, found.reason) == (precondition, "WEIGHT_VERSION_STALE")
    await hello(harness.wire, 10)
    head, data = header(6, trainer_epoch=9)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(harness, messages(head, data))
    assert read_failure(caught.value).reason == "STALE_EPOCH"
    await harness.upload(6, trainer_epoch=10)


async def test_a_second_upload_while_one_runs_is_refused(harness: Harness) -> None:
    head, data = header(1)
    requests = messages(head, data)
    gate = asyncio.Event()

    async def halting() -> Any:
        yield requests[0]
        await gate.wait()
        for request in requests[1:]:
            yield request

    first = harness.wire.UpdateWeights(halting())
    assert STATES[(await first.read()).state] == "ready"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await upload(harness.wire, 2)
    found = read_failure(caught.value)
    assert (found.code, found.reason) == (grpc.StatusCode.ABORTED, "UPLOAD_IN_PROGRESS")
    gate.set()
    assert [STATES[(await first.read()).state] for _ in range(2)] == ["staged", "active"]


def check_versions(turn: Any, prompt: list[int]) -> None:
    """Check that every token is the one its version samples at its position."""
    assert turn.tokens == expected_tokens(prompt, turn.versions)[0]


@pytest.mark.parametrize("policy", ["keep", "recompute", "drain", "abort"])
async def test_turns_in_flight_by_policy(slow: Harness, policy: str) -> None:
    in_flight = getattr(weights_pb2, f"IN_FLIGHT_POLICY_{policy.upper()}")
    calls = [
        asyncio.ensure_future(
            slow.generate(f"t{i}", [i + 1], sampling_params=sampling(TURN_TOKENS))
        )
        for i in range(4)
    ]
    for i in range(4):
        await slow.sampled(f"t{i}")
    await slow.upload(1, in_flight=in_flight)
    late = await slow.generate("late", sampling_params=sampling(5))
    assert late.versions == [1] * 5
    for index, call in enumerate(calls):
        turn = await call
        check_versions(turn, [index + 1])
        if policy == "drain":
            assert turn.versions == [0] * TURN_TOKENS
        elif policy == "abort":
            assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
            assert 0 < len(turn.tokens) < TURN_TOKENS
            rest = await slow.resume(f"t{index}")
            assert rest.versions == [1] * (TURN_TOKENS - len(turn.tokens))
        else:
            assert sorted(set(turn.versions)) == [0, 1]
            assert turn.versions == sorted(turn.versions)
            assert len(turn.tokens) == TURN_TOKENS
            # A mid-turn switch starts a new segment.
            assert {s.weight_version for s in turn.segments} == {0, 1}


async def test_new_turns_never_share_cache_with_other_weights(harness: Harness) -> None:
    await harness.generate("a")
    await harness.upload(1)
    await harness.generate("b")
    assert {(salt, version) for _, salt, version in harness.engine.salts} == {("0", 0), ("1", 1)}


async def test_a_pinned_turn_is_aborted_rather_than_mixed(slow: Harness) -> None:
    await slow.upload(1)
    call = asyncio.ensure_future(
        slow.generate("t", required_weight_version=1, sampling_params=sampling(100))
    )
    await slow.sampled("t")
    await slow.upload(2)
    turn = await call
    assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
    assert set(turn.versions) == {1}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow.resume("t")
    assert read_failure(caught.value).reason == "WEIGHT_VERSION_NOT_ACTIVE"


async def test_a_load_that_fails_half_way_stops_serving_until_a_full_upload(
    slow: Harness,
) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(100)))
    await slow.sampled("t")
    slow.engine.fail_loads = 1
    unavailable = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow.upload(1)
    found = read_failure(caught.value)
    assert (found.code, found.reason) == (unavailable, "WEIGHTS_INCONSISTENT")
    turn = await call
    assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
    check_versions(turn, [1, 2, 3])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow.generate("u")
    found = read_failure(caught.value)
    assert (found.code, found.reason) == (unavailable, "WEIGHTS_INCONSISTENT")
    await slow.upload(1)
    # The refused turn left its id free.
    assert (await slow.generate("u")).versions == [1] * 16
    rest = await slow.resume("t")
    assert set(rest.versions) == {1}
    assert len(turn.tokens) + len(rest.tokens) == 100


async def test_twenty_updates_under_load_label_every_token_with_what_sampled_it(
    slow: Harness,
) -> None:
    stop = asyncio.Event()
    turns: list[tuple[list[int], Any]] = []

    async def load(worker: int) -> None:
        count = 0
        while not stop.is_set():
            prompt = [worker + 1, count % 200]
            turn = await slow.generate(f"w{worker}-{count}", prompt, sampling_params=sampling(40))
            turns.append((prompt, turn))
            count += 1

    workers = [asyncio.ensure_future(load(worker)) for worker in range(8)]
    policies = [weights_pb2.IN_FLIGHT_POLICY_KEEP, weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE]
    for version in range(1, 21):
        await slow.upload(version, in_flight=policies[version % 2])
    stop.set()
    await asyncio.gather(*workers)
    for prompt, turn in turns:
        check_versions(turn, prompt)
        assert len(turn.tokens) == 40
    assert sum(len(set(turn.versions)) > 1 for _, turn in turns) > 5
    salts = slow.engine.salts
    assert all(salt == str(version) for _, salt, version in salts)
