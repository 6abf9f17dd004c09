"""Weights over a collective, on the wire: order, refusals, epochs,
and trainers that fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.weights.staging.manifest import WeightRefused
from penstock.server.weights.switch import InFlight
from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import Failure, read_failure
from penstock.wire.messages import CollectiveJoin as Join
from penstock.wire.messages import CollectiveRound as Round
from penstock.wire.reasons import Reason
from tests.support.fakes import TENSORS, expected_scores
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    TensorSpec,
    UpdateWeightsRequest,
    WeightCommit,
    WeightHeader,
    WeightProbe,
    delta,
    header,
    hello,
    messages,
    sampling,
    send,
    serve,
)
from tests.support.weight_checks import check_tokens, held_bytes

READY = weights_pb2.WEIGHT_STATE_READY
ACTIVE = weights_pb2.WEIGHT_STATE_ACTIVE
POLICIES = ("keep", "recompute", "drain", "abort")
EPOCH = 1 << 62
NUMBERS = itertools.count()
NAMES = [name for name, meta in TENSORS.items() if not meta.optional]


@pytest.fixture
async def quick(tmp_path: Path) -> AsyncGenerator[Harness]:
    """A server with a deadline of half a second for everything in a collective."""
    async with serve(tmp_path, "weights.collective_seconds=0.5", step_seconds=0.005) as running:
        yield running


def specs(names: list[str] = NAMES, **fields: Any) -> list[Any]:
    return [
        TensorSpec(**{"name": name, "shape": TENSORS[name].shape, "dtype": "float32", **fields})
        for name in names
    ]


def update(names: list[str] = NAMES, **fields: Any) -> dict[str, Any]:
    """The trainer's description of one round."""
    return {
        "names": names,
        "dtype_names": ["float32"] * len(names),
        "shapes": [list(TENSORS[name].shape) if name in TENSORS else [1] for name in names],
        **fields,
    }


def described(found: Any) -> Any:
    text = found if isinstance(found, str) else json.dumps(found)
    return UpdateWeightsRequest(round=Round(update_json=text))


class Call:
    """One upload over a collective, message by message."""

    def __init__(
        self, harness: Harness, version: int, backend: str = "gloo", **fields: Any
    ) -> None:
        self.head = WeightHeader(
            **{
                "weight_version": version,
                "tensors": specs(),
                "collective": {"backend": backend},
                "activation": weights_pb2.ACTIVATION_IMMEDIATE,
                "trainer_epoch": EPOCH,
                **fields,
            }
        )
        self.call = harness.wire.UpdateWeights()

    async def write(self, request: Any) -> Any:
        await self.call.write(request)
        return await self.call.read()

    async def begin(self) -> None:
        response = await self.write(UpdateWeightsRequest(header=self.head))
        assert response.state == READY, response

    async def round(self, found: Any = None) -> None:
        response = await self.write(described(update() if found is None else found))
        assert response is not grpc.aio.EOF and response.state == READY

    async def commit(self, digest: bytes | None = None) -> Any:
        digest = digest or hashlib.sha256(self.head.SerializeToString(deterministic=True)).digest()
        request = UpdateWeightsRequest(commit=WeightCommit(header_sha256=digest))
        response = await self.write(request)
        await self.call.done_writing()
        if response is not grpc.aio.EOF:
            assert await self.call.read() is grpc.aio.EOF
        return response

    async def whole(self) -> Any:
        await self.begin()
        await self.round()
        return await self.commit()

    async def failure(self, work: Any) -> Failure:
        """The failure that ends the call, whatever it is doing."""
        with contextlib.suppress(grpc.aio.AioRpcError, AssertionError):
            await work
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return read_failure(caught.value)


async def join(harness: Harness, backend: str = "gloo", epoch: int = EPOCH, **fields: Any) -> None:
    rendezvous = json.dumps({"world_size": 2, **fields})
    message = Join(backend=backend, rendezvous_json=rendezvous, trainer_epoch=epoch)
    responses = await send(harness, [UpdateWeightsRequest(join=message)])
    assert [response.state for response in responses] == [READY]


async def failing(work: Any) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return read_failure(caught.value)


async def active(harness: Harness) -> int:
    return int((await harness.wire.GetServerInfo(GetServerInfoRequest())).active_weight_version)


