"""A version that fails to load: the server rolls back to the previous one, or serves
nothing until an upload succeeds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors.numpy import save_file

from penstock.server.engine.protocol import EngineLost, StagedWeights
from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire.failure import Failure, read_failure
from tests.support.fakes import TENSORS
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    delta,
    header,
    hello,
    messages,
    payload,
    sampling,
    send,
    serve,
    shared,
    weights_of,
)
from tests.support.weight_checks import MODEL_BYTES, check_tokens, held_bytes, state_of

KEEP = weights_pb2.IN_FLIGHT_POLICY_KEEP
POLICIES = ("keep", "recompute", "drain", "abort")


async def fails(harness: Harness, requests: list[Any]) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(harness, requests)
    return read_failure(caught.value)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_load_that_fails_goes_back_to_the_version_before(
    slow: Harness, policy: str
) -> None:
    await slow.upload(1)
    before = await state_of(slow, "before")
    calls = [
        asyncio.ensure_future(slow.generate(f"t{i}", [i + 1], sampling_params=sampling(40)))
        for i in range(4)
    ]
    for i in range(4):
        await slow.sampled(f"t{i}")
    late = asyncio.ensure_future(slow.generate("late", sampling_params=sampling(20)))
    slow.engine.fail_loads = 1
    in_flight = getattr(weights_pb2, f"IN_FLIGHT_POLICY_{policy.upper()}")
    head, data = header(2, in_flight=in_flight)
    failure = await fails(slow, messages(head, data))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "WEIGHT_LOAD_FAILED")
    assert failure.metadata == {"weight_version": "2", "active": "1"}
    for index, call in enumerate(calls):
        turn = await call
        check_tokens(turn, [index + 1])
        assert set(turn.versions) == {1}
        if policy == "abort":
            assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
            assert len(turn.tokens + (await slow.resume(f"t{index}")).tokens) == 40
        else:
            assert len(turn.tokens) == 40
    check_tokens(await late, [1, 2, 3])
    # The rollback loads the bytes that the server held.
    assert slow.engine.payloads == [payload(1)[0]] * 2
    after = await state_of(slow, "after")
    assert after.tokens == before.tokens
    assert (after.active, after.staged, after.base, after.held_bytes) == (1, (), 1, MODEL_BYTES)
    # The same version may be sent again, even as a delta.
    assert (await send(slow, messages(*delta(2, 1))))[-1].active_weight_version == 2
    assert slow.engine.payloads[-1] == payload(2)[0]


@pytest.mark.parametrize("policy", POLICIES)
async def test_what_cannot_be_made_ready_is_refused_without_a_pause(
    slow: Harness, policy: str
) -> None:
    await slow.upload(1)
    before = await state_of(slow, "before")
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(60)))
    await slow.sampled("t")
    pauses, loads = slow.engine.pauses, len(slow.engine.loaded)
    slow.engine.fail_preparations = 1
    in_flight = getattr(weights_pb2, f"IN_FLIGHT_POLICY_{policy.upper()}")
    failure = await fails(slow, messages(*header(2, in_flight=in_flight)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "WEIGHT_LOAD_FAILED")
    assert failure.metadata == {"weight_version": "2", "active": "1"}
    assert (slow.engine.pauses, len(slow.engine.loaded)) == (pauses, loads)
    assert not call.done()
    turn = await call
    check_tokens(turn, [1, 2, 3])
    assert (len(turn.tokens), set(turn.versions)) == (60, {1})
    after = await state_of(slow, "after")
    assert after.tokens == before.tokens
    assert (after.active, after.staged, after.base, after.held_bytes) == (1, (), 1, MODEL_BYTES)
    await slow.upload(2)
    assert slow.engine.prepared == [1, 2]


async def test_turns_are_admitted_while_a_version_is_made_ready(harness: Harness) -> None:
    await harness.upload(1)
    begun, go_on = asyncio.Event(), asyncio.Event()
    prepare = harness.engine.prepare

    async def held(weights: StagedWeights) -> None:
        begun.set()
        await go_on.wait()
        await prepare(weights)

    harness.engine.prepare = held  # type: ignore[method-assign]
    drain = weights_pb2.IN_FLIGHT_POLICY_DRAIN
    upload = asyncio.ensure_future(send(harness, messages(*header(2, in_flight=drain))))
    await begun.wait()
    for name in ("a", "b"):
        turn = await harness.generate(name)
        check_tokens(turn, [1, 2, 3])
        assert set(turn.versions) == {1}
    assert not upload.done()
    go_on.set()
    await upload
    assert set((await harness.generate("c")).versions) == {2}


async def test_nothing_is_made_ready_where_that_is_not_wanted_or_of_no_use(tmp_path: Path) -> None:
    async with serve(tmp_path, "weights.prepare_ahead=false") as harness:
        await harness.upload(1)
        assert harness.engine.prepared == []
        assert set((await harness.generate("t")).versions) == {1}
    async with serve(tmp_path, "weights.hold_active=false") as harness:
        await harness.upload(1)
        harness.engine.fail_loads = 1
        assert (await fails(harness, messages(*header(2)))).reason == "WEIGHTS_INCONSISTENT"
        # Nothing is served, so there is no pause to shorten.
        await harness.upload(3)
        assert harness.engine.prepared == [1, 2]


async def test_an_engine_that_dies_while_it_makes_a_version_ready_is_lost(
    harness: Harness,
) -> None:
    async def dies(weights: StagedWeights) -> None:
        raise EngineLost("told to die")

    harness.engine.prepare = dies  # type: ignore[method-assign]
    failure = await fails(harness, messages(*header(1)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")


async def test_a_switch_that_fails_is_rejected_and_says_what_is_active(harness: Harness) -> None:
    exchange = await hello(harness.wire, 1 << 62)
    await harness.upload(1)
    for version in (2, 3):
        await harness.upload(version, staged=True)
    harness.engine.fail_loads = 1
    for version, active in ((3, 1), (2, 2)):
        exchange.send(switch_weights={"weight_version": version})
        receipt = await exchange.receive("weight_receipt")
        assert receipt.weight_version == version
        assert receipt.active_weight_version == active
        assert receipt.rejection.reason == ("WEIGHT_LOAD_FAILED" if active == 1 else "")
    assert set((await harness.generate("t")).versions) == {2}
    assert held_bytes(harness) == MODEL_BYTES


@pytest.mark.parametrize("held", ["true", "false"])
@pytest.mark.parametrize("policy", POLICIES)
async def test_memory_that_is_written_to_while_it_is_loaded_is_noticed(
    tmp_path: Path, held: str, policy: str
) -> None:
    async with serve(tmp_path, f"weights.hold_active={held}") as harness:
        await harness.upload(1)
        load = harness.engine.load
        head, data = header(2)
        with shared(head, data) as (copy, path):

            async def load_meanwhile(weights: StagedWeights) -> None:
                with path.open("r+b") as file:
                    file.write(bytes([data[0] ^ 1]))
                await load(weights)

            harness.engine.load = load_meanwhile  # type: ignore[method-assign]
            failure = await fails(harness, messages(copy, b""))
        harness.engine.load = load  # type: ignore[method-assign]
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "WEIGHTS_INCONSISTENT",
        )
        assert "written to after it was verified" in failure.message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await harness.generate("refused")
        assert read_failure(caught.value).reason == "WEIGHTS_INCONSISTENT"
        assert held_bytes(harness) == 0
        # The number is the same but the bytes differ, so the cache must not be reused.
        dropped = harness.engine.caches_dropped
        in_flight = getattr(weights_pb2, f"IN_FLIGHT_POLICY_{policy.upper()}")
        await send(harness, messages(*header(2, in_flight=in_flight)))
        assert harness.engine.caches_dropped == dropped + 1
        turn = await harness.generate("healed")
        check_tokens(turn, [1, 2, 3])
        assert set(turn.versions) == {2}


async def test_an_engine_whose_load_failed_for_good_begins_with_an_empty_cache(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, "weights.hold_active=false") as harness:
        await harness.upload(1)
        harness.engine.fail_loads = 1
        assert (await fails(harness, messages(*header(2)))).reason == "WEIGHTS_INCONSISTENT"
        dropped = harness.engine.caches_dropped
        # The number may come again, and the cache under it belongs to other weights.
        await send(harness, messages(*header(1, in_flight=KEEP)))
        assert harness.engine.caches_dropped == dropped + 1
        assert set((await harness.generate("t")).versions) == {1}


async def test_version_0_is_read_again_from_its_folder(tmp_path: Path) -> None:
    base = {name: weights_of(0)[name] for name in TENSORS if name in weights_of(0)}
    save_file(base, tmp_path / "model.safetensors")
    async with serve(tmp_path, checkpoint=tmp_path) as harness:
        before = await state_of(harness, "before")
        harness.engine.fail_loads = 1
        failure = await fails(harness, messages(*header(1)))
        assert (failure.reason, failure.metadata["active"]) == ("WEIGHT_LOAD_FAILED", "0")
        (loaded,) = harness.engine.loaded
        data = harness.engine.payloads[0]
        found = {
            t.name: data[t.offset_bytes : t.offset_bytes + t.length_bytes] for t in loaded.tensors
        }
        assert found == {name: tensor.tobytes() for name, tensor in base.items()}
        after = await state_of(harness, "after")
        assert (after.active, after.tokens, after.held_bytes) == (0, before.tokens, 0)
        await harness.upload(1)
        # From now on version 0 is not needed.
        (tmp_path / "model.safetensors").unlink()
        harness.engine.fail_loads = 1
        assert (await fails(harness, messages(*header(2)))).metadata["active"] == "1"


async def unserved(harness: Harness, version: int) -> None:
    """Check that calls are refused as WEIGHTS_INCONSISTENT, and that a
    full upload restores service."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await harness.generate("refused")
    failure = read_failure(caught.value)
    assert (failure.code, failure.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "WEIGHTS_INCONSISTENT",
    )
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert info.delta_base_weight_version == 0
    assert held_bytes(harness) == 0
    # A resumed trainer may send the number of the active version again.
    await harness.upload(version)
    assert set((await harness.generate("served")).versions) == {version}
    assert held_bytes(harness) == MODEL_BYTES


