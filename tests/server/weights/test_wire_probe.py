"""Probes: correct weights pass; wrong weights are rolled back and all
their tokens are discarded."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from tests.support.fakes import MAX_CONTEXT, VOCAB_SIZE, expected_scores
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    WeightProbe,
    delta,
    header,
    hello,
    messages,
    payload,
    sampling,
    send,
    serve,
    until,
)
from tests.support.weight_checks import MODEL_BYTES, check_tokens, held_bytes, refused, state_of

TOKENS = [*range(1, 40)]
ABORTED = trajectory_pb2.FINISH_REASON_ABORTED
POLICIES = ("keep", "recompute", "drain", "abort")


def policy_of(name: str) -> Any:
    return getattr(weights_pb2, f"IN_FLIGHT_POLICY_{name.upper()}")


def probe(version: int, tolerance: float = 0.01, off: float = 0.0, **fields: Any) -> Any:
    """The probe that a trainer with this version sends."""
    tokens = fields.get("tokens", TOKENS)
    logprobs = fields.get("logprobs", expected_scores(tokens, version) + np.float32(off))
    return WeightProbe(
        token_ids=codec.array_bytes(np.asarray(tokens, np.int32)),
        logprobs=codec.array_bytes(np.asarray(logprobs, np.float32), codec.LOGPROB),
        tolerance=tolerance,
    )


async def fails(harness: Harness, requests: list[Any]) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(harness, requests)
    return read_failure(caught.value)


async def test_a_right_version_passes_and_says_how_far_it_is_off(harness: Harness) -> None:
    responses = await harness.upload(1, probe=probe(1, off=0.005))
    assert responses[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
    assert responses[-1].probe.mean_difference == pytest.approx(0.005, rel=1e-3)
    assert responses[-1].probe.max_difference == pytest.approx(0.005, rel=1e-3)
    assert not any(response.HasField("probe") for response in responses[:-1])
    responses = await send(harness, messages(*delta(2, 1, probe=probe(2))))
    assert responses[-1].probe.mean_difference == 0.0
    assert harness.engine.scores == 2
    assert not (await harness.upload(3))[-1].HasField("probe")


async def test_the_receipt_of_a_switch_tells_of_the_probe(harness: Harness) -> None:
    exchange = await hello(harness.wire, 1 << 62)
    await harness.upload(1)
    await harness.upload(2, staged=True, probe=probe(2))
    assert harness.engine.scores == 0
    exchange.send(switch_weights={"weight_version": 2})
    receipt = await exchange.receive("weight_receipt")
    assert receipt.HasField("pause")
    assert receipt.HasField("probe")
    assert receipt.active_weight_version == 2
    await harness.upload(3, staged=True, probe=probe(3))
    harness.engine.corrupt_next_load = True
    exchange.send(switch_weights={"weight_version": 3})
    receipt = await exchange.receive("weight_receipt")
    assert receipt.active_weight_version == 2
    assert receipt.rejection.reason == "PROBE_MISMATCH"
    assert receipt.probe.mean_difference > 0.01
    found = float(receipt.rejection.metadata["mean_difference"])
    assert found == pytest.approx(receipt.probe.mean_difference)


@pytest.mark.parametrize("policy", POLICIES)
async def test_what_wrong_weights_sampled_is_thrown_away(slow: Harness, policy: str) -> None:
    await slow.upload(1)
    before = await state_of(slow, "before")
    calls = [
        asyncio.ensure_future(slow.generate(f"t{i}", [i + 1], sampling_params=sampling(60)))
        for i in range(4)
    ]
    for i in range(4):
        await slow.sampled(f"t{i}")
    slow.engine.corrupt_next_load = True
    slow.engine.score_gate.clear()
    head, data = header(2, in_flight=policy_of(policy), probe=probe(2))
    uploading = asyncio.ensure_future(fails(slow, messages(head, data)))
    while slow.engine.version != 2:
        await asyncio.sleep(0.01)
    # They continue under the new version for longer than any of them needs to finish.
    late = asyncio.ensure_future(slow.generate("late", sampling_params=sampling(5)))
    await asyncio.sleep(0.5)
    assert (await slow.wire.GetServerInfo(GetServerInfoRequest())).active_weight_version == 1
    assert not late.done()
    slow.engine.score_gate.set()
    failure = await uploading
    assert (failure.code, failure.reason) == (grpc.StatusCode.DATA_LOSS, "PROBE_MISMATCH")
    assert float(failure.metadata["mean_difference"]) > float(failure.metadata["tolerance"])
    assert failure.metadata["active"] == "1"
    for index, call in enumerate(calls):
        turn = await call
        assert set(turn.versions) == {1}
        check_tokens(turn, [index + 1])
        if policy == "drain":
            assert len(turn.tokens) == 60
            continue
        assert turn.finished.finish_reason == ABORTED
        assert 0 < len(turn.tokens) < 60
        rest = await slow.resume(f"t{index}")
        assert set(rest.versions) == {1}
        assert len(turn.tokens + rest.tokens) == 60
        turn.segments += rest.segments
        check_tokens(turn, [index + 1])
    check_tokens(await late, [1, 2, 3])
    after = await state_of(slow, "after")
    assert after.tokens == before.tokens
    assert (after.active, after.staged, after.base, after.held_bytes) == (1, (), 1, MODEL_BYTES)
    # The bad weights' cache has the version's salt, and must not be found under it later.
    assert slow.engine.caches_dropped >= 1
    assert slow.engine.payloads == [payload(1)[0], payload(2)[0], payload(1)[0]]
    await slow.upload(2, probe=probe(2))


@pytest.mark.parametrize("policy", ["keep", "recompute"])
async def test_what_right_weights_sampled_is_only_held_back(slow: Harness, policy: str) -> None:
    prompts = [[i + 1] for i in range(4)]
    calls = [
        asyncio.ensure_future(slow.generate(f"t{i}", prompt, sampling_params=sampling(60)))
        for i, prompt in enumerate(prompts)
    ]
    for i in range(4):
        await slow.sampled(f"t{i}")
    slow.engine.score_gate.clear()
    head, data = header(1, in_flight=policy_of(policy), probe=probe(1))
    begun = time.monotonic()
    uploading = asyncio.ensure_future(send(slow, messages(head, data)))
    await until(lambda: slow.engine.version == 1 and not slow.engine._paused)
    resumed = time.monotonic()
    late = asyncio.ensure_future(slow.generate("late", sampling_params=sampling(5)))
    await asyncio.sleep(0.5)
    assert not any(call.done() for call in [*calls, late])
    assert {turn.record.segments[-1].weight_version for turn in slow.serving.turns.sampling} == {0}
    slow.engine.score_gate.set()
    responses = await uploading
    # The pause ends at resume; the half second of the probe does not count.
    assert responses[-1].pause.ToTimedelta().total_seconds() < resumed - begun
    for prompt, call in zip(prompts, calls, strict=True):
        turn = await call
        assert sorted(set(turn.versions)) == [0, 1]
        assert len(turn.tokens) == 60
        check_tokens(turn, prompt)
    assert set((await late).versions) == {1}


async def test_an_abort_during_a_probe_waits_for_its_verdict(slow: Harness) -> None:
    for version, good in ((1, True), (2, False)):
        name = f"t{version}"
        call = asyncio.ensure_future(slow.generate(name, sampling_params=sampling(200)))
        await slow.sampled(name)
        slow.engine.score_gate.clear()
        slow.engine.corrupt_next_load = not good
        head, data = header(version, in_flight=policy_of("keep"), probe=probe(version))
        uploading = asyncio.ensure_future(send(slow, messages(head, data)))
        while slow.engine.version != version:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        aborting = asyncio.ensure_future(slow.serving.turns.abort(slow.serving.turns.sampling))
        await asyncio.sleep(0.05)
        assert not aborting.done()
        slow.engine.score_gate.set()
        await asyncio.gather(uploading, return_exceptions=True)
        await aborting
        turn = await call
        assert turn.finished.finish_reason == ABORTED
        check_tokens(turn, [1, 2, 3])
        assert set(turn.versions) == ({0, 1} if good else {1})


async def test_an_engine_that_dies_over_a_probe_ends_its_turns(slow: Harness) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(200)))
    await slow.sampled("t")
    slow.engine.score_gate.clear()
    head, data = header(1, in_flight=policy_of("keep"), probe=probe(1))
    uploading = asyncio.ensure_future(fails(slow, messages(head, data)))
    while slow.engine.version != 1:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    slow.engine.die()
    assert (await uploading).reason == "ENGINE_LOST"
    try:
        turn = await call
        assert turn.finished.finish_reason == ABORTED
        assert set(turn.versions) == {0}
    except grpc.aio.AioRpcError as error:
        assert read_failure(error).reason == "ENGINE_LOST"


async def test_a_score_that_is_no_number_is_a_mismatch(harness: Harness) -> None:
    await harness.upload(1)
    score = harness.engine.score

    async def broken(token_ids: Any) -> Any:
        return await score(token_ids) * np.float32(np.nan)

    harness.engine.score = broken  # type: ignore[method-assign]
    failure = await fails(harness, messages(*header(2, probe=probe(2))))
    assert failure.reason == "PROBE_MISMATCH"
    assert (await state_of(harness, "t")).active == 1


async def test_an_engine_that_cannot_score_is_not_trusted(slow: Harness) -> None:
    await slow.upload(1)
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(200)))
    await slow.sampled("t")

    async def broken(token_ids: Any) -> Any:
        await asyncio.sleep(0.1)
        raise RuntimeError("told to fail")

    slow.engine.score = broken  # type: ignore[method-assign]
    failure = await fails(slow, messages(*header(2, probe=probe(2), in_flight=policy_of("keep"))))
    assert failure.reason == "INTERNAL_ERROR"
    assert set((await call).versions) == {1}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await slow.generate("u")
    assert read_failure(caught.value).reason == "WEIGHTS_INCONSISTENT"
    await slow.upload(2)
    assert set((await slow.generate("u")).versions) == {2}


async def test_without_a_way_back_a_bad_probe_stops_serving(slow: Harness) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(200)))
    await slow.sampled("t")
    slow.engine.corrupt_next_load = True
    head, data = header(1, in_flight=policy_of("keep"), probe=probe(1))
    failure = await fails(slow, messages(head, data))
    assert failure.reason == "WEIGHTS_INCONSISTENT"
    assert "probe" in failure.metadata["problem"]
    turn = await call
    assert set(turn.versions) == {0}
    assert held_bytes(slow) == 0
    await slow.upload(1, probe=probe(1))
    assert set((await slow.resume("t")).versions) == {1}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one token": ({"tokens": [1], "logprobs": []}, "token_ids"),
    "none": ({"tokens": [], "logprobs": []}, "token_ids"),
    "too long": ({"tokens": [1] * MAX_CONTEXT}, "token_ids"),
    "outside": ({"tokens": [1, VOCAB_SIZE]}, "token_ids"),
    "negative": ({"tokens": [-1, 2]}, "token_ids"),
    "too few values": ({"logprobs": [0.0]}, "logprobs"),
    "not a number": ({"tokens": [1, 2], "logprobs": [np.nan]}, "logprobs"),
    "infinite": ({"tokens": [1, 2], "logprobs": [-np.inf]}, "logprobs"),
    "no tolerance": ({"tolerance": 0.0}, "tolerance"),
    "negative tolerance": ({"tolerance": -1.0}, "tolerance"),
    "infinite tolerance": ({"tolerance": np.inf}, "tolerance"),
    "a tolerance that is none": ({"tolerance": np.nan}, "tolerance"),
}


async def test_a_probe_that_cannot_be_scored_is_refused_with_the_header(harness: Harness) -> None:
    for name, (fields, field) in BAD.items():
        failure = await refused(harness, messages(*header(1, probe=probe(1, **fields))))
        assert failure.metadata["field"] == f"header.probe.{field}", name
    crooked = WeightProbe(token_ids=b"12345", logprobs=b"1234", tolerance=1.0)  # type: ignore[arg-type]
    failure = await refused(harness, messages(*header(1, probe=crooked)))
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert harness.engine.scores == 0


async def test_probes_good_and_bad_under_load_mislabel_nothing(tmp_path: Path) -> None:
    dice = random.Random(7)
    async with serve(tmp_path, step_seconds=0.002) as harness:
        await harness.upload(1)
        stop = asyncio.Event()
        seen: list[tuple[list[int], Any, int]] = []

        async def agent(worker: int) -> None:
            count = 0
            while not stop.is_set():
                name, prompt = f"w{worker}-{count}", [worker + 1, count % 200]
                turn = await harness.generate(name, prompt, sampling_params=sampling(40))
                parts = 1
                while turn.finished.finish_reason == ABORTED:
                    rest = await harness.resume(name)
                    turn.segments += rest.segments
                    turn.finished = rest.finished
                    parts += 1
                seen.append((prompt, turn, parts))
                count += 1

        agents = [asyncio.ensure_future(agent(worker)) for worker in range(8)]
        good = {1}
        for version in range(2, 42):
            fields = {"in_flight": policy_of(dice.choice(POLICIES))}
            harness.engine.fail_loads = int(dice.random() < 0.15)
            if dice.random() < 0.7:
                fields["probe"] = probe(version)
                # The rollback is a load too, and must not be corrupted.
                harness.engine.corrupt_next_load = (
                    not harness.engine.fail_loads and dice.random() < 0.4
                )
            upload = header if dice.random() < 0.3 else delta
            base = () if upload is header else (max(good),)
            try:
                await send(harness, messages(*upload(version, *base, **fields)))
                good.add(version)
            except grpc.aio.AioRpcError as error:
                assert read_failure(error).reason in ("PROBE_MISMATCH", "WEIGHT_LOAD_FAILED")
            assert held_bytes(harness) == MODEL_BYTES
        stop.set()
        await asyncio.gather(*agents)
        assert 10 < len(good) < 41
        for prompt, turn, _ in seen:
            assert set(turn.versions) <= good
            assert len(turn.tokens) == 40
            check_tokens(turn, prompt)
        assert any(parts > 1 for _, _, parts in seen)
        assert any(len(set(turn.versions)) > 1 for _, turn, _ in seen)