async def serves(harness: Harness, version: int) -> None:
    """Check that turns are sampled by this version, every token as expected."""
    turn = await harness.generate(f"t{next(NUMBERS)}-{version}")
    check_tokens(turn, [1, 2, 3])
    assert set(turn.versions) == {version} == {await active(harness)}


async def test_an_upload_in_rounds_becomes_the_active_version(harness: Harness) -> None:
    await join(harness, address="here")
    assert harness.engine.joined == ("gloo", {"world_size": 2, "address": "here"})
    call = Call(harness, 1)
    await call.begin()
    for name in NAMES:
        await call.round(update([name]))
    response = await call.commit()
    assert response.state == ACTIVE
    assert response.active_weight_version == response.weight_version == 1
    assert response.pause.ToNanoseconds() > 0
    assert response.changed_tensor_count == len(NAMES)
    assert [found["names"] for found in harness.engine.rounds] == [[name] for name in NAMES]
    await serves(harness, 1)
    # The engine is still joined.
    await Call(harness, 2).whole()
    await serves(harness, 2)
    assert harness.engine.joins == 1


async def test_the_server_says_that_it_takes_them(harness: Harness) -> None:
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert weights_pb2.WEIGHT_SOURCE_KIND_COLLECTIVE in info.weight_sources


@pytest.mark.parametrize("policy", POLICIES)
async def test_turns_in_flight_cross_it_by_their_policy(slow: Harness, policy: str) -> None:
    await join(slow)
    calls = [
        asyncio.ensure_future(slow.generate(f"t{i}", [i + 1], sampling_params=sampling(60)))
        for i in range(4)
    ]
    for i in range(4):
        await slow.sampled(f"t{i}")
    call = Call(slow, 1, in_flight=getattr(weights_pb2, f"IN_FLIGHT_POLICY_{policy.upper()}"))
    await call.begin()
    late = asyncio.ensure_future(slow.generate("late", sampling_params=sampling(20)))
    await asyncio.sleep(0.05)
    assert not late.done()
    await call.round()
    await call.commit()
    for index, running in enumerate(calls):
        turn = await running
        check_tokens(turn, [index + 1])
        versions = {"drain": {0}, "abort": {0}}.get(policy, {0, 1})
        assert set(turn.versions) == versions
        aborted = turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
        assert aborted == (policy == "abort")
        assert aborted or len(turn.tokens) == 60
    assert set((await late).versions) == {1}
    check_tokens(await late, [1, 2, 3])
    assert slow.engine.caches_dropped == (policy != "keep")


async def test_nothing_is_sampled_while_its_rounds_arrive(slow: Harness) -> None:
    await join(slow)
    running = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(100)))
    await slow.sampled("t")
    call = Call(slow, 1)
    await call.begin()
    before = slow.engine._running[next(iter(slow.engine._running))].count
    await asyncio.sleep(0.05)
    await call.round()
    assert slow.engine._running[next(iter(slow.engine._running))].count == before
    await call.commit()
    assert set((await running).versions) == {0, 1}


async def test_a_probe_is_scored_after_it(harness: Harness) -> None:
    await join(harness)
    tokens = [1, 2, 3, 4]
    for version, scored_by, reason in ((1, 1, ""), (2, 1, "WEIGHTS_INCONSISTENT")):
        probe = WeightProbe(
            token_ids=codec.array_bytes(tokens),
            logprobs=codec.array_bytes(expected_scores(tokens, scored_by), codec.LOGPROB),
            tolerance=0.01,
        )
        call = Call(harness, version, probe=probe)
        if not reason:
            assert (await call.whole()).probe.mean_difference < 0.01
            await serves(harness, 1)
        else:
            # There are no bytes of version 1 to roll back to.
            failure = await call.failure(call.whole())
            assert failure.reason == reason
    await harness.upload(2)
    await serves(harness, 2)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "staged": (
        {"activation": weights_pb2.ACTIVATION_STAGED},
        "FIELD_INVALID",
        "header.activation",
    ),
    "unknown name": ({"tensors": [*specs(), TensorSpec(name="x")]}, "TENSOR_UNKNOWN", "x"),
    "missing": ({"tensors": specs(NAMES[:1])}, "TENSOR_MISSING", NAMES[1]),
    "shape": ({"tensors": specs(shape=[1])}, "SHAPE_MISMATCH", NAMES[0]),
    "dtype": ({"tensors": specs(dtype="bfloat16")}, "DTYPE_MISMATCH", NAMES[0]),
    "placed": ({"tensors": specs(length_bytes=4)}, "FIELD_INVALID", "header.tensors.length_bytes"),
    "delta": ({"base_weight_version": 1}, "FIELD_INVALID", "header.base_weight_version"),
    "stale": ({"weight_version": 0}, "WEIGHT_VERSION_STALE", ""),
    "other backend": ({"collective": {"backend": "nccl"}}, "SOURCE_UNAVAILABLE", ""),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_header_that_cannot_be_taken_pauses_nothing(harness: Harness, case: str) -> None:
    await join(harness)
    fields, reason, named = REFUSED[case]
    call = Call(harness, fields.pop("weight_version", 1), **fields)
    failure = await call.failure(call.begin())
    assert failure.reason == reason
    found = failure.metadata.get("field" if reason == "FIELD_INVALID" else "tensor", "")
    assert found == named
    assert harness.engine.pauses == 0
    await Call(harness, 1).whole()
    await serves(harness, 1)


