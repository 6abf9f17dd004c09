"""LoRA over the wire: each version is a separate adapter, no switch pauses, and a policy
decides about turns in flight."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from penstock.server.engine.protocol import AdapterLimits
from penstock.server.weights.adapter_folder import NAME
from penstock.v1 import trainer_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import Failure, read_failure
from tests.server.rpc.test_wire_exchange import finish_groups
from tests.support.fakes import MAX_CONTEXT, expected_scores, expected_tokens
from tests.support.harness import (
    AbortRequest,
    GetServerInfoRequest,
    Harness,
    InlineSource,
    TensorSpec,
    Turn,
    WeightProbe,
    delta,
    header,
    hello,
    messages,
    sampling,
    send,
    serve,
    shared,
)
from tests.support.weight_checks import check_tokens, held_bytes, refused, state_of

RANK = 2
MODULE = "base_model.model.model.layers.0.mlp"
POLICIES = {
    name: getattr(weights_pb2, f"IN_FLIGHT_POLICY_{name.upper()}")
    for name in ("keep", "recompute", "drain", "abort")
}
ACTIVE = weights_pb2.WEIGHT_STATE_ACTIVE


@pytest.fixture
async def lora(tmp_path: Path) -> AsyncGenerator[Harness]:
    """A server with room for two adapters that takes five milliseconds per token."""
    async with serve(tmp_path, step_seconds=0.005, adapters=AdapterLimits(8, 2)) as running:
        yield running


def tensors_of(version: int, rank: int = RANK) -> dict[str, Any]:
    """The adapter of a version. Its B is zero at version 0, as PEFT initializes it."""
    return {
        f"{MODULE}.lora_A.weight": np.full((rank, 4), 0.5, np.float32),
        f"{MODULE}.lora_B.weight": np.full((8, rank), version, np.float32),
    }


def adapter(
    version: int, *, staged: bool = False, tensors: dict[str, Any] | None = None, **fields: Any
) -> tuple[Any, bytes]:
    """Header and payload of an adapter."""
    data = b""
    specs: list[Any] = []
    for name, tensor in (tensors or tensors_of(version)).items():
        values = tensor.tobytes()
        specs.append(
            TensorSpec(
                name=name,
                shape=tensor.shape,
                dtype=str(tensor.dtype),
                offset_bytes=len(data),
                length_bytes=len(values),
                xxh3=xxhash.xxh3_64_intdigest(values),
            )
        )
        data += values
    shape = {"rank": RANK, "alpha": 4.0, "target_modules": ["mlp"], **fields.pop("shape", {})}
    head, _ = header(
        version,
        staged=staged,
        **{
            "tensors": specs,
            "inline": InlineSource(length_bytes=len(data)),
            "adapter": shape,
            **fields,
        },
    )
    return head, data


async def push(harness: Harness, version: int, **fields: Any) -> list[Any]:
    """Upload an adapter inline; return the responses."""
    if "policy" in fields:
        fields["in_flight"] = POLICIES[fields.pop("policy")]
    return await send(harness, messages(*adapter(version, **fields)))


async def refused_push(harness: Harness, version: int, **fields: Any) -> Failure:
    return await refused(harness, messages(*adapter(version, **fields)))


async def info_of(harness: Harness) -> Any:
    return await harness.wire.GetServerInfo(GetServerInfoRequest())


async def adapters_of(harness: Harness) -> list[int]:
    return list((await info_of(harness)).adapter_weight_versions)


async def freed(harness: Harness, *versions: int) -> None:
    """Wait until the engine has none of these adapters or their files."""
    async with asyncio.timeout(20):
        while set(versions) & set(harness.engine.adapters) or any(
            harness.engine.adapter_folders[v].exists() for v in versions
        ):
            await asyncio.sleep(0.005)


def begin(harness: Harness, name: str, prompt: Sequence[int], count: int, **fields: Any) -> Any:
    """Start a turn in the background."""
    fields.setdefault("sampling_params", sampling(count))
    return asyncio.ensure_future(harness.generate(name, prompt, **fields))


# Switches


async def test_an_adapter_samples_as_a_version_of_its_own(lora: Harness) -> None:
    base = await lora.generate("base")
    assert set(base.versions) == {0}
    responses = await push(lora, 1)
    assert responses[-1].state == ACTIVE
    assert responses[-1].active_weight_version == 1
    assert responses[-1].changed_tensor_count == 2
    # The response reports a pause of zero, because no turn paused.
    assert responses[-1].HasField("pause")
    assert responses[-1].pause.ToNanoseconds() == 0
    assert lora.engine.pauses == 0
    turn = await lora.generate("t")
    assert turn.started.weight_version == 1
    assert set(turn.versions) == {1}
    check_tokens(turn, [1, 2, 3])
    info = await info_of(lora)
    assert info.active_weight_version == 1
    assert list(info.adapter_weight_versions) == [1]
    assert (info.lora.max_rank, info.lora.max_adapters) == (8, 2)


async def test_the_engine_gets_a_folder_as_peft_writes_it(lora: Harness) -> None:
    await push(lora, 7, shape={"alpha": 3.5, "rank_stabilized": True})
    folder = lora.engine.adapter_folders[7]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (RANK, 3.5, True)
    assert config["target_modules"] == ["mlp"]
    for name, tensor in tensors_of(7).items():
        np.testing.assert_array_equal(lora.engine.adapters[7][name], tensor)


async def test_cache_of_other_versions_is_never_shared(lora: Harness) -> None:
    await lora.generate("a")
    await push(lora, 3)
    await lora.generate("b")
    await push(lora, 4)
    await lora.generate("c")
    assert [salt for _, salt, _ in lora.engine.salts] == ["0", "3", "4"]


async def test_a_staged_adapter_waits_for_its_switch_and_gets_a_receipt(lora: Harness) -> None:
    await push(lora, 1, staged=True)
    assert set((await lora.generate("t")).versions) == {0}
    assert list((await info_of(lora)).staged_weight_versions) == [1]
    exchange = await hello(lora.wire)
    exchange.send(switch_weights={"weight_version": 1})
    receipt = await exchange.receive("weight_receipt")
    assert (receipt.active_weight_version, receipt.HasField("rejection")) == (1, False)
    assert receipt.pause.ToNanoseconds() == 0
    assert set((await lora.generate("u")).versions) == {1}


async def test_an_adapter_may_come_through_shared_memory(lora: Harness) -> None:
    head, data = adapter(1)
    with shared(head, data) as (there, _):
        responses = await send(lora, messages(there, b""))
    assert responses[-1].state == ACTIVE
    check_tokens(await lora.generate("t"), [1, 2, 3])


async def test_what_its_uploader_changes_after_it_was_staged_is_not_served(lora: Harness) -> None:
    head, data = adapter(1, staged=True)
    with shared(head, data) as (there, path):
        await send(lora, messages(there, b""))
        path.write_bytes(data[:-4] + b"\1\1\1\1")
        exchange = await hello(lora.wire)
        exchange.send(switch_weights={"weight_version": 1})
        receipt = await exchange.receive("weight_receipt")
    assert receipt.rejection.reason == "CHECKSUM_MISMATCH"
    assert receipt.active_weight_version == 0
    assert lora.engine.adapters_added == []


async def test_the_same_adapter_again_is_no_work(lora: Harness) -> None:
    await push(lora, 1)
    assert [r.state for r in await push(lora, 1)] == [ACTIVE]
    assert lora.engine.adapters_added == [1]


async def test_an_adapter_that_changes_nothing_is_an_alarm(
    lora: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    await push(lora, 1, tensors=tensors_of(1))
    responses = await push(lora, 2, tensors=tensors_of(1))
    assert responses[-1].changed_tensor_count == 0
    assert "version 2 changes no tensor" in caplog.text


async def test_lag_counts_adapters_as_any_version(lora: Harness) -> None:
    policy = trainer_service_pb2.LATE_POLICY_DROP
    exchange = await hello(lora.wire, 1 << 62, max_lag=1, groups_per_step=1, late_policy=policy)
    await push(lora, 1, staged=True)
    exchange.send(switch_weights={"weight_version": 1})
    await exchange.receive("weight_receipt")
    await finish_groups(lora, "a", "b")
    for version, kind in ((2, "delivery"), (3, "notice")):
        await push(lora, version, staged=True)
        exchange.send(switch_weights={"weight_version": version})
        await exchange.receive("weight_receipt")
        exchange.send(demand={"group_count": 1})
        found = await exchange.receive(kind)
        if kind == "delivery":
            assert found.group.oldest_weight_version == 1
        else:
            assert found.reason == "GROUP_DROPPED"


# Turns in flight


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", ["base", "adapter"])
async def test_turns_in_flight_by_policy(lora: Harness, policy: str, before: str) -> None:
    old, new = 0, 1
    if before == "adapter":
        await push(lora, 1)
        old, new = 1, 2
    calls = [begin(lora, f"t{i}", [i + 1], 60) for i in range(4)]
    for i in range(4):
        await lora.sampled(f"t{i}")
    await push(lora, new, policy=policy)
    assert set((await lora.generate("late", sampling_params=sampling(5))).versions) == {new}
    for index, call in enumerate(calls):
        turn = await call
        check_tokens(turn, [index + 1])
        if policy in ("keep", "drain"):
            assert turn.versions == [old] * 60
        elif policy == "abort":
            assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
            rest = await lora.resume(f"t{index}")
            assert rest.versions == [new] * (60 - len(turn.tokens))
        else:
            assert turn.versions == sorted(turn.versions)
            assert set(turn.versions) == {old, new}
            # Callers see one turn, with a new segment where the adapter changed.
            assert len(turn.tokens) == 60
            assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
            assert turn.finished.policy_token_count == 60
    if before == "adapter":
        await freed(lora, 1)
    assert await adapters_of(lora) == [new]
    assert lora.engine.pauses == 0


async def test_under_drain_new_turns_wait_until_the_old_have_finished(lora: Harness) -> None:
    await push(lora, 1)
    old = begin(lora, "old", [1], 60)
    await lora.sampled("old")
    switching = asyncio.ensure_future(push(lora, 2, policy="drain"))
    while not lora.serving.switch.switching:
        await asyncio.sleep(0.002)
    new = await lora.generate("new", sampling_params=sampling(3))
    assert old.done()
    assert set(new.versions) == {2}
    assert set((await old).versions) == {1}
    await switching


async def test_a_seeded_turn_that_moves_on_draws_anew(lora: Harness) -> None:
    seen: list[int | None] = []
    original = lora.engine.generate

    async def watch(request: Any) -> Any:
        seen.append(request.sampling.seed)
        return await original(request)

    lora.engine.generate = watch
    call = begin(lora, "t", [1], 60, sampling_params=sampling(60, seed=5))
    await lora.sampled("t")
    await push(lora, 1, policy="recompute")
    await call
    assert seen == [5, 6]


async def test_a_stop_string_is_found_across_the_move(lora: Harness) -> None:
    """The engine's second request begins in the middle of the stop string."""
    prompt, cut = [9, 9], 10
    before = expected_tokens(prompt, [0] * cut)[0]
    after = expected_tokens(prompt, [0] * cut + [1])[0]
    stop = bytes(after[-2:]).decode()
    assert stop not in bytes(before).decode()
    lora.engine.freeze_at = cut
    call = begin(lora, "t", prompt, 60, sampling_params=sampling(60, stop=[stop]))
    async with asyncio.timeout(20):
        while [r.count for r in lora.engine._running.values()] != [cut]:
            await asyncio.sleep(0.005)
    await push(lora, 1, policy="recompute")
    lora.engine.freeze_at = None
    turn = await call
    assert turn.tokens == after
    assert turn.versions == [0] * cut + [1]
    assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_STOP


