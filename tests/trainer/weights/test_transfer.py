"""vLLM's weight-sync protocol over the wire, with the fake engine; and the layout of gloo's buckets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from penstock.trainer.core.errors import TrainerError
from penstock.trainer.weights.collective.transfer import PenstockWeightSyncClient, WeightSyncFailed
from penstock.v1 import weights_pb2
from penstock.wire import gloo_group
from tests.support.fakes import TENSORS
from tests.support.harness import Harness

NAMES = [name for name, meta in TENSORS.items() if not meta.optional]
SPECS = tuple(
    weights_pb2.TensorSpec(name=name, shape=TENSORS[name].shape, dtype="float32") for name in NAMES
)


def described(
    version: int, tensors: Sequence[weights_pb2.TensorSpec] = ()
) -> weights_pb2.WeightHeader:
    return weights_pb2.WeightHeader(weight_version=version, trainer_epoch=1, tensors=tensors)


def update(*names: str, **fields: Any) -> dict[str, Any]:
    return {
        "names": list(names),
        "dtype_names": ["float32"] * len(names),
        "shapes": [list(TENSORS[name].shape) for name in names],
        **fields,
    }


@pytest.fixture
async def client(harness: Harness) -> AsyncGenerator[PenstockWeightSyncClient]:
    """A client that has joined."""
    client = PenstockWeightSyncClient(harness.address, "gloo", timeout_seconds=2.0)
    await asyncio.to_thread(client.init_weight_transfer_engine, {"port": 7})
    assert harness.engine.joined == ("gloo", {"port": 7})
    yield client
    client.close()


async def test_the_four_calls_make_one_update(
    harness: Harness, client: PenstockWeightSyncClient
) -> None:
    def run() -> None:
        for version, tensors in ((1, ()), (2, SPECS)):
            client.prepare(described(version, tensors))
            client.start_weight_update()
            assert bool(harness.engine._updating) == bool(tensors)
            # If `prepare` does not name the tensors, the first round must name them all.
            rounds = [update(*NAMES)] if not tensors else [update(name) for name in NAMES]
            for found in rounds:
                client.update_weights(found)
            client.finish_weight_update(str(version))
            assert client.result.active_weight_version == version
            assert client.result.changed_tensor_count == len(NAMES)

    await asyncio.to_thread(run)
    assert [json.dumps(found) for found in harness.engine.rounds] == [
        json.dumps(update(name)) for name in NAMES
    ]


async def test_refusals_carry_the_servers_reason(
    harness: Harness, client: PenstockWeightSyncClient
) -> None:
    def run() -> None:
        client.prepare(described(1))
        client.start_weight_update()
        with pytest.raises(WeightSyncFailed, match="TENSOR_MISSING") as caught:
            client.update_weights(update(NAMES[0]))
        assert caught.value.failure.metadata["tensor"] == NAMES[1]
        with pytest.raises(RuntimeError, match="no update"):
            client.finish_weight_update()
        client.prepare(described(0, SPECS))
        with pytest.raises(WeightSyncFailed, match="WEIGHT_VERSION_STALE"):
            client.start_weight_update()
        client.trainer_epoch = 5
        client.init_weight_transfer_engine({})
        client.trainer_epoch = 4
        with pytest.raises(WeightSyncFailed, match="STALE_EPOCH"):
            client.init_weight_transfer_engine({})

    await asyncio.to_thread(run)
    assert harness.engine.pauses == 0


async def test_an_answer_that_does_not_come_ends_at_the_deadline(
    harness: Harness, client: PenstockWeightSyncClient
) -> None:
    harness.engine.arriving.clear()

    def run() -> None:
        client.prepare(described(1, SPECS))
        client.start_weight_update()
        began = time.monotonic()
        with pytest.raises(WeightSyncFailed, match="DEADLINE_EXCEEDED"):
            client.update_weights(update(*NAMES))
        assert 2.0 <= time.monotonic() - began < 20.0

    await asyncio.to_thread(run)
    # The client's call is gone, so nothing of the update remains once the round is over.
    harness.engine.arriving.set()
    turn = await harness.generate("t")
    assert set(turn.versions) == {0}


async def test_it_is_told_what_the_next_update_is(client: PenstockWeightSyncClient) -> None:
    with pytest.raises(RuntimeError, match="prepare"):
        client.start_weight_update()
    client.prepare(described(3))
    with pytest.raises(ValueError, match="version 3"):
        client.finish_weight_update("4")


async def test_what_is_no_json_is_not_sent(
    client: PenstockWeightSyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainerError, match="not JSON"):
        client.init_weight_transfer_engine({"key": b"bytes"})
    pytest.importorskip("vllm")
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    client.prepare(described(1))
    with pytest.raises(TrainerError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        client.update_weights(update(*NAMES, ipc_handles=[{"gpu": (1, b"handle")}]))


@pytest.mark.parametrize("bucket_bytes", [1, 7, 64, 100, 10_000])
def test_buckets_cover_every_byte_once(bucket_bytes: int) -> None:
    lengths = [5, 0, 64, 130, 1]
    offsets, total = gloo_group.lay_out(lengths)
    assert offsets == [0, 64, 64, 128, 320]
    assert total == 384
    cuts = list(gloo_group.buckets(total, bucket_bytes))
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts)][:-1]
    assert cuts[-1][1] == total
    assert all(0 < end - begin <= bucket_bytes for begin, end in cuts)
    assert list(gloo_group.buckets(0, bucket_bytes)) == []


def test_nobody_waits_where_nobody_listens() -> None:
    meeting = gloo_group.Meeting("127.0.0.1", 0, 2, 60.0)
    port = meeting.port
    del meeting
    began = time.monotonic()
    with pytest.raises(gloo_group.GroupBroken, match=f"no trainer listens at 127.0.0.1:{port}"):
        gloo_group.join_group("127.0.0.1", port, 1, 2, 60.0)
    assert time.monotonic() - began < 20.0


def test_a_meeting_that_nobody_comes_to_ends() -> None:
    meeting = gloo_group.Meeting("127.0.0.1", 0, 2, 0.5)
    began = time.monotonic()
    with pytest.raises(gloo_group.GroupBroken, match="did not meet"):
        meeting.lead()
    assert time.monotonic() - began < 20.0