async def test_without_a_join_there_is_no_source(harness: Harness) -> None:
    call = Call(harness, 1)
    failure = await call.failure(call.begin())
    assert failure.code is grpc.StatusCode.FAILED_PRECONDITION
    assert failure.reason == "SOURCE_UNAVAILABLE"
    assert harness.engine.pauses == 0


JOINS: dict[str, tuple[Any, str]] = {
    "no backend": (Join(rendezvous_json="{}"), "join.backend"),
    "no JSON": (Join(backend="gloo", rendezvous_json="{"), "join.rendezvous_json"),
    "no object": (Join(backend="gloo", rendezvous_json="[]"), "join.rendezvous_json"),
    "nothing": (Join(backend="gloo"), "join.rendezvous_json"),
    "nested": (Join(backend="gloo", rendezvous_json="[" * 100_000), "join.rendezvous_json"),
}


@pytest.mark.parametrize("case", JOINS)
async def test_a_join_that_makes_no_sense_is_refused(harness: Harness, case: str) -> None:
    message, field = JOINS[case]
    message.trainer_epoch = EPOCH
    failure = await failing(send(harness, [UpdateWeightsRequest(join=message)]))
    assert (failure.reason, failure.metadata["field"]) == ("FIELD_INVALID", field)
    assert harness.engine.joins == 0


async def test_a_backend_that_the_engine_has_not_is_refused(harness: Harness) -> None:
    await join(harness)
    failure = await failing(join(harness, "carrier_pigeon"))
    assert failure.reason == "SOURCE_UNAVAILABLE"
    assert "carrier_pigeon" in failure.message
    # The previous collective has also ended.
    call = Call(harness, 1)
    assert (await call.failure(call.begin())).reason == "SOURCE_UNAVAILABLE"


async def test_joining_again_replaces_what_was_joined(harness: Harness) -> None:
    await join(harness, "gloo")
    await join(harness, "nccl")
    call = Call(harness, 1, "gloo")
    assert (await call.failure(call.begin())).metadata["joined"] == "nccl"
    await Call(harness, 1, "nccl").whole()
    await serves(harness, 1)


async def test_an_older_trainer_can_neither_join_nor_upload(harness: Harness) -> None:
    await join(harness, epoch=5)
    assert (await failing(join(harness, epoch=4))).reason == "STALE_EPOCH"
    call = Call(harness, 1, trainer_epoch=4)
    assert (await call.failure(call.begin())).reason == "STALE_EPOCH"
    await Call(harness, 1, trainer_epoch=5).whole()


@pytest.mark.parametrize("way", ["hello", "join", "upload"])
async def test_a_newer_trainer_ends_the_rounds_of_an_older_one(harness: Harness, way: str) -> None:
    await join(harness, epoch=1)
    old = Call(harness, 1, trainer_epoch=1)
    await old.begin()
    await old.round()
    if way == "hello":
        await hello(harness.wire, epoch=2)
    elif way == "join":
        await join(harness, epoch=2)
    else:
        await harness.upload(1, trainer_epoch=2)
    assert (await old.failure(old.call.read())).reason == "STALE_EPOCH"
    await serves(harness, 1 if way == "upload" else 0)