async def test_a_turn_moves_as_often_as_versions_come_and_keeps_its_budget(lora: Harness) -> None:
    call = begin(lora, "t", [4], 100)
    await lora.sampled("t")
    for version in range(1, 6):
        await push(lora, version, policy="recompute")
        await asyncio.sleep(0.03)
    turn = await call
    check_tokens(turn, [4])
    assert len(turn.tokens) == 100
    assert len(set(turn.versions)) >= 4
    assert turn.versions == sorted(turn.versions)


async def test_a_turn_that_requires_its_version_finishes_under_it_or_is_aborted(
    lora: Harness,
) -> None:
    await push(lora, 1)
    pinned = begin(lora, "kept", [1], 60, required_weight_version=1)
    await lora.sampled("kept")
    await push(lora, 2, policy="keep")
    assert (await pinned).versions == [1] * 60
    moved = begin(lora, "moved", [1], 60, required_weight_version=2)
    await lora.sampled("moved")
    await push(lora, 3, policy="recompute")
    turn = await moved
    assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
    assert set(turn.versions) == {2}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await lora.generate("late", required_weight_version=2)
    assert read_failure(caught.value).reason == "WEIGHT_VERSION_NOT_ACTIVE"


async def test_a_caller_that_is_lost_while_its_turn_moves_leaves_nothing(lora: Harness) -> None:
    await push(lora, 1)
    calls = [begin(lora, f"t{i}", [i + 1], 200) for i in range(4)]
    for i in range(4):
        await lora.sampled(f"t{i}")
    switching = asyncio.ensure_future(push(lora, 2, policy="recompute"))
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await switching
    async with asyncio.timeout(20):
        while lora.serving.turns.in_flight:
            await asyncio.sleep(0.01)
    await freed(lora, 1)
    assert lora.engine._running == {}


