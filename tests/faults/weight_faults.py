"""The faults of a weight upload. Each function makes its fault happen once and checks the outcome.

A fault spoils an `Attempt` and sends it. The caller checks that everything else is unchanged. If
the version is active in the end, the attempt records that it took effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from penstock.v1 import weights_pb2
from penstock.wire import codec, sparse
from penstock.wire.failure import read_failure
from tests.faults import killed_uploader
from tests.faults.attempts import (
    ACTIVE,
    READY,
    STAGED,
    Attempt,
    Source,
    flip,
    flip_in_file,
    places_in,
    progress_offset,
)
from tests.support.harness import TensorSpec, UpdateWeightsRequest, WeightChunk

Fault = Callable[[Attempt], Awaitable[None]]
FAULTS: dict[str, tuple[Fault, tuple[Source, ...]]] = {}
"""Name -> (the function, the sources it applies to)."""

DENSE = (Source.INLINE, Source.SHARED, Source.FILLING, Source.CHECKPOINT)
DELTAS = (Source.DELTA, Source.DELTA_SHARED)
STREAMED = (Source.INLINE, Source.DELTA)
FILES = (Source.SHARED, Source.FILLING, Source.DELTA_SHARED)
ALL = tuple(Source)
SPARSE = weights_pb2.TENSOR_ENCODING_SPARSE
SAME = weights_pb2.TENSOR_ENCODING_SAME


def fault(*sources: Source) -> Callable[[Fault], Fault]:
    def register(function: Fault) -> Fault:
        FAULTS[function.__name__] = function, sources
        return function

    return register


# Bytes that differ from the announced ones


@fault(*STREAMED)
async def chunk_corrupt(attempt: Attempt) -> None:
    """A bit of a chunk is flipped in transit."""
    at = attempt.rng.choice(attempt.chunks)
    chunk = attempt.messages[at].chunk
    data = bytearray(chunk.data)
    flip(data, attempt.rng, 0, len(data))
    attempt.messages[at] = chunk_message(chunk.offset_bytes, bytes(data), chunk.xxh3)
    await attempt.refused("CHECKSUM_MISMATCH", field="chunk.data", offset_bytes=chunk.offset_bytes)


@fault(*ALL)
async def tensor_corrupt(attempt: Attempt) -> None:
    """A bit is flipped before the chunks are made, so only the tensor's checksum can detect it."""
    name = attempt.some_tensor()
    if attempt.source is Source.CHECKPOINT:
        flip_in_file(attempt.file, attempt.rng, *places_in(attempt.file)[name])
        await attempt.refused("CHECKSUM_MISMATCH", tensor=name)
        return
    spec = attempt.upload.spec(name)
    while not spec.length_bytes:
        spec = attempt.upload.spec(attempt.some_tensor())
    reason = ""
    while not reason:
        begin, end = spec.offset_bytes, spec.offset_bytes + spec.length_bytes
        data = attempt.upload.data
        before = bytes(data[begin:end])
        flip(data, attempt.rng, begin, end)
        reason = what_it_is_now(attempt, spec, before, bytes(data[begin:end]))
    await attempt.refused(reason, tensor=spec.name)


def what_it_is_now(attempt: Attempt, spec: Any, before: bytes, now: bytes) -> str:
    """The reason with which a receiver must refuse changed bytes of a tensor; "" if they mean the
    same.
    """
    if spec.encoding != SPARSE:
        return "CHECKSUM_MISMATCH"
    found = attempt.base[spec.name].ravel().view(np.uint32).copy()
    try:
        sparse.apply(found, spec.sparse, now)
    except sparse.SparseInvalid:
        return "FIELD_INVALID"
    same = xxhash.xxh3_64_intdigest(found.tobytes()) == spec.xxh3
    return "" if same else "CHECKSUM_MISMATCH"