async def test_where_the_way_back_fails_too_nothing_is_served(slow: Harness) -> None:
    await slow.upload(1)
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(100)))
    await slow.sampled("t")
    slow.engine.fail_loads = 2
    failure = await fails(slow, messages(*header(2)))
    assert (failure.code, failure.reason) == (
        grpc.StatusCode.UNAVAILABLE,
        "WEIGHTS_INCONSISTENT",
    )
    turn = await call
    assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
    check_tokens(turn, [1, 2, 3])
    assert (await fails(slow, messages(*delta(2, 1)))).reason == "BASE_VERSION_MISMATCH"
    slow.engine.fail_loads = 1
    assert (await fails(slow, messages(*header(2)))).reason == "WEIGHTS_INCONSISTENT"
    await unserved(slow, 1)
    assert len(turn.tokens + (await slow.resume("t")).tokens) == 100


async def test_where_there_is_no_way_back_nothing_is_served(tmp_path: Path) -> None:
    async with serve(tmp_path, "weights.hold_active=false", checkpoint=tmp_path) as harness:
        # The checkpoint folder is empty.
        harness.engine.fail_loads = 1
        assert (await fails(harness, messages(*header(1)))).reason == "WEIGHTS_INCONSISTENT"
        await harness.upload(1)
        harness.engine.fail_loads = 1
        assert (await fails(harness, messages(*header(2)))).reason == "WEIGHTS_INCONSISTENT"
        await harness.upload(2)
        assert set((await harness.generate("served")).versions) == {2}
        assert held_bytes(harness) == 0