async def test_an_abort_while_a_turn_waits_to_go_on_is_obeyed(lora: Harness) -> None:
    await push(lora, 1)
    call = begin(lora, "t", [1], 200)
    await lora.sampled("t")
    async with lora.serving.switch.gate_closed():
        await lora.serving.turns.move(lora.serving.turns.sampling)
        await asyncio.sleep(0.01)
        answer = await lora.wire.Abort(AbortRequest(trajectories={"trajectory_ids": ["t"]}))
    turn = await call
    assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
    assert answer.aborted_turns[0].policy_token_count == len(turn.tokens) > 0
    check_tokens(turn, [1])


# Slots and freeing


async def test_an_adapter_is_freed_when_its_last_turn_ends(lora: Harness) -> None:
    await push(lora, 1)
    short, long = begin(lora, "short", [1], 20), begin(lora, "long", [2], 80)
    await lora.sampled("short")
    await lora.sampled("long")
    await push(lora, 2)
    await short
    assert await adapters_of(lora) == [1, 2]
    assert lora.engine.adapters_removed == []
    assert (await long).versions == [1] * 80
    await freed(lora, 1)
    assert await adapters_of(lora) == [2]


async def test_where_there_is_no_slot_the_oldest_turns_go_on_under_the_new(
    lora: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = [begin(lora, "t0", [1], 150)]
    for version in (1, 2, 3):
        await lora.sampled(f"t{version - 1}")
        await push(lora, version, policy="keep")
        calls.append(begin(lora, f"t{version}", [version + 1], 150))
    turns = [await call for call in calls]
    for index, turn in enumerate(turns):
        check_tokens(turn, [index + 1])
        assert len(turn.tokens) == 150
    # The base needs no slot; version 1 had to make room for version 3.
    assert [sorted(set(turn.versions)) for turn in turns] == [[0], [1, 3], [2], [3]]
    assert "1 turns of adapter version 1 continue under version 3" in caplog.text
    assert lora.serving.adapters.moves == {"max_loras": 1}
    await freed(lora, 1, 2)


async def test_a_single_slot_is_enough(tmp_path: Path) -> None:
    async with serve(tmp_path, step_seconds=0.005, adapters=AdapterLimits(8, 1)) as lora:
        call = begin(lora, "t", [1], 100)
        for version in (1, 2, 3, 4):
            await asyncio.sleep(0.03)
            await push(lora, version, probe=probe(version))
            call2 = await lora.generate(f"n{version}", sampling_params=sampling(5))
            assert set(call2.versions) == {version}
            calls = begin(lora, f"l{version}", [5], 100)
        check_tokens(await call, [1])
        check_tokens(await calls, [5])
        await freed(lora, 1, 2, 3)


async def test_nothing_is_left_of_a_server_that_ends(tmp_path: Path) -> None:
    async with serve(tmp_path, adapters=AdapterLimits(8, 2)) as lora:
        await push(lora, 1)
        assert list((tmp_path / "stage").glob(f"{NAME}*"))
    assert not list((tmp_path / "stage").glob(f"{NAME}*"))


async def test_what_a_killed_server_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "stage" / f"{NAME}left" / "v1").mkdir(parents=True)
    limits = AdapterLimits(8, 2)
    async with (
        serve(tmp_path, adapters=limits) as first,
        serve(tmp_path, adapters=limits) as second,
    ):
        await push(first, 1)
        assert not (tmp_path / "stage" / f"{NAME}left").exists()
        await push(second, 1)
        assert first.engine.adapter_folders[1].exists()