async def test_a_patch_is_for_what_is_active_when_it_is_its_turn(slow: Harness) -> None:
    await slow.upload(1)
    await join(slow, "sparse_nccl")
    await slow.upload(2, staged=True)
    turn = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(60)))
    await slow.sampled("t")
    switch = asyncio.ensure_future(slow.serving.weights.activate(2, InFlight.DRAIN))
    await asyncio.sleep(0)
    call = Call(slow, 3, "sparse_nccl", base_weight_version=1, tensors=specs(NAMES[:1]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.begin()
    assert read_failure(refused.value).reason == "BASE_VERSION_MISMATCH"
    await switch
    await turn
    assert slow.serving.weights.trusted_version == 2


async def test_one_thing_at_a_time(harness: Harness) -> None:
    harness.engine.meeting.clear()
    joining = asyncio.ensure_future(join(harness))
    while not harness.engine.joins:
        await asyncio.sleep(0.01)
    for work in (join(harness), harness.upload(1)):
        failure = await failing(work)
        assert failure.reason == "UPLOAD_IN_PROGRESS"
        assert failure.metadata == {"backend": "gloo"}
    harness.engine.meeting.set()
    await joining
    call = Call(harness, 1)
    await call.begin()
    for work in (join(harness), harness.upload(2)):
        assert (await failing(work)).metadata == {"weight_version": "1"}
    await call.round()
    await call.commit()
    await serves(harness, 1)


ROUNDS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "FIELD_INVALID"),
    "a number": (1, "FIELD_INVALID"),
    "an empty list": ([], "FIELD_INVALID"),
    "a list of numbers": ([1], "FIELD_INVALID"),
    "names that are no list": ({"names": "x"}, "FIELD_INVALID"),
    "fewer shapes": (update(shapes=[[1]]), "FIELD_INVALID"),
    "a shape that is none": (update(shapes=["x", "y"]), "FIELD_INVALID"),
    "a size that is none": (update(shapes=[[1.5], [1]]), "FIELD_INVALID"),
    "a tensor that was not announced": (update(["x"]), "TENSOR_UNKNOWN"),
    "another shape": (update(shapes=[[1], [1]]), "SHAPE_MISMATCH"),
    "another dtype": (update(dtype_names=["float16", "float16"]), "DTYPE_MISMATCH"),
}


@pytest.mark.parametrize("case", ROUNDS)
async def test_a_round_that_is_not_as_announced_changes_nothing(
    harness: Harness, case: str
) -> None:
    await join(harness)
    found, reason = ROUNDS[case]
    call = Call(harness, 1)
    await call.begin()
    assert (await call.failure(call.round(found))).reason == reason
    assert harness.engine.rounds == []
    await serves(harness, 0)
    await join(harness)
    await Call(harness, 1).whole()
    await serves(harness, 1)


async def test_each_worker_can_have_a_description_of_its_own(harness: Harness) -> None:
    await join(harness)
    call = Call(harness, 1)
    await call.begin()
    await call.round([update(NAMES[:1]), update(NAMES[1:])])
    await call.commit()
    await serves(harness, 1)


async def test_checksums_of_the_header_bind_those_of_the_rounds(harness: Harness) -> None:
    await join(harness)
    call = Call(harness, 1, tensors=specs(xxh3=7))
    await call.begin()
    failure = await call.failure(call.round(update(xxh3=[7, 8])))
    assert (failure.reason, failure.metadata["tensor"]) == ("CHECKSUM_MISMATCH", NAMES[1])
    await join(harness)
    for version, changed in ((1, 2), (2, 0), (3, 1)):
        tensors = specs(xxh3=7)
        if version == 3:
            tensors[0].xxh3 = 8
        response = await Call(harness, version, tensors=tensors).whole()
        assert response.changed_tensor_count == changed


async def test_a_commit_before_everything_came_changes_nothing(harness: Harness) -> None:
    await join(harness)
    call = Call(harness, 1)
    await call.begin()
    await call.round(update(NAMES[:1]))
    failure = await call.failure(call.commit())
    assert (failure.reason, failure.metadata["tensor"]) == ("TENSOR_MISSING", NAMES[1])
    await serves(harness, 0)


async def test_a_commit_of_another_header_changes_nothing(harness: Harness) -> None:
    await join(harness)
    call = Call(harness, 1)
    await call.begin()
    await call.round()
    assert (await call.failure(call.commit(b"other"))).reason == "CHECKSUM_MISMATCH"
    await serves(harness, 0)