async def test_where_nothing_was_held_nothing_is_served(harness: Harness) -> None:
    with shared(*header(1)) as (head, _):
        await send(harness, messages(head, b""))
    harness.serving.weights.held.release()
    harness.engine.fail_loads = 1
    assert (await fails(harness, messages(*header(2)))).reason == "WEIGHTS_INCONSISTENT"
    await unserved(harness, 2)


async def test_a_switch_goes_on_when_its_caller_is_gone(slow: Harness) -> None:
    turn = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(60)))
    await slow.sampled("t")
    drain = weights_pb2.IN_FLIGHT_POLICY_DRAIN
    call = slow.wire.UpdateWeights(iter(messages(*header(1, in_flight=drain))))
    while (await call.read()).state != weights_pb2.WEIGHT_STATE_STAGED:
        pass
    await asyncio.sleep(0.02)
    assert not turn.done()
    call.cancel()
    late = await slow.generate("late")
    assert set((await turn).versions) == {0}
    assert set(late.versions) == {1}
    assert await state_of(slow, "after")
    assert held_bytes(slow) == MODEL_BYTES


async def test_without_room_the_new_version_matters_more_than_the_old_one(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.upload(1)
    stage = harness.serving.weights.stage
    allocate = stage._memory.allocate
    full = True

    async def room_for_one(length_bytes: int) -> Any:
        if full and stage.held_bytes:
            from penstock.server.weights.staging.manifest import WeightRefused
            from penstock.wire.reasons import Reason

            raise WeightRefused(Reason.DISK_FULL, "no room")
        return await allocate(length_bytes)

    stage._memory.allocate = room_for_one  # type: ignore[method-assign]
    await harness.upload(2)
    assert "next to held version 1; releasing the held one" in caplog.text
    assert held_bytes(harness) == MODEL_BYTES
    full = False
    assert (await send(harness, messages(*delta(3, 2))))[-1].active_weight_version == 3