# Refusals


async def test_what_is_wrong_with_an_adapter_is_said_and_nothing_changes(lora: Harness) -> None:
    a, b = tensors_of(1)
    good = tensors_of(1)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("TENSOR_MISSING", {"tensors": {a: good[a]}}, b),
        ("TENSOR_UNKNOWN", {"tensors": {**good, "model.layers.0.mlp.weight": good[a]}}, "mlp"),
        ("SHAPE_MISMATCH", {"tensors": {a: good[a].T.copy(), b: good[b]}}, a),
        ("SHAPE_MISMATCH", {"tensors": tensors_of(1, rank=3)}, a),
        ("DTYPE_MISMATCH", {"tensors": {a: good[a].astype(np.float16), b: good[b]}}, "float32"),
        ("NOT_FINITE", {"tensors": {a: good[a], b: good[b] * np.inf}}, b),
        ("FIELD_INVALID", {"shape": {"rank": 9}}, "from 1 to 8"),
        ("FIELD_INVALID", {"shape": {"rank": 0}}, "header.adapter.rank"),
        ("FIELD_INVALID", {"shape": {"alpha": 0.0}}, "header.adapter.alpha"),
        ("FIELD_INVALID", {"shape": {"alpha": float("nan")}}, "header.adapter.alpha"),
        ("FIELD_INVALID", {"shape": {"target_modules": []}}, "target_modules"),
        ("FIELD_INVALID", {"shape": {"target_modules": ["mlp", "q_proj"]}}, "q_proj"),
        ("FIELD_INVALID", {"shape": {"target_modules": ["embed_tokens"]}}, "embed_tokens"),
        ("FIELD_INVALID", {"base_weight_version": 1}, "header.base_weight_version"),
        ("FIELD_INVALID", {"inline": None, "checkpoint": {"path": "/"}}, "checkpoint"),
        ("FIELD_INVALID", {"inline": None, "collective": {"backend": "gloo"}}, "collective"),
        ("FIELD_INVALID", {"inline": None}, "header.source"),
    ]
    for reason, fields, said in cases:
        failure = await refused_push(lora, 1, **fields)
        assert (failure.reason, said in failure.message) == (reason, True), failure.message
    requests = messages(*adapter(1))
    requests[1].chunk.data = bytes(len(requests[1].chunk.data))
    assert (await refused(lora, requests)).reason == "CHECKSUM_MISMATCH"
    assert lora.engine.adapters_added == []
    assert (await push(lora, 1))[-1].state == ACTIVE


