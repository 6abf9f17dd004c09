"""Shared memory is verified while it is filled: in any order, with one verdict, all or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.common.memory_file import MemoryFile
from penstock.server.engine.protocol import TensorMeta
from penstock.server.weights.staging.filling import Filling
from penstock.server.weights.staging.incoming import IncomingUpload
from penstock.server.weights.staging.manifest import ManifestTensor, WeightRefused
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.server.weights.staging.verify import Check
from penstock.v1 import weights_pb2
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    UpdateWeightsRequest,
    WeightCommit,
    header,
    shared,
)

SHAPES = {"a": (7, 4), "b": (3,), "c": (), "d": (0, 5), "e": (40,)}
EXPECTED = {name: TensorMeta(shape) for name, shape in SHAPES.items()}
PADDING = 12
READY, STAGED, ACTIVE = (
    weights_pb2.WEIGHT_STATE_READY,
    weights_pb2.WEIGHT_STATE_STAGED,
    weights_pb2.WEIGHT_STATE_ACTIVE,
)
NAN = b"\0\0\xc0\x7f"


def version(seed: int = 0) -> tuple[bytearray, list[ManifestTensor], list[int]]:
    """A payload with gaps between its tensors, its manifest without
    checksums, and the checksums."""
    data, manifest, checksums = bytearray(), list[ManifestTensor](), list[int]()
    random = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        part = random.standard_normal(shape).astype(np.float32).tobytes()
        manifest.append(ManifestTensor(name, shape, "float32", len(data), len(part), 0))
        checksums.append(xxhash.xxh3_64_intdigest(part))
        data += part + bytes(PADDING)
    return data, manifest, checksums


@contextlib.contextmanager
def memory(data: bytes) -> Iterator[MemoryFile]:
    file = MemoryFile(len(data), with_progress=True)
    file.view[:] = data
    try:
        yield file
    finally:
        file.close()


async def begin(
    stage: WeightStage, file: MemoryFile, manifest: Sequence[ManifestTensor]
) -> IncomingUpload:
    return await stage.begin_shared(
        1,
        manifest,
        str(file.path),
        file.host_namespace,
        progress_offset_bytes=file.progress_offset_bytes,
    )


# Bytes arrive after the header, and the progress word is only a hint


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("told", [True, False])
async def test_what_is_filled_after_the_header_is_verified(sealed: bool, told: bool) -> None:
    data, manifest, checksums = version()
    stage = WeightStage(None, EXPECTED, "float32")
    place = -(-len(data) // 64) * 64
    with contextlib.ExitStack() as stack:
        if sealed:
            file = stack.enter_context(memory(bytes(len(data))))
            path, namespace = file.path, file.host_namespace
            assert file.progress_offset_bytes == place
        else:
            head, path = stack.enter_context(shared(header(1)[0], bytes(place + 8)))
            namespace = head.shared_memory.host_namespace
        with path.open("r+b", buffering=0) as writer:
            upload = await stage.begin_shared(
                1, manifest, str(path), namespace, progress_offset_bytes=place if told else 0
            )
            for begin in range(0, len(data), 50):
                writer.seek(begin)
                writer.write(data[begin : begin + 50])
                writer.seek(place)
                writer.write(min(begin + 50, len(data)).to_bytes(8, "little"))
                await asyncio.sleep(0.001)
            staged = await upload.verify(checksums)
        assert staged.weights.path.read_bytes()[: len(data)] == data
        assert dict(staged.hashes) == dict(zip(SHAPES, checksums, strict=True))
        staged.release()
    stage.close()


async def test_what_the_word_says_is_looked_at_before_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()
    update: Callable[..., None] = Check.update

    def seen(check: Check, piece: memoryview) -> None:
        update(check, piece)
        loop.call_soon_threadsafe(looked.set)

    monkeypatch.setattr(Check, "update", seen)
    data, manifest, checksums = version()
    with memory(bytes(data)) as file:
        stage = WeightStage(None, EXPECTED, "float32")
        upload = await begin(stage, file, manifest)
        # However long nothing new arrived.
        await asyncio.sleep(0.1)
        assert not looked.is_set()
        file.tell_filled(8)
        async with asyncio.timeout(20):
            await looked.wait()
        # Reported too early: the verified bytes are those of the check.
        file.view[:4] = b"\xff" * 4
        (await upload.verify(checksums)).release()
        stage.close()


def verdict(
    manifest: Sequence[ManifestTensor], spoiled: set[str], not_finite: set[str]
) -> tuple[Reason, str] | None:
    """The expected refusal, and its tensor."""
    for tensor in manifest:
        if tensor.name in spoiled:
            return Reason.CHECKSUM_MISMATCH, tensor.name
        if tensor.name in not_finite:
            return Reason.NOT_FINITE, tensor.name
    return None


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    said=st.lists(
        st.tuples(
            st.integers(0, 500) | st.sampled_from([1 << 31, 1 << 63, (1 << 64) - 1]),
            st.sampled_from([None, 0.0, 0.0005]),
        ),
        max_size=12,
    ),
    spoiled=st.sets(st.sampled_from(list(SHAPES)), max_size=2),
    not_finite=st.sets(st.sampled_from(["a", "b", "c", "e"]), max_size=2),
)
async def test_the_verdict_is_the_same_whatever_the_word_says_and_whenever_the_commit_comes(
    said: list[tuple[int, float | None]], spoiled: set[str], not_finite: set[str]
) -> None:
    data, manifest, checksums = version()
    for index, tensor in enumerate(manifest):
        end = tensor.offset_bytes + tensor.length_bytes
        if tensor.name in not_finite:
            data[end - 4 : end] = NAN
        digest = xxhash.xxh3_64_intdigest(data[tensor.offset_bytes : end])
        checksums[index] = digest ^ (tensor.name in spoiled)
    with memory(bytes(data)) as file:
        stage = WeightStage(None, EXPECTED, "float32")
        upload = await begin(stage, file, manifest)
        for value, pause in said:
            file.tell_filled(value)
            if pause is not None:
                await asyncio.sleep(pause)
        expected = verdict(manifest, spoiled, not_finite)
        async with asyncio.timeout(20):
            if expected is None:
                staged = await upload.verify(checksums)
                assert dict(staged.hashes) == dict(zip(SHAPES, checksums, strict=True))
                staged.release()
            else:
                with pytest.raises(WeightRefused) as caught:
                    await upload.verify(checksums)
                assert (caught.value.reason, caught.value.metadata["tensor"]) == expected
        stage.close()


async def test_a_word_that_never_moves_keeps_nobody_waiting_and_hardly_a_core_busy() -> None:
    data, manifest, _ = version()
    with memory(bytes(data)) as file:
        stage = WeightStage(None, EXPECTED, "float32")
        upload = await begin(stage, file, manifest)
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < 0.1
        async with asyncio.timeout(20):
            await upload.end()
        stage.close()


@pytest.mark.parametrize("place", [-8, 8, 12, 1 << 62, "misaligned", "end"])
async def test_a_word_in_a_tensor_or_outside_is_refused(place: int | str) -> None:
    data, manifest, _ = version()
    with memory(bytes(data)) as file:
        places = {"misaligned": file.progress_offset_bytes - 4, "end": path_length(file.path)}
        offset = places[place] if isinstance(place, str) else place
        stage = WeightStage(None, EXPECTED, "float32")
        with pytest.raises(WeightRefused) as caught:
            await stage.begin_shared(
                1, manifest, str(file.path), file.host_namespace, progress_offset_bytes=offset
            )
        stage.close()
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.metadata["field"] == "header.shared_memory.progress_offset_bytes"
    assert caught.value.metadata["got"] == str(offset)


def path_length(path: Path) -> int:
    return path.stat().st_size


# Slow checks


class Held:
    """Blocks a check that has begun until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.go_on = threading.Event()
        self.ended = 0
        self._loop = asyncio.get_running_loop()
        follow: Callable[..., None] = Filling._follow

        def slowly(filling: Filling) -> None:
            self._loop.call_soon_threadsafe(self.begun.set)
            assert self.go_on.wait(20)
            follow(filling)
            self.ended += 1

        monkeypatch.setattr(Filling, "_follow", slowly)