@fault(*STREAMED)
async def bytes_missing(attempt: Attempt) -> None:
    """A chunk is missing, or arrives only after the commit."""
    lost = attempt.messages.pop(attempt.rng.choice(attempt.chunks))
    if attempt.rng.random() < 0.5:
        attempt.messages.append(lost)
    begin = lost.chunk.offset_bytes
    await attempt.refused(
        "FIELD_INVALID", field="chunk.offset_bytes", begin=begin, end=begin + len(lost.chunk.data)
    )


@fault(*STREAMED)
async def bytes_twice(attempt: Attempt) -> None:
    """A chunk, or a part of one, is sent twice."""
    at = attempt.rng.choice(attempt.chunks)
    chunk = attempt.messages[at].chunk
    begin = attempt.rng.randrange(len(chunk.data))
    end = attempt.rng.randint(begin + 1, len(chunk.data))
    offset = chunk.offset_bytes + begin
    again = attempt.rng.randint(at + 1, len(attempt.messages) - 1)
    attempt.messages.insert(again, chunk_message(offset, chunk.data[begin:end]))
    await attempt.refused("FIELD_INVALID", field="chunk.offset_bytes", got=offset)


@fault(*STREAMED)
async def bytes_beyond(attempt: Attempt) -> None:
    """A chunk begins before the payload, or ends after it."""
    length = len(attempt.upload.data)
    offset = attempt.rng.choice((-1, length - 1, length, length + 4096, 1 << 40))
    at = attempt.rng.randint(1, len(attempt.messages) - 1)
    attempt.messages.insert(at, chunk_message(offset, b"ab"))
    await attempt.refused("FIELD_INVALID", field="chunk.offset_bytes", got=offset)


@fault(Source.FILLING)
async def progress_ahead(attempt: Attempt) -> None:
    """The progress word claims all bytes before any exist, and they are written before the commit.

    Only bytes that the server read too early, if any, are wrong.
    """
    data = bytes(attempt.upload.data)
    _ = attempt.messages
    attempt.file.write_bytes(bytes(progress_offset(len(data))))
    attempt.tell_filled(attempt.rng.choice((len(data), (1 << 64) - 1)))
    found: list[int] = []
    async with attempt.opened() as (call, outgoing):
        await asyncio.sleep(attempt.rng.uniform(0.0, 0.002))
        with attempt.file.open("r+b") as file:
            file.write(data)
        outgoing.put_nowait(attempt.messages[1])
        outgoing.put_nowait(None)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                found.append(response.state)
        except grpc.aio.AioRpcError as error:
            failure = read_failure(error)
            attempt.is_refusal(failure, "CHECKSUM_MISMATCH", {})
            assert failure.metadata["tensor"] in attempt.tensors
            return
    if attempt.staged:
        assert found == [STAGED]
        receipt = await attempt.switch(attempt.version)
        assert receipt.active_weight_version == attempt.version
    else:
        assert found == [STAGED, ACTIVE]
    attempt.took_effect()


@fault(Source.FILLING)
async def progress_meaningless(attempt: Attempt) -> None:
    """The progress word never moves, goes back, or exceeds the payload; or there is none."""
    attempt.has_progress = attempt.rng.random() < 0.8
    moving = asyncio.create_task(move_progress(attempt))
    try:
        await attempt.accepted()
    finally:
        moving.cancel()


async def move_progress(attempt: Attempt) -> None:
    while True:
        attempt.tell_filled(attempt.some_progress())
        await asyncio.sleep(0.0005)


@fault(Source.SHARED, Source.FILLING, Source.DELTA_SHARED)
async def progress_misplaced(attempt: Attempt) -> None:
    """The progress word is inside a tensor, outside the file, or unaligned; or the payload is not
    being filled.
    """
    _ = attempt.messages
    size = attempt.file.stat().st_size
    choice = (-8, 8, 9, size - 4, size - 7, size, 1 << 62)
    shared = attempt.messages[0].header.shared_memory
    shared.progress_offset_bytes = attempt.rng.choice(choice)
    await attempt.refused("FIELD_INVALID", field="header.shared_memory.progress_offset_bytes")