async def test_adapters_keep_the_order_of_versions_and_epochs(lora: Harness) -> None:
    await push(lora, 5)
    for version in (5, 4, 0):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await push(lora, version, policy="drain")
        assert read_failure(caught.value).reason == "WEIGHT_VERSION_STALE"
    await hello(lora.wire, 10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(lora, 6, trainer_epoch=9)
    assert read_failure(caught.value).reason == "STALE_EPOCH"
    await push(lora, 6, trainer_epoch=10)


async def test_a_server_without_lora_says_how_to_start_it(harness: Harness) -> None:
    failure = await refused_push(harness, 1)
    assert failure.reason == "FIELD_INVALID"
    assert failure.metadata["field"] == "header.adapter"
    assert "--enable-lora" in failure.message
    info = await info_of(harness)
    assert not info.HasField("lora")


async def test_full_weights_after_an_adapter_are_refused(lora: Harness) -> None:
    await push(lora, 1)
    for requests in (messages(*header(2)), messages(*delta(2, 1))):
        failure = await refused(lora, requests)
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "ADAPTER_ACTIVE",
        )
        assert failure.metadata["active"] == "1"
    assert (await info_of(lora)).delta_base_weight_version == 0


async def test_full_weights_staged_before_an_adapter_became_active_are_refused_too(
    lora: Harness,
) -> None:
    await push(lora, 1, staged=True)
    await lora.upload(2, staged=True)
    exchange = await hello(lora.wire)
    for version in (1, 2):
        exchange.send(switch_weights={"weight_version": version})
    assert (await exchange.receive("weight_receipt")).active_weight_version == 1
    receipt = await exchange.receive("weight_receipt")
    assert (receipt.active_weight_version, receipt.rejection.reason) == (1, "ADAPTER_ACTIVE")
    assert set((await lora.generate("t")).versions) == {1}