async def test_memory_is_given_back_only_when_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, manifest, checksums = version()
    held = Held(monkeypatch)
    released: list[Buffer] = []
    release = Buffer.release
    monkeypatch.setattr(Buffer, "release", lambda b: (released.append(b), release(b))[1])
    with memory(bytes(data)) as file:
        stage = WeightStage(None, EXPECTED, "float32")
        upload = await begin(stage, file, manifest)
        await held.begun.wait()
        verifying = asyncio.ensure_future(upload.verify(checksums))
        for _ in range(3):
            await asyncio.sleep(0.01)
            verifying.cancel()
        await asyncio.sleep(0.01)
        assert not released and not verifying.done()
        held.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await verifying
        assert held.ended == 1 and len(released) == 1
        stage.close()


# Over the wire


@contextlib.contextmanager
def filling(number: int, **fields: Any) -> Iterator[tuple[list[Any], bytes, Path]]:
    """The header and commit of a version in shared memory, its bytes, and the file."""
    head, data = header(number, **fields)
    place = -(-len(data) // 8) * 8
    with shared(head, data.ljust(place + 8, b"\xff")) as (copy, path):
        copy.shared_memory.filling = True
        copy.shared_memory.progress_offset_bytes = place
        checksums = [spec.xxh3 for spec in copy.tensors]
        for spec in copy.tensors:
            spec.ClearField("xxh3")
        digest = hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()
        commit = WeightCommit(header_sha256=digest, tensor_xxh3=checksums)
        yield (
            [
                UpdateWeightsRequest(header=copy),
                UpdateWeightsRequest(commit=commit),
            ],
            data,
            path,
        )


async def states(harness: Harness, requests: Sequence[Any]) -> list[int]:
    return [r.state async for r in harness.wire.UpdateWeights(iter(requests))]


async def refusal(harness: Harness, requests: Sequence[Any]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await states(harness, requests)
    return read_failure(caught.value).reason


async def test_a_version_that_is_filled_after_its_header_becomes_active(harness: Harness) -> None:
    with filling(1) as (requests, _, _):
        assert await states(harness, requests) == [READY, STAGED, ACTIVE]
    assert (await harness.generate("t")).versions == [1] * 16


async def test_the_same_again_is_no_work_and_other_checksums_are_another_version(
    harness: Harness,
) -> None:
    with filling(1, staged=True) as (requests, _, path):
        assert await states(harness, requests) == [READY, STAGED]
        # The bytes are not read again.
        path.write_bytes(b"")
        assert await states(harness, requests) == [READY, STAGED]
        # A stream without a commit changes nothing. One with other checksums is a different upload.
        assert await states(harness, requests[:-1]) == [READY]
        requests[-1].commit.tensor_xxh3[0] ^= 1
        assert await refusal(harness, requests) == "WEIGHT_VERSION_STALE"
        requests[-1].commit.tensor_xxh3.pop()
        assert await refusal(harness, requests) == "FIELD_INVALID"
    with filling(2) as (requests, _, _):
        assert await states(harness, requests) == [READY, STAGED, ACTIVE]
        assert await states(harness, requests) == [READY, ACTIVE]
        requests[-1].commit.tensor_xxh3[0] ^= 1
        assert await refusal(harness, requests) == "WEIGHT_VERSION_STALE"
    assert [loaded.weight_version for loaded in harness.engine.loaded] == [2]


async def test_only_shared_memory_without_checksums_may_be_filled(harness: Harness) -> None:
    with filling(1) as (requests, _, _):
        # No other source has a progress word.
        requests[0].header.shared_memory.filling = False
        assert await refusal(harness, requests) == "FIELD_INVALID"
        for spec in requests[0].header.tensors:
            spec.xxh3 = 1
        requests[0].header.shared_memory.filling = True
        assert await refusal(harness, requests) == "FIELD_INVALID"


@contextlib.asynccontextmanager
async def opened(harness: Harness, requests: Sequence[Any]) -> AsyncGenerator[Any]:
    """A call that has sent these requests and stays open."""

    async def sent() -> AsyncGenerator[Any]:
        for request in requests:
            yield request
        await asyncio.Event().wait()

    call = harness.wire.UpdateWeights(sent())
    assert (await call.read()).state == READY
    try:
        yield call
    finally:
        call.cancel()


async def test_a_newer_trainer_ends_what_is_being_filled_while_it_is_looked_at(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with filling(1, trainer_epoch=7) as (older, _, _), filling(1, trainer_epoch=8) as (newer, _, _):
        async with opened(harness, older[:-1]) as call:
            await held.begun.wait()
            taken = asyncio.ensure_future(states(harness, newer))
            await asyncio.sleep(0.05)
            # It waits for the thread that reads the older upload's memory.
            assert not taken.done()
            held.go_on.set()
            assert await taken == [READY, STAGED, ACTIVE]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert read_failure(caught.value).reason == "STALE_EPOCH"


async def test_an_uploader_that_vanishes_while_it_fills_leaves_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with filling(1) as (requests, _, _):
        async with opened(harness, requests[:1]):
            await held.begun.wait()
        held.go_on.set()
        # The same version is accepted once the older upload has ended.
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await states(harness, requests) == [READY, STAGED, ACTIVE]
                    break
                except grpc.aio.AioRpcError as error:
                    assert read_failure(error).reason == "UPLOAD_IN_PROGRESS"
                    await asyncio.sleep(0.01)
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert info.active_weight_version == 1