async def test_chunks_have_no_place_in_it(harness: Harness) -> None:
    await join(harness)
    call = Call(harness, 1)
    await call.begin()
    chunk = messages(*header(1))[1]
    assert (await call.failure(call.write(chunk))).metadata["field"] == "message"
    await serves(harness, 0)


async def test_what_the_engine_finds_wrong_is_named_and_changes_nothing(harness: Harness) -> None:
    await join(harness)
    call = Call(harness, 1)
    await call.begin()
    harness.engine.refuse_round = WeightRefused(Reason.NOT_FINITE, "a NaN", tensor=NAMES[0])
    failure = await call.failure(call.round())
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")
    assert failure.metadata["tensor"] == NAMES[0]
    await serves(harness, 0)


async def test_a_backend_that_writes_through_needs_a_way_back(harness: Harness) -> None:
    await harness.upload(1)
    for version, held in ((2, True), (3, False)):
        await join(harness, "nccl")
        call = Call(harness, version, "nccl")
        await call.begin()
        harness.engine.refuse_round = WeightRefused(Reason.INTERNAL_ERROR, "it broke")
        failure = await call.failure(call.round())
        if held:
            assert failure.reason == "WEIGHT_LOAD_FAILED"
            assert failure.metadata == {"weight_version": "2", "active": "1"}
            await serves(harness, 1)
            await join(harness, "nccl")
            await Call(harness, 2, "nccl").whole()
            await serves(harness, 2)
            assert held_bytes(harness) == 0
        else:
            assert failure.reason == "WEIGHTS_INCONSISTENT"
            assert (await failing(harness.generate("refused"))).reason == "WEIGHTS_INCONSISTENT"
    # A whole version over the collective also restores service.
    await join(harness, "nccl")
    await Call(harness, 3, "nccl").whole()
    await serves(harness, 3)


async def test_a_broken_transfer_does_not_make_inconsistent_weights_serve(
    harness: Harness,
) -> None:
    await join(harness)
    await Call(harness, 1).whole()
    harness.engine.fail_finishes = 1
    call = Call(harness, 2)
    assert (await call.failure(call.whole())).reason == "WEIGHTS_INCONSISTENT"
    await join(harness)
    call = Call(harness, 2)
    await call.begin()
    harness.engine.refuse_round = WeightRefused(Reason.NOT_FINITE, "a NaN", tensor=NAMES[0])
    assert (await call.failure(call.round())).reason == "NOT_FINITE"
    assert (await failing(harness.generate("refused"))).reason == "WEIGHTS_INCONSISTENT"
    await join(harness)
    await Call(harness, 2).whole()
    await serves(harness, 2)


async def test_no_delta_applies_to_what_came_by_a_collective(harness: Harness) -> None:
    await harness.upload(1)
    await join(harness)
    await Call(harness, 2).whole()
    assert held_bytes(harness) == 0
    assert (await failing(send(harness, messages(*delta(3, 2))))).reason == "BASE_VERSION_MISMATCH"
    await harness.upload(3)
    await send(harness, messages(*delta(4, 3)))
    await serves(harness, 4)


async def test_patches_need_not_be_whole_but_know_their_base(harness: Harness) -> None:
    await harness.upload(2)
    await join(harness, "sparse_nccl")
    patch = {"tensors": specs(NAMES[:1])}
    call = Call(harness, 3, "sparse_nccl", base_weight_version=1, **patch)
    failure = await call.failure(call.begin())
    assert failure.reason == "BASE_VERSION_MISMATCH"
    assert failure.metadata == {"base": "1", "active": "2"}
    call = Call(harness, 3, "sparse_nccl", base_weight_version=2, **patch)
    await call.begin()
    await call.round(update(NAMES[:1], num_updates_list=[3]))
    assert (await call.commit()).active_weight_version == 3
    await serves(harness, 3)


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("way", ["cancels", "half-closes", "says nothing"])
async def test_a_trainer_that_is_gone_between_rounds_changes_nothing(
    quick: Harness, way: str, rounds: int
) -> None:
    await join(quick)
    running = asyncio.ensure_future(quick.generate("t", sampling_params=sampling(100)))
    await quick.sampled("t")
    call = Call(quick, 1)
    await call.begin()
    for _ in range(rounds):
        await call.round()
    if way == "cancels":
        call.call.cancel()
    elif way == "half-closes":
        await call.call.done_writing()
    async with asyncio.timeout(20):
        turn = await running
        if way != "cancels":
            failure = await call.failure(call.call.read())
            assert failure.reason == "SOURCE_UNAVAILABLE"
    check_tokens(turn, [1, 2, 3])
    assert set(turn.versions) == {0}
    await serves(quick, 0)
    await join(quick)
    await Call(quick, 1).whole()
    await serves(quick, 1)