async def test_adapters_may_follow_full_weights(lora: Harness) -> None:
    await lora.upload(1)
    call = begin(lora, "t", [1], 60)
    await lora.sampled("t")
    await push(lora, 2, policy="recompute")
    turn = await call
    check_tokens(turn, [1])
    assert set(turn.versions) == {1, 2}
    # The full version's bytes are no longer needed.
    assert held_bytes(lora) == 0
    info = await info_of(lora)
    assert (info.active_weight_version, info.full_weight_version) == (2, 1)


# Failures


async def test_an_adapter_that_cannot_be_loaded_leaves_the_version_before(lora: Harness) -> None:
    await push(lora, 1)
    call = begin(lora, "t", [1], 60)
    before = await state_of(lora, "seen")
    lora.engine.fail_adapters = 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(lora, 2, policy="abort")
    failure = read_failure(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "WEIGHT_LOAD_FAILED")
    assert await state_of(lora, "seen again") == before
    assert (await call).versions == [1] * 60
    # Sent again, it is accepted.
    assert (await push(lora, 2))[-1].state == ACTIVE


def probe(version: int, **fields: Any) -> Any:
    """The probe that a trainer would send with this version."""
    tokens = [1, 2, 3, 4, 5]
    return WeightProbe(
        **{
            "token_ids": codec.array_bytes(np.asarray(tokens, np.int32)),
            "logprobs": codec.array_bytes(expected_scores(tokens, version), codec.LOGPROB),
            "tolerance": 1e-4,
            **fields,
        }
    )


async def test_a_probe_is_scored_before_anything_samples(lora: Harness) -> None:
    await push(lora, 1)
    lora.engine.score_gate.clear()
    switching = asyncio.ensure_future(push(lora, 2, probe=probe(2)))
    await asyncio.sleep(0.05)
    # Neither running nor new turns wait for the probe.
    assert set((await lora.generate("meanwhile")).versions) == {1}
    lora.engine.score_gate.set()
    responses = await switching
    assert responses[-1].state == ACTIVE
    assert responses[-1].probe.mean_difference == pytest.approx(0.0, abs=1e-6)
    assert set((await lora.generate("after")).versions) == {2}