@fault(Source.FILLING)
async def checksum_wrong(attempt: Attempt) -> None:
    """The commit has a wrong checksum for one tensor, or swaps those of two."""
    checksums = attempt.messages[-1].commit.tensor_xxh3
    first, second = sorted(attempt.rng.sample(range(len(checksums)), 2))
    if attempt.rng.random() < 0.5:
        checksums[first] ^= 1 << attempt.rng.randrange(64)
    else:
        checksums[first], checksums[second] = checksums[second], checksums[first]
    await attempt.refused("CHECKSUM_MISMATCH", tensor=attempt.upload.head.tensors[first].name)


@fault(*ALL)
async def checksums_miscounted(attempt: Attempt) -> None:
    """The commit has too many or too few checksums."""
    checksums = attempt.messages[-1].commit.tensor_xxh3
    if checksums and attempt.rng.random() < 0.5:
        checksums.pop()
    else:
        checksums.append(attempt.rng.getrandbits(64))
    await attempt.refused("FIELD_INVALID", field="commit.tensor_xxh3")


@fault(Source.FILLING)
async def filling_malformed(attempt: Attempt) -> None:
    """The header of a payload that is still being filled has a base version, or a checksum."""
    head = attempt.messages[0].header
    if attempt.rng.random() < 0.5:
        head.base_weight_version = attempt.before
        await attempt.refused("FIELD_INVALID", field="header.base_weight_version")
        return
    attempt.rng.choice(head.tensors).xxh3 = attempt.rng.randint(1, (1 << 64) - 1)
    await attempt.refused("FIELD_INVALID", field="header.tensors.xxh3")


@fault(Source.FILLING)
async def same_number_other_weights(attempt: Attempt) -> None:
    """A staged version is uploaded again. The same weights are accepted, and different ones are
    refused.
    """
    attempt.staged = True
    assert [r.state for r in await attempt.send()] == [READY, STAGED]
    assert [r.state for r in await attempt.send()] == [READY, STAGED]
    checksums = attempt.messages[-1].commit.tensor_xxh3
    checksums[attempt.rng.randrange(len(checksums))] ^= 1 << attempt.rng.randrange(64)
    await attempt.refused(
        "WEIGHT_VERSION_STALE", weight_version=attempt.version, newest=attempt.version
    )
    receipt = await attempt.switch(attempt.version)
    assert receipt.active_weight_version == attempt.version
    attempt.took_effect()


# Tensors that do not match the model


@fault(*ALL)
async def tensor_missing(attempt: Attempt) -> None:
    name = attempt.some_tensor()
    missing = {n: t for n, t in attempt.tensors.items() if n != name}
    if attempt.source is Source.CHECKPOINT and attempt.rng.random() < 0.5:
        attempt.stored = missing
    else:
        attempt.tensors = missing
    await attempt.refused("TENSOR_MISSING", tensor=name)


@fault(*ALL)
async def tensor_extra(attempt: Attempt) -> None:
    name = attempt.some_tensor() + attempt.rng.choice((".bias", "x", "_scale"))
    names = list(attempt.tensors)
    names.insert(attempt.rng.randint(0, len(names)), name)
    extra = np.zeros(attempt.rng.randint(1, 64), np.float32)
    attempt.tensors = {n: attempt.tensors.get(n, extra) for n in names}
    await attempt.refused("TENSOR_UNKNOWN", tensor=name)


@fault(*ALL)
async def tensor_twice(attempt: Attempt) -> None:
    name = attempt.some_tensor()
    attempt.upload.head.tensors.append(
        TensorSpec.FromString(attempt.upload.spec(name).SerializeToString())
    )
    await attempt.refused("FIELD_INVALID", field="header.tensors.name", tensor=name, got=name)