async def test_a_trainer_that_is_gone_before_the_engine_has_paused_changes_nothing(
    quick: Harness,
) -> None:
    await join(quick)
    running = asyncio.ensure_future(quick.generate("t", sampling_params=sampling(60)))
    await quick.sampled("t")
    call = Call(quick, 1, in_flight=weights_pb2.IN_FLIGHT_POLICY_DRAIN)
    await call.call.write(UpdateWeightsRequest(header=call.head))
    await asyncio.sleep(0.05)
    call.call.cancel()
    assert len((await running).tokens) == 60
    await serves(quick, 0)
    assert quick.engine.rounds == []
    await harness_free(quick)


async def harness_free(harness: Harness) -> None:
    """Check that the ended call blocks nothing."""
    await harness.upload(7)
    await serves(harness, 7)


async def test_a_trainer_that_is_gone_after_the_commit_is_too_late(harness: Harness) -> None:
    await join(harness)
    call = Call(harness, 1)
    await call.begin()
    await call.round()
    harness.engine.finishing.clear()
    committing = asyncio.ensure_future(call.commit())
    while not harness.engine._changed:
        await asyncio.sleep(0.01)
    call.call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    harness.engine.finishing.set()
    late = await harness.generate("late")
    assert set(late.versions) == {1}
    await serves(harness, 1)


async def test_a_round_whose_bytes_never_come_ends_at_its_deadline(quick: Harness) -> None:
    await join(quick)
    call = Call(quick, 1)
    await call.begin()
    quick.engine.arriving.clear()
    async with asyncio.timeout(20):
        failure = await call.failure(call.round())
    assert failure.reason == "SOURCE_UNAVAILABLE"
    await serves(quick, 0)


async def test_a_join_that_nobody_comes_to_ends_at_its_deadline(quick: Harness) -> None:
    quick.engine.meeting.clear()
    async with asyncio.timeout(20):
        assert (await failing(join(quick))).reason == "SOURCE_UNAVAILABLE"
    await harness_free(quick)


async def test_a_join_whose_trainer_is_gone_makes_room_when_it_has_ended(quick: Harness) -> None:
    quick.engine.meeting.clear()
    message = Join(backend="gloo", rendezvous_json="{}", trainer_epoch=1)
    call = quick.wire.UpdateWeights()
    await call.write(UpdateWeightsRequest(join=message))
    await call.read()
    call.cancel()
    # A newer trainer waits for the join to end.
    await quick.upload(1, trainer_epoch=2)
    await serves(quick, 1)


async def test_an_engine_that_hangs_in_a_collective_is_lost(quick: Harness) -> None:
    await join(quick, "nccl")
    call = Call(quick, 1, "nccl")
    await call.begin()
    quick.engine.arriving.clear()
    async with asyncio.timeout(20):
        failure = await call.failure(call.round())
        assert failure.code is grpc.StatusCode.UNAVAILABLE
        assert failure.reason == "ENGINE_LOST"
        assert "hangs" in await quick.life.failed()


async def test_a_stop_does_not_wait_for_a_trainer(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        await join(harness)
        call = Call(harness, 1)
        await call.begin()
    async with asyncio.timeout(20):
        assert await call.call.code() is not grpc.StatusCode.OK


async def test_what_was_staged_before_is_outdated_by_it(harness: Harness) -> None:
    exchange = await hello(harness.wire, EPOCH)
    await harness.upload(1, staged=True)
    await join(harness)
    await Call(harness, 2).whole()
    for version, rejected in ((1, "WEIGHT_VERSION_NOT_STAGED"), (2, "")):
        exchange.send(switch_weights={"weight_version": version})
        receipt = await exchange.receive("weight_receipt")
        assert receipt.rejection.reason == rejected
        assert receipt.active_weight_version == 2
    assert held_bytes(harness) == 0