@pytest.mark.parametrize("slots", [1, 2])
async def test_a_probe_that_is_off_leaves_the_version_before(tmp_path: Path, slots: int) -> None:
    async with serve(tmp_path, step_seconds=0.005, adapters=AdapterLimits(8, slots)) as lora:
        await push(lora, 1)
        call = begin(lora, "t", [1], 60)
        await lora.sampled("t")
        for policy in ("keep", "recompute"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await push(lora, 2, policy=policy, probe=probe(3))
            failure = read_failure(caught.value)
            assert (failure.code, failure.reason) == (
                grpc.StatusCode.DATA_LOSS,
                "PROBE_MISMATCH",
            )
        assert (await call).versions == [1] * 60
        await freed(lora, 2)
        assert await adapters_of(lora) == [1]
        assert (await push(lora, 2, probe=probe(2)))[-1].state == ACTIVE


async def test_where_all_slots_are_taken_the_probe_gets_one(lora: Harness) -> None:
    calls: list[Any] = []
    for version in (1, 2, 3, 4):
        await push(lora, version, probe=probe(version))
        calls.append(begin(lora, f"t{version}", [version], 100))
        await lora.sampled(f"t{version}")
    for index, call in enumerate(calls):
        turn = await call
        check_tokens(turn, [index + 1])
        assert len(turn.tokens) == 100
    assert lora.serving.adapters.moves == {"max_loras": 2}


async def test_an_adapter_does_not_heal_weights_that_nobody_can_trust(lora: Harness) -> None:
    lora.engine.fail_loads = 1
    with pytest.raises(grpc.aio.AioRpcError):
        await lora.upload(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(lora, 2)
    assert read_failure(caught.value).reason == "WEIGHTS_INCONSISTENT"
    await lora.upload(1)
    await push(lora, 2)
    assert set((await lora.generate("t")).versions) == {2}


async def test_a_switch_is_answered_when_the_engine_dies(lora: Harness) -> None:
    await push(lora, 1)
    lora.engine.score_gate.clear()
    switching = asyncio.ensure_future(push(lora, 2, probe=probe(2)))
    await asyncio.sleep(0.05)
    lora.engine.die()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await switching
    assert read_failure(caught.value).reason == "ENGINE_LOST"


# Under load


async def test_twenty_adapters_under_sixteen_turns_label_every_token(lora: Harness) -> None:
    stop = asyncio.Event()
    turns: list[tuple[list[int], Turn]] = []
    chance = random.Random(0)

    async def load(worker: int) -> None:
        count = 0
        while not stop.is_set():
            prompt = [worker + 1, count % 200]
            name = f"w{worker}-{count}"
            turn = await lora.generate(name, prompt, sampling_params=sampling(40))
            while turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED:
                more = await lora.resume(name)
                turn.segments += more.segments
                turn.finished = more.finished
            turns.append((prompt, turn))
            count += 1

    workers = [asyncio.ensure_future(load(worker)) for worker in range(16)]
    for version in range(1, 21):
        fields: dict[str, Any] = {"probe": probe(version)} if chance.random() < 0.3 else {}
        await push(lora, version, policy=chance.choice(list(POLICIES)), **fields)
        await asyncio.sleep(chance.random() * 0.05)
    stop.set()
    await asyncio.gather(*workers)
    for prompt, turn in turns:
        check_tokens(turn, prompt)
        assert len(turn.tokens) == 40
        assert turn.versions == sorted(turn.versions)
    assert sum(len(set(turn.versions)) > 1 for _, turn in turns) > 5
    await freed(lora, *range(1, 20))
    assert await adapters_of(lora) == [20]
    assert lora.engine.pauses == 0
    assert lora.engine.max_running <= MAX_CONTEXT