@fault(*ALL)
async def shape_wrong(attempt: Attempt) -> None:
    name = attempt.some_tensor()
    tensor = attempt.tensors[name]
    shape = list(tensor.shape)
    other = attempt.rng.choice(
        [
            [*shape, 1],
            [1, *shape],
            [shape[0] + 1, *shape[1:]],
            [*shape[:-1], shape[-1] - 1],
            [tensor.size // 2, 2],
            [],
        ]
    )
    if attempt.source is Source.CHECKPOINT and attempt.rng.random() < 0.5:
        attempt.stored = attempt.tensors | {name: np.zeros(other, np.float32)}
    else:
        spec = attempt.upload.spec(name)
        spec.ClearField("shape")
        spec.shape.extend(other)
    await attempt.refused("SHAPE_MISMATCH", tensor=name, expected=shape, got=other)


@fault(*ALL)
async def dtype_wrong(attempt: Attempt) -> None:
    name = attempt.some_tensor()
    if attempt.source is Source.CHECKPOINT and attempt.rng.random() < 0.5:
        other = attempt.rng.choice((np.float16, np.float64, np.int32))
        attempt.stored = attempt.tensors | {name: attempt.tensors[name].astype(other)}
        await attempt.refused(
            "DTYPE_MISMATCH", tensor=name, expected="float32", got=np.dtype(other).name
        )
        return
    dtype = attempt.rng.choice(
        ("bfloat16", "float16", "float64", "int32", "F32", "torch.float32", "")
    )
    attempt.upload.spec(name).dtype = dtype
    await attempt.refused("DTYPE_MISMATCH", tensor=name, expected="float32", got=dtype)


@fault(*ALL)
async def not_a_number(attempt: Attempt) -> None:
    """Any NaN pattern, quiet or signalling, of either sign."""
    await holds(attempt, 0x7F80_0000 | attempt.rng.randint(1, 0x7F_FFFF))


@fault(*ALL)
async def infinity(attempt: Attempt) -> None:
    await holds(attempt, 0x7F80_0000)


async def holds(attempt: Attempt, bits: int) -> None:
    name = attempt.some_tensor()
    places = attempt.tensors[name].reshape(-1).view(np.uint32)
    places[attempt.rng.randrange(places.size)] = bits | attempt.rng.choice((0, 1 << 31))
    await attempt.refused("NOT_FINITE", tensor=name)


# Deltas that do not fit


@fault(*DELTAS)
async def base_stale(attempt: Attempt) -> None:
    """A delta from a version other than the active one."""
    active = attempt.before
    base = attempt.rng.choice((active - 1, active + 1, active + 1000, -active, 1 << 60))
    if base == 0:
        base = -1
    attempt.upload.head.base_weight_version = base
    await attempt.refused("BASE_VERSION_MISMATCH", base=base, active=active, held=active)


@fault(*DELTAS)
async def base_same_and_not(attempt: Attempt) -> None:
    """A tensor is declared the same as the base's, but with another checksum."""
    spec = attempt.upload.spec(attempt.some_tensor())
    held = xxhash.xxh3_64_intdigest(attempt.base[spec.name].tobytes())
    spec.encoding, spec.length_bytes = SAME, 0
    spec.ClearField("sparse")
    spec.xxh3 = held ^ (1 << attempt.rng.randrange(64))
    await attempt.refused(
        "BASE_VERSION_MISMATCH",
        tensor=spec.name,
        base_xxh3=f"{held:016x}",
        got=f"{spec.xxh3:016x}",
    )


@fault(*DELTAS)
async def base_bytes_wrong(attempt: Attempt) -> None:
    """The uploader's copy of the base differs from the server's by one bit."""
    name = attempt.some_tensor()
    places = attempt.base[name].reshape(-1).view(np.uint32)
    held = attempt.site.tensors(attempt.before)[name]
    while True:
        at = attempt.rng.randrange(places.size)
        places[at] ^= 1 << attempt.rng.randrange(32)
        if attempt._spec(name, attempt.tensors[name])[0].encoding == SPARSE:
            break
        places[:] = held.reshape(-1).view(np.uint32)
    await attempt.refused("CHECKSUM_MISMATCH", tensor=name)


Change = Callable[[Any, random.Random], object]

CODINGS: dict[str, Change] = {
    "none": lambda s, r: s.ClearField("sparse"),
    "no change": lambda s, r: setattr(s.sparse, "changed_element_count", 0),
    "a negative count": lambda s, r: setattr(s.sparse, "changed_element_count", -r.randint(1, 99)),
    "another count": lambda s, r: setattr(
        s.sparse, "changed_element_count", s.sparse.changed_element_count + 1
    ),
    "a count beyond all": lambda s, r: setattr(s.sparse, "changed_element_count", 1 << 62),
    "unset positions": lambda s, r: setattr(s.sparse, "index_coding", 0),
    "unknown positions": lambda s, r: setattr(s.sparse, "index_coding", r.randint(3, 1000)),
    "positions outside": lambda s, r: setattr(
        s.sparse, "index_length_bytes", s.length_bytes + r.randint(1, 1 << 40)
    ),
    "a negative length of positions": lambda s, r: setattr(s.sparse, "index_length_bytes", -1),
    "shorter positions": lambda s, r: setattr(
        s.sparse, "index_length_bytes", s.sparse.index_length_bytes - 1
    ),
    "unknown compression": lambda s, r: setattr(s.sparse, "compression", r.randint(2, 1000)),
    "another compression": lambda s, r: setattr(s.sparse, "compression", 1 - s.sparse.compression),
    "cut short": lambda s, r: setattr(
        s, "length_bytes", s.length_bytes - r.randint(1, s.length_bytes)
    ),
    "longer than any": lambda s, r: setattr(s, "length_bytes", 1 << 40),
    "a negative length": lambda s, r: setattr(s, "length_bytes", -1),
    "outside": lambda s, r: setattr(s, "offset_bytes", 1 << 40),
    "before": lambda s, r: setattr(s, "offset_bytes", -1),
    "the same with bytes": lambda s, r: setattr(s, "encoding", SAME),
}


@fault(*DELTAS)
async def coding_malformed(attempt: Attempt) -> None:
    """The description of a tensor's coding is impossible."""
    sparse_ones = [spec for spec in attempt.upload.head.tensors if spec.encoding == SPARSE]
    spec = attempt.rng.choice(sparse_ones)
    CODINGS[attempt.rng.choice(list(CODINGS))](spec, attempt.rng)
    failure = await attempt.refused("FIELD_INVALID", tensor=spec.name)
    assert failure.metadata["field"].startswith("header.tensors.")


# Malformed streams


@fault(*ALL)
async def stream_ends_early(attempt: Attempt) -> None:
    """The stream ends normally before the commit."""
    count = attempt.rng.randrange(len(attempt.messages))
    if not count:
        attempt.messages.clear()
        await attempt.refused("FIELD_INVALID", field="message")
        return
    assert [response.state for response in await attempt.send(attempt.messages[:count])] == [READY]


@fault(*ALL)
async def stream_cancelled(attempt: Attempt) -> None:
    """The stream is cancelled before the commit."""
    count = attempt.rng.randrange(1, len(attempt.messages))
    async with attempt.opened() as (_, outgoing):
        for message in attempt.messages[1:count]:
            outgoing.put_nowait(message)
        await asyncio.sleep(attempt.rng.uniform(0.0, 0.01))


@fault(*FILES, Source.CHECKPOINT)
async def file_cut_short(attempt: Attempt) -> None:
    """The file is cut short before the server reads it, or after it accepted the header."""
    where = places(attempt)
    specs = [spec for spec in attempt.upload.head.tensors if where[spec.name][1]]
    begin = min(begin for begin, _ in where.values())
    size = attempt.rng.randrange(begin, max(end for _, end in where.values()))
    beyond = next(spec.name for spec in specs if where[spec.name][1] > size)
    _ = attempt.messages
    if attempt.rng.random() < 0.5:
        os.truncate(attempt.file, size)
        if attempt.source is Source.CHECKPOINT:
            await attempt.refused("SOURCE_UNAVAILABLE", path=attempt.file.parent)
        else:
            await attempt.refused(
                "FIELD_INVALID", tensor=beyond, field="header.tensors.offset_bytes"
            )
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with attempt.opened() as (call, outgoing):
            os.truncate(attempt.file, size)
            for message in attempt.messages[1:]:
                outgoing.put_nowait(message)
            await call.read()
            raise AssertionError("it was accepted")
    attempt.is_refusal(read_failure(caught.value), "SOURCE_UNAVAILABLE", {"tensor": beyond})


def places(attempt: Attempt) -> dict[str, tuple[int, int]]:
    """The (begin, end) of each tensor in the file; (0, 0) if it has no bytes."""
    if attempt.source is Source.CHECKPOINT:
        return places_in(attempt.file)
    return {
        spec.name: (spec.offset_bytes, spec.offset_bytes + spec.length_bytes)
        if spec.length_bytes
        else (0, 0)
        for spec in attempt.upload.head.tensors
    }


@fault(*STREAMED)
async def chunks_reordered(attempt: Attempt) -> None:
    """Legal, because a chunk names its offset."""
    chunks = attempt.messages[1:-1]
    attempt.rng.shuffle(chunks)
    attempt.messages[1:-1] = chunks
    await attempt.accepted()


@fault(*DENSE)
async def version_not_newer(attempt: Attempt) -> None:
    """The active version, or an older one, is uploaded again."""
    version = attempt.rng.choice((attempt.before, attempt.before - 1, 0, -1, -(1 << 60)))
    attempt.upload.head.weight_version = version
    await attempt.refused("WEIGHT_VERSION_STALE", weight_version=version, newest=attempt.before)


@fault(*ALL)
async def versions_reordered(attempt: Attempt) -> None:
    """A version arrives after a newer one is staged, and an older one is requested after a newer one."""
    site, rng = attempt.site, attempt.rng
    first, second = Attempt(site, rng.choice(DENSE), rng), Attempt(site, rng.choice(DENSE), rng)
    with contextlib.closing(first), contextlib.closing(second):
        for ahead in (first, second):
            ahead.staged = True
            assert (await ahead.send())[-1].state == STAGED
        newest = {"weight_version": attempt.version, "newest": second.version}
        await attempt.refused("WEIGHT_VERSION_STALE", **newest)
        receipt = await second.switch(second.version)
        assert not receipt.HasField("rejection"), receipt
        receipt = await attempt.switch(first.version)
        assert receipt.rejection.reason == "WEIGHT_VERSION_NOT_STAGED"
        assert receipt.active_weight_version == second.version
    attempt.version, attempt.policy = second.version, second.policy
    attempt.took_effect()


@fault(*ALL)
async def header_twice(attempt: Attempt) -> None:
    at = attempt.rng.randint(1, len(attempt.messages) - 1)
    attempt.messages.insert(at, attempt.messages[0])
    await attempt.refused("FIELD_INVALID", field="message")


@fault(*ALL)
async def header_not_first(attempt: Attempt) -> None:
    """A commit, a chunk or an empty message comes first; or the header comes last."""
    head, *others, commit = attempt.messages
    attempt.messages[:] = attempt.rng.choice(
        (
            [commit, head, *others],
            [*others, commit],
            [UpdateWeightsRequest(), head, *others, commit],
            [chunk_message(0, b"ab"), head, *others, commit],
        )
    )
    await attempt.refused("FIELD_INVALID", field="message")


@fault(*ALL)
async def commit_wrong(attempt: Attempt) -> None:
    """The commit belongs to another header."""
    digest = attempt.messages[-1].commit.header_sha256
    wrong = bytearray(digest)
    flip(wrong, attempt.rng, 0, len(wrong))
    other = attempt.rng.choice((bytes(wrong), digest[:-1], digest + b"\0", b""))
    attempt.messages[-1] = UpdateWeightsRequest(commit={"header_sha256": other})
    await attempt.refused("CHECKSUM_MISMATCH", expected=digest.hex(), actual=other.hex())


@fault(*ALL)
async def epoch_older(attempt: Attempt) -> None:
    current = attempt.upload.head.trainer_epoch
    epoch = attempt.rng.choice((current - 1, attempt.rng.randrange(current), 0, -1))
    attempt.upload.head.trainer_epoch = epoch
    await attempt.refused("STALE_EPOCH", trainer_epoch=epoch, current=current)


# Killed uploaders, and failing loads


@contextlib.asynccontextmanager
async def uploader(attempt: Attempt, count: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has sent the first messages and received an answer. It is killed with SIGKILL
    in the end.
    """
    with tempfile.NamedTemporaryFile() as file:
        requests = [codec.encode(message) for message in attempt.messages]
        Path(file.name).write_bytes(pickle.dumps(requests))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            killed_uploader.__file__,
            attempt.site.address,
            file.name,
            str(count),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            missing = {"sent", "answer"}
            while missing:
                word = (await process.stdout.readline()).decode().strip()
                assert word, "it ended by itself"
                missing.discard(word)
            yield process
        finally:
            process.kill()
            await process.wait()
            # Its shared memory disappears with it.
            attempt.close()


@fault(*ALL)
async def uploader_killed(attempt: Attempt) -> None:
    """The uploader is killed with SIGKILL in the middle of the upload."""
    async with uploader(attempt, attempt.rng.randrange(1, len(attempt.messages))):
        await asyncio.sleep(attempt.rng.uniform(0.0, 0.01))


@fault(*ALL)
async def uploader_killed_while_loading(attempt: Attempt) -> None:
    """The uploader is killed with SIGKILL while the engine loads. The verified version still
    becomes active.
    """
    attempt.staged = False
    loads = attempt.site.loads
    loads.hold()
    try:
        async with uploader(attempt, len(attempt.messages)):
            await loads.begun.wait()
            if attempt.rng.random() < 0.5:
                loads.go_on()
    finally:
        loads.go_on()
    attempt.took_effect()


@fault(*ALL)
async def load_breaks(attempt: Attempt) -> None:
    """The engine fails half-way through a load, and the previous version is loaded again."""
    attempt.site.loads.break_next()
    await cannot_be_loaded(attempt)


@fault(*ALL)
async def preparation_breaks(attempt: Attempt) -> None:
    """The engine cannot prepare the version, and keeps sampling with the previous one."""
    attempt.site.loads.break_next_ahead()
    await cannot_be_loaded(attempt)


async def cannot_be_loaded(attempt: Attempt) -> None:
    """Check that the version is refused when the server should switch to it."""
    metadata = {"weight_version": str(attempt.version), "active": str(attempt.before)}
    if not attempt.staged:
        await attempt.refused("WEIGHT_LOAD_FAILED", **metadata)
        return
    assert [response.state for response in await attempt.send()] == [READY, STAGED]
    receipt = await attempt.switch(attempt.version)
    assert receipt.rejection.reason == "WEIGHT_LOAD_FAILED"
    assert dict(receipt.rejection.metadata) == metadata
    assert receipt.active_weight_version == attempt.before


def chunk_message(offset_bytes: int, data: bytes, xxh3: int | None = None) -> Any:
    """A chunk, by default with the checksum of its bytes."""
    digest = xxhash.xxh3_64_intdigest(data) if xxh3 is None else xxh3
    chunk = WeightChunk(offset_bytes=offset_bytes, data=data, xxh3=digest)
    return UpdateWeightsRequest(chunk=chunk)
